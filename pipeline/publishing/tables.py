"""Tables of a published version: a file a table, a record a row, read in place by row number.

A record holds everything of its row, so that one read of a few dozen bytes brings it: the codes, then low and span of
the row's range as float16 (coding 8 and 4), or the values themselves (fp16, fp32). Low and span are relative to a power
of two for each block of rows, which the version's description keeps.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pipeline.checkpoint.quantise import EncodedRows, decode, packed_bytes

FLOATS = {"fp16": torch.float16, "fp32": torch.float32}
_RANGE_BYTES = 4


@dataclass(frozen=True, kw_only=True)
class TableLayout:
    """``file`` holds ``rows`` records of ``record_bytes``. ``coding``: 8 | 4 | fp16 | fp32.

    ``units``: of each ``block_rows`` rows the power of two that their low and span are relative to.
    """

    file: str
    rows: int
    dim: int
    coding: str
    record_bytes: int
    block_rows: int
    units: list[float] = field(default_factory=list)

    def to_json(self) -> dict[str, Any]:
        """Plain data of the version's description."""
        return asdict(self)

    def decode(self, records: NDArray[np.uint8], rows: NDArray[np.int64]) -> Tensor:
        """The float32 values [n, dim] of ``records`` [n, record_bytes], which are those of ``rows`` [n]."""
        found = torch.from_numpy(records)
        if not len(rows):
            return torch.zeros(0, self.dim)
        if self.coding in FLOATS:
            return found.view(FLOATS[self.coding]).float()
        codes, ends = found[:, :-_RANGE_BYTES], found[:, -_RANGE_BYTES:].contiguous().view(torch.float16)
        values = decode(EncodedRows(codes, ends[:, 0], ends[:, 1], 1.0, int(self.coding), self.dim))
        units = torch.tensor(self.units, dtype=torch.float32)[torch.from_numpy(rows // self.block_rows)]
        return values.mul_(units[:, None])  # a power of two: exact


def record_bytes(dim: int, coding: str) -> int:
    """Bytes of one row."""
    return dim * FLOATS[coding].itemsize if coding in FLOATS else packed_bytes(dim, int(coding)) + _RANGE_BYTES
