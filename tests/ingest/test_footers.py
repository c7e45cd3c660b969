"""Files put together from columns that were encoded apart are those that Arrow writes."""

import io

import numpy as np
import polars as pl
import pyarrow.parquet as pq
import pytest

from pipeline.ingest.output import RowsFile, encoded, plain, rows_writer


@pytest.mark.parametrize("compression", ["lz4", "zstd", "snappy"])
@pytest.mark.parametrize("groups", [1, 3, 40])
def test_a_file_in_pieces_is_the_file_that_arrow_writes(compression, groups):
    rng = np.random.default_rng(0)
    rows, size = 4000, 4000 // groups
    frame = pl.DataFrame(
        {
            "x": rng.random(rows).astype(np.float32),
            "row": rng.integers(0, 9, rows).astype(np.int32),
            "list": pl.Series([[1, 2], [3]] * (rows // 2), dtype=pl.List(pl.Int32)),
            "true_probability": pl.Series([None, 0.5] * (rows // 2), dtype=pl.Float32),
            **{f"c{i}": rng.integers(0, 2**40, rows) for i in range(20)},
        }
    )
    parts = [frame.slice(at, size) for at in range(0, rows, size)]
    whole, pieces = io.BytesIO(), io.BytesIO()
    with rows_writer(whole, plain(frame).schema, compression) as writer:
        for part in parts:
            writer.write_table(plain(part), row_group_size=part.height)
    file = RowsFile(pieces, plain(frame.clear()).schema, compression)
    for part in parts:
        file.add((encoded(plain(part[:, at : at + 5]), compression) for at in range(0, part.width, 5)), part.height)
    file.close()
    assert pieces.getvalue() == whole.getvalue()
    assert pl.from_arrow(pq.read_table(pieces)).equals(frame)
