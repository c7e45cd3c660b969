"""What is kept of a user's events and how a history is cut from them. Light: no polars."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

# Microseconds, in which times are counted.
DAY_US = 86_400_000_000
MINUTE_US = 60_000_000


@dataclass(frozen=True, kw_only=True)
class HistoryPlan:
    """A history, which rows get as column ``name``: of the user in column ``by``, the newest ``most`` events.

    ``of``: the column of the log for each field of an event. ``time``: that of the rows' times. Events are strictly
    earlier than their row, by ``lag_minutes`` at least, and by no more than ``days`` (None: however much). ``where``:
    the column that says which events count; None: all do.
    """

    name: str
    by: str
    of: Mapping[str, str]
    time: str
    days: int | None
    most: int
    where: str | None = None
    lag_minutes: float = 0.0

    @property
    def reach(self) -> int:
        """Whole days before a row's own that may have events of its history.

        A day more than ``days``: a day of 23 hours, or a day as it is written in another zone, moves its end.
        """
        assert self.days is not None, "a log of days has histories of days"
        return self.days + 1

    @property
    def read(self) -> list[str]:
        """The columns of the log that are read."""
        columns = [self.by, self.time, *self.of.values()]
        if self.where:
            columns.append(self.where)
        return list(dict.fromkeys(columns))

    def setting_of(self, column: str) -> str:
        """The setting that names ``column``, one of ``read``."""
        path = f"data.sequences.{self.name}"
        settings = {self.by: f"{path}.history.by", self.time: "data.timestamp"}
        for feature, source in self.of.items():
            settings.setdefault(source, f"{path}.features.{feature}.column")
        return settings.get(column, f"{path}.history.where")
