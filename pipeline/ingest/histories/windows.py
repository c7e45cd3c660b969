"""Which events belong to which row: users' events in order of time, and ranges of them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import polars as pl

from pipeline.config.sequences import EVENT_TIME
from pipeline.ingest.histories.events import value_columns
from pipeline.ingest.histories.plan import DAY_US, MINUTE_US, HistoryPlan
from pipeline.ingest.ids import as_lists

_ELEMENTS = 1 << 21  # of lists that are made at a time


@dataclass(frozen=True)
class Ranges:
    """Of each row, its events: those from ``first`` to before ``last`` in the order of events."""

    first: np.ndarray
    last: np.ndarray

    @property
    def lengths(self) -> np.ndarray:
        """How many events each row has."""
        return self.last - self.first


def ranges(
    users: np.ndarray, times: np.ndarray, row_users: np.ndarray, row_times: np.ndarray, plan: HistoryPlan
) -> Ranges:
    """The events of each row: of its user, strictly before its time less the lag, within the days, the newest ones.

    ``users`` (int64, from 0) and ``times`` (int64, microseconds): of events, ordered by both.
    """
    lag = round(plan.lag_minutes * MINUTE_US)
    ranks, width = np.unique(times), len(np.unique(times)) + 1
    ordered = users * width + np.searchsorted(ranks, times)

    def before(limit: np.ndarray) -> np.ndarray:
        """Events of the row's user and of those before, earlier than ``limit``."""
        return np.searchsorted(ordered, row_users * width + np.searchsorted(ranks, limit))

    last = before(row_times - lag)
    oldest = np.full_like(row_times, ranks[0] if len(ranks) else 0)
    first = np.maximum(before(oldest if plan.days is None else row_times - plan.days * DAY_US), last - plan.most)
    return Ranges(np.minimum(first, last), last)


def histories(events: pl.DataFrame, plan: HistoryPlan) -> Iterator[pl.DataFrame]:
    """``place`` and the history (column ``plan.name``) of the rows that have one, some rows at a time.

    ``events``: all that users did (``event_schema``) with ``place``, negative where the row is none of this dataset.
    Events at the same time are ordered by what they are of, so that the order of the log plays no part.
    """
    values = value_columns(plan)
    whole = events.sort("key", "check", "time", *values)
    other = pl.any_horizontal(pl.col("key", "check") != pl.col("key", "check").shift()).fill_null(False)
    users = whole.select(other.cast(pl.Int64).cum_sum()).to_series().to_numpy()
    counting, rows = whole["counts"].to_numpy(), (whole["place"] >= 0).to_numpy()
    times, kept = whole["time"].to_numpy(), _as_fields(whole.filter("counts"), plan)
    own = ranges(users[counting], times[counting], users[rows], times[rows], plan)
    places = whole["place"].to_numpy()[rows]
    order = np.argsort(places)
    order = order[own.lengths[order] > 0]
    ends = np.cumsum(own.lengths[order])
    cuts = np.searchsorted(ends, np.arange(_ELEMENTS, (ends[-1] if len(ends) else 0) + _ELEMENTS, _ELEMENTS))
    for some in np.split(order, np.unique(cuts)):
        if len(some):
            yield _lists(places[some], Ranges(own.first[some], own.last[some]), kept, plan)


def _as_fields(events: pl.DataFrame, plan: HistoryPlan) -> pl.Series:
    """The events as structs: what they are of, as text, and their times."""
    time = pl.from_epoch("time", time_unit="us").dt.replace_time_zone("UTC").alias(EVENT_TIME)
    fields = [pl.col(own).alias(name) for own, name in zip(value_columns(plan), plan.of, strict=True)]
    return events.select(*fields, time).to_struct(plan.name)


def _lists(places: np.ndarray, own: Ranges, kept: pl.Series, plan: HistoryPlan) -> pl.DataFrame:
    offsets = np.concatenate([[0], np.cumsum(own.lengths)])
    index = np.arange(offsets[-1]) + np.repeat(own.first - offsets[:-1], own.lengths)
    return pl.DataFrame([pl.Series("place", places), as_lists(kept.gather(index), offsets)])
