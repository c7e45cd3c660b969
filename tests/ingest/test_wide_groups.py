"""Row groups of many columns: the rows are those that Arrow reads, and memory holds a batch, not the row group."""

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from pipeline.core.errors import ArtifactError
from pipeline.ingest.formats import columnar
from pipeline.ingest.formats.columnar import Parquet
from tests.alone import alone

ROWS, NUMBERS, GROUP = 6_000, 140, 2_500
KINDS = ["ids", "words", "vector", "map", "none"]


@pytest.fixture(scope="module")
def wide_file(tmp_path_factory):
    """Numbers, and columns of every other kind: a dictionary, strings with nulls, lists, maps, nothing at all."""
    draw = np.random.default_rng(3)
    columns = {f"x{number}": pa.array(draw.normal(size=ROWS)) for number in range(NUMBERS)}
    columns["ids"] = pa.array([f"i{one}" for one in draw.integers(0, 9, ROWS)]).dictionary_encode()
    columns["words"] = pa.array([None if one % 7 == 0 else f"w{one}" for one in range(ROWS)])
    columns["vector"] = pa.array([[one, one / 2] for one in range(ROWS)], pa.list_(pa.float32(), 2))
    columns["map"] = pa.array([[("a", one)] for one in range(ROWS)], pa.map_(pa.string(), pa.int64()))
    columns["none"] = pa.nulls(ROWS, pa.float64())
    path = tmp_path_factory.mktemp("wide") / "log.parquet"
    pq.write_table(pa.table(columns), path, row_group_size=GROUP)
    return path


def batches_of(path, columns=None, part=(0, None), block_bytes=1 << 20):
    with path.open("rb") as stream:
        yield from Parquet().batches(stream, columns or pq.read_schema(path).names, block_bytes, part)


def test_batches_hold_the_rows_of_the_file_in_order_and_none_spans_row_groups(wide_file, monkeypatch):
    monkeypatch.setattr(columnar, "_TOGETHER", 1 << 18)  # several sets of columns
    batches = [*batches_of(wide_file)]
    assert pa.Table.from_batches(batches).equals(pq.read_table(wide_file))
    per_group = [1024, 1024, 452]
    assert [batch.num_rows for batch in batches] == [*per_group, *per_group, 1000]


def test_a_part_and_some_columns_are_read_alike(wide_file):
    names = [*KINDS[::-1], *(f"x{number}" for number in range(NUMBERS - 1, 0, -1))]
    got = pa.Table.from_batches([*batches_of(wide_file, names, (1, 2))])
    assert got.equals(pq.read_table(wide_file).select(names).slice(GROUP, GROUP))


@alone
def test_memory_holds_some_columns_and_not_the_row_group(wide_file):
    columnar._TOGETHER = 1 << 17  # for this process, which is the test's own
    before, held = pa.total_allocated_bytes(), []
    for _ in batches_of(wide_file, part=(0, 1)):
        held.append(pa.total_allocated_bytes() - before)
    assert max(held) < GROUP * NUMBERS * 8 / 4


def test_a_full_disk_is_refused_by_name(wide_file, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.pwrite", full)
    with pytest.raises(ArtifactError, match="no space left for ingestion's temporary file"):
        next(batches_of(wide_file))
