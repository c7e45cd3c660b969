"""The events of users: who, when, of what, and whether they count."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np
import polars as pl

from pipeline.core.errors import DataError
from pipeline.ingest import events
from pipeline.ingest.hashing import hash_event_keys
from pipeline.ingest.histories.history_plan import HistoryPlan
from pipeline.ingest.parse import parse
from pipeline.ingest.rejects import RejectedRows
from pipeline.ingest.schema import DAY, DataSpec
from pipeline.ingest.sources import Block
from pipeline.ingest.values import text_of
from pipeline.ingest.zones import instants, standard
from pipeline.records.dataset import LABEL

_KEPT = {"key": pl.UInt64, "check": pl.UInt64, "time": pl.Int64, "day": pl.Int32, "counts": pl.Boolean}


def value_columns(plan: HistoryPlan) -> list[str]:
    """The columns of events that hold what they are of, one for each of ``plan.of``."""
    return [f"value{number}" for number in range(len(plan.of))]


def event_schema(plan: HistoryPlan) -> Mapping[str, type[pl.DataType]]:
    """The columns of events, but for the lines of their rows.

    ``key``, ``check``: hashes of the user. ``time``: microseconds since 1970. ``counts``: whether it is part of
    histories. Values are text, "" where missing.
    """
    return {**_KEPT, **dict.fromkeys(value_columns(plan), pl.String)}


def narrow(spec: DataSpec, plan: HistoryPlan) -> DataSpec:
    """What is read of a row to find its event: label, day, user, time, and what it is of."""
    narrowed = replace(events.narrow(spec), event_key=None)
    columns = {}
    for name, override in narrowed.columns.items():
        if name != spec.event_key or name in plan.read:
            columns[name] = override
    for name in plan.read:
        columns[name] = spec.columns[name]
    return replace(narrowed, columns=columns)


@dataclass(frozen=True)
class ReadEvents:
    """The events of the rows of a block whose label and day parse and that have a user and a time, with their lines.

    ``spec``: as of ``narrow``. ``day``: of rows that carry none.
    """

    spec: DataSpec
    plan: HistoryPlan
    day: int = 0

    def __call__(self, block: Block) -> pl.DataFrame:
        """Columns of ``event_schema``, and ``line``."""
        plan, spec = self.plan, self.spec
        raw = block.read()
        parsed = parse(raw.frame.select(list(spec.columns)), raw.lines, spec)
        frame = raw.frame.filter(pl.Series(np.isin(raw.lines, parsed.lines)))
        rejected = RejectedRows(parsed.lines)
        text, present = {}, {}
        for name in plan.read:
            if isinstance(frame[name].dtype, pl.List):
                raise DataError(
                    f"{raw.file}: column {name!r} holds lists, expected one value a row: a row is one event of one "
                    "user",
                    hint=f"{plan.setting_of(name)}=<a column with one value a row>",
                )
            text[name] = text_of(frame[name], spec, rejected)
            is_missing = text[name].is_in(list(spec.missing)).fill_null(False)
            present[name] = text[name].set(is_missing, None)
        user = present[plan.by]
        key, check = hash_event_keys(user.fill_null(""))
        written = standard(frame[plan.time], text[plan.time], spec.time_format)
        time = instants(frame[plan.time], written, spec.time_zone or "UTC").dt.timestamp("us")
        day = parsed.frame[DAY] if DAY in parsed.frame.columns else pl.Series([self.day]).new_from_index(0, len(user))
        values = [present[column] for column in plan.of.values()]
        # What an event is of comes first; one that is of nothing is none.
        counts = values[0].is_not_null()
        if plan.where == spec.label:
            counts &= parsed.frame[LABEL] > 0
        elif plan.where is not None:
            counts &= (text[plan.where].cast(pl.Float64, strict=False) > 0).fill_null(False)
        columns = {"key": key, "check": check, "time": time, "day": day.cast(pl.Int32), "counts": counts}
        for name, value in zip(value_columns(plan), values, strict=True):
            columns[name] = value.fill_null("")
        columns["line"] = pl.Series(parsed.lines, dtype=pl.Int64)
        return pl.DataFrame(columns).filter(user.is_not_null() & time.is_not_null() & ~pl.Series(rejected.bad))
