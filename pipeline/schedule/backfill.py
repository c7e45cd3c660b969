"""Several nights in the order of their dates: a backfill, and the nights that were missed before this one."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from datetime import date, timedelta

from pipeline.config import Config
from pipeline.errors import DataError
from pipeline.records import FAILED, HELD, PUBLISHED
from pipeline.schedule.base import run_name
from pipeline.schedule.nightly import INTERRUPTED, Run, read_record, run_night
from pipeline.store import Store

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
) -> int:
    """The nights of ``days``, one after the other; the exit code: of the first that failed, else 6 if one was held.

    A night that failed stops the later ones unless ``keep_going``; a held one does not: what served goes on serving,
    and the next night starts from it. A signal always stops. ``wait_last``: minutes that the last one waits for its
    logs; those of earlier days are there or not. ``catching_up``: the last one is tonight's, and one before it whose
    logs are missing or wrong is skipped, for they may never come: tonight's record says so, its exit code counts.
    """
    failed = held = 0
    skipped: list[str] = []
    for place, day in enumerate(days, 1):
        if len(days) > 1:
            log.info("\nnight %d of %d: %s", place, len(days), day)
        last = place == len(days)
        record = run_night(compose(day), store, day, run, wait_last if last else 0.0, skipped if last else ())
        code = record.exit_code or 0
        if code > INTERRUPTED:
            return code
        if catching_up and not last and code == DataError.exit_code:
            why = record.message or "its logs are missing or wrong"
            skipped.append(why if str(day) in why else f"{day}: {why}")
            log.warning("catch-up   %s is skipped: the later nights are done without it", day)
            continue
        held = held or (code if record.outcome == HELD else 0)
        if record.outcome == FAILED:
            failed = failed or code
            if not last and not keep_going:
                log.warning(
                    "%d later nights are left out, %s to %s; nightly.keep_going=true does them all the same",
                    len(days) - place, days[place], days[-1],
                )  # fmt: skip
                break
    return failed or held


def missed_nights(store: Store, model: str, day: date, most: int) -> list[date]:
    """The days before ``day`` without a verdict since the last night that had one, oldest first, ``most`` at most.

    None where there was no night yet, nor where that of ``day`` is published: nights go forwards. Those that are left
    out are logged.
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
            "catch-up   %d nights were missed, nightly.catch_up=%d: %s to %s are left out; nightjar backfill from=%s "
            "to=%s before this one would do them",
            len(missed), most, left[0], left[-1], left[0], left[-1],
        )  # fmt: skip
    return missed[-most:]


def last_night(store: Store, model: str, day: date) -> date | None:
    """The newest day before ``day`` whose night has its verdict; None where there is none in a year."""
    known = set(store.names("runs"))
    for back in range(1, LOOK_BACK_DAYS + 1):
        other = day - timedelta(days=back)
        record = read_record(store, model, other) if run_name(model, other) in known else None
        if record is not None and record.decided:
            return other
    return None
