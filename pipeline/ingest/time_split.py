"""The split by time (``data.split.by=time``): where the test rows begin, found by a pass over the times of the rows."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import numpy as np
import polars as pl

from pipeline.config.data import DataConfig
from pipeline.core.errors import DataError
from pipeline.ingest.days import day_number, day_rule
from pipeline.ingest.engines import IngestEngine
from pipeline.ingest.events import LogSources, day_parts, narrow_to_key
from pipeline.ingest.parse import DayRule, parse
from pipeline.ingest.schema import DAY, SPLIT_TIME, DataSpec
from pipeline.ingest.sources import Block
from pipeline.ingest.times import SECONDS_PER_HOUR, TimeSplit, time_text

# Maximum number of times that are told apart: with 16 bytes each, 32 MiB.
MOST_TIMES = 1 << 21


class TimeCounts:
    """How many rows there are at each time, exact in whatever order they are added.

    Times are rounded down to a ``step`` in seconds, which doubles when more than ``most`` would have to be told apart.
    A step that is too small for some of the rows is too small for all, so the last one does not depend on their order.
    """

    def __init__(self, most: int = MOST_TIMES) -> None:
        self.step = 1
        self._most = most
        self._counts = pl.DataFrame(schema={SPLIT_TIME: pl.Int64, "rows": pl.UInt32})
        self._added: list[pl.DataFrame] = []

    def add(self, counts: pl.DataFrame) -> None:
        """Add ``counts``: times (``split_time``) and how many ``rows`` are of each."""
        self._added.append(counts)
        # Wait for as many as there are, so that each is added up only a few times, however many blocks a log has.
        if sum(each.height for each in self._added) > max(self._counts.height, self._most // 8):
            self._add_up()

    def _add_up(self) -> None:
        counts = pl.concat([self._counts, *self._added])
        self._added = []
        while True:
            rounded = (pl.col(SPLIT_TIME) // self.step * self.step).alias(SPLIT_TIME)
            counts = counts.group_by(rounded).agg(pl.col("rows").sum())
            if counts.height <= self._most:
                break
            self.step *= 2
        self._counts = counts

    def sorted(self) -> tuple[np.ndarray, np.ndarray]:
        """Return the times in order, in seconds, and the rows of each (both int64)."""
        self._add_up()
        counts = self._counts.sort(SPLIT_TIME)
        return counts[SPLIT_TIME].to_numpy(), counts["rows"].cast(pl.Int64).to_numpy()


def _count_times(spec: DataSpec, rule: DayRule | None, named: tuple[int, int] | None, block: Block) -> pl.DataFrame:
    # Returns columns `split_time` and `rows`, of the rows of a block whose label and time parse. `named`: the first and
    # last wanted day, if rows carry a day. Rows that come in files of a day before theirs, as `rule` allows, count,
    # too.
    raw = block.read()
    parsed = parse(raw.frame.select(list(spec.columns)), raw.lines, spec, rule)
    frames = [parsed.frame]
    for rows in parsed.other_days.values():
        # Line numbers do not matter here: rows are rejected in pass 1.
        frames.append(parse(rows, np.zeros(rows.height, np.int64), spec).frame)
    frame = pl.concat(frames)
    if named is not None and DAY in frame.columns:
        frame = frame.filter(pl.col(DAY).is_between(*named))
    return frame.group_by(SPLIT_TIME).agg(pl.len().cast(pl.UInt32).alias("rows"))


def find_cut(engine: IngestEngine, data: DataConfig, spec: DataSpec, sources: LogSources) -> TimeSplit | None:
    """Read the times of the rows of ``data``, and cut them into train and test rows.

    Args:
        engine: Reads the blocks.
        data: Its ``split`` says the share of the test rows, and the gap before them.
        spec: The schema of the log.
        sources: Returns those of a day, or of the whole log, as pass 1 reads them.

    Returns:
        The cut whose share of test rows is nearest to the one that is asked for: rows of one time stay together. None
        if no row has a label and a time; the pass that counts the rows says why.

    Raises:
        DataError: All rows are of one time, or none lies before the gap.
    """
    # 1. Narrow the schema to what is read of a row to find its time: label, time, day and hour.
    read = {spec.label, spec.day_column, spec.timestamp, spec.hour_column, spec.split_time}
    wanted = replace(
        narrow_to_key(spec),
        event_key=None,
        columns={name: override for name, override in spec.columns.items() if name in read},
        split=spec.split,
        split_time=spec.split_time,
        hour_column=spec.hour_column,
    )

    # 2. Count. A log that holds all days is read once, without a rule for days: `named` chooses the rows.
    named = None
    if data.days:
        named = day_number(data.days[0]), day_number(data.days[-1])
    counts = TimeCounts()
    for logs in day_parts(engine, data, wanted, sources):
        rule = day_rule(data, logs.day, data.days)
        for _, counted in engine.map_blocks(logs.parts, partial(_count_times, wanted, rule, named)):
            counts.add(counted)

    # 3. Cut.
    times, rows = counts.sorted()
    if not len(times):
        return None
    return cut_of(times, rows, data)


def cut_of(times: np.ndarray, rows: np.ndarray, data: DataConfig) -> TimeSplit:
    """Return the cut of a log with ``rows`` rows at each of ``times`` (in order); DataError if none is left to train.

    If two cuts are equally near to ``data.split.test_share``, the later one is returned.
    """
    where, split = data.path or "the synthetic log", data.split
    if int(rows.sum()) == 1:
        raise DataError(f"{where} has one row with a label, which cannot be split", hint="more rows")
    if len(times) == 1:
        raise DataError(
            f"all {rows[0]:,} rows of {where} are of one time, {time_text(int(times[0]))}: they cannot be split by it",
            hint="data.timestamp=<the column with the time of a row>, or data.split.by=hash",
        )
    wanted = round(split.test_share * int(rows.sum()))
    # Rows from each time on, except for the first time.
    later = rows[::-1].cumsum()[::-1][1:]
    # Search backwards, because argmin returns the first of equals and the last is wanted.
    place = len(later) - int(np.argmin(np.abs(later - wanted)[::-1]))
    test_from = int(times[place])
    train_until = test_from - round(split.gap_hours * SECONDS_PER_HOUR)
    if times[0] >= train_until:
        raise DataError(
            f"data.split.gap_hours={split.gap_hours:g} leaves no train rows: {where} begins at "
            f"{time_text(int(times[0]))}, and its test rows at {time_text(test_from)}",
            hint="data.split.gap_hours=<fewer>, or data.split.test_share=<smaller>",
        )
    return TimeSplit(train_until, test_from)
