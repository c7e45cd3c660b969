"""Waiting until a day's logs are complete."""

from __future__ import annotations

import logging
from datetime import date

from pipeline.clock import CLOCK, Clock
from pipeline.config import DataConfig
from pipeline.errors import DataError
from pipeline.ingest.days import day_state

log = logging.getLogger(__name__)


def wait_for(data: DataConfig, day: date, minutes: float, poll_seconds: float, clock: Clock = CLOCK) -> float:
    """Wait until the logs of ``day`` are complete (``data.watermark``); returns the seconds that it took.

    Checks every ``poll_seconds``, and logs what is missing when that changes. Raises DataError, with what is
    missing, after ``minutes``.
    """
    started, logged = clock.monotonic(), ""
    while True:
        state = day_state(data, day)
        waited = clock.monotonic() - started
        if state.complete:
            if logged:
                log.info("watermark  %s is complete after %.1f minutes", day, waited / 60)
            return waited
        missing = "; ".join(state.missing)
        left = 60 * minutes - waited
        if left <= 0:
            after = f" after {minutes:g} minutes (nightly.wait_minutes)" if minutes else ""
            raise DataError(
                f"{day} is not complete{after}: {missing}",
                hint=f"nightjar nightly date={day} with the same overrides, once the logs are delivered",
            )
        if missing != logged:
            log.info(
                "watermark  %s is not complete: %s; checking every %g s for up to %.1f minutes (nightly.wait_minutes)",
                day,
                missing,
                poll_seconds,
                left / 60,
            )
            logged = missing
        clock.sleep(min(poll_seconds, left))
