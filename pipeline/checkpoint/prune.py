"""Removing the checkpoints of a running training that retention no longer needs, behind the training."""

from __future__ import annotations

from dataclasses import dataclass, field

from pipeline.checkpoint.fault_points import OnPoint
from pipeline.checkpoint.index import Entry, kept, remove
from pipeline.checkpoint.retention import pinned_names
from pipeline.errors import ArtifactError
from pipeline.store import Store


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

    def prune(self, entries: list[Entry]) -> tuple[list[str], str]:
        """Remove what is not needed of ``entries`` (oldest step first); names that stay, and what went wrong ("")."""
        names = [entry.name for entry in entries]
        if not self._late and len(kept(entries, self.keep_last, self.keep_every)) == len(entries):
            return names, ""
        try:
            pins = pinned_names(self.store, self.directory)
        except ArtifactError as error:
            return names, f"old checkpoints stay, because a manifest that may name them cannot be read: {error.message}"
        stay = kept(entries, self.keep_last, self.keep_every, pins)
        self._late += [entry for entry in entries if entry.name not in stay]
        going = [entry for entry in self._late if entry.name not in pins]
        try:
            remove(self.store, self.directory, going, self.on_point)
            self._late = []
        except ArtifactError as error:
            return [name for name in names if name in stay], f"old checkpoints stay until the next one: {error.message}"
        return [name for name in names if name in stay], ""
