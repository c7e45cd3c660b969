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
from pipeline.planning.candidates import BESIDE, Offer, places
from pipeline.planning.cost import step_ms
from pipeline.planning.hardware import Capacity
from pipeline.records.plan import PHASES

# A step takes the sum of its phases or the overlapping work, whichever is longer. The assignment minimises
# (1 - w) x sum + w x overlapping work, a lower bound of the step for every w; usually the overlapping work is shorter.
BESIDE_SHARES = (1e-5, 0.5, 0.99)
# A plan is rated so much better than TorchRec's by TorchRec's own model where that can be had: both models may err.
STOCK_GAIN = 1.03
NEAR = 1.003  # steps that differ by less are as fast as each other
TOLERANCE = 0.01  # the assignment of a large problem may end this far above its bound
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

    def _shards(self) -> Iterator[tuple[Offer, int, int]]:
        for name, offer in self.offers.items():
            for index, rank in enumerate(self.ranks[name]):
                yield offer, index, rank


@dataclass(frozen=True, kw_only=True)
class BestPlacement:
    """The chosen placement, how far it may be from the best (a share), and a remark where no bound is known."""

    placement: Placement
    gap: float
    remark: str = ""


@dataclass(frozen=True, kw_only=True)
class PlacementSpace:
    """All offers of all tables, the room of every rank, and the ms by phase that it spends in any case."""

    hardware: HardwareConfig
    offers: Mapping[str, list[Offer]]
    room: Capacity
    fixed: Mapping[str, float]

    def placement(self, offers: Mapping[str, Offer], ranks: Mapping[str, tuple[int, ...]]) -> Placement:
        """A placement in this space."""
        return Placement(offers=offers, ranks=ranks, world_size=self.hardware.world_size, fixed=self.fixed)

    def problem(self, weights: CostWeights, most_stock_ms: float) -> AssignmentProblem:
        """The assignment problem with shard costs weighted by ``weights``.

        Where ``most_stock_ms`` is finite, no rank costs more in TorchRec's model: its ms are taken up like memory.
        """
        world, limited = self.hardware.world_size, math.isfinite(most_stock_ms)
        beside = self.fixed.get(BESIDE, 0.0)
        base = weights.step * (sum(self.fixed.values()) - beside) + weights.beside * beside
        candidates = {
            name: tuple(self._candidate(o, weights, limited) for o in offered) for name, offered in self.offers.items()
        }
        capacity = (*self.room.each, most_stock_ms * ROUNDING) if limited else self.room.each
        return AssignmentProblem(candidates=candidates, capacity=(capacity,) * world, base_ms=(base,) * world)

    def _candidate(self, offer: Offer, weights: CostWeights, limited: bool) -> Candidate:
        shards = zip(offer.ms, offer.beside_ms, offer.stock_ms, offer.bytes, strict=True)
        pieces = tuple(
            ShardCost(
                ms=weights.step * step + weights.beside * beside + weights.stock * stock,
                takes=(*size, stock) if limited else size,
            )
            for step, beside, stock, size in shards
        )
        return Candidate(pieces=pieces, places=places(self.hardware, offer.layout))


class CostWeights(NamedTuple):
    """Weights of a shard's costs: our step, our overlapping work, TorchRec's total."""

    step: float
    beside: float
    stock: float = 0.0


def anywhere(space: PlacementSpace) -> Placement | None:
    """The assignment's placement, or None: the quick answer to whether the tables fit."""
    assigned = _assigned(space, CostWeights(0.5, 0.5), tolerance=math.inf)
    return assigned[0] if assigned else None


def best(space: PlacementSpace, default: Placement | None) -> BestPlacement | None:
    """The placement to take, None where nothing fits; ``default``: what TorchRec's planner finds by default.

    The fastest in our model wins, among those that TorchRec's model rates better than ``default`` by STOCK_GAIN. Where
    none of these is found that is as fast as ``default``, it is among those that TorchRec's model rates no worse.
    """
    ours = _ours(space, math.inf)
    if not ours:
        remark = "found by TorchRec's search alone: no bound is known"
        return None if default is None else BestPlacement(placement=default, gap=1.0, remark=remark)
    bound = max(bound for _, bound in ours)
    plans = [plan for plan, _ in ours]
    placement = min(plans, key=_step) if default is None else _rated_well(space, plans, default)
    return BestPlacement(placement=placement, gap=max(0.0, placement.step_ms / bound - 1))


def _rated_well(space: PlacementSpace, plans: list[Placement], default: Placement) -> Placement:
    """The fastest placement within the best limit on TorchRec's cost that can be kept; ``plans``: without a limit.

    Of those that are as fast but for NEAR, the one that TorchRec's model rates best.
    """
    stock = _assigned(space, CostWeights(0.0, 0.0, 1.0), thorough=False)
    plans = [*plans, default, *([stock[0]] if stock is not None else [])]
    least = min(plan.stock_ms for plan in plans)
    goal = default.stock_ms / STOCK_GAIN
    for limit in (math.sqrt(goal * least), goal, default.stock_ms):
        if limit >= least and min(plans, key=_step).stock_ms > limit * ROUNDING:
            plans += [plan for plan, _ in _ours(space, limit)]
        kept = [plan for plan in plans if plan.stock_ms <= limit * ROUNDING and plan.step_ms <= default.step_ms]
        if limit >= goal and kept:
            fastest = min(kept, key=_step)
            return min((p for p in kept if p.step_ms <= fastest.step_ms * NEAR), key=lambda plan: plan.stock_ms)
    return default


def _step(placement: Placement) -> float:
    return placement.step_ms


def _ours(space: PlacementSpace, most_stock_ms: float) -> list[tuple[Placement, float]]:
    """Placements for our model alone, each with a lower bound of any placement's step within the limit.

    If the first one's steps do not wait for overlapping work, the others cannot be better.
    """
    assigned: list[tuple[Placement, float]] = []
    for share in BESIDE_SHARES:
        placed = _assigned(space, CostWeights(1 - share, share), most_stock_ms, thorough=math.isinf(most_stock_ms))
        if placed is None:
            break
        assigned.append(placed)
        if not assigned[0][0].waits:
            break
    return assigned


def _assigned(
    space: PlacementSpace,
    weights: CostWeights,
    most_stock_ms: float = math.inf,
    *,
    thorough: bool = True,
    tolerance: float = TOLERANCE,
) -> tuple[Placement, float] | None:
    assignment = assign(space.problem(weights, most_stock_ms), tolerance=tolerance, thorough=thorough)
    if assignment is None:
        return None
    offers = {name: space.offers[name][index] for name, index in assignment.chosen.items()}
    return space.placement(offers, assignment.ranks), assignment.bound
