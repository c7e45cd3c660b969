"""Placements, rated by both cost models, and the search for the best one in ours."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from pipeline.config import HardwareConfig
from pipeline.planning.assign import EXACT_GAP, assign
from pipeline.planning.assign_model import Candidate, Piece, Problem
from pipeline.planning.candidates import BESIDE, Offer, places
from pipeline.planning.cost import step_ms
from pipeline.planning.hardware import Capacity
from pipeline.records import PHASES

# A step takes the sum of its phases or the overlapping work, whichever is longer. The assignment minimises
# (1 - w) x sum + w x overlapping work, a lower bound of the step for every w; usually the overlapping work is shorter.
BESIDE_SHARES = (1e-5, 0.5, 0.99)
# Where the fastest placement costs more in TorchRec's model than TorchRec's plan: weights of that model to try.
STOCK_SHARES = (0.3, 0.6, 1.0)
# The assignment of a large problem may end this far above its bound: in our model, and in TorchRec's.
TOLERANCE, STOCK_TOLERANCE = 0.01, 0.03
ROUNDING = 1 + 1e-9


@dataclass(frozen=True, kw_only=True, eq=False)
class Placement:
    """One of ``offers`` and the ``ranks`` of its shards by table; ``fixed``: ms by phase that every rank spends."""

    offers: Mapping[str, Offer]
    ranks: Mapping[str, tuple[int, ...]]
    world_size: int
    fixed: Mapping[str, float]

    @cached_property
    def phases(self) -> list[dict[str, float]]:
        """Predicted ms of every rank by phase (PHASES)."""
        spent = [{phase: self.fixed.get(phase, 0.0) for phase in PHASES} for _ in range(self.world_size)]
        for offer, index, rank in self._shards():
            for phase, ms in offer.phases[index].items():
                spent[rank][phase] += ms
        return spent

    @cached_property
    def step_ms(self) -> float:
        """Our model's step: the slowest rank's, overlap excluded."""
        return max(step_ms(phases) for phases in self.phases)

    @property
    def waits(self) -> bool:
        """Whether the slowest rank waits for work that overlaps with its step: the exchange of ids, rows from SSD."""
        return self.step_ms > max(sum(ms for name, ms in p.items() if name != BESIDE) for p in self.phases)

    @cached_property
    def stock_ms(self) -> float:
        """TorchRec's own model: the largest sum of shard costs on one rank."""
        spent = [0.0] * self.world_size
        for offer, index, rank in self._shards():
            spent[rank] += offer.stock_ms[index]
        return max(spent)

    @cached_property
    def memory(self) -> list[tuple[int, int, int]]:
        """Bytes of every rank in the order of MEMORIES."""
        used = [[0, 0, 0] for _ in range(self.world_size)]
        for offer, index, rank in self._shards():
            for place, size in enumerate(offer.bytes[index]):
                used[rank][place] += size
        return [(hbm, ddr, ssd) for hbm, ddr, ssd in used]

    def at_least_as_good(self, other: Placement) -> bool:
        """Whether neither cost model rates it worse than ``other``."""
        return self.step_ms <= other.step_ms * ROUNDING and self.stock_ms <= other.stock_ms * ROUNDING

    def _shards(self) -> Iterator[tuple[Offer, int, int]]:
        for name, offer in self.offers.items():
            for index, rank in enumerate(self.ranks[name]):
                yield offer, index, rank


@dataclass(frozen=True, kw_only=True)
class Best:
    """The chosen placement, how far it may be from the best (a share), and a remark where no bound is known."""

    placement: Placement
    gap: float
    remark: str = ""


@dataclass(frozen=True, kw_only=True)
class Space:
    """All offers of all tables, the room of every rank, and the ms by phase that it spends in any case."""

    hardware: HardwareConfig
    offers: Mapping[str, list[Offer]]
    room: Capacity
    fixed: Mapping[str, float]

    def placement(self, offers: Mapping[str, Offer], ranks: Mapping[str, tuple[int, ...]]) -> Placement:
        """A placement in this space."""
        return Placement(offers=offers, ranks=ranks, world_size=self.hardware.world_size, fixed=self.fixed)

    def problem(self, weights: Weights) -> Problem:
        """The assignment problem with shard costs weighted by ``weights``."""
        world = self.hardware.world_size
        beside = self.fixed.get(BESIDE, 0.0)
        base = weights.step * (sum(self.fixed.values()) - beside) + weights.beside * beside
        candidates = {
            name: tuple(self._candidate(o, weights) for o in offered) for name, offered in self.offers.items()
        }
        return Problem(candidates=candidates, capacity=(self.room.each,) * world, base_ms=(base,) * world)

    def _candidate(self, offer: Offer, weights: Weights) -> Candidate:
        costs = zip(offer.ms, offer.beside_ms, offer.stock_ms, offer.bytes, strict=True)
        pieces = tuple(
            Piece(ms=weights.step * step + weights.beside * beside + weights.stock * stock, bytes=size)
            for step, beside, stock, size in costs
        )
        return Candidate(pieces=pieces, places=places(self.hardware, offer.layout))


class Weights(NamedTuple):
    """Weights of a shard's costs: our step, our overlapping work, TorchRec's total."""

    step: float
    beside: float
    stock: float


def anywhere(space: Space) -> Placement | None:
    """The assignment's placement, or None: the quick answer to whether the tables fit."""
    assigned = _assigned(space, Weights(0.5, 0.5, 0.0), math.inf, math.inf)
    return assigned[0] if assigned else None


def best(space: Space, default: Placement | None) -> Best | None:
    """The placement to take, None where nothing fits; ``default``: what TorchRec's planner finds by default.

    The fastest in our model wins, among those that neither model rates worse than ``default``, or than the best known
    plan in TorchRec's model where that is better than ``default`` in both.
    """
    ours = _ours(space)
    if not ours:
        remark = "found by TorchRec's search alone: no bound is known"
        return None if default is None else Best(placement=default, gap=1.0, remark=remark)
    bound = max(bound for _, bound in ours)
    plans = [plan for plan, _ in ours]
    if default is not None:
        stock = _assigned(space, Weights(0.0, 0.0, 1.0), STOCK_TOLERANCE, STOCK_TOLERANCE)
        if stock is not None and stock[0].at_least_as_good(default):
            default = stock[0]
        plans = [plan for plan in (*plans, *_between(space, plans[0], default)) if plan.at_least_as_good(default)]
    placement = min(plans, key=lambda plan: plan.step_ms)
    return Best(placement=placement, gap=max(0.0, placement.step_ms / bound - 1))


def _between(space: Space, ours: Placement, default: Placement) -> Iterator[Placement]:
    """``default``, and placements between our model and TorchRec's, by weights of TorchRec's."""
    yield default
    if ours.at_least_as_good(default):
        return
    ratio = ours.step_ms / max(default.stock_ms, 1e-9)
    for share in STOCK_SHARES:
        placed = _assigned(space, Weights(1 - share, 1e-5, share * ratio), STOCK_TOLERANCE, STOCK_TOLERANCE)
        if placed is not None:
            yield placed[0]


def _ours(space: Space) -> list[tuple[Placement, float]]:
    """Placements for our model alone, each with a lower bound of any placement's step.

    If the first one's steps do not wait for overlapping work, the others cannot be better.
    """
    assigned: list[tuple[Placement, float]] = []
    for share in BESIDE_SHARES:
        placed = _assigned(space, Weights(1 - share, share, 0.0), TOLERANCE, EXACT_GAP)
        if placed is None:
            break
        assigned.append(placed)
        if not assigned[0][0].waits:
            break
    return assigned


def _assigned(space: Space, weights: Weights, tolerance: float, whole: float) -> tuple[Placement, float] | None:
    assignment = assign(space.problem(weights), tolerance=tolerance, whole=whole)
    if assignment is None:
        return None
    offers = {name: space.offers[name][index] for name, index in assignment.chosen.items()}
    return space.placement(offers, assignment.ranks), assignment.bound
