"""The queue of announced batches: a batch without free slots in a shard waits until others are done.

There is a queue for each shard, since the kernels of a model look up their tables one after another: the next batch's
rows of one table may be needed while the former batch still holds rows of another. For the store's worker thread alone.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from pipeline.embeddings.ssd.shard import ShardRequest, SsdShard
from pipeline.errors import GuardError

Parts = list[tuple[SsdShard, ShardRequest]]
LEFT_OUT = -2  # the ``era`` of a part that was let go before it had slots


class WaitingParts:
    """Parts of batches without slots. ``bring`` fetches the rows of parts, at most one of each shard."""

    def __init__(self, bring: Callable[[Parts], None]) -> None:
        self._bring = bring
        self._parts: dict[SsdShard, deque[ShardRequest]] = {}

    def join(self, parts: Parts) -> None:
        """Bring the parts with free slots; the others wait. GuardError for a part larger than its shard's cache."""
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
        """End ``parts``, trained or left out, and bring the waiting ones that now have free slots."""
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
        """Drop the parts that wait for slots of ``shard``."""
        self._parts.pop(shard, None)


def check_room(shard: SsdShard, part: ShardRequest) -> None:
    """GuardError where batches under way leave too few slots for a batch that was not announced."""
    if not shard.room(part):
        raise GuardError(
            f"the plan's cache_rows of table {shard.name!r} is too small: {len(part.rows):,} rows are needed beside "
            "those of the batches read ahead",
            hint=f"a larger +plan.tables.{shard.name}.cache_rows, or train.prefetch_batches=1",
        )
