"""Which scheduler ``launch`` names, and the lock that goes with it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from pipeline.config import Config
from pipeline.launch.protocol import StageRunner
from pipeline.launch.runlock import run_lock
from pipeline.store import Store


def scheduler(config: Config, columns: int = 0) -> StageRunner:
    """The scheduler of ``config.launch``; LaunchError where there are no credentials for its cluster.

    ``columns``: the terminal's width, 0 where there is none.
    """
    if config.launch.name == "local":
        from pipeline.launch.local import LocalStages

        return LocalStages(config, columns)
    from pipeline.launch.kubernetes.api import Api
    from pipeline.launch.kubernetes.credentials import api_client

    api = Api(api_client(config.launch.context))
    if config.launch.job == "indexed":
        from pipeline.launch.kubernetes.batch import IndexedRunner

        return IndexedRunner(config, api)
    from pipeline.launch.kubernetes.volcano import VolcanoRunner

    return VolcanoRunner(config, api)


@contextmanager
def only_launcher(config: Config, store: Store) -> Iterator[None]:
    """Hold the run: a lock of its folder, and on a cluster a lease. LaunchError where another launcher does.

    On a cluster LaunchError, before anything is written, where it is out of reach, clocks differ or a right is missing.
    """
    with run_lock(store, str(config.run)):
        if config.launch.name == "local":
            yield
            return
        from pipeline.launch.kubernetes.api import Api, check_clock
        from pipeline.launch.kubernetes.credentials import api_client
        from pipeline.launch.kubernetes.lease import held
        from pipeline.launch.kubernetes.names import run_label
        from pipeline.launch.kubernetes.rights import check_rights

        api = Api(api_client(config.launch.context))
        check_clock(api)
        check_rights(api, config)
        lease = f"nightjar-{run_label(str(config.run), 54)}"
        with held(api, config.launch.namespace, lease, config.launch.lease_seconds):
            yield
