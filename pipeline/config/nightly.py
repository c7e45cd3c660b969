"""The ``nightly`` group: what a night waits for, makes up for and reports."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(kw_only=True)
class NightlyConfig:
    """A night (docs/nightly.md). ``timezone``: of date=yesterday; null: ``schedule.time_zone``.

    ``wait_minutes``: for the day's logs to be complete, looked at every ``poll_seconds``. ``catch_up``: so many missed
    nights are made up for first. ``keep_going``: a night that failed does not stop the later ones. ``reuse_plan``: the
    incumbent's, where nothing changed. ``lease_seconds``: after which a dead launcher's lock is taken over.
    ``webhook``: URL to which the verdict is posted.
    """

    timezone: str | None = None
    wait_minutes: float = 120.0
    poll_seconds: float = 60.0
    catch_up: int = 0
    keep_going: bool = False
    reuse_plan: bool = True
    lease_seconds: float = 30.0
    webhook: str | None = None
