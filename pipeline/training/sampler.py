"""The order of an epoch's rows: lanes of row groups, each of which gives every global batch equally many rows.

Row groups are permuted and laid end to end; lane l of L has rows [f(l), f(l + 1)) of that sequence, so that all lanes
end at the same time. ``B / L`` rows of each lane make a global batch, and the rest of the epoch makes the last, short
one. A lane's rows are mixed within windows of row groups. The order depends only on (content of the train rows, seed,
epoch, global batch) and on the lanes: not on the ranks, nor on where the logs lay or when they were written.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from pipeline.config.train import TrainConfig, fitting_lanes
from pipeline.records.dataset import UNSEEN_ROW
from pipeline.store.manifest import Artifact
from pipeline.training.parquet import RowGroup


def shuffle_key(dataset: Artifact) -> str:
    """Return the key of the order of a dataset's train rows: a hash of their content, 32 hex digits.

    A dataset's own key also covers the names and times of its log files, which decide only whether the logs must be
    read again. The checksums of its Parquet files are the same from every format, folder and ingestion engine.
    """
    digest = hashlib.sha256()
    for name in sorted(dataset.files):
        if name.startswith("train/"):
            digest.update(f"{name} {dataset.files[name].checksum}\n".encode())
    return digest.hexdigest()[:32]


@dataclass(frozen=True, kw_only=True)
class Order:
    """The settings that fix the sequence of global batches, and this rank's share of it.

    ``key`` is ``shuffle_key`` of the dataset, or what a training that an earlier release began has in its place.
    ``lanes``: the most lanes; a dataset with too few row groups gets fewer. Without ``shuffle`` a lane has its rows in
    their order. ``group_by`` is the feature whose ids keep rows together when a window is shuffled; None: rows are
    shuffled one by one. ``world_size`` is the number of ranks with a share, which come first; ``without`` is the number
    of ranks behind them that have none, on embedding hosts.
    """

    key: str
    seed: int
    global_batch: int
    shuffle: bool = True
    window_groups: int = 8
    lanes: int = 1
    group_by: str | None = None
    rank: int = 0
    world_size: int = 1
    without: int = 0

    @property
    def local_batch(self) -> int:
        """Return the rows of a batch on this rank, padding included; 0 without a share."""
        return -(-self.global_batch // self.world_size) if self.has_share else 0

    @property
    def has_share(self) -> bool:
        """Whether this rank has rows of global batches."""
        return self.rank < self.world_size

    def steps_per_epoch(self, rows: int) -> int:
        """Return the global batches of an epoch of ``rows`` rows, the last of which may be short."""
        return -(-rows // self.global_batch)

    def samples_after(self, step: int, rows: int) -> int:
        """Return the samples that ``step`` steps have trained, in epochs of ``rows`` rows."""
        epochs, batches = divmod(step, self.steps_per_epoch(rows))
        return epochs * rows + batches * self.global_batch

    def generator(self, *numbers: int) -> np.random.Generator:
        """Return a random generator that depends only on ``key``, seed and ``numbers``."""
        mixed = np.random.SeedSequence([self.seed, *self.key.encode(), *numbers])
        return np.random.Generator(np.random.PCG64(mixed))


@dataclass(frozen=True)
class RowRange:
    """Rows [start, stop) of a row group."""

    group: RowGroup
    start: int
    stop: int


@dataclass(frozen=True)
class Window:
    """``rows`` rows of a ``lane`` that are mixed with each other, from row ``start`` of the lane in this epoch on."""

    epoch: int
    lane: int
    number: int
    start: int
    rows: int
    parts: tuple[RowRange, ...]


@dataclass(frozen=True)
class Take:
    """Rows [start, stop) of a ``lane``, counted from its first row in the epoch."""

    lane: int
    start: int
    stop: int


class BatchSampler:
    """Deals the rows of ``groups`` to global batches and ranks by ``order``."""

    def __init__(self, order: Order, groups: list[RowGroup]) -> None:
        self.order, self._groups = order, groups
        self.rows = sum(group.rows for group in groups)
        self.lanes = fitting_lanes(order.lanes, order.global_batch, len(groups))
        # The rows of each lane in a global batch.
        self.quota = order.global_batch // self.lanes
        self._full, self._short = divmod(self.rows, order.global_batch)
        # The number of global batches in an epoch.
        self.batches = self._full + bool(self._short)
        # The number of row groups in a window.
        self.together = max(1, -(-order.window_groups // self.lanes)) if order.shuffle else 1
        self._laid = lru_cache(maxsize=2)(self._lay)

    def total(self, batch: int) -> int:
        """Return the rows of global batch ``batch`` of an epoch."""
        return self.order.global_batch if batch < self._full else self._short

    def takes(self, batch: int, rank: int, world: int) -> list[Take]:
        """Return the rows of ``rank`` of ``world`` in a global batch, in order; empty if the batch has none for it.

        A rank has the places [r * b, (r + 1) * b) of the batch, where b = ceil(B / W), and lane l fills the places from
        l * B / L on. So if the number of ranks divides the number of lanes, each rank has its own lanes.
        """
        size = -(-self.order.global_batch // world)
        first, end = rank * size, min((rank + 1) * size, self.order.global_batch)
        begin, found = batch * self.quota, []
        for lane in range(first // self.quota, -(-end // self.quota)):
            low, high = max(first - lane * self.quota, 0), min(end - lane * self.quota, self._filled(batch, lane))
            if low < high:
                found.append(Take(lane, begin + low, begin + high))
        return found

    def owned(self, batch: int, rank: int, world: int) -> int:
        """Count the rows of a global batch that belong to ``rank`` of ``world``."""
        return sum(take.stop - take.start for take in self.takes(batch, rank, world))

    def first(self, batch: int) -> Take:
        """Return the first row of a global batch."""
        # The short batch may have fewer rows than there are lanes, so the first lanes may be empty.
        lane = next(lane for lane in range(self.lanes) if self._filled(batch, lane))
        return Take(lane, batch * self.quota, batch * self.quota + 1)

    def places(self, take: Take) -> slice:
        """Return where the rows of ``take`` are among all rows of an epoch, lane after lane."""
        begin = self._begin(take.lane)
        return slice(begin + take.start, begin + take.stop)

    def windows(self, epoch: int, lane: int) -> Iterator[Window]:
        """Yield the windows of a lane in an ``epoch``."""
        parts, start = self._parts(epoch, lane), 0
        for number, at in enumerate(range(0, len(parts), self.together)):
            own = tuple(parts[at : at + self.together])
            rows = sum(part.stop - part.start for part in own)
            yield Window(epoch, lane, number, start, rows, own)
            start += rows

    def mixed(self, window: Window) -> np.ndarray:
        """Return the order of the rows of a window."""
        if not self.order.shuffle:
            return np.arange(window.rows)
        numbers = [window.epoch, window.number]
        # Lane 0 keeps the order of a dataset with a single lane.
        if window.lane:
            numbers.append(window.lane)
        return self.order.generator(*numbers).permutation(window.rows)

    def _filled(self, batch: int, lane: int) -> int:
        # The rows of ``lane`` in a global batch; in the last, short one the lanes' numbers differ by one at most.
        if batch < self._full:
            return self.quota
        return self._short * (lane + 1) // self.lanes - self._short * lane // self.lanes

    def _begin(self, lane: int) -> int:
        return self._full * self.quota * lane + self._short * lane // self.lanes

    def _lay(self, epoch: int) -> tuple[list[RowGroup], np.ndarray]:
        # Lays the row groups of an epoch end to end; also returns the place where each ends among the epoch's rows.
        groups = self._groups
        if self.order.shuffle:
            groups = [groups[i] for i in self.order.generator(epoch).permutation(len(groups))]
        return groups, np.cumsum([group.rows for group in groups])

    def _parts(self, epoch: int, lane: int) -> list[RowRange]:
        groups, ends = self._laid(epoch)
        at, stop = self._begin(lane), self._begin(lane + 1)
        number, parts = int(np.searchsorted(ends, at, side="right")), []
        while at < stop:
            # A group that lies across the border of two lanes is a part of both.
            group, end = groups[number], int(ends[number])
            begin = end - group.rows
            parts.append(RowRange(group, at - begin, min(end, stop) - begin))
            at, number = end, number + 1
        return parts


def keep_groups(order: np.ndarray, ids: np.ndarray) -> np.ndarray:
    """Return ``order`` with the rows of each group together, at the place of the first of them.

    Args:
        order: A permutation of the rows of a window, [n].
        ids: The group of each row of the window, int [n]; a row whose id is at most ``UNSEEN_ROW`` has none.
    """
    ordered = ids[order]
    _, first, group = np.unique(ordered, return_index=True, return_inverse=True)
    place = first[group]
    # Rare ids share one row number, and so do rows without an id: neither of them is a group.
    alone = np.flatnonzero(ordered <= UNSEEN_ROW)
    place[alone] = alone
    return order[np.argsort(place, kind="stable")]


def decoded_share(train: TrainConfig, world_size: int, groups: int) -> float:
    """Return the share of the rows in ``groups`` row groups that the busiest of ``world_size`` ranks decodes.

    Predictions and dry runs use it. A rank decodes each lane that it takes rows of as a whole (``BatchSampler``). Row
    groups across the border of two lanes, which are decoded for both, are not counted twice.
    """
    lanes = fitting_lanes(train.dealt_lanes, train.batch, groups)
    size, quota = -(-train.batch // world_size), train.batch // lanes
    most = 0
    for start in range(0, train.batch, size):
        end = min(start + size, train.batch)
        # Count from the lane of the first row to that of the last one.
        most = max(most, -(-end // quota) - start // quota)
    return most / lanes
