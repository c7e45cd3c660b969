"""What ``nightjar what-if`` and ``nightjar plan-diff`` answer. Pairs are [first, second]."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from pipeline.records.record import Record, absent

Pair = list[float]


@dataclass(frozen=True, kw_only=True)
class PlannedCase(Record):
    """The plan of one combination of ``settings``, or the ``problem``: infeasible | refused.

    ``tiers``: bytes by tier, over all ranks. ``tables``: their number by tier. ``bottleneck``: the longest of the
    ``phases`` (ms) of the slowest rank. ``short``: what is wrong, in few words. ``way_out``: the first remedy.
    ``seconds``: the time that planning took.
    """

    settings: dict[str, str]
    hardware: str | None = None
    world_size: int | None = None
    fits: bool
    step_ms: float | None = absent()
    gap: float | None = absent()
    tiers: dict[str, int] | None = absent()
    reserved_bytes: int | None = absent()
    tables: dict[str, int] | None = absent()
    bottleneck: str | None = absent()
    bottleneck_ms: float | None = absent()
    phases: dict[str, float] | None = absent()
    problem: str | None = absent()
    short: str | None = absent()
    way_out: str | None = absent()
    message: str | None = absent()
    hint: str | None = absent()
    seconds: float = 0.0


@dataclass(frozen=True, kw_only=True)
class PlanSide(Record):
    """One of two compared plans. ``tables``: their number; ``bytes``: their size."""

    name: str
    hardware: str
    device: str
    world_size: int
    tables: int
    bytes: int


@dataclass(frozen=True, kw_only=True)
class MovedTable(Record):
    """A table with another tier, sharding, ranks or cache (``places``), where it was (``before``), and why it moved.

    ``kinds``: both places without rank numbers and cached rows, equal for tables that moved alike. ``bytes_moved``:
    weights and optimizer state on a rank and tier that did not hold them before. ``because``: the changed inputs.
    ``reasons``: those in the plans.
    """

    places: dict[str, list[Any]]
    before: str
    to: str
    kinds: list[str]
    bytes: int
    bytes_moved: int
    cost_ms: Pair
    hit_rate: Pair
    because: list[str]
    reasons: list[str]

    def to_json(self) -> dict[str, Any]:
        """Plain data, in which ``before`` is ``from``."""
        return {"from" if name == "before" else name: value for name, value in super().to_json().items()}


@dataclass(frozen=True, kw_only=True)
class TierBytes(Record):
    """Predicted bytes of a tier in tables: of all ranks, and of the fullest."""

    all_bytes: list[int]
    fullest_bytes: list[int]


@dataclass(frozen=True, kw_only=True)
class PlanDiff(Record):
    """How two plans differ.

    ``changes``: hardware figures, settings and profile. ``own``: of a table, its rows, dim, pooling and pins.
    ``tables``: those that moved, most moved bytes first. ``phases``: ms on the slowest rank of each plan.
    """

    first: PlanSide
    second: PlanSide
    changes: dict[str, list[Any]]
    own: dict[str, dict[str, list[Any]]]
    tables: dict[str, MovedTable]
    tables_in_both: int
    only_in_first: list[str]
    only_in_second: list[str]
    bytes_moved: int
    step_ms: Pair
    phases: dict[str, Pair]
    memory: dict[str, TierBytes]
