"""Ensembles: the snapshots of a training that a version averages, and what that costs where it serves."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pipeline.records.record import Record, absent


@dataclass(frozen=True, kw_only=True)
class Member(Record):
    """A snapshot, by its checkpoint's path: what its logits count, and its own NE on the validation rows."""

    checkpoint: str
    weight: float = 1.0
    ne: float | None = absent()


@dataclass(frozen=True, kw_only=True)
class EnsemblePart(Record):
    """The members of a training's ensemble, out of ``made`` snapshots of ``kind``, and NE of the validation rows.

    ``ne``: of all members together; ``best_ne``: of the best snapshot alone; ``last_ne``: of the plain mean of as many
    newest ones. ``seconds``: that choosing took.
    """

    members: tuple[Member, ...]
    made: int
    kind: str
    ne: float | None = absent()
    best_ne: float | None = absent()
    last_ne: float | None = absent()
    seconds: float | None = absent()


@dataclass(frozen=True, kw_only=True)
class ServingCost(Record):
    """What scoring by an ensemble takes: its ``members``, bytes of tables, and microseconds a row on this machine.

    ``bytes_of_one``: of a version with one of them; ``row_us_of_incumbent``: where it could be scored as it is.
    """

    members: int
    bytes: int
    bytes_of_one: int
    row_us: float
    row_us_of_incumbent: float | None = absent()


def ensemble_of(summary: Mapping[str, Any]) -> EnsemblePart | None:
    """Return the ensemble of the training with this summary; None if it is a single model."""
    record = (summary.get("train") or {}).get("ensemble")
    return None if record is None else EnsemblePart.from_json(record)


def members_of(summary: Mapping[str, Any]) -> tuple[Member, ...]:
    """Return the parts of a training's result: the members of its ensemble, or its last checkpoint."""
    ensemble = ensemble_of(summary)
    if ensemble is None:
        return (Member(checkpoint=summary["final"]),)
    return ensemble.members
