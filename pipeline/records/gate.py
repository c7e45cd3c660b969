"""``gate.json``: what the gate measured of a version, what it asked, and its verdict."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple

from pipeline.records.ensemble import ServingCost
from pipeline.records.error_budget import ErrorBudget
from pipeline.records.record import Record, absent

GATE = "gate.json"
PASS, HOLD = "PASS", "HOLD"


class Interval(NamedTuple):
    """A figure of all rows and the ends of its confidence interval; in JSON a list of three."""

    point: float
    low: float
    high: float


@dataclass(frozen=True, kw_only=True)
class Curve(Record):
    """Reliability: mean prediction, observed click rate and rows of each bin, by rising prediction."""

    FILE: ClassVar[str] = "reliability.json"
    KIND: ClassVar[str] = "reliability curve"

    predicted: list[float]
    observed: list[float]
    rows: list[int]


@dataclass(frozen=True, kw_only=True)
class Histogram(Record):
    """Shares of rows by predicted probability, between ``edges``."""

    edges: list[float]
    candidate: list[float]
    incumbent: list[float] | None = absent()


@dataclass(frozen=True, kw_only=True)
class Figures(Record):
    """Figures of a model on some rows; or of the change from one to another: NE as a share, the others differences."""

    ne: Interval
    auc: Interval
    calibration: Interval


@dataclass(frozen=True, kw_only=True)
class ModelFigures(Figures):
    """Figures of a model on all rows. ``calibration_by_prediction``: off by this share of the clicks; its error."""

    calibration_by_prediction: float
    calibration_by_prediction_error: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Shift(Record):
    """How far the candidate's predictions lie from the incumbent's."""

    psi: float
    ks: float


@dataclass(frozen=True, kw_only=True)
class Beside(Record):
    """Another model on the same rows: its NE, the change from it to the candidate, the candidate's share of its gain.

    ``spare``: by how much the candidate's gain exceeds the share asked for. None of these where predictions are not
    finite; then the number of those.
    """

    predictions_not_finite: int | None = absent()
    ne: Interval | None = absent()
    change: Interval | None = absent()
    gain: Interval | None = absent()
    spare: Interval | None = absent()


@dataclass(frozen=True, kw_only=True)
class Best(Beside):
    """The best of the last versions; without figures where that is the incumbent. ``notes``: on those passed over."""

    version: str = ""
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Serving(Record):
    """The served model beside the trained one: the trained one's NE, the rise as a share, the largest difference.

    ``ulps``: the largest difference of two logits in units in the last place.
    """

    trained_ne: float
    gap: float
    largest_difference: float
    ulps: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Slice(Record):
    """The rows whose column ``slice`` has ``value``."""

    slice: str
    value: str
    rows: int
    clicks: int
    candidate: Figures
    incumbent: Figures | None = absent()
    change: Figures | None = absent()


@dataclass(frozen=True, kw_only=True)
class TaskComparison(Record):
    """A further task on the rows with its label: its ``figure`` (NE or RMSE) of candidate and incumbent.

    ``change``: of that figure, as a share. Without ``candidate``, no row allows figures; without ``incumbent``, nothing
    serves, or what serves lacks the task.
    """

    kind: str
    figure: str
    rows: int = 0
    candidate: Interval | None = absent()
    auc: Interval | None = absent()
    calibration: Interval | None = absent()
    incumbent: Interval | None = absent()
    change: Interval | None = absent()


@dataclass(frozen=True, kw_only=True)
class UserAuc(Record):
    """GAUC: the mean AUC within ``users`` that have rows of both classes, weighted by their ``rows``.

    ``change``: from incumbent to candidate, a difference. ``limit``: the largest drop; without it, nothing is held for
    GAUC. Without ``candidate``, no user has rows of both classes. ``by``: the feature whose ids are the users, which
    may be any group of rows; without it, they are those of a file of scores.
    """

    users: int
    rows: int
    by: str | None = absent()
    candidate: Interval | None = absent()
    incumbent: Interval | None = absent()
    change: Interval | None = absent()
    limit: float | None = absent()

    @property
    def counted(self) -> str:
        """The number of users in words: users, or groups by a feature."""
        kind, by = "user", ""
        if self.by is not None:
            kind, by = "group", f" by {self.by}"
        ending = "" if self.users == 1 else "s"
        return f"{self.users:,} {kind}{ending}{by}"


@dataclass(frozen=True, kw_only=True)
class Calibrated(Record):
    """The calibrator in ``gate.json``: rows and clicks that it was fitted on, and figures without it on the others.

    ``values``: of ``slices`` that have a shift of their own.
    """

    method: str
    rows: int
    clicks: int
    slices: str | None = absent()
    values: int | None = absent()
    before: Figures | None = absent()

    @property
    def words(self) -> str:
        """The record in a sentence."""
        by = "" if self.slices is None else f", by {self.slices} ({self.values} values with a shift)"
        fitted = f"{self.method} on {self.rows:,} held-out rows with {self.clicks:,} clicks{by}"
        if self.before is None:
            return fitted
        return (
            f"{fitted}; before it calibration {self.before.calibration.point:.4f}, NE {self.before.ne.point:.5f}, "
            f"AUC {self.before.auc.point:.5f}"
        )


@dataclass(frozen=True, kw_only=True)
class Importance(Record):
    """By how much NE rises where the values of a feature, or of a tower's, change places between rows; its error."""

    rise: float
    error: float


@dataclass(frozen=True, kw_only=True)
class Former(Record):
    """What the incumbent's own gate record says of it, with standard errors."""

    ne: float
    ne_error: float = 0.0
    calibration: float
    calibration_error: float = 0.0
    calibration_by_prediction: float
    calibration_by_prediction_error: float = 0.0
    click_rate: float = 0.0
    coverage: dict[str, float] = field(default_factory=dict)
    importance: dict[str, Importance] | None = absent()


@dataclass(frozen=True, kw_only=True)
class RowsPower(Record):
    """What the rows tell of a rise of NE: it is at most ``bound`` with the probability ``power``.

    ``resolved``: the smallest limit these rows can tell; ``rows_needed``: how many can tell ``limit``, if any can;
    ``instead``: where the rows are too few for ``limit``, the smallest that they can test.
    """

    limit: float
    power: float
    bound: float
    resolved: float
    rows_needed: int | None = None
    instead: float | None = absent()


@dataclass(frozen=True)
class Check(Record):
    """The answer to one question: ``words`` say it with its numbers, ``setting`` decides it.

    ``warned``: it passed, but a person should read it.
    """

    name: str
    setting: str
    passed: bool
    words: str
    warned: bool = False


@dataclass(frozen=True, kw_only=True)
class GateRecord(Record):
    """The figures of a candidate, beside the incumbent where there is one, and the verdict.

    Where ``candidate`` is None, some predictions are not finite and there are no figures. ``coverage``: by feature, the
    share of lookups that trained rows serve; ``weights_not_finite``: by table or parameter; null: scores alone were
    judged. ``not_comparable``: why the incumbent could not be scored; ``forced``: why a person let the version through.
    ``version``: of ``model``.
    ``tasks``: those besides the main one. ``young_labels``: in words, that clicks of the scored rows may still come;
    calibration then holds nothing. ``calibrated``: where the version has a calibrator; then all other figures
    of the candidate are with it, on rows that it was not fitted on, but for ``serving``. ``importance``: of the
    candidate's features, by name, and of its towers. ``cost``: of an ensemble. ``gauc``: where rows have users.
    ``budget``: where there is one (``gate.budget``) and NE was compared with the incumbent's.
    """

    FILE: ClassVar[str] = GATE
    KIND: ClassVar[str] = "gate record"

    rows: int
    clicks: int
    click_rate: float
    confidence: float
    predictions_not_finite: dict[str, int]
    reliability: dict[str, Curve] | None = absent()
    candidate: ModelFigures | None = absent()
    incumbent: ModelFigures | None = absent()
    change: Figures | None = absent()
    shift: Shift | None = absent()
    best: Best | None = absent()
    baseline: Beside | None = absent()
    histogram: Histogram | None = absent()
    serving: Serving | None = absent()
    slices: tuple[Slice, ...] | None = absent()
    tasks: dict[str, TaskComparison] | None = absent()
    gauc: UserAuc | None = absent()
    calibrated: Calibrated | None = absent()
    importance: dict[str, Importance] | None = absent()
    tower_importance: dict[str, Importance] | None = absent()
    cost: ServingCost | None = absent()
    young_labels: str | None = absent()
    incumbent_version: str | None = None
    weights_not_finite: dict[str, int] | None = field(default_factory=dict)
    coverage: dict[str, float] = field(default_factory=dict)
    former: Former | None = None
    not_comparable: str | None = absent()
    verdict: str = HOLD
    reasons: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()
    checks: tuple[Check, ...] = ()
    power: RowsPower | None = absent()
    budget: ErrorBudget | None = absent()
    forced: str | None = absent()
    model: str = ""
    version: str = ""

    def to_json(self) -> dict[str, Any]:
        """Return plain data; a best version that was not scored comes after the figures, as it always did."""
        # Files of earlier releases must be rewritten byte for byte. A key can only move to a dictionary's end, so the
        # later keys are moved there, too.
        record = super().to_json()
        if self.best is not None and self.best.ne is None and self.best.predictions_not_finite is None:
            later = list(record)[list(record).index("incumbent_version") :]
            record["best"] = record.pop("best")
            record |= {name: record.pop(name) for name in later}
        return record
