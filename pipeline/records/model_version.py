"""A version of a model: its ``card.json`` and ``calibrator.json``, and what ``nightjar models`` answers about it."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

from pipeline.records.gate import Calibrated, Interval
from pipeline.records.record import Record, absent
from pipeline.records.result import Evaluation
from pipeline.records.serving import TableLayout

CARD, CALIBRATOR = "card.json", "calibrator.json"


@dataclass(frozen=True, kw_only=True)
class CalibrationCurve(Record):
    """Straight lines through the knots (``x``, ``y``), both rising; beyond the outer ones, lines of ``slope``.

    ``x`` and ``y`` are logits. ``rows``, ``clicks``: those it was fitted on. ``shifts``: by slice, what is added to the
    calibrated logit.
    """

    x: list[float]
    y: list[float]
    slope: float
    rows: int = 0
    clicks: int = 0
    shifts: dict[str, float] | None = absent()

    def shifted(self, shift: float) -> CalibrationCurve:
        """Return the curve with ``shift`` added to every value."""
        return replace(self, y=[value + shift for value in self.y])


@dataclass(frozen=True, kw_only=True)
class CalibratorRecord(Record):
    """The curve of every task whose labels are 0 and 1, by name; ``click``: the main one.

    ``slices``: the feature by whose row of its table (of several ids, the first one's) the shifts are told apart.
    """

    FILE: ClassVar[str] = CALIBRATOR
    KIND: ClassVar[str] = "calibrator"
    VERSION: ClassVar[str] = "nightjar-calibrator-1"
    REMEDY: ClassVar[str] = "publish it again"

    format: str = VERSION
    method: str
    share: float
    slices: str | None = absent()
    curves: dict[str, CalibrationCurve] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Verdict(Record):
    """What the gate said; ``forced``: why a person let the version through."""

    verdict: str
    reasons: tuple[str, ...] = ()
    forced: str | None = None


@dataclass(frozen=True, kw_only=True)
class CardPlan(Record):
    """The plan of the training; ``tiers``: predicted bytes by tier."""

    path: str
    hardware: str
    tiers: dict[str, int] | None = None


@dataclass(frozen=True, kw_only=True)
class Lineage(Record):
    """Where a version comes from; paths are relative to the store.

    ``planned_steps``: as ``planned`` of ``Resumed``, where the training was made shorter or longer.
    """

    run: str
    checkpoint: str
    training: str
    evaluation: str
    partition: str
    started_from: str | None = None
    started_from_checkpoint: dict[str, Any] | None = None
    incumbent: str | None = None
    planned_steps: int | None = absent()


@dataclass(frozen=True, kw_only=True)
class ModelCard(Record):
    """A version of ``model``. ``figures``: on held-out rows, as served; ``data``: ``name``, ``dataset``, and the
    summary of its ingestion; ``created``: seconds since 1970; ``calibrator``: with the figures before it.
    """

    FILE: ClassVar[str] = CARD
    KIND: ClassVar[str] = "model card"

    model: str
    version: str
    created: float
    gate: Verdict
    figures: dict[str, Interval] = field(default_factory=dict)
    calibrator: Calibrated | None = absent()
    evaluation_of_training: Evaluation = field(default_factory=Evaluation)
    data: dict[str, Any] = field(default_factory=dict)
    tables: dict[str, TableLayout] = field(default_factory=dict)
    plan: CardPlan
    lineage: Lineage


@dataclass(frozen=True, kw_only=True)
class Promotion(Record):
    """An entry in the log of ``current.json``: what happened, why, and when (``at``: seconds since 1970).

    ``by``: publish | promote | rollback. ``id`` tells the writer whether a write succeeded whose answer was lost.
    ``training``: key of the training that ``version`` was made from, ``weights``: its checkpoints, whatever the plan,
    ``content``: checksum of its tables and dense part. They outlive the version, which ``gc`` may remove.
    """

    version: str
    instead_of: str | None = None
    by: str
    reason: str = ""
    at: float
    id: str | None = absent()
    training: str | None = absent()
    weights: str | None = absent()
    content: str | None = absent()


@dataclass(frozen=True, kw_only=True)
class ListedVersion(Record):
    """A version in ``nightjar models ls``. ``previous``: a rollback restores it. ``summary``: of its manifest.

    ``problem``: why the version cannot be used, or "". It is ``damaged`` unless it may still be in the making.
    ``withdrawn``: how its training was taken out of service; no stage lets it serve again.
    """

    version: str
    serves: bool
    previous: bool
    created: float | None = None
    bytes: int | None = None
    summary: dict[str, Any] = field(default_factory=dict)
    problem: str = ""
    damaged: bool = False
    withdrawn: str | None = absent()
    age_seconds: float | None = None


@dataclass(frozen=True, kw_only=True)
class ListedModel(Record):
    """The versions of a model, oldest first, and the one that serves."""

    model: str
    serving: str | None
    versions: tuple[ListedVersion, ...]


@dataclass(frozen=True, kw_only=True)
class ShownVersion(Record):
    """A version: its card, bytes by file, and its entries in the log. ``withdrawn``: as of a ``ListedVersion``."""

    path: str
    serves: bool
    card: ModelCard
    files: dict[str, int]
    log: tuple[Promotion, ...]
    withdrawn: str | None = absent()


@dataclass(frozen=True, kw_only=True)
class RemovedVersion(Record):
    """A version of a model that is removed, and why."""

    version: str
    bytes: int | None
    reason: str


@dataclass(frozen=True, kw_only=True)
class RemovedVersions(Record):
    """The answer of ``nightjar models gc``: the versions of ``model`` that are removed."""

    model: str
    dry_run: bool
    removed: tuple[RemovedVersion, ...]
