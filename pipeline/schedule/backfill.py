"""Several nights in the order of their dates: a backfill, or missed nights before tonight's."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from datetime import date, datetime, timedelta

from pipeline.config import Config
from pipeline.errors import DataError
from pipeline.records.night import FAILED, HELD, PUBLISHED
from pipeline.schedule.base import run_name
from pipeline.schedule.nightly import INTERRUPTED, Run, read_record, run_night
from pipeline.store.artifacts import Store

Compose = Callable[[date], Config]
LOOK_BACK_DAYS = 366
log = logging.getLogger(__name__)


def run_nights(
    days: Sequence[date],
    compose: Compose,
    store: Store,
    run: Run,
    *,
    keep_going: bool,
    wait_last: float = 0.0,
    catching_up: bool = False,
    deadline: datetime | None = None,
) -> int:
    """Run the nights of ``days`` in order; returns the exit code of the first that failed, else 6 if one was held.

    A failed night stops the later ones unless ``keep_going``. A held night does not stop them: they start from the
    version that keeps serving. A signal always stops. ``wait_last``: minutes that the last night waits for its logs;
    the others do not wait. ``catching_up``: the last night is tonight's. An earlier one whose logs are missing or wrong
    is then skipped and named in tonight's record, because its logs may never come. ``deadline``: when the cluster ends
    this process; no night begins after it.
    """
    failed = held = 0
    skipped: list[str] = []
    for place, day in enumerate(days, 1):
        if len(days) > 1:
            log.info("\nnight %d of %d: %s", place, len(days), day)
        last = place == len(days)
        wait, without = (wait_last, skipped) if last else (0.0, [])
        record = run_night(compose(day), store, day, run, wait, without, deadline)
        code = record.exit_code or 0
        if code > INTERRUPTED:
            return code
        if catching_up and not last and code == DataError.exit_code:
            why = record.message or "its logs are missing or wrong"
            skipped.append(why if str(day) in why else f"{day}: {why}")
            log.warning("catch-up   %s is skipped; the later nights run without it", day)
            continue
        if deadline is not None and datetime.now(deadline.tzinfo) >= deadline:
            return code
        held = held or (code if record.outcome == HELD else 0)
        if record.outcome == FAILED:
            failed = failed or code
            if not last and not keep_going:
                log.warning(
                    "the %d later nights, %s to %s, are skipped; nightly.keep_going=true runs them anyway",
                    len(days) - place,
                    days[place],
                    days[-1],
                )
                break
    return failed or held


def missed_nights(store: Store, model: str, day: date, most: int) -> list[date]:
    """The newest ``most`` days between the last night with a verdict and ``day``, oldest first.

    Empty if there was no night yet, or if the night of ``day`` is published, because nights run forward in time. Logs
    which days are skipped.
    """
    tonight = read_record(store, model, day)
    if tonight is not None and tonight.outcome == PUBLISHED:
        return []
    last = last_night(store, model, day)
    if last is None or most < 1:
        return []
    missed = [last + timedelta(days=i) for i in range(1, (day - last).days)]
    if len(missed) > most:
        left = missed[: len(missed) - most]
        log.warning(
            "catch-up   %d nights were missed, but nightly.catch_up=%d: %s to %s are skipped; to include them, "
            "run nightjar backfill from=%s to=%s before this night",
            len(missed),
            most,
            left[0],
            left[-1],
            left[0],
            left[-1],
        )
    return missed[-most:]


def last_night(store: Store, model: str, day: date) -> date | None:
    """The newest day before ``day`` whose night has a verdict; None if there is none within a year."""
    known = set(store.names("runs"))
    for back in range(1, LOOK_BACK_DAYS + 1):
        other = day - timedelta(days=back)
        record = read_record(store, model, other) if run_name(model, other) in known else None
        if record is not None and record.decided:
            return other
    return None
