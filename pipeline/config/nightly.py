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
        None, doc="Time zone of date=yesterday and date=today; null: `data.time_zone`, else `schedule.time_zone`."
    )
    wait_minutes: float = setting(
        120.0,
        low=0.0,
        doc="Minutes to wait for the day's logs; if they are not complete then, the night ends with exit code 3.",
    )
    poll_seconds: float = setting(60.0, low=0.01, doc="Seconds between two checks for the logs.")
    catch_up: int = setting(0, low=0, high=366, doc="Largest number of missed nights to catch up on first.")
    keep_going: bool = setting(False, doc="Run the later nights although an earlier one failed.")
    reuse_plan: bool = setting(True, doc="Reuse the incumbent's plan if neither tables nor settings have changed.")
    lease_seconds: float = setting(
        30.0,
        low=0.1,
        high=3600.0,
        doc="Another launcher takes over a night whose lease has not been renewed for this many seconds.",
    )
    webhook: str | None = setting(None, doc="URL that the outcome is posted to as JSON; null: none.")

    def check(self, path: str) -> None:
        """The webhook must be a URL, the time zone must exist."""
        if self.webhook is not None and not re.match(r"https?://[^/\s]", self.webhook):
            raise ConfigError(
                f"{path}.webhook is not an http or https URL",
                hint=f"{path}.webhook=https://<host>/<path>",
            )
        check_time_zone(f"{path}.time_zone", self.time_zone)
