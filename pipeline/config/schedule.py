"""The ``schedule`` group: the CronJob that starts a launcher every night."""

from __future__ import annotations

from dataclasses import dataclass

from pipeline.config.fields import setting
from pipeline.config.values import check_time_zone


@dataclass(kw_only=True)
class ScheduleConfig:
    """The CronJob that starts a launcher every night."""

    name: str = setting("nightjar-nightly", doc="The CronJob has this name.")
    cron: str = setting("0 2 * * *", doc="A launcher starts at these times: minute, hour, day, month, weekday.")
    time_zone: str = setting("Etc/UTC", doc="`cron` is in this time zone.")
    start_within_minutes: int = setting(60, low=1, doc="A start that is this many minutes late is left out.")
    retries: int = setting(
        2, low=0, high=20, doc="A launcher that failed is started again this often, and continues where it stopped."
    )
    deadline_hours: float = setting(20.0, low=0.01, doc="A night is cancelled after this many hours.")
    keep: int = setting(7, low=0, doc="The cluster remembers this many finished nights of each outcome.")
    suspended: bool = setting(False, doc="The CronJob starts nothing.")

    def check(self, path: str) -> None:
        """The time zone must exist."""
        check_time_zone(f"{path}.time_zone", self.time_zone)
