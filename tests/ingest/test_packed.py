"""Typed rows between the passes: what comes out is what went in, read where it lies."""

import numpy as np
import polars as pl
import pytest
from polars.testing import assert_frame_equal

from pipeline.ingest.blocks import CODE, packed, unpacked
from pipeline.ingest.ids import Coded

ROWS = 1_000


def typed_rows() -> pl.DataFrame:
    draw = np.random.default_rng(5)
    numbers = draw.normal(size=ROWS)
    return pl.DataFrame(
        {
            "label": draw.integers(0, 2, ROWS).astype(np.float32),
            "dense:wide": numbers,
            "dense:narrow": pl.Series(numbers.astype(np.float32).astype(np.float64)).set(pl.Series(numbers > 2), None),
            "words": [None if one % 7 == 0 else "w" * (one % 40) for one in range(ROWS)],
            "lists": [[one] * (one % 3) for one in range(ROWS)],
        }
    )


@pytest.mark.parametrize("rows", [ROWS, 1, 0])
def test_rows_and_ids_come_out_as_they_went_in(rows: int) -> None:
    frame = typed_rows().head(rows)
    hashes = np.random.default_rng(6).integers(0, 1 << 63, 9, np.uint64)
    codes = pl.Series(np.arange(rows, dtype=np.uint16) % 9)
    out, coded = unpacked(packed(frame, {"user": Coded.of_codes(hashes, codes)}))
    assert out["dense:wide"].dtype == (pl.Float64 if rows else out["dense:wide"].dtype)
    same = out.select(frame.columns).with_columns(pl.col("dense:wide", "dense:narrow").cast(pl.Float64))
    assert_frame_equal(same, frame, check_exact=True)
    assert coded["user"].hashes.tolist() == hashes.tolist()
    assert out[CODE + "user"].to_list() == codes.to_list()


def test_numbers_that_fit_stay_float32_and_none_is_rounded() -> None:
    out, _ = unpacked(packed(typed_rows(), {}))
    assert (out["dense:narrow"].dtype, out["dense:wide"].dtype) == (pl.Float32, pl.Float64)
