"""Placements, rated by both cost models, and the search for the best one in ours."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from pipeline.config.hardware import HardwareConfig
from pipeline.planning.assign import assign
from pipeline.planning.assign_model import AssignmentProblem, Candidate, ShardCost
from pipeline.planning.candidates import OVERLAPPED, Offer, allowed_places
from pipeline.planning.cost import step_ms
from pipeline.planning.hardware import Capacity
from pipeline.records.plan import PHASES

# A step takes the sum of its phases or the overlapping work, whichever is longer. The assignment minimises
# (1 - w) x sum + w x overlapping work, a lower bound of the step for every w; usually the overlapping work is shorter.
OVERLAPPED_WEIGHTS = (1e-5, 0.5, 0.99)
# A plan is rated so much better than TorchRec's by TorchRec's own model where that can be had: both models may err.
STOCK_GAIN = 1.03
# Steps that differ by less are as fast as each other.
NEAR = 1.003
# The assignment of a large problem may end this far above its bound.
TOLERANCE = 0.01
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
        fixed = {phase: self.fixed.get(phase, 0.0) for phase in PHASES}
        spent = [dict(fixed) for _ in range(self.world_size)]
        for offer, shard, rank in self._shards():
            for phase, ms in offer.phases[shard].items():
                spent[rank][phase] += ms
        return spent

    @cached_property
    def step_ms(self) -> float:
        """Our model's step: the slowest rank's, overlap excluded."""
        return max(step_ms(phases) for phases in self.phases)

    @property
    def waits(self) -> bool:
        """Whether the slowest rank waits for work that overlaps with its step: the exchange of ids, rows from SSD."""
        slowest = 0.0
        for phases in self.phases:
            slowest = max(slowest, sum(ms for phase, ms in phases.items() if phase != OVERLAPPED))
        return self.step_ms > slowest

    @cached_property
    def stock_ms(self) -> float:
        """TorchRec's own model: the largest sum of shard costs on one rank."""
        spent = [0.0] * self.world_size
        for offer, shard, rank in self._shards():
            spent[rank] += offer.stock_ms[shard]
        return max(spent)

    @cached_property
    def memory(self) -> list[tuple[int, int, int]]:
        """Bytes of every rank in the order of MEMORIES."""
        used = [(0, 0, 0)] * self.world_size
        for offer, shard, rank in self._shards():
            hbm, ddr, ssd = offer.bytes[shard]
            used[rank] = (used[rank][0] + hbm, used[rank][1] + ddr, used[rank][2] + ssd)
        return used

    def _shards(self) -> Iterator[tuple[Offer, int, int]]:
        for name, offer in self.offers.items():
            for shard, rank in enumerate(self.ranks[name]):
                yield offer, shard, rank


@dataclass(frozen=True, kw_only=True)
class BestPlacement:
    """The chosen placement, how far it may be from the best (a share), and a remark where no bound is known."""

    placement: Placement
    gap: float
    remark: str = ""


class CostWeights(NamedTuple):
    """Weights of a shard's costs: our step, our overlapping work, TorchRec's total."""

    step: float
    overlapped: float
    stock: float = 0.0


@dataclass(frozen=True, kw_only=True)
class PlacementSpace:
    """All offers of all tables, the room of every rank, and the ms by phase that it spends in any case."""

    hardware: HardwareConfig
    offers: Mapping[str, list[Offer]]
    room: Capacity
    fixed: Mapping[str, float]

    def placement(self, offers: Mapping[str, Offer], ranks: Mapping[str, tuple[int, ...]]) -> Placement:
        return Placement(offers=offers, ranks=ranks, world_size=self.hardware.world_size, fixed=self.fixed)

    def assignment_problem(self, weights: CostWeights, most_stock_ms: float) -> AssignmentProblem:
        """Build the assignment problem with shard costs weighted by ``weights``.

        Where ``most_stock_ms`` is finite, no rank costs more in TorchRec's model: its ms are used up like memory.
        """
        limited = math.isfinite(most_stock_ms)
        candidates = {}
        for name, offered in self.offers.items():
            candidates[name] = tuple(self._candidate(offer, weights, limited) for offer in offered)
        capacity: tuple[float, ...] = self.room.each
        if limited:
            capacity = (*capacity, most_stock_ms * ROUNDING)
        overlapped = self.fixed.get(OVERLAPPED, 0.0)
        base = weights.step * (sum(self.fixed.values()) - overlapped) + weights.overlapped * overlapped
        world = self.hardware.world_size
        return AssignmentProblem(candidates=candidates, capacity=(capacity,) * world, base_ms=(base,) * world)

    def _candidate(self, offer: Offer, weights: CostWeights, limited: bool) -> Candidate:
        shards = []
        for step, overlapped, stock, size in zip(
            offer.ms, offer.overlapped_ms, offer.stock_ms, offer.bytes, strict=True
        ):
            ms = weights.step * step + weights.overlapped * overlapped + weights.stock * stock
            shards.append(ShardCost(ms=ms, usage=(*size, stock) if limited else size))
        return Candidate(shards=tuple(shards), places=allowed_places(self.hardware, offer.layout))


def find_feasible(space: PlacementSpace) -> Placement | None:
    """Find any placement that fits: the quick answer to whether the tables fit."""
    assigned = _assign(space, CostWeights(0.5, 0.5), tolerance=math.inf)
    return assigned[0] if assigned else None


def find_best(space: PlacementSpace, default: Placement | None) -> BestPlacement | None:
    """Find the placement to take, None where nothing fits; ``default``: what TorchRec's planner finds by default.

    The fastest in our model wins, among those that TorchRec's model rates better than ``default`` by STOCK_GAIN. Where
    none of these is found that is as fast as ``default``, it is among those that TorchRec's model rates no worse.
    """
    # 1. The fastest in our model, whatever TorchRec's says.
    ours = _search_ours(space, math.inf)
    if not ours:
        if default is None:
            return None
        return BestPlacement(placement=default, gap=1.0, remark="found by TorchRec's search alone: no bound is known")
    plans = [plan for plan, _ in ours]
    # 2. Of the plans that TorchRec's model rates well enough, the fastest.
    placement = min(plans, key=_step) if default is None else _choose_rated_well(space, plans, default)
    # 3. Every weighting of the costs bounds the step from below; the best bound counts.
    bound = max(bound for _, bound in ours)
    return BestPlacement(placement=placement, gap=max(0.0, placement.step_ms / bound - 1))


def _choose_rated_well(space: PlacementSpace, plans: list[Placement], default: Placement) -> Placement:
    # The least cost in TorchRec's model that can be had says which limits are worth a search.
    candidates = [*plans, default]
    cheapest = _assign(space, CostWeights(0.0, 0.0, 1.0), thorough=False)
    if cheapest is not None:
        candidates.append(cheapest[0])
    least = min(plan.stock_ms for plan in candidates)
    goal = default.stock_ms / STOCK_GAIN
    # The first limit lies between the two and only adds candidates. A plan is taken that keeps the goal, else one that
    # keeps the default's own cost.
    for limit in (math.sqrt(goal * least), goal, default.stock_ms):
        if limit >= least and min(candidates, key=_step).stock_ms > limit * ROUNDING:
            candidates += [plan for plan, _ in _search_ours(space, limit)]
        if limit < goal:
            continue
        within = [p for p in candidates if p.stock_ms <= limit * ROUNDING and p.step_ms <= default.step_ms]
        if within:
            # Of those that are as fast but for NEAR, the one that TorchRec's model rates best.
            fastest = min(within, key=_step)
            near = [plan for plan in within if plan.step_ms <= fastest.step_ms * NEAR]
            return min(near, key=lambda plan: plan.stock_ms)
    return default


def _step(placement: Placement) -> float:
    return placement.step_ms


def _search_ours(space: PlacementSpace, most_stock_ms: float) -> list[tuple[Placement, float]]:
    """Placements for our model alone, each with a lower bound of any placement's step within the limit."""
    assigned: list[tuple[Placement, float]] = []
    for weight in OVERLAPPED_WEIGHTS:
        weights = CostWeights(1 - weight, weight)
        found = _assign(space, weights, most_stock_ms, thorough=math.isinf(most_stock_ms))
        if found is None:
            break
        assigned.append(found)
        # If the first one's steps do not wait for overlapping work, the others cannot be better.
        if not assigned[0][0].waits:
            break
    return assigned


def _assign(
    space: PlacementSpace,
    weights: CostWeights,
    most_stock_ms: float = math.inf,
    *,
    thorough: bool = True,
    tolerance: float = TOLERANCE,
) -> tuple[Placement, float] | None:
    problem = space.assignment_problem(weights, most_stock_ms)
    assignment = assign(problem, tolerance=tolerance, thorough=thorough)
    if assignment is None:
        return None
    offers = {name: space.offers[name][number] for name, number in assignment.chosen.items()}
    return space.placement(offers, assignment.ranks), assignment.bound
