"""All nights of a store at a glance: read from their records, and written as the store's own page, ``index.html``."""

from __future__ import annotations

import json
import logging
import re
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import date
from functools import partial
from typing import TypeVar, cast

from pipeline.core.errors import ArtifactError, NightjarError
from pipeline.publishing.promotion import read_current
from pipeline.publishing.versions import CARD_TEXT, model_path, models, version_path
from pipeline.records.error_budget import BudgetLedger, SpentBudget
from pipeline.records.gate import GATE, GateRecord, Interval
from pipeline.records.night import NIGHT, NightLine, NightRecord, ServedVersion, StoreOverview
from pipeline.records.record import Record
from pipeline.records.result import Result
from pipeline.records.runs import RunLine, run_directory
from pipeline.report.store_page import STORE_PAGE, store_page
from pipeline.store.artifacts import Store

# Nights of each model on the page: a year and a month, which keep the page below a megabyte.
MOST_NIGHTS = 396
MOST_RUNS = 100
# Parallel requests to an object store.
READERS = 16
_NIGHT_RUN = re.compile(r"(?P<model>.+)-(?P<date>\d{4}-\d\d-\d\d)")
R = TypeVar("R", bound=Record)
Line = TypeVar("Line")
log = logging.getLogger(__name__)


def write_store_page(store: Store) -> None:
    """Write ``index.html`` at the root of ``store``; a warning says why it could not be written.

    Writers do not wait for each other: the page is replaced as a whole, and the last one has read what the others did.
    """
    try:
        overview = read_overview(store, MOST_NIGHTS, with_runs=True)
        store.write_bytes(STORE_PAGE, store_page(overview, time.time()).encode())
    except Exception as problem:
        # Whatever happened to the page, the outcome of the run or the night stands.
        text = f"{type(problem).__name__}: {problem}"
        if isinstance(problem, NightjarError):
            text = problem.message
        log.warning("the page of all nights, %s, is not up to date: %s", STORE_PAGE, text)


def read_overview(store: Store, last: int | None = None, *, with_runs: bool = False) -> StoreOverview:
    """Read the nights of ``store``, a few small files each, many at a time.

    What cannot be read becomes a line of ``problems``.

    Args:
        last: Only so many nights of each model, the newest.
        with_runs: Read the runs that are no nights, too.
    """
    problems: list[str] = []
    by_model: dict[str, list[str]] = {}
    others: list[str] = []
    for name in store.names("runs"):
        match = _NIGHT_RUN.fullmatch(name)
        if match and _is_date(match["date"]):
            # Names are sorted, so a model's nights are sorted by date.
            by_model.setdefault(match["model"], []).append(name)
        else:
            others.append(name)
    chosen, left_out = [], 0
    for names in by_model.values():
        newest = names if last is None else names[-last:]
        chosen += newest
        left_out += len(names) - len(newest)
    versions = {model: set(store.folders(model_path(model))) for model in models(store)}
    found = _read_all(partial(_read_night, store, versions, problems), chosen, problems)
    nights = []
    for name, night in found.items():
        if night is not None:
            nights.append(night)
        else:
            # The run's name only looks like that of a night.
            others.append(name)
    served = _read_all(partial(_read_served, store), versions, problems)
    budgets = _read_all(partial(_read_spent, store), versions, problems)
    overview = StoreOverview(
        nights=tuple(sorted(nights, key=lambda night: (night.date, night.model))),
        served={model: spans for model, spans in served.items() if spans},
        budgets={model: budget for model, budget in budgets.items() if budget is not None} or None,
        nights_left_out=left_out,
    )
    if with_runs:
        lines = _read_all(partial(_read_run, store), others[-MOST_RUNS:], problems)
        runs = sorted(filter(None, lines.values()), key=lambda line: (line.finished or 0.0, line.run))
        overview = replace(overview, runs=tuple(runs), runs_left_out=max(0, len(others) - MOST_RUNS))
    return replace(overview, problems=tuple(sorted(problems)))


def _is_date(text: str) -> bool:
    try:
        date.fromisoformat(text)
    except ValueError:
        return False
    return True


def _read_all(read: Callable[[str], Line], names: Iterable[str], problems: list[str]) -> dict[str, Line]:
    # Return what ``read`` gives for each name. A name that cannot be read is left out and adds a line to ``problems``.
    def attempt(name: str) -> tuple[str, Line | None, str]:
        try:
            return name, read(name), ""
        except NightjarError as error:
            return name, None, error.message
        except OSError as error:
            return name, None, f"{name} cannot be read: {type(error).__name__}: {error}"

    lines = {}
    with ThreadPoolExecutor(READERS, thread_name_prefix="nightjar-overview") as pool:
        for name, line, problem in pool.map(attempt, names):
            if problem:
                problems.append(problem)
            else:
                lines[name] = cast(Line, line)
    return lines


def _read(kind: type[R], store: Store, path: str) -> R | None:
    # Return None if there is no such file. This takes one request, and messages have the path in the store.
    try:
        data = json.loads(store.fs.cat_file(store.full(path)))
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (ValueError, RecursionError) as error:
        raise ArtifactError(f"{path} is not valid JSON: {error}") from None
    return kind.from_json(data, path)


def _read_night(store: Store, versions: dict[str, set[str]], problems: list[str], name: str) -> NightLine | None:
    run = run_directory(name)
    night = _read(NightRecord, store, f"{run}/{NIGHT}")
    if night is None:
        return None
    if f"{night.model}-{night.date}" != name:
        raise ArtifactError(f"{run}/{NIGHT} is of night {night.date} of model {night.model}")
    pages = {}
    if night.summary:
        pages["night"] = night.summary
    # A run that was refused before its first stage has no page.
    if night.stages or night.seconds:
        pages["run"] = f"{run}/report.html"
    if night.version in versions.get(night.model, ()):
        pages["version"] = f"{version_path(night.model, str(night.version))}/{CARD_TEXT}"
    gate = None
    if night.gate_page:
        try:
            gate = _read(GateRecord, store, f"{night.gate_page.rpartition('/')[0]}/{GATE}")
        except ArtifactError as error:
            # The night's own record still has its verdict and NE.
            problems.append(error.message)
    calibration = incumbent_calibration = incumbent_ne = baseline_ne = None
    if gate is not None:
        pages["gate"] = str(night.gate_page)
        if gate.candidate is not None:
            calibration = gate.candidate.calibration
        if gate.incumbent is not None:
            incumbent_ne, incumbent_calibration = gate.incumbent.ne, gate.incumbent.calibration
        if gate.baseline is not None:
            baseline_ne = gate.baseline.ne
    elif night.gate_page:
        # ``models gc`` removes a version with its gate record. What the run measured stays, without an interval.
        result = _read(Result, store, f"{run}/{Result.FILE}")
        if result is not None and result.eval is not None and result.eval.calibration is not None:
            calibration = Interval(*[result.eval.calibration] * 3)
    if incumbent_ne is None and night.incumbent_ne is not None:
        incumbent_ne = Interval(*[night.incumbent_ne] * 3)
    ne = None
    if night.ne is not None:
        # Records of early releases have no interval.
        ne = Interval(night.ne, *(night.ne_interval or (night.ne, night.ne)))
    reasons = night.reasons or ()
    if not reasons and night.message:
        reasons = (night.message,)
    if night.culprit:
        reasons = (night.culprit, *reasons)
    return NightLine(
        model=night.model,
        date=night.date,
        run=night.run,
        outcome=night.outcome,
        exit_code=night.exit_code,
        verdict=night.verdict,
        reasons=reasons,
        version=night.version,
        incumbent=night.incumbent,
        finished=night.finished,
        ne=ne,
        incumbent_ne=incumbent_ne,
        baseline_ne=baseline_ne,
        ne_change=night.ne_change,
        calibration=calibration,
        incumbent_calibration=incumbent_calibration,
        rows=night.rows,
        rows_quarantined=night.rows_quarantined,
        seconds=night.seconds,
        cost=night.cost,
        pages=pages,
    )


def _read_served(store: Store, model: str) -> tuple[ServedVersion, ...]:
    # Read the log of promotions, which goes back as far as ``current.json`` keeps it.
    spans = list[ServedVersion]()
    until = None
    for change in reversed(read_current(store, model).log):
        spans.append(
            ServedVersion(version=change.version, since=change.at, until=until, by=change.by, reason=change.reason)
        )
        until = change.at
    return tuple(reversed(spans))


def _read_spent(store: Store, model: str) -> SpentBudget | None:
    ledger = _read(BudgetLedger, store, f"{model_path(model)}/{BudgetLedger.FILE}")
    if ledger is None:
        return None
    return ledger.spent()


def _read_run(store: Store, name: str) -> RunLine | None:
    result = _read(Result, store, f"{run_directory(name)}/{Result.FILE}")
    if result is None:
        return None
    # The run ends with its last stage; stages that did not start have no time.
    ends = []
    for stage in result.stages.values():
        if stage.started is not None:
            ends.append(stage.started + stage.seconds)
    return RunLine.of(result, max(ends, default=None))
