"""``search.json``: what ``nightjar search`` decided, how it came to it, and what that costs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from pipeline.records.record import Record, absent


def search_directory(name: str) -> str:
    """Return where a search lies in the store."""
    return f"searches/{name}"


@dataclass(frozen=True, kw_only=True)
class Price(Record):
    """Predicted ms of a step (``step_ms``), and bytes of the tables with their optimizer state, by tier."""

    step_ms: float
    bytes: Mapping[str, int]

    @property
    def total(self) -> int:
        """Bytes in all tiers."""
        return sum(self.bytes.values())


@dataclass(frozen=True, kw_only=True)
class DecisionRecord(Record):
    """A decision of ``part``: its ``choices``, the configured one first; the one ``chosen``, and its probability.

    ``history``: probabilities of the choices at each point of the search.
    """

    part: str
    choices: tuple[Any, ...]
    chosen: Any
    probability: float
    history: tuple[tuple[float, ...], ...]


@dataclass(frozen=True, kw_only=True)
class SearchPoint(Record):
    """A point of the search: mean log losses since the last point, on the rows for the weights and the held ones.

    ``cost``: the cost term, as log loss. ``held_loss`` and ``cost`` are absent while the weights learn alone.
    """

    step: int
    temperature: float
    loss: float
    held_loss: float | None = absent()
    cost: float | None = absent()


@dataclass(frozen=True, kw_only=True)
class SearchRecord(Record):
    """A search. ``dataset``: path of the artifact. ``seconds``: of the search itself.

    ``rows``, ``held_rows``: train rows for the weights and for the decisions. ``before``, ``after``: the cost of the
    configured model and of the one found. ``undecided``: decisions whose choices stayed about as likely as at first.
    """

    FILE: ClassVar[str] = "search.json"
    KIND: ClassVar[str] = "search"

    name: str
    dataset: str
    seed: int
    steps: int
    rows: int
    held_rows: int
    seconds: float
    before: Price
    after: Price
    decisions: Mapping[str, DecisionRecord]
    points: tuple[SearchPoint, ...]
    undecided: tuple[str, ...] = absent(())
