"""Rows of the same event: hashes of its key, which of the rows stays, and what that does to the blocks of a log.

An event's key is told by 128 bits, two xxhash64 of other seeds: the odds that any two of 10^12 keys share them are
1 in 10^15.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import numpy as np
import polars as pl

from pipeline.config.ingest import SamplingConfig, SplitConfig
from pipeline.ingest.hashing import hash_event_keys
from pipeline.ingest.parse import parse
from pipeline.ingest.rejects import RejectedRows
from pipeline.ingest.schema import CLICKED_LATER, DAY, EVENT, EVENT_CHECK, DataSpec
from pipeline.ingest.sources import Block, RawBlock
from pipeline.ingest.values import text_of
from pipeline.records.dataset import LABEL

# The columns of events: two hashes of the key, whether the row came with a click, its day and its line.
FOUND = {
    "key": pl.UInt64,
    "check": pl.UInt64,
    "clicked": pl.Boolean,
    "day": pl.Int32,
    "line": pl.Int64,
}


def narrow(spec: DataSpec) -> DataSpec:
    """What is read of a row to find its event: label, key and day."""
    wanted = {spec.label, spec.event_key, spec.day_column, spec.timestamp}
    columns = {name: override for name, override in spec.columns.items() if name in wanted}
    return replace(
        spec,
        dense=(),
        sparse=(),
        tasks=(),
        row_weight=None,
        sampling=SamplingConfig(),
        hour_column=None,
        true_probability=False,
        columns=columns,
        sequences=(),
        row_time=None,
        histories=(),
        split=SplitConfig(),
        split_time=None,
    )


@dataclass(frozen=True)
class FindEvents:
    """The events of the rows of a block that parse, as ``FOUND``. ``day``: of rows that carry none."""

    spec: DataSpec
    day: int = 0

    def __call__(self, block: Block) -> pl.DataFrame:
        raw = block.read()
        parsed = parse(raw.frame.select(list(self.spec.columns)), raw.lines, self.spec)
        frame = parsed.frame
        if DAY in frame.columns:
            day = frame[DAY]
        else:
            day = pl.Series([self.day], dtype=pl.Int32).new_from_index(0, frame.height)
        return pl.DataFrame(
            {
                "key": frame[EVENT],
                "check": frame[EVENT_CHECK],
                "clicked": frame[LABEL] > 0,
                "day": day,
                "line": pl.Series(parsed.lines, dtype=pl.Int64),
            }
        )


@dataclass(frozen=True)
class FindClicks:
    """The events of a block of a log that has clicks alone, a key a row."""

    spec: DataSpec
    day: int

    def __call__(self, block: Block) -> pl.DataFrame:
        raw, column = block.read(), self.spec.event_key or ""
        text = text_of(raw.frame[column], self.spec, RejectedRows(raw.lines)).drop_nulls()
        text = text.filter(~text.is_in(list(self.spec.missing)))
        key, check = hash_event_keys(text)
        constants = {"clicked": pl.lit(True), "day": pl.lit(self.day, pl.Int32), "line": pl.lit(0, pl.Int64)}
        return pl.DataFrame({"key": key, "check": check}).with_columns(**constants).select(list(FOUND))


@dataclass(frozen=True)
class MarkedRows:
    """Of a part of a log, the lines (int64) whose rows are dropped, and of those that were clicked later.

    ``clicked``: by other rows of these logs; ``later``: by those of later datasets. As a ``RowChange`` it takes the
    dropped rows out, and adds a column that says which were clicked later, and by what (1, 2, or both: 3).
    """

    dropped: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int64))
    clicked: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int64))
    later: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int64))

    def __call__(self, raw: RawBlock, lines: np.ndarray) -> RawBlock:
        stay = ~np.isin(lines, self.dropped)
        clicked = np.isin(lines, self.clicked).astype(np.int8)
        clicked += 2 * np.isin(lines, self.later).astype(np.int8)
        frame = raw.frame.with_columns(pl.Series(CLICKED_LATER, clicked)).filter(pl.Series(stay))
        further = raw.further_lines + int((~stay).sum())
        return replace(raw, frame=frame, lines=raw.lines[stay], further_lines=further)
