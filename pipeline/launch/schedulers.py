"""Who runs the stages by ``launch``: this machine, or a launcher that a plugin adds; and the lock that goes with it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from pipeline.config import Config
from pipeline.launch.locks import run_lock
from pipeline.launch.protocol import Launcher, StageRunner
from pipeline.specs.registry import LAUNCHERS, load_hooks
from pipeline.store.artifacts import Store


def launcher_of(config: Config) -> Launcher | None:
    """Return the launcher that ``launch`` names, None for processes of this machine."""
    return load_hooks(LAUNCHERS).get(config.launch.name)


def scheduler(config: Config, columns: int = 0) -> StageRunner:
    """The scheduler of ``config.launch``; LaunchError where there are no credentials for its cluster.

    ``columns``: the terminal's width, 0 where there is none.
    """
    launcher = launcher_of(config)
    if launcher is not None:
        return launcher.runner(config)
    from pipeline.launch.local import LocalStages

    return LocalStages(config, columns)


@contextmanager
def only_launcher(config: Config, store: Store) -> Iterator[None]:
    """Hold the run lock, and on a cluster what ``Launcher.only_launcher`` holds there.

    LaunchError where another launcher holds one of them.
    """
    launcher = launcher_of(config)
    with run_lock(store, str(config.run), config.launch.lease_seconds):
        if launcher is None:
            yield
        else:
            with launcher.only_launcher(config):
                yield
