"""One night: from the day's logs to a verdict, once per date.

Its record, ``runs/<model>-<date>/nightly.json``, is written before anything runs and names the base. A night that was
killed continues from that base when it is called again, whatever version serves by then.
"""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from datetime import date, datetime
from typing import Any

from pipeline import logs
from pipeline.clock import CLOCK, Clock
from pipeline.compose import compose, config_hash
from pipeline.config import Config
from pipeline.config.data import DataConfig
from pipeline.errors import SIGNALLED, DataError, GateHeldError, LaunchError, NightjarError, PassingError, exit_code_of
from pipeline.ingest.days import day_state, delivered_mark
from pipeline.launch.signals import Interrupted
from pipeline.records.night import FAILED, HELD, NIGHT, PUBLISHED, RUNNING, Base, NightRecord
from pipeline.records.record import read
from pipeline.records.runs import run_directory
from pipeline.report.tracking import tell_night
from pipeline.schedule.base import find_base, night_config, run_name
from pipeline.schedule.dates import ANY_DAY, night_zone
from pipeline.schedule.night_summary import finished_record, line_of, write_summary
from pipeline.schedule.webhook import deliver
from pipeline.specs.registry import find_package_at_fault
from pipeline.store.artifacts import Store
from pipeline.store.errors import TakenError
from pipeline.store.manifest import artifact_key
from pipeline.store.retrying import explained
from pipeline.units import for_chat

INTERRUPTED = SIGNALLED  # an exit code above it: a signal ended the launcher
DEADLINE_SLACK = 5.0  # seconds by which clocks may differ
Run = Callable[[Config], int]  # a whole run; returns its exit code
TRACK = "track."
# Overrides that say where records and posts go; the others may be the mistake.
TELLING = (
    "nightly.webhook=",
    "nightly.time_zone=",
    "data.time_zone=",
    "store=",
    "publish.model=",
    "data=",
    "data.name=",
    "schedule.",
    TRACK,
)
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


def record_path(model: str, day: date) -> str:
    """The path of a night's record, relative to the store."""
    return f"{run_directory(run_name(model, day))}/{NIGHT}"


def read_record(store: Store, model: str, day: date) -> NightRecord | None:
    """The record of a night; None if it never began. ArtifactError if another release wrote it."""
    path = record_path(model, day)
    return read(NightRecord, store, path) if store.exists(path) else None


def run_night(
    config: Config,
    store: Store,
    day: date,
    run: Run,
    wait_minutes: float,
    skipped: Sequence[str] = (),
    deadline: datetime | None = None,
) -> NightRecord:
    """Run the night of ``day``, unless it has a verdict; returns its record.

    ``config``: composed for that day. ``skipped``: missed days that it does not learn from, and why. A failure becomes
    an outcome, and is logged like a verdict. An exit code above 128 is a signal's: the next call continues the night,
    unless the signal came at the ``deadline`` of the cluster's job.
    """
    try:
        record = read_record(store, config.model_name, day)
        if record is not None and not config.force and _decided(record, config, day):
            again = "its logs have changed: " if record.logs != delivered_mark(config.data, day) else "nothing to do: "
            log.info("night      %s; %sforce=true runs it again", line_of(record), again)
            return record
        record = replace(_begun(config, store, day, record), skipped=tuple(skipped))
    except Exception as problem:
        refusal = of_family(problem)
        _complain(str(refusal))
        return refused(config, store, day, refusal)
    log.info("night      %s of model %s: run %s, %s", day, config.model_name, record.run, _from(record.base))
    error: NightjarError | None = None
    try:
        waited = wait_for(config.data, day, wait_minutes, config.nightly.poll_seconds)
        record = replace(record, seconds_waited=round(waited, 1), logs=delivered_mark(config.data, day))
        code = run(night_config(config, day, record.base))
    except Exception as problem:
        error = of_family(problem)
        code = exit_code_of(error)
        _complain(str(error))
    except Interrupted as stop:
        code = stop.exit_code
        _complain(f"{stop}; the same command continues where it stopped")
    if code > INTERRUPTED:
        if deadline is None or time.time() < deadline.timestamp() - DEADLINE_SLACK:
            return replace(record, exit_code=code)
        error = _too_late(config, day)
        code = error.exit_code
    outcome = PUBLISHED if code == 0 else HELD if code == GateHeldError.exit_code else FAILED
    record = replace(record, outcome=outcome, exit_code=code, finished=time.time())
    record = _written(store, record, error)
    log.info("night      %s", line_of(record))
    if record.summary is not None:
        log.info("summary    %s", store.url_of(record.summary))
    _post(config, store, record)
    return record


def _too_late(config: Config, day: date) -> LaunchError:
    hours = config.schedule.deadline_hours
    return LaunchError(
        f"the night was ended at its deadline, schedule.deadline_hours={hours:g}",
        hint=f"schedule.deadline_hours={2 * hours:g}; nightjar nightly date={day} with the same overrides continues it",
    )


def _complain(text: str) -> None:
    sys.stderr.write(f"nightjar: {text}\n")


def of_family(problem: Exception) -> NightjarError:
    """``problem`` as an error that can be recorded; prints the traceback of an unexpected one.

    BrokenPipeError is raised again, because nobody reads this launcher's output any more.
    """
    if isinstance(problem, BrokenPipeError):
        raise problem
    known = problem if isinstance(problem, NightjarError) else explained(problem)
    if known is not None:
        return known
    logs.show_fault(problem)
    package = find_package_at_fault(problem)
    whose = "this is a bug in Nightjar; please report it"
    if package:
        whose = f"it was raised in {package}; please report it there"
    return NightjarError(
        f"unexpected {type(problem).__name__}: {problem}",
        hint=f"{whose} with the log of this night, which has its traceback",
    )


def _written(store: Store, record: NightRecord, error: NightjarError | None) -> NightRecord:
    """Complete ``record``, and write it and its page. If that fails, its message says so and the outcome stays."""
    if error is not None:
        record = replace(record, message=error.message, hint=error.hint)
    try:
        _save(store, record)  # so that it does not stay "running", whatever happens to its page
        record = finished_record(store, record, error)
        _save(store, record)
        write_summary(store, record)
    except Exception as problem:
        fault = of_family(problem)
        message = f"the night's record or page cannot be written: {fault.message}"
        _complain(message)
        record = replace(record, message="; ".join(filter(None, (record.message, message))), hint=fault.hint)
    return record


def refused(config: Config, store: Store, day: date, problem: NightjarError, *, write: bool = True) -> NightRecord:
    """The record of a night that could not begin, posted; written where the date has no verdict, and ``write``."""
    former = None
    with suppress(Exception):  # a record that cannot be read is not replaced, nor one in a store that is away
        former = read_record(store, config.model_name, day)
        write = write and (former is None or not former.decided)
    record = former or NightRecord(
        model=config.model_name, date=str(day), run=run_name(config.model_name, day), outcome=FAILED
    )
    record = replace(
        record,
        outcome=FAILED,
        exit_code=problem.exit_code,
        finished=time.time(),
        message=problem.message,
        hint=problem.hint,
    )
    if write and not isinstance(problem, PassingError):
        record = _written(store, record, problem)
    _post(config, store, record)
    return record


def _post(config: Config, store: Store, record: NightRecord) -> None:
    """Tell those who asked for it: the webhook and the trackers."""
    if config.nightly.webhook:
        deliver(config.nightly.webhook, _posted(record))
    tell_night(config.track, store, record)


def _settings(config: Config) -> str:
    """Hash of everything but the logs that decides the verdict."""
    return artifact_key(
        "nightly", {"gate": asdict(config.gate), "publish": asdict(config.publish)}, {"run": config_hash(config)}
    )


def _decided(record: NightRecord, config: Config, day: date) -> bool:
    """Whether the night has a verdict. Other settings or logs void the verdict of a held night."""
    if record.outcome != HELD:
        return record.outcome == PUBLISHED
    return record.settings == _settings(config) and record.logs == delivered_mark(config.data, day)


def _begun(config: Config, store: Store, day: date, former: NightRecord | None) -> NightRecord:
    """The record of a night that begins, or that was killed and continues from the same base."""
    model = config.model_name
    base = find_base(store, model, day, None if former is None else former.base)
    if former is not None and former.outcome == RUNNING and not config.force:
        base = former.base
    record = NightRecord(
        model=model,
        date=str(day),
        run=run_name(model, day),
        outcome=RUNNING,
        settings=_settings(config),
        base=base,
        started=time.time(),
    )
    _save(store, record)
    return record


def _save(store: Store, record: NightRecord) -> None:
    store.write_json(f"{run_directory(record.run)}/{NIGHT}", record.to_json())


def _from(base: Base | None) -> str:
    return f"warm start from {base.version} ({base.day or base.run})" if base else "nothing published yet"


def _posted(record: NightRecord) -> dict[str, Any]:
    """What is posted to the webhook."""
    names = (
        "model",
        "date",
        "run",
        "outcome",
        "exit_code",
        "verdict",
        "reasons",
        "message",
        "hint",
        "version",
        "incumbent",
        "ne",
        "incumbent_ne",
        "rows",
        "seconds",
        "summary",
        "skipped",
    )
    without = "".join(f"; skipped {missed}" for missed in record.skipped or ())
    known = record.to_json()
    return {
        "text": for_chat(f"Nightjar: {line_of(record)}{without}"),
        **{name: known[name] for name in names if name in known},
    }


@dataclass
class Posted:
    """``begun``: nights run, which post and record themselves."""

    begun: bool = False


@contextmanager
def refusals_posted(config: Config, store: Store, day: Callable[[], date]) -> Iterator[Posted]:
    """Within: an error before ``begun`` is posted and recorded as the outcome of the night of ``day``, and raised.

    Such nights end before they begin: by another launcher, a cluster or a store that is away. Each is recorded where it
    can be: a date that has a verdict keeps it, and what another launcher works on is that launcher's to record.
    """
    posted = Posted()
    try:
        yield posted
    except Exception as problem:
        if not posted.begun:
            error = of_family(problem)
            refused(config, store, day(), error, write=not isinstance(problem, TakenError))
            raise error from problem
        raise


def post_refusal(
    overrides: Sequence[str], wanted: Callable[[str, datetime | None], list[date]], error: NightjarError
) -> None:
    """Post and record ``error``, which is that ``overrides`` do not compose, if those of ``TELLING`` do."""
    with suppress(Exception):  # the error is printed in any case
        telling = [text for text in overrides if text.startswith(TELLING)]
        config = _composed(telling)
        if any(text.startswith(("store=", "nightly.webhook=")) for text in telling):
            day = wanted(night_zone(config), None)[-1]
            store = Store(config.store)
            refused(config, store, day, error, write=store.answers())  # a mistake makes no store


def _composed(telling: Sequence[str]) -> Config:
    """The configuration of ``telling``, without the trackers where they are the mistake."""
    day = f"data.day={ANY_DAY}"
    try:
        return compose([*telling, day], night=True)
    except NightjarError:
        return compose([*(text for text in telling if not text.startswith(TRACK)), day], night=True)
