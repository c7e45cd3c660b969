"""Waiting until a day's logs are complete."""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import date

from pipeline.config import Config
from pipeline.errors import DataError
from pipeline.ingest.days import day_state


def wait_for(config: Config, day: date, minutes: float, say: Callable[[str], None]) -> float:
    """Return, once the logs of ``day`` are complete by ``data.watermark``, how many seconds that took.

    Looks every ``nightly.poll_seconds`` and says what is missing whenever that changes. DataError naming it where they
    are not complete after ``minutes``.
    """
    started, said = time.monotonic(), ""
    while True:
        state = day_state(config.data, day)
        waited = time.monotonic() - started
        if state.complete:
            if said:
                say(f"watermark  {day} is complete after {waited / 60:.1f} minutes")
            return waited
        missing = "; ".join(state.missing)
        left = 60 * minutes - waited
        if left <= 0:
            after = f" after {minutes:g} minutes (nightly.wait_minutes)" if minutes else ""
            raise DataError(
                f"{day} is not complete{after}: {missing}",
                hint=f"nightjar nightly date={day} with the same overrides once it is delivered",
            )
        if missing != said:
            say(f"watermark  {day} is not complete: {missing}; looking every {config.nightly.poll_seconds:g} s, for "
                f"{left / 60:.1f} minutes")  # fmt: skip
            said = missing
        time.sleep(min(config.nightly.poll_seconds, left))
