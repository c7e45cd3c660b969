"""The ``schedule`` group: the CronJob that starts a launcher every night."""

from __future__ import annotations

from dataclasses import dataclass

from pipeline.config.fields import setting
from pipeline.config.values import check_time_zone


@dataclass(kw_only=True)
class ScheduleConfig:
    """The CronJob that starts a launcher every night."""

    name: str = setting("nightjar-nightly", doc="Name of the CronJob.")
    cron: str = setting("0 2 * * *", doc="When a launcher starts: minute, hour, day, month, weekday.")
    time_zone: str = setting("Etc/UTC", doc="Time zone of `cron`.")
    start_within_minutes: int = setting(60, low=1, doc="Skip a start that is more than this many minutes late.")
    retries: int = setting(
        2, low=0, high=20, doc="How often to restart a launcher that failed; it continues where it stopped."
    )
    deadline_hours: float = setting(20.0, low=0.01, doc="Hours after which a night is cancelled.")
    keep: int = setting(7, low=0, doc="Finished nights of each outcome that the cluster remembers.")
    suspended: bool = setting(False, doc="Suspend the CronJob.")

    def check(self, path: str) -> None:
        """The time zone must exist."""
        check_time_zone(f"{path}.time_zone", self.time_zone)
