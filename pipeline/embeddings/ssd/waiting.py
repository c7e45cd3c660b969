"""Announced batches in the order they came: a batch that a shard has no free slots for waits until others are done.

By shard, for the tables of a model are looked up one kernel after another: the next batch's rows of one table may be
waited for while rows of the former batch are still held in another. For the store's worker thread alone.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from pipeline.embeddings.ssd.shard import Part, SsdShard
from pipeline.errors import GuardError

Parts = list[tuple[SsdShard, Part]]
LEFT_OUT = -2  # the ``era`` of a part that was let go before it had slots


class Line:
    """Parts of batches that have no slots yet. ``bring`` fetches the rows of parts, of each shard one at most."""

    def __init__(self, bring: Callable[[Parts], None]) -> None:
        self._bring = bring
        self._parts: dict[SsdShard, deque[Part]] = {}

    def join(self, parts: Parts) -> None:
        """Bring what has slots now; the rest waits. GuardError for a batch that no shard of its size can hold."""
        now = []
        for shard, part in parts:
            if part.era == LEFT_OUT:
                continue
            if shard in self._parts or not shard.room(part):
                self._parts.setdefault(shard, deque()).append(part)
            else:
                now.append((shard, part))
        self._bring(now)

    def release(self, parts: Parts) -> None:
        """These batches are done, or left out; bring those that have slots now."""
        for shard, part in parts:
            if part.era >= 0:
                shard.release(part)
                continue
            part.era = LEFT_OUT
            if shard in self._parts and part in self._parts[shard]:
                self._parts[shard].remove(part)
        self._parts = {shard: line for shard, line in self._parts.items() if line}
        while self._parts and (now := [(shard, line[0]) for shard, line in self._parts.items() if shard.room(line[0])]):
            for shard, _ in now:
                self._parts[shard].popleft()
                if not self._parts[shard]:
                    del self._parts[shard]
            self._bring(now)

    def leave(self, shard: SsdShard) -> None:
        """Forget what waits for slots of ``shard``."""
        self._parts.pop(shard, None)


def check_room(shard: SsdShard, part: Part) -> None:
    """GuardError where batches on their way hold too many slots for one that nobody announced."""
    if not shard.room(part):
        raise GuardError(
            f"{len(part.rows):,} rows of table {shard.name!r} are needed at once beside those of the batches that are "
            "read ahead, but the plan's cache_rows is too small for them",
            hint=f"a larger +plan.tables.{shard.name}.cache_rows, or train.prefetch_batches=1",
        )
