"""``python -m benchmarks.reading``: what 1, 2, 4, 8 and 64 ranks read of one dataset, each rank by a reader of its own.

``ratio``: rows that 64 ranks decode in all over those that one decodes. ``bytes``: the same of bytes fetched, footers
included; ``decoded_over_rows`` and ``fetched_over_size``: of 64 ranks, over the rows and the size of the dataset (row
groups across the ends of lanes are read twice, by one rank too). ``cpu``: rows per CPU second a rank, of 64 ranks over
one. ``same_order``: the ranks' rows, put together, are one rank's, batch by batch. ``resumed``: of 1,000 random (epoch,
batch, ranks) the share after which a random rank goes on with exactly its rows. ``groups_mixed``: row groups that a
global batch has rows of.
"""

from __future__ import annotations

import io
import tempfile
import time
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from benchmarks.harness import finish, options
from pipeline.records import DatasetSchema, SparseColumn
from pipeline.store import Artifact, Store
from pipeline.training.batches import BatchReader
from pipeline.training.parquet import DecodedColumns, Ragged, RowGroup, SplitReader
from pipeline.training.sampler import BatchSampler, Order

WORLDS, LANES = (1, 2, 4, 8, 64), 64
FILE_GROUPS = 8  # row groups of a file
DENSE, IDS, TABLE_ROWS = 13, 26, 20_000
KEY = "reading"


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
    """What the ranks of a world read in an epoch, all in all; ``order``: row numbers by global batch."""

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
        store = Metered(folder)
        dataset = _write(store, "data", given.groups, given.group_rows, DENSE, IDS)
        size = sum(entry.bytes for name, entry in dataset.files.items() if name.endswith(".parquet"))
        _read(store, dataset, 1, given.batch, epochs=1)  # warms up
        done = {world: _read(store, dataset, world, given.batch) for world in WORLDS}
        small = _write(store, "small", 600, 48, 1, 1)
        resumed = _resumed(SplitReader(store, small, "train"), given.pairs)
        mixed = float(np.mean([len(np.unique(batch // given.group_rows)) for batch in done[1].order]))
    one, many = done[1], done[64]
    rows = sum(len(batch) for batch in one.order)
    finish(
        "reading",
        many.decoded / one.decoded,
        bytes=many.fetched / one.fetched,
        cpu=one.cpu_seconds / many.cpu_seconds,
        decoded_over_rows=many.decoded / rows,
        fetched_over_size=many.fetched / size,
        same_order=all(
            all(np.array_equal(a, b) for a, b in zip(each.order, one.order, strict=True)) for each in done.values()
        ),
        resumed=resumed,
        groups_mixed=mixed,
        rows=rows,
        groups=given.groups,
        batch=given.batch,
    )


def _write(store: Store, name: str, groups: int, group_rows: int, dense: int, ids: int) -> Artifact:
    """Random rows; numeric column ``I1`` has the number of the row, which float32 holds up to 16 million."""
    rng, rows = np.random.default_rng(1), groups * group_rows - group_rows // 3
    file_rows = FILE_GROUPS * group_rows
    starts = range(0, rows, file_rows)
    sizes = [min(file_rows, rows - start) for start in starts]
    schema = DatasetSchema(
        dense=tuple(f"I{i + 1}" for i in range(dense)),
        sparse=tuple(SparseColumn(name=f"C{i + 1}", rows=TABLE_ROWS) for i in range(ids)),
        rows={"train": rows},
        files={"train": [f"train/part-{i:05d}.parquet" for i in range(len(starts))]},
        groups={"train": [[min(group_rows, n - at) for at in range(0, n, group_rows)] for n in sizes]},
    )
    columns = {"label": rng.random(file_rows) < 0.2}
    columns |= {each: rng.normal(size=file_rows) for each in schema.dense}
    columns = {each: values.astype(np.float32) for each, values in columns.items()}
    columns |= {each.name: rng.integers(0, TABLE_ROWS, file_rows, np.int32) for each in schema.sparse}
    with store.draft(f"datasets/{name}/{KEY}", kind="dataset", key=KEY, config={}, inputs={}) as draft:
        for file, start, size in zip(schema.files["train"], starts, sizes, strict=True):
            columns["I1"] = np.arange(start, start + file_rows, dtype=np.float32)
            with draft.open(file) as sink:
                pq.write_table(
                    pa.table(columns).slice(0, size),
                    sink,
                    row_group_size=group_rows,
                    compression="lz4",
                    use_dictionary=False,
                    write_statistics=False,
                )
        draft.write_json("schema.json", schema.to_json())
        return draft.commit({})


def _read(store: Metered, dataset: Artifact, world: int, batch: int, epochs: int = 1) -> Reading:
    parts: list[list[np.ndarray]] = []
    before, began, decoded = store.fetched, time.process_time(), 0
    for rank in range(world):
        split = Counting(store, dataset, "train")
        with BatchReader(split, _order(batch, rank, world), epochs=epochs) as reader:
            parts.append([_numbers(each) for each in reader])
        decoded += split.decoded
    seconds = time.process_time() - began
    order = [np.concatenate(each) for each in zip(*parts, strict=True)]
    fetched = store.fetched - before
    print(f"{world} ranks: {decoded:,} rows, {fetched:,} bytes, {seconds:.2f} CPU seconds", flush=True)
    return Reading(decoded, fetched, seconds, order)


def _order(batch: int, rank: int = 0, world: int = 1) -> Order:
    return Order(key=KEY, seed=1, global_batch=batch, lanes=LANES, rank=rank, world_size=world)


def _numbers(batch: Any) -> np.ndarray:
    return batch.dense[batch.weights > 0, 0].numpy().astype(np.int64)


def _resumed(split: SplitReader, pairs: int, batch: int = 512, epochs: int = 3) -> float:
    """Share of random (position, ranks) from which three batches of a random rank are those of one rank's order."""
    with BatchReader(split, _order(batch), epochs=epochs) as reader:
        whole = [_numbers(each) for each in reader]
    rng, right = np.random.default_rng(2), 0
    for _ in range(pairs):
        at, world = int(rng.integers(0, len(whole))), int(rng.integers(1, 129))
        order = _order(batch, int(rng.integers(0, world)), world)
        deal = BatchSampler(order, split.groups)
        with BatchReader(split, order, epochs=epochs, start=divmod(at, deal.batches)) as reader:
            found = [_numbers(each) for _, each in zip(range(3), reader, strict=False)]
        right += all(
            np.array_equal(rows, _share(deal, whole[at + i], (at + i) % deal.batches)) for i, rows in enumerate(found)
        ) and len(found) == min(3, len(whole) - at)
    print(f"resumed {right} of {pairs}", flush=True)
    return right / pairs


def _share(deal: BatchSampler, rows: np.ndarray, batch: int) -> np.ndarray:
    """The part of a global batch's ``rows`` that is its rank's."""
    rank, world = deal.order.rank, deal.order.world_size
    before = sum(deal.owned(batch, each, world) for each in range(rank))
    return rows[before : before + deal.owned(batch, rank, world)]


if __name__ == "__main__":
    main()
