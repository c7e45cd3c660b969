"""Which scheduler ``launch`` names, and the lock that goes with it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from pipeline.config import Config
from pipeline.launch.locks import run_lock
from pipeline.launch.protocol import StageRunner
from pipeline.store.artifacts import Store

if TYPE_CHECKING:
    from pipeline.launch.kubernetes.api import Api
    from pipeline.launch.kubernetes.jobs import ClusterRunner


def scheduler(config: Config, columns: int = 0) -> StageRunner:
    """The scheduler of ``config.launch``; LaunchError where there are no credentials for its cluster.

    ``columns``: the terminal's width, 0 where there is none.
    """
    if config.launch.name != "kubernetes":
        from pipeline.launch.local import LocalStages

        return LocalStages(config, columns)
    from pipeline.launch.kubernetes.api import connect

    return cluster_runner(config, connect(config.launch.context).patient(60 * config.launch.outage_minutes))


def cluster_runner(config: Config, api: Api) -> ClusterRunner:
    """What submits stages in the form that ``launch.job`` names."""
    if config.launch.job == "indexed":
        from pipeline.launch.kubernetes.job_kinds import IndexedRunner

        return IndexedRunner(config, api)
    if config.launch.job == "jobset":
        from pipeline.launch.kubernetes.job_kinds import JobSetRunner

        return JobSetRunner(config, api)
    from pipeline.launch.kubernetes.job_kinds import VolcanoRunner

    return VolcanoRunner(config, api)


@contextmanager
def only_launcher(config: Config, store: Store) -> Iterator[None]:
    """Hold the run lock, and on a cluster the run's lease; LaunchError where another launcher holds one of them.

    On a cluster, the run's network policy lasts as long, or as its jobs.

    On a cluster also LaunchError, before anything is written, where the API server does not answer, its clock differs
    or a right is missing.
    """
    with run_lock(store, str(config.run), config.launch.lease_seconds):
        if config.launch.name != "kubernetes":
            yield
            return
        from pipeline.launch.kubernetes.api import check_clock, connect
        from pipeline.launch.kubernetes.lease_object import held
        from pipeline.launch.kubernetes.network import closed
        from pipeline.launch.kubernetes.pod_templates import check_templates, run_label
        from pipeline.launch.kubernetes.rbac import check_rights

        outage = 60 * config.launch.outage_minutes
        api = connect(config.launch.context).patient(outage)
        check_clock(api)
        check_rights(api, config.launch)
        check_templates(api, config)
        lease = f"nightjar-{run_label(str(config.run), 54)}"
        runner = cluster_runner(config, api)
        alone = held(api, config.launch.namespace, lease, config.launch.lease_seconds, outage)
        with alone, closed(api, config, runner.goes_on):
            yield
