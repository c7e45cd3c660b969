"""What ``nightjar models`` answers about the versions of a model."""

from __future__ import annotations

from dataclasses import dataclass

from pipeline.records.card import ModelCard
from pipeline.records.record import Record, absent


@dataclass(frozen=True, kw_only=True)
class Promotion(Record):
    """An entry in the log of ``current.json``: what was done, by whom and why; ``at``: seconds since 1970.

    ``by``: publish | promote | rollback. ``id`` tells its writer whether a write whose answer was lost was done.
    """

    version: str
    instead_of: str | None = None
    by: str
    reason: str = ""
    at: float
    id: str | None = absent()


@dataclass(frozen=True, kw_only=True)
class ShownVersion(Record):
    """A version: its card, bytes by file, and what was done with it."""

    path: str
    serves: bool
    card: ModelCard
    files: dict[str, int]
    log: tuple[Promotion, ...]
