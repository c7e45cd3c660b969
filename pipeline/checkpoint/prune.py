"""Removing what a training no longer needs: remains of killed writers before it starts, old checkpoints behind it."""

from __future__ import annotations

from collections.abc import Collection, Container, Iterable
from dataclasses import dataclass, field

from pipeline.checkpoint.fault_points import FaultPoint, OnPoint
from pipeline.checkpoint.index import Entry, committed, kept, rested_on
from pipeline.checkpoint.retention import pinned_names
from pipeline.errors import ArtifactError
from pipeline.store import MANIFEST, Store
from pipeline.store.removal import remove


def sweep(store: Store, directory: str, pinned: Iterable[str] = (), aside: Container[str] = ()) -> list[str]:
    """Remove what writers and pruners that were killed left, checkpoints without a manifest; says in lines what.

    One that a committed checkpoint rests on or that is ``pinned`` (names) stays: it lost its manifest. What was set
    ``aside`` (names) stays without a word.
    """
    stay = set(pinned) | set(rested_on(committed(store, directory)))
    lines = []
    for name in store.names(directory):
        path = f"{directory}/{name}"
        if not name.startswith("step-") or name in aside or store.exists(f"{path}/{MANIFEST}"):
            continue
        if name in stay:
            lines.append(f"{path} has no manifest, but something depends on it, so it is kept")
        else:
            remove(store, path)
            lines.append(f"removed {path}, which has no manifest: it was never committed")
    return lines


@dataclass
class Pruner:
    """Called on rank 0, in the writer's thread, once for each checkpoint that is committed.

    ``keep_last``, ``keep_every`` as in the configuration. What something outside names is read once a call.
    """

    store: Store
    directory: str
    keep_last: int
    keep_every: int | None
    on_point: OnPoint
    _late: list[Entry] = field(default_factory=list)  # should be gone, but the store refused it

    def prune(self, before: list[Entry], held: Collection[str], newest: Entry) -> tuple[list[str], str]:
        """Remove what is not needed of those ``before`` (oldest step first), now that ``newest`` is committed.

        ``held``: names that the training itself needs. Returns names that stay, and what went wrong ("").
        """
        entries = [*before, newest]
        names = [entry.name for entry in entries]
        if not self._late and len(kept(entries, self.keep_last, self.keep_every)) == len(entries):
            return names, ""
        try:
            pins = [*pinned_names(self.store, self.directory), *held]
        except ArtifactError as error:
            why = "a manifest that may name them cannot be read"
            return names, f"old checkpoints are kept, because {why}: {error.message}"
        stay = kept(entries, self.keep_last, self.keep_every, pins)
        self._late += [entry for entry in entries if entry.name not in stay]
        going = [entry for entry in self._late if entry.name not in pins]
        try:
            for entry in sorted(going, key=lambda entry: -entry.step):  # the ones that rest on others first
                remove(self.store, f"{self.directory}/{entry.name}", lambda: self.on_point(FaultPoint.PRUNE))
            self._late = []
        except ArtifactError as error:
            message = f"old checkpoints are kept until the next one: {error.message}"
            return [name for name in names if name in stay], message
        return [name for name in names if name in stay], ""
