"""The ``schedule`` group: the CronJob that starts a launcher every night."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(kw_only=True)
class ScheduleConfig:
    """The CronJob that starts a launcher every night.

    ``cron`` in ``time_zone``; a start that is ``start_within_minutes`` late is left out. ``retries``: of a launcher
    that failed, each of which goes on where the last one stopped; ``deadline_hours``: of the whole night. ``keep``:
    finished nights of each outcome that the cluster remembers.
    """

    name: str = "nightjar-nightly"
    cron: str = "0 2 * * *"
    time_zone: str = "Etc/UTC"
    start_within_minutes: int = 60
    retries: int = 2
    deadline_hours: float = 20.0
    keep: int = 7
    suspended: bool = False
