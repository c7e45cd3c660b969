"""Locks: one launcher per run, one night per model; and the launcher plugin that ``launch`` names."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING

from pipeline.core.clock import CLOCK, Clock
from pipeline.core.registry import LAUNCHERS, load_hooks
from pipeline.records.runs import run_directory
from pipeline.store.artifacts import Store
from pipeline.store.errors import taken
from pipeline.store.lease import Lease, LeaseFile

if TYPE_CHECKING:
    from pipeline.config import Config
    from pipeline.launch.protocol import Launcher


def launcher_of(config: Config) -> Launcher | None:
    """Return the launcher that ``launch`` names, None for processes of this machine."""
    return load_hooks(LAUNCHERS).get(config.launch.name)


@contextmanager
def only_launcher(config: Config, store: Store) -> Iterator[None]:
    """Hold the run lock, and on a cluster what ``Launcher.only_launcher`` holds there.

    Raises:
        LaunchError: Another launcher holds one of them.
    """
    launcher = launcher_of(config)
    with run_lock(store, str(config.run), config.launch.lease_seconds):
        if launcher is None:
            yield
        else:
            with launcher.only_launcher(config):
                yield


def run_lock(store: Store, run: str, seconds: float, clock: Clock = CLOCK) -> AbstractContextManager[None]:
    """Lock ``run`` for this launcher while the context lasts, as ``folder_lock`` does.

    One launcher per run, because a second one would overwrite the first one's records and checkpoints.
    """
    hint = "run the same command again once that one has ended, or run=<another name>"
    return folder_lock(store, run_directory(run), f"run {run!r}", seconds, hint=hint, clock=clock)


def folder_lock(
    store: Store, folder: str, of: str, seconds: float, *, hint: str, clock: Clock = CLOCK
) -> AbstractContextManager[None]:
    """Lock ``folder`` of the store while the context lasts; LaunchError if another launcher holds the lock.

    On a local disk this is a lock of the folder, which ends with its process. On an object store it is the lease
    ``<folder>/lease.json``, which another launcher takes over once nobody has renewed it for ``seconds``.

    Args:
        of: What is locked, for messages.
    """
    what = f"{of} is running already"
    # On a disk, the kernel frees the lock when its process ends, so nobody waits for a lease to expire.
    if store.is_local:
        return store.locked(folder, taken(what, "another launcher", store.full(folder), hint))
    doing = of.replace("'", "")
    return _lease(store, f"{folder}/lease.json", f"the lock of {of}", what, hint, doing, seconds, clock).held()


def _lease(store: Store, path: str, name: str, what: str, hint: str, doing: str, seconds: float, clock: Clock) -> Lease:
    lease_file = LeaseFile(store, path, name=name, taken=what, hint=hint, doing=doing, seconds=seconds, clock=clock)
    return Lease(lease_file, seconds, clock=clock)


def night_lease_path(model: str) -> str:
    """Return the path of the lease that nights of ``model`` hold, relative to the store."""
    return f"nightly/{model}/lease.json"


def model_lease(store: Store, model: str, seconds: float, doing: str, clock: Clock = CLOCK) -> Lease:
    """Make the lease of ``model``. Others see ``doing`` as the work of its holder."""
    name, what = f"the lock of model {model!r}", f"model {model!r} is already being worked on"
    hint = "run the same command once that one has ended, or publish.model=<another name>"
    return _lease(store, night_lease_path(model), name, what, hint, doing, seconds, clock)


def night_lock(
    store: Store, model: str, seconds: float, doing: str, clock: Clock = CLOCK
) -> AbstractContextManager[None]:
    """Hold the lease of ``model``; LaunchError names another process that holds it.

    The lease of a dead process is taken over after the seconds that its record promises. A launcher that loses its
    lease ends, and the next call continues its work.
    """
    return model_lease(store, model, seconds, doing, clock).held()
