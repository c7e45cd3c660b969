"""Tables of a published version: one file per table, one record per row, read in place by row number.

One read of a few dozen bytes brings a whole row. In coding 8 and 4, a record holds the codes, then low and span of the
row's range as float16, relative to a power of two for each block of rows (``TableLayout.units``). In fp16 and fp32, it
holds the values.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pipeline.checkpoint.quantise import EncodedRows, decode, packed_bytes
from pipeline.records import TableLayout

FLOATS = {"fp16": torch.float16, "fp32": torch.float32}
_RANGE_BYTES = 4


def decoded(layout: TableLayout, records: NDArray[np.uint8], rows: NDArray[np.int64]) -> Tensor:
    """The float32 values [n, dim] of ``records`` [n, record_bytes] with row numbers ``rows`` [n]."""
    codes_and_range = torch.from_numpy(records)
    if not len(rows):
        return torch.zeros(0, layout.dim)
    if layout.coding in FLOATS:
        return codes_and_range.view(FLOATS[layout.coding]).float()
    codes, ends = codes_and_range[:, :-_RANGE_BYTES], codes_and_range[:, -_RANGE_BYTES:].contiguous()
    ranges = ends.view(torch.float16)
    values = decode(EncodedRows(codes, ranges[:, 0], ranges[:, 1], 1.0, int(layout.coding), layout.dim))
    units = torch.tensor(layout.units, dtype=torch.float32)[torch.from_numpy(rows // layout.block_rows)]
    return values.mul_(units[:, None])  # a power of two: exact


def record_bytes(dim: int, coding: str) -> int:
    """Bytes of one record."""
    return dim * FLOATS[coding].itemsize if coding in FLOATS else packed_bytes(dim, int(coding)) + _RANGE_BYTES
