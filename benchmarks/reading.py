"""``python -m benchmarks.reading``: what 1, 2, 4, 8 and 64 ranks read of one dataset, each rank by a reader of its own.

``ratio``: rows that 64 ranks decode in all over those that one decodes. ``bytes``: the same of bytes fetched, footers
included; ``decoded_over_rows`` and ``fetched_over_size``: of 64 ranks, over the rows and the size of the dataset (row
groups across the ends of lanes are read twice, by one rank too). ``cpu``: rows per CPU second a rank, of 64 ranks over
one. ``same_order``: the ranks' rows, put together, are one rank's, batch by batch. ``resumed``: of 1,000 random (epoch,
batch, ranks) the share after which a random rank goes on with exactly its rows.
"""

from __future__ import annotations

import io
import itertools
import tempfile
import time
from dataclasses import dataclass
from typing import Any

import numpy as np

from benchmarks.harness import finish, options
from benchmarks.models_and_rows import generate
from pipeline.store import Artifact, Store
from pipeline.training.batches import BatchReader
from pipeline.training.parquet import DecodedColumns, Ragged, RowGroup, SplitReader
from pipeline.training.sampler import BatchSampler, Order

WORLDS, LANES = (1, 2, 4, 8, 64), 64
FILE_GROUPS = 8  # row groups of a file


class Metered(Store):
    """A store whose files are fetched in ranges, as those of an object store, and that counts their bytes."""

    def __init__(self, url: str) -> None:
        super().__init__(url)
        self.is_local, self.fetched = False, 0

    def open(self, path: str, mode: str = "rb", *, parts: bool = False) -> Any:
        """Open a file; reads of Parquet are counted."""
        return _File(self.full(path), self) if path.endswith(".parquet") else super().open(path, mode)


class _File(io.FileIO):
    def __init__(self, path: str, store: Metered) -> None:
        super().__init__(path)
        self._store = store

    def read(self, size: int | None = -1) -> bytes:
        data = super().read(-1 if size is None else size) or b""
        self._store.fetched += len(data)
        return data


class Counting(SplitReader):
    """Counts the rows that are decoded."""

    decoded = 0

    def read(self, group: RowGroup, into: DecodedColumns, at: int) -> dict[str, Ragged]:
        """See ``SplitReader.read``."""
        with self._lock:
            self.decoded += group.rows
        return super().read(group, into, at)


@dataclass
class Reading:
    """What the ranks of a world read in an epoch, all in all; ``order``: rows by global batch."""

    decoded: int
    fetched: int
    cpu_seconds: float
    order: list[np.ndarray]


def main() -> None:
    given = options(
        __doc__,
        groups=(700, "row groups of the dataset"),
        group_rows=8192,
        batch=(65_536, "rows of a global batch"),
        pairs=(1000, "random (position, ranks) that are resumed"),
    )
    with tempfile.TemporaryDirectory() as folder:
        store, rows = Metered(f"{folder}/large"), given.groups * given.group_rows - given.group_rows // 3
        dataset = _generate(f"{folder}/large", rows, given.group_rows)
        size = sum(entry.bytes for name, entry in dataset.files.items() if name.startswith("train/"))
        _read(store, dataset, 1, given.batch)  # warms up
        done = {world: _read(store, dataset, world, given.batch) for world in WORLDS}
        small = _generate(f"{folder}/small", 600 * 48 - 16, 48)
        resumed = _resumed(SplitReader(Store(f"{folder}/small"), small, "train"), given.pairs)
    one, many = done[1], done[64]
    finish(
        "reading",
        many.decoded / one.decoded,
        bytes=many.fetched / one.fetched,
        cpu=one.cpu_seconds / many.cpu_seconds,
        decoded_over_rows=many.decoded / rows,
        fetched_over_size=many.fetched / size,
        same_order=all(_equal(each.order, one.order) for each in done.values()),
        resumed=resumed,
        rows=rows,
        groups=given.groups,
        batch=given.batch,
    )


def _generate(url: str, rows: int, group: int) -> Artifact:
    return generate(Store(url), rows, 0, group, FILE_GROUPS)


def _read(store: Metered, dataset: Artifact, world: int, batch: int) -> Reading:
    parts: list[list[np.ndarray]] = []
    before, began, decoded = store.fetched, time.process_time(), 0
    for rank in range(world):
        split = Counting(store, dataset, "train")
        with BatchReader(split, _order(batch, rank, world)) as reader:
            parts.append([_rows(each) for each in reader])
        decoded += split.decoded
    seconds = time.process_time() - began
    order = [np.concatenate(each) for each in zip(*parts, strict=True)]
    fetched = store.fetched - before
    print(f"{world} ranks: {decoded:,} rows, {fetched:,} bytes, {seconds:.2f} CPU seconds", flush=True)
    return Reading(decoded, fetched, seconds, order)


def _order(batch: int, rank: int = 0, world: int = 1) -> Order:
    return Order(key="reading", seed=1, global_batch=batch, lanes=LANES, rank=rank, world_size=world)


def _rows(batch: Any) -> np.ndarray:
    """Dense values of the rows without padding: normal ones, by which a row is known."""
    values: np.ndarray = batch.dense[batch.weights > 0, :2].numpy().copy()
    return values


def _equal(some: list[np.ndarray], others: list[np.ndarray]) -> bool:
    return len(some) == len(others) and all(map(np.array_equal, some, others))


def _resumed(split: SplitReader, pairs: int, batch: int = 512, epochs: int = 3) -> float:
    """Share of random (position, ranks) from which three batches of a random rank are those of one rank's order."""
    with BatchReader(split, _order(batch), epochs=epochs) as reader:
        whole = [_rows(each) for each in reader]
    rng, right = np.random.default_rng(2), 0
    for _ in range(pairs):
        at, world = int(rng.integers(0, len(whole))), int(rng.integers(1, 129))
        order = _order(batch, int(rng.integers(0, world)), world)
        deal = BatchSampler(order, split.groups)
        with BatchReader(split, order, epochs=epochs, start=divmod(at, deal.batches)) as reader:
            found = [_rows(each) for each in itertools.islice(reader, 3)]
        right += _equal(found, [_share(deal, whole[i], i % deal.batches) for i in range(at, min(at + 3, len(whole)))])
    return right / pairs


def _share(deal: BatchSampler, rows: np.ndarray, batch: int) -> np.ndarray:
    """The part of a global batch's ``rows`` that is its rank's."""
    rank, world = deal.order.rank, deal.order.world_size
    before = sum(deal.owned(batch, each, world) for each in range(rank))
    return rows[before : before + deal.owned(batch, rank, world)]


if __name__ == "__main__":
    main()
