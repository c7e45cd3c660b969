"""Tells other ranks about coming batches: the ids of tables on tier ssd, and the number of events.

A rank decodes its own rows alone. But the rank that holds a row of a table on SSD must fetch it before the step,
whichever rank looks it up, and TorchRec's exchange needs equally many rows of events on every rank. So each batch is
announced by two exchanges on a separate group: first the counts, then the ids, each sent to the ranks that hold its
row. They run beside the steps before the batch's own.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

import numpy as np
import torch
import torch.distributed as dist

from pipeline.embeddings.event_lookups import event_lookups
from pipeline.records.dataset import DatasetSchema
from pipeline.records.plan import ShardPlan
from pipeline.training.distributed import side_group
from pipeline.training.parquet import DecodedColumns, SplitReader

Ids = dict[str, np.ndarray]
Item = TypeVar("Item")


@dataclass(frozen=True)
class Announce:
    """The receiver of the ids of coming batches: ``receive`` is called with {table: ids int64} for each batch in turn.

    The ids are those of the whole global batch, in any order; with several ranks, each receives those of the rows that
    it holds. ``tables`` has the features of the announced tables, and ``shards`` says where their rows are.
    """

    tables: Mapping[str, tuple[str, ...]]
    shards: Mapping[str, Sequence[ShardPlan]]
    receive: Callable[[Ids], None]

    def ids(self, split: SplitReader, rows: DecodedColumns, count: int) -> Ids:
        """Return the ids of the first ``count`` rows by table, int64."""
        found = {}
        for table, names in self.tables.items():
            parts = []
            for name in names:
                if name in rows.ragged:
                    ids = rows.ragged[name].cut(0, count).values
                else:
                    ids = rows.single[split.single.index(name), :count]
                parts.append(ids.astype(np.int64))
            found[table] = np.concatenate(parts)
        return found


@dataclass(frozen=True)
class Announcement:
    """What one rank tells the others of its rows of a batch.

    ``ids``: int64 [n], those for rank 0 by table, then those for rank 1, and so on. ``counts``: int64 [W, T + 1], the
    number of ids by rank and table; the last column has the rank's number of event rows.
    """

    ids: torch.Tensor
    counts: torch.Tensor


class Announcements(Generic[Item]):
    """Makes this rank's announcements, and takes part in those of all ranks.

    All ranks take equally many items, each from one thread. An item is announced ``ahead`` - 2 items before it is
    taken, or when it is taken.
    """

    def __init__(self, announce: Announce | None, world: int, ahead: int) -> None:
        self._announce, self._world, self._ahead = announce, world, ahead
        self._holders: dict[str, _Holders] = {}
        if announce is not None:
            self._holders = {table: _Holders(shards, world) for table, shards in announce.shards.items()}
        # Use a group other than that of the steps: these collectives run beside a step, in another order on each rank.
        self._group = side_group()
        self._coming: deque[tuple[Item, _Telling]] = deque()

    @classmethod
    def needed(
        cls, schema: DatasetSchema, announce: Announce | None, world: int, ahead: int
    ) -> Announcements[Item] | None:
        """Build the announcements; None for one rank, or where no rank needs to know anything. Collective."""
        # A single rank holds all rows itself, and no other rank can have more events.
        if world == 1 or (announce is None and event_lookups(schema) is None):
            return None
        return cls(announce, world, ahead)

    def make(self, split: SplitReader, rows: DecodedColumns, count: int, events: int) -> Announcement:
        """Make the announcement of a batch with the first ``count`` of these rows, and ``events`` rows of events."""
        tables: list[list[np.ndarray]] = []
        if self._announce is not None:
            ids = self._announce.ids(split, rows, count)
            tables = [holders.deal(ids[table]) for table, holders in self._holders.items()]
        counts = np.full((self._world, len(tables) + 1), events, np.int64)
        # Start with an empty part, since there may be events but no table to announce.
        parts = [np.zeros(0, np.int64)]
        for rank in range(self._world):
            for number, of_ranks in enumerate(tables):
                parts.append(of_ranks[rank])
                counts[rank, number] = len(of_ranks[rank])
        return Announcement(torch.from_numpy(np.concatenate(parts)), torch.from_numpy(counts))

    def take(self, following: Callable[[], tuple[Item, Announcement | None]]) -> tuple[Item, int]:
        """Return the next item and the most event rows of a rank in it; StopIteration after the last. Collective.

        ``following`` returns this rank's items in turn, each with its announcement, and raises StopIteration after the
        last.
        """
        for _, telling in self._coming:
            telling.go_on()
        while len(self._coming) <= self._ahead:
            try:
                item, own = following()
            except StopIteration:
                break
            assert own is not None
            self._coming.append((item, _Telling(self._tell(own))))
        if not self._coming:
            raise StopIteration
        first, telling = self._coming.popleft()
        while telling.most is None:
            telling.go_on()
        return first, telling.most

    def _tell(self, own: Announcement) -> Generator[None, None, int]:
        # Runs the exchanges of an item, each of which continues between two calls; returns the most rows of events.
        counts = torch.empty_like(own.counts)
        work = dist.all_to_all_single(counts, own.counts, group=self._group, async_op=True)
        yield
        work.wait()
        if self._announce is not None:
            sizes, sent = counts[:, :-1], own.counts[:, :-1]
            ids = torch.empty(int(sizes.sum()), dtype=torch.int64)
            split = (sizes.sum(1).tolist(), sent.sum(1).tolist())
            work = dist.all_to_all_single(ids, own.ids, *split, group=self._group, async_op=True)
            yield
            work.wait()
            # The ids are ordered by rank, and within a rank by table: of T tables, every T-th part is of the same one.
            parts = np.split(ids.numpy(), np.cumsum(sizes.flatten().numpy())[:-1])
            received = {}
            for number, table in enumerate(self._holders):
                received[table] = np.concatenate(parts[number :: len(self._holders)])
            self._announce.receive(received)
        return int(counts[:, -1].max())


class _Telling:
    """Runs the exchanges of an announcement, from the first one on."""

    def __init__(self, exchanges: Generator[None, None, int]) -> None:
        self._exchanges = exchanges
        # The largest number of events on a rank, once all exchanges are done.
        self.most: int | None = None
        self.go_on()

    def go_on(self) -> None:
        """Wait for the running exchange, and start the next one."""
        if self.most is not None:
            return
        try:
            next(self._exchanges)
        except StopIteration as ended:
            # A generator's return value comes with the exception that ends it.
            self.most = ended.value


class _Holders:
    """The ranks that hold the rows of a table, whose ranges of rows are equal or do not overlap."""

    def __init__(self, shards: Sequence[ShardPlan], world: int) -> None:
        held = {shard.rank: (shard.row, shard.row + shard.rows) for shard in shards if shard.rows}
        # Ranks that hold columns of the same rows share a range.
        ranges = sorted(set(held.values()))
        self._ends = np.array([end for _, end in ranges])
        self._range: list[int | None] = [None] * world
        for rank, rows in held.items():
            self._range[rank] = ranges.index(rows)

    def deal(self, ids: np.ndarray) -> list[np.ndarray]:
        """Split ``ids`` [n] by rank, leaving out those beyond the table."""
        count = len(self._ends)
        # NumPy sorts 16-bit integers by radix, which is fast.
        at = np.searchsorted(self._ends, ids, side="right").astype(np.uint16)
        ordered, cuts = ids[np.argsort(at, kind="stable")], np.cumsum(np.bincount(at, minlength=count)[:count])
        parts = np.split(ordered, cuts)
        dealt = []
        for number in self._range:
            dealt.append(ids[:0] if number is None else parts[number])
        return dealt
