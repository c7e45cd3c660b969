"""Rows by the number of their events, for slices: in steps of powers of two."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from pipeline.records import MISSING_ROW, SequenceGroup

if TYPE_CHECKING:
    from pipeline.training.parquet import DecodedColumns


def length_codes(columns: DecodedColumns, sequence: SequenceGroup) -> np.ndarray:
    """A number for each row: 0 without events, else 1 + log2 of their number, rounded down."""
    lists = [columns.ragged[column.name] for column in sequence.columns]
    starts, lengths = lists[0].offsets[:-1], np.diff(lists[0].offsets)
    missing = np.all([each.values[starts] == MISSING_ROW for each in lists], axis=0)
    codes: np.ndarray = 1 + np.floor(np.log2(lengths)).astype(np.int64)
    codes[(lengths == 1) & missing] = 0
    return codes


def length_names(sequence: SequenceGroup) -> dict[int, str]:
    """What the numbers of ``length_codes`` are called."""
    names = {0: "(no events)", 1: "1 event"}
    steps = range(1, sequence.max_length.bit_length())
    return names | {step + 1: f"{2**step} to {min(2 ** (step + 1) - 1, sequence.max_length)} events" for step in steps}
