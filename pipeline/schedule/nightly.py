"""One night, from the day's logs to a verdict, once per date; several nights in the order of their dates.

A night's record, ``runs/<model>-<date>/nightly.json``, is written before anything runs and names the base. A night that
was killed continues from that base when it is called again, whatever version serves by then.
"""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from datetime import date, datetime, timedelta

from pipeline.config import Config
from pipeline.config.compose import compose, config_hash
from pipeline.config.data import DataConfig
from pipeline.core import logs
from pipeline.core.clock import CLOCK, Clock
from pipeline.core.errors import (
    SIGNALLED,
    DataError,
    GateHeldError,
    LaunchError,
    NightjarError,
    PassingError,
    exit_code_of,
)
from pipeline.core.registry import find_package_at_fault
from pipeline.core.retrying import explained
from pipeline.core.units import for_chat
from pipeline.ingest.days import day_state, delivered_mark
from pipeline.launch.signals import Interrupted
from pipeline.records.bisection import BISECT
from pipeline.records.night import FAILED, HELD, NIGHT, PUBLISHED, RUNNING, NightRecord
from pipeline.records.record import read
from pipeline.records.runs import run_directory
from pipeline.report.tracking import tell_night
from pipeline.schedule.bisect import bisect_run
from pipeline.schedule.night_config import ANY_DAY, find_base, night_config, night_zone, run_name
from pipeline.schedule.night_summary import deliver, finished_record, line_of, with_cost, write_summary
from pipeline.schedule.store_overview import write_store_page
from pipeline.store.artifacts import Store
from pipeline.store.errors import TakenError
from pipeline.store.manifest import artifact_key

# A higher exit code means that a signal ended the launcher.
INTERRUPTED = SIGNALLED
# Seconds by which the clocks of the cluster and of this machine may differ.
DEADLINE_SLACK = 5.0
Run = Callable[[Config], int]  # runs all stages and returns the exit code
TRACK = "track."
# Overrides that say where records and posts go; any other override may be the mistake.
TELLING: tuple[str, ...] = ("store=", "publish.model=", "data=", "data.name=", "data.time_zone=", "schedule.", TRACK)
TELLING += ("nightly.webhook=", "nightly.time_zone=")
# The fields of a record that are posted to the webhook.
POSTED: tuple[str, ...] = ("model", "date", "run", "outcome", "exit_code", "verdict", "reasons", "message", "hint")
POSTED += ("version", "incumbent", "ne", "incumbent_ne", "rows", "seconds", "summary", "skipped")
log = logging.getLogger(__name__)


def wait_for(data: DataConfig, day: date, minutes: float, poll_seconds: float, clock: Clock = CLOCK) -> float:
    """Wait until the logs of ``day`` are complete (``data.watermark``).

    Checks every ``poll_seconds``, and logs what is missing when that changes.

    Returns:
        The seconds that it took.

    Raises:
        DataError: They are not complete after ``minutes``; it says what is missing.
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
        # Log only when the state changes, since a wait of hours would fill the log.
        if missing != logged:
            every = f"checking every {poll_seconds:g} s for up to {left / 60:.1f} minutes (nightly.wait_minutes)"
            log.info("watermark  %s is not complete: %s; %s", day, missing, every)
            logged = missing
        clock.sleep(min(poll_seconds, left))


def read_record(store: Store, model: str, day: date) -> NightRecord | None:
    """Read the record of a night; None if it never began. ArtifactError if another release wrote it."""
    path = f"{run_directory(run_name(model, day))}/{NIGHT}"
    if not store.exists(path):
        return None
    return read(NightRecord, store, path)


def _save(store: Store, record: NightRecord) -> None:
    store.write_json(f"{run_directory(record.run)}/{NIGHT}", record.to_json())


def run_night(
    config: Config,
    store: Store,
    day: date,
    run: Run,
    wait_minutes: float,
    skipped: Sequence[str] = (),
    deadline: datetime | None = None,
) -> NightRecord:
    """Run the night of ``day``, unless it has a verdict. A failure becomes an outcome, and is logged like a verdict.

    Args:
        config: Composed for that day.
        skipped: Missed days that it does not learn from, and why.
        deadline: When the cluster ends the job of this night.

    Returns:
        Its record. An exit code above 128 is a signal's: the next call continues the night, unless the signal came at
        the deadline.
    """
    try:
        record = read_record(store, config.model_name, day)
        if record is not None and not config.force and _has_verdict(record, config, day):
            again = "nothing to do: "
            # The verdict stands, but whoever corrected the logs should know that no model has learnt from them.
            if not _same_logs(record, config, day):
                again = "its logs have changed: "
            log.info("night      %s; %sforce=true runs it again", line_of(record), again)
            return record
        record = replace(_begin(config, store, day, record), skipped=tuple(skipped))
    except Exception as problem:
        refusal = _as_known_error(problem)
        _complain(str(refusal))
        return _record_refusal(config, store, day, refusal)

    base, start = record.base, "nothing published yet"
    if base is not None:
        start = f"warm start from {base.version} ({base.day or base.run})"
    log.info("night      %s of model %s: run %s, %s", day, config.model_name, record.run, start)
    error: NightjarError | None = None
    try:
        waited = wait_for(config.data, day, wait_minutes, config.nightly.poll_seconds)
        record = replace(record, seconds_waited=round(waited, 1), logs=delivered_mark(config.data, day))
        code = run(night_config(config, day, base))
    except Exception as problem:
        error = _as_known_error(problem)
        code = exit_code_of(error)
        _complain(str(error))
    except Interrupted as stop:
        code = stop.exit_code
        _complain(f"{stop}; the same command continues where it stopped")
    if code > INTERRUPTED:
        # A night that a signal ended continues at the next call, unless it was ended at its deadline.
        if deadline is None or time.time() < deadline.timestamp() - DEADLINE_SLACK:
            return replace(record, exit_code=code)
        hours = config.schedule.deadline_hours
        error = LaunchError(
            f"the night was ended at its deadline, schedule.deadline_hours={hours:g}",
            hint=f"schedule.deadline_hours={2 * hours:g}; nightjar nightly date={day} with the same overrides "
            "continues it",
        )
        code = error.exit_code

    outcome = FAILED
    if code == 0:
        outcome = PUBLISHED
    elif code == GateHeldError.exit_code:
        outcome = HELD
    record = replace(record, outcome=outcome, exit_code=code, finished=time.time())
    record = _complete_record(config, store, record, error)
    log.info("night      %s", line_of(record))
    for title, page in (("gate", record.gate_page), ("summary", record.summary)):
        if page is not None:
            log.info("%-10s %s", title, store.url_of(page))
    _post(config, store, record)
    write_store_page(store)
    return record


def _bisect(store: Store, record: NightRecord, run: Run, limit: int, deadline: datetime | None) -> int:
    # Find what spoilt a held night, once all nights have their verdicts. Return the exit code of a signal, else 0.
    try:
        culprit = bisect_run(store, record.run, run, limit, deadline).culprit
        if culprit is not None:
            log.info("bisect     %s", culprit.words)
    except Exception as problem:
        log.warning("bisect     nothing was found: %s", _as_known_error(problem))
    except Interrupted as stop:
        _complain(f"{stop}; nightjar bisect {record.run} goes on")
        return stop.exit_code
    write_store_page(store)
    return 0


def _has_verdict(record: NightRecord, config: Config, day: date) -> bool:
    if record.outcome != HELD:
        return record.outcome == PUBLISHED
    # Other settings or logs void the verdict of a held night.
    return record.settings == _hash_settings(config) and _same_logs(record, config, day)


def _same_logs(record: NightRecord, config: Config, day: date) -> bool:
    # Logs that have been archived since change no verdict: the night cannot be run again without them.
    return delivered_mark(config.data, day) in ("", record.logs)


def _hash_settings(config: Config) -> str:
    # Hash everything but the logs that decides the verdict.
    settings = {"gate": asdict(config.gate), "publish": asdict(config.publish)}
    return artifact_key("nightly", settings, {"run": config_hash(config)})


def _begin(config: Config, store: Store, day: date, former: NightRecord | None) -> NightRecord:
    # Write the record of a night that begins, or of one that was killed and continues from the same base, so that all
    # its artifacts keep their keys.
    model = config.model_name
    base = find_base(store, model, day, None if former is None else former.base)
    if former is not None and former.outcome == RUNNING and not config.force:
        base = former.base
    record = NightRecord(
        model=model,
        date=str(day),
        run=run_name(model, day),
        outcome=RUNNING,
        settings=_hash_settings(config),
        base=base,
        started=time.time(),
    )
    _save(store, record)
    return record


def _complain(text: str) -> None:
    sys.stderr.write(f"nightjar: {text}\n")


def _as_known_error(problem: Exception) -> NightjarError:
    # Convert ``problem`` to an error that can be recorded, and print the traceback of an unexpected one.
    if isinstance(problem, BrokenPipeError):
        # This is not the night's error: nobody reads this launcher's output any more.
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


def _complete_record(config: Config, store: Store, record: NightRecord, error: NightjarError | None) -> NightRecord:
    # Complete the record, and write it and its page. If that fails, its message says so and the outcome stays.
    if error is not None:
        record = replace(record, message=error.message, hint=error.hint)
    try:
        # Save the record at once, so that it does not stay "running" if the rest fails.
        _save(store, record)
        record = with_cost(config, finished_record(store, record, error))
        _save(store, record)
        write_summary(store, record)
    except Exception as problem:
        fault = _as_known_error(problem)
        message = f"the night's record or page cannot be written: {fault.message}"
        _complain(message)
        record = replace(record, message="; ".join(filter(None, (record.message, message))), hint=fault.hint)
    return record


def _record_refusal(
    config: Config, store: Store, day: date, problem: NightjarError, *, write: bool = True
) -> NightRecord:
    # Post a night that could not begin. With ``write``, its record is written if the date has no verdict.
    former, model = None, config.model_name
    try:
        former = read_record(store, model, day)
    except Exception:
        # If the record cannot be read or the store does not answer, do not overwrite it.
        write = False
    decided = former is not None and former.decided
    if decided:
        # The verdict stands: its version and figures are not those of what failed now.
        former, write = None, False
    record = replace(
        former or NightRecord(model=model, date=str(day), run=run_name(model, day), outcome=FAILED),
        outcome=FAILED,
        exit_code=problem.exit_code,
        finished=time.time(),
        message=problem.message,
        hint=problem.hint,
    )
    if write and not isinstance(problem, PassingError):
        record = _complete_record(config, store, record, problem)
        write_store_page(store)
    _post(config, store, record, tracked=not decided)
    return record


def _post(config: Config, store: Store, record: NightRecord, *, tracked: bool = True) -> None:
    # Post to the webhook, and if ``tracked`` to the trackers, which have one outcome for each night.
    if config.nightly.webhook:
        text = f"Nightjar: {line_of(record)}"
        for missed in record.skipped or ():
            text += f"; skipped {missed}"
        fields = record.to_json()
        verdict = {"text": for_chat(text)} | {name: fields[name] for name in POSTED if name in fields}
        deliver(config.nightly.webhook, verdict)
    if tracked:
        tell_night(config.track, store, record)


@dataclass
class Posted:
    """``begun``: the nights run, and post and record their own outcomes."""

    begun: bool = False


@contextmanager
def refusals_posted(config: Config, store: Store, day: Callable[[], date]) -> Iterator[Posted]:
    """Post and record an error that comes before ``begun`` is set as the outcome of the night of ``day``; raise it.

    Such nights end before they begin, because of another launcher, or a cluster or store that is away. Each is recorded
    if possible: a date with a verdict keeps it, and another launcher records what it works on.
    """
    posted = Posted()
    try:
        yield posted
    except Exception as problem:
        if not posted.begun:
            error = _as_known_error(problem)
            _record_refusal(config, store, day(), error, write=not isinstance(problem, TakenError))
            raise error from problem
        raise


def post_refusal(
    overrides: Sequence[str], wanted: Callable[[str, datetime | None], list[date]], error: NightjarError
) -> None:
    """Post and record ``error``, which is that ``overrides`` do not compose, if those of ``TELLING`` do."""
    # The caller prints the error in any case.
    with suppress(Exception):
        telling = [text for text in overrides if text.startswith(TELLING)]
        any_day = f"data.day={ANY_DAY}"
        try:
            config = compose([*telling, any_day], night=True)
        except NightjarError:
            # The trackers may be the mistake.
            untracked = [text for text in telling if not text.startswith(TRACK)]
            config = compose([*untracked, any_day], night=True)
        if any(text.startswith(("store=", "nightly.webhook=")) for text in telling):
            day = wanted(night_zone(config), None)[-1]
            store = Store(config.store)
            # A store that does not answer may be a typing error, so do not create one.
            _record_refusal(config, store, day, error, write=store.answers())


LOOK_BACK_DAYS = 366


def run_nights(
    days: Sequence[date],
    config_of: Callable[[date], Config],
    store: Store,
    run: Run,
    *,
    keep_going: bool,
    wait_last: float = 0.0,
    catching_up: bool = False,
    deadline: datetime | None = None,
) -> int:
    """Run the nights of ``days`` in order.

    A failed night stops the later ones unless ``keep_going``. A held night does not stop them: they start from the
    version that keeps serving. A signal always stops. After the last night, what spoilt held ones is searched for
    (``nightly.bisect``), if no search is recorded yet.

    Args:
        wait_last: Minutes that the last night waits for its logs; the others do not wait.
        catching_up: The last night is tonight's. An earlier one whose logs are missing or wrong is then skipped and
            named in tonight's record, because its logs may never come.
        deadline: When the cluster ends this process; no night begins after it.

    Returns:
        The exit code of the first that failed, else 6 if one was held; above 128 if a signal ended a night, or the
        search after the last one.
    """
    failed = held = 0
    unexplained: list[tuple[NightRecord, int]] = []
    skipped: list[str] = []
    for place, day in enumerate(days, 1):
        if len(days) > 1:
            log.info("\nnight %d of %d: %s", place, len(days), day)
        last, config = place == len(days), config_of(day)
        if last:
            record = run_night(config, store, day, run, wait_last, skipped, deadline)
        else:
            record = run_night(config, store, day, run, 0.0, [], deadline)
        code = record.exit_code or 0
        if code > INTERRUPTED:
            return code
        if catching_up and not last and code == DataError.exit_code:
            why = record.message or "its logs are missing or wrong"
            if str(day) not in why:
                why = f"{day}: {why}"
            skipped.append(why)
            log.warning("catch-up   %s is skipped; the later nights run without it", day)
            continue
        if deadline is not None and datetime.now(deadline.tzinfo) >= deadline:
            return code
        if record.outcome == HELD:
            held = held or code
            path = f"{run_directory(record.run)}/{BISECT}"
            # Calling the same night again does not repeat the search for what spoilt this very version.
            if config.nightly.bisect and not (
                store.exists(path) and store.read_json(path).get("version") == record.version
            ):
                unexplained.append((record, config.nightly.bisect))
        if record.outcome == FAILED:
            failed = failed or code
            if not last and not keep_going:
                rest = f"the {len(days) - place} later nights, {days[place]} to {days[-1]}, are skipped"
                log.warning("%s; nightly.keep_going=true runs them anyway", rest)
                break
    # Do this after all nights, since a search may take as long as several of them.
    for record, limit in unexplained:
        signalled = _bisect(store, record, run, limit, deadline)
        if signalled:
            return signalled
    return failed or held


def missed_nights(store: Store, model: str, day: date, most: int) -> list[date]:
    """List the newest ``most`` days between the last night with a verdict and ``day``, oldest first.

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
        first, until = missed[0], missed[-most - 1]
        log.warning(
            f"catch-up   {len(missed)} nights were missed, but nightly.catch_up={most}: {first} to {until} are "
            f"skipped; to include them, run nightjar backfill from={first} to={until} before this night"
        )
    return missed[-most:]


def last_night(store: Store, model: str, day: date) -> date | None:
    """Find the newest day before ``day`` whose night has a verdict; None if there is none within a year."""
    runs = set(store.names("runs"))
    for back in range(1, LOOK_BACK_DAYS + 1):
        other = day - timedelta(days=back)
        if run_name(model, other) in runs:
            record = read_record(store, model, other)
            if record is not None and record.decided:
                return other
    return None
