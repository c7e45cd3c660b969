"""What ``nightjar models`` answers about the versions of a model."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from pipeline.records.card import ModelCard
from pipeline.records.record import Record, absent


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
