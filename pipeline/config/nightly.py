"""The ``nightly`` group: what a night waits for, catches up on and reports."""

from __future__ import annotations

import re
from dataclasses import dataclass

from pipeline.config.fields import setting
from pipeline.config.values import check_time_zone
from pipeline.errors import ConfigError


@dataclass(kw_only=True)
class NightlyConfig:
    """A night; docs/nightly.md explains it."""

    time_zone: str | None = setting(
        None, doc="date=yesterday and date=today are days of this time zone; null: of `schedule.time_zone`."
    )
    wait_minutes: float = setting(
        120.0, low=0.0, doc="A night waits this many minutes for the day's logs to be complete, then ends with code 3."
    )
    poll_seconds: float = setting(
        60.0, low=0.01, doc="While it waits, a night checks for the logs at this interval, in seconds."
    )
    catch_up: int = setting(0, low=0, high=366, doc="A night first catches up on this many missed nights.")
    keep_going: bool = setting(False, doc="Later nights run although an earlier one failed.")
    reuse_plan: bool = setting(True, doc="The incumbent's plan is reused if neither tables nor settings changed.")
    lease_seconds: float = setting(
        30.0, low=0.1, high=3600.0, doc="Another launcher takes over a night that shows no sign of life for this long."
    )
    webhook: str | None = setting(None, doc="The outcome is posted to this URL as JSON; null: it is not posted.")

    def check(self, path: str) -> None:
        """The webhook must be a URL, the time zone must exist."""
        if self.webhook is not None and not re.match(r"https?://[^/\s]", self.webhook):
            raise ConfigError(
                f"{path}.webhook is not an http or https URL",
                hint=f"{path}.webhook=https://<host>/<path>",
            )
        check_time_zone(f"{path}.time_zone", self.time_zone)
