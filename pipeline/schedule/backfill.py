"""Several nights in the order of their dates: a backfill, and the nights that were missed before this one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import date, timedelta

from pipeline.config import Config
from pipeline.errors import DataError
from pipeline.records import FAILED, HELD, PUBLISHED
from pipeline.schedule.base import run_name
from pipeline.schedule.nightly import INTERRUPTED, Tools, read_record, run_night
from pipeline.store import Store

Compose = Callable[[date], Config]
LOOK_BACK_DAYS = 366


def run_nights(
    days: Sequence[date],
    compose: Compose,
    store: Store,
    tools: Tools,
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
            tools.say(f"\nnight {place} of {len(days)}: {day}")
        last = place == len(days)
        record = run_night(compose(day), store, day, tools, wait_last if last else 0.0, skipped if last else ())
        code = record.exit_code or 0
        if code > INTERRUPTED:
            return code
        if catching_up and not last and code == DataError.exit_code:
            why = record.message or "its logs are missing or wrong"
            skipped.append(why if str(day) in why else f"{day}: {why}")
            tools.say(f"catch-up   {day} is skipped: the later nights are done without it")
            continue
        held = held or (code if record.outcome == HELD else 0)
        if record.outcome == FAILED:
            failed = failed or code
            if not last and not keep_going:
                tools.say(
                    f"{len(days) - place} later nights are left out, {days[place]} to {days[-1]}; "
                    "nightly.keep_going=true does them all the same"
                )
                break
    return failed or held


def missed_nights(store: Store, model: str, day: date, most: int, say: Callable[[str], None]) -> list[date]:
    """The days before ``day`` without a verdict since the last night that had one, oldest first, ``most`` at most.

    None where there was no night yet, nor where that of ``day`` is published: nights go forwards. Those that are left
    out are said.
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
        say(
            f"catch-up   {len(missed)} nights were missed, nightly.catch_up={most}: {left[0]} to {left[-1]} are left "
            f"out; nightjar backfill from={left[0]} to={left[-1]} before this one would do them"
        )
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
