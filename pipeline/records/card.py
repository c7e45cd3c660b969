"""``card.json``: what a version was made of and how good it was found to be."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar

from pipeline.records.gate import Calibrated, Interval
from pipeline.records.record import Record, absent
from pipeline.records.result import Evaluation
from pipeline.records.serving import TableLayout

CARD = "card.json"


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
