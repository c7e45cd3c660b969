"""``nightly.json``: one night, from what it starts from to its verdict. All nights of a store in few figures."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar

from pipeline.records.error_budget import ErrorBudget, SpentBudget
from pipeline.records.gate import Interval
from pipeline.records.record import Record, absent
from pipeline.records.result import Grown, Shrunk, StageOutcome
from pipeline.records.runs import RunLine

NIGHT = "nightly.json"
PUBLISHED, HELD, FAILED, RUNNING = "published", "held", "failed", "running"


@dataclass(frozen=True, kw_only=True)
class Base(Record):
    """The version a night starts from; ``day``: of its logs ("": not known). Paths are relative to the store."""

    version: str
    day: str
    run: str
    checkpoint: str
    dataset: str
    plan: str


@dataclass(frozen=True, kw_only=True)
class Cost(Record):
    """What a night cost: ``hosts`` of ``offer`` (with ``spot``, of its spot hosts) for the time of its stages."""

    amount: float
    currency: str
    offer: str
    hosts: int
    spot: bool = absent(False)


@dataclass(frozen=True, kw_only=True)
class NightRecord(Record):
    """The night of ``date`` for ``model``. ``outcome``: running | published | held | failed.

    ``settings``, ``logs``: hashes of what decides the verdict. ``base``: None where nothing was published before.
    ``skipped``: missed days that it goes on without; ``changed``: what is not as it was for ``base``, in words;
    ``seconds``: by stage; ``budget``: what the gate spent of ``gate.budget``; ``culprit``: what ``nightjar bisect``
    found, in words; ``gauc``: of the candidate, where ``evaluate.group_by`` is set. Times are seconds since 1970.
    """

    FILE: ClassVar[str] = NIGHT
    KIND: ClassVar[str] = "night's record"
    REMEDY: ClassVar[str] = "remove it and run the night again"

    format: int = 1
    model: str
    date: str
    run: str
    outcome: str
    exit_code: int | None = None
    settings: str = ""
    logs: str = ""
    base: Base | None = None
    started: float | None = absent()
    skipped: tuple[str, ...] | None = absent()
    seconds_waited: float | None = absent()
    finished: float | None = absent()
    summary: str | None = absent()
    message: str | None = absent()
    hint: str | None = absent()
    verdict: str | None = absent(unless="seconds")
    reasons: tuple[str, ...] | None = absent()
    warnings: tuple[str, ...] | None = absent()
    version: str | None = absent(unless="seconds")
    incumbent: str | None = absent(unless="seconds")
    forced: str | None = absent(unless="seconds")
    rows: int | None = absent(unless="seconds")
    rows_quarantined: int | None = absent(unless="seconds")
    seconds: dict[str, float] | None = absent()
    cost: Cost | None = absent()
    stages: dict[str, StageOutcome] | None = absent()
    shrunk: tuple[Shrunk, ...] | None = absent()
    grown: tuple[Grown, ...] | None = absent()
    ne: float | None = absent()
    ne_interval: tuple[float, float] | None = absent()
    rows_scored: int | None = absent()
    incumbent_ne: float | None = absent()
    ne_change: Interval | None = absent()
    gauc: Interval | None = absent()
    gauc_change: Interval | None = absent()
    gate_page: str | None = absent()
    budget: ErrorBudget | None = absent()
    changed: tuple[str, ...] | None = absent()
    culprit: str | None = absent()

    @property
    def decided(self) -> bool:
        """Whether the night has its verdict."""
        return self.outcome in (PUBLISHED, HELD)

    def to_json(self) -> dict[str, Any]:
        """Return plain data; for a night without a run, the page comes last, as it always did."""
        record = super().to_json()
        if self.seconds is None and "summary" in record:
            record["summary"] = record.pop("summary")
        return record


@dataclass(frozen=True, kw_only=True)
class NightLine(Record):
    """A night in few figures, as ``nightjar nights ls`` lists it; a figure that the night does not have is absent.

    ``reasons``: of the gate, or what ended a failed night. NE and calibration are the gate's, on one set of test rows,
    with their intervals where these are known; ``baseline_ne``: of the model that the gate takes as the baseline.
    ``seconds``: by stage. ``pages``: paths in the store by name: ``night``, ``gate``, ``run``, ``version``.
    """

    model: str
    date: str
    run: str
    outcome: str
    exit_code: int | None = absent()
    verdict: str | None = absent()
    reasons: tuple[str, ...] = ()
    version: str | None = absent()
    incumbent: str | None = absent()
    finished: float | None = absent()
    ne: Interval | None = absent()
    incumbent_ne: Interval | None = absent()
    baseline_ne: Interval | None = absent()
    ne_change: Interval | None = absent()
    calibration: Interval | None = absent()
    incumbent_calibration: Interval | None = absent()
    rows: int | None = absent()
    rows_quarantined: int | None = absent()
    seconds: dict[str, float] | None = absent()
    cost: Cost | None = absent()
    pages: dict[str, str] | None = absent()


@dataclass(frozen=True, kw_only=True)
class ServedVersion(Record):
    """A time in which ``version`` served: seconds since 1970; ``until`` is absent of the version that serves now.

    ``by``: what made it serve (publish | promote | rollback), and ``reason``: why, where somebody gave one.
    """

    version: str
    since: float
    until: float | None = absent()
    by: str
    reason: str = ""


@dataclass(frozen=True, kw_only=True)
class StoreOverview(Record):
    """The nights of a store, oldest first, what served by model, other runs, and what could not be read.

    ``budgets``: what was spent of ``gate.budget``, by model. ``nights_left_out``, ``runs_left_out``: how many older
    ones there are.
    """

    nights: tuple[NightLine, ...] = ()
    served: dict[str, tuple[ServedVersion, ...]] = field(default_factory=dict)
    budgets: dict[str, SpentBudget] | None = absent()
    runs: tuple[RunLine, ...] | None = absent()
    nights_left_out: int = 0
    runs_left_out: int | None = absent()
    problems: tuple[str, ...] = ()
