"""The search: our assignment for both cost models, TorchRec's own searches with both, and the choice between.

The rule: best in our model among the plans that neither model rates worse than what TorchRec's planner finds.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from pipeline.config import HardwareConfig
from pipeline.planning.assign import EXACT_GAP, assign
from pipeline.planning.assign_model import Candidate, Piece, Problem
from pipeline.planning.candidates import BESIDE, STOCK_CACHE, Chosen, Offer, places
from pipeline.planning.hardware import Capacity
from pipeline.planning.placement import Placement

# Of a step counts its phases' sum or what goes on beside it, whichever is longer. The assignment minimises
# (1 - w) x the sum + w x the other, which bounds the step from below for every w; the other is short as a rule.
BESIDE_SHARES = (1e-5, 0.5, 0.99)
# A plan's cost in TorchRec's model may exceed the best plan known there by this much, where it knows no cache.
STOCK_SLACK = 1.08
# How far above its bound the assignment of a large problem may stay: for our model, and for TorchRec's.
TOLERANCE, STOCK_TOLERANCE = 0.01, 0.03
ROUNDING = 1 + 1e-9


@dataclass(frozen=True, kw_only=True)
class Found:
    """The plan taken, how far from the best it may be (share), and a remark where the rule could not be kept."""

    placement: Placement
    gap: float
    remark: str = ""


@dataclass(frozen=True, kw_only=True)
class Space:
    """All offers of all tables, what every rank may hold, and the ms by phase that it spends anyhow."""

    hardware: HardwareConfig
    offers: Mapping[str, list[Offer]]
    room: Capacity
    fixed: Mapping[str, float]

    def placement(self, offers: Mapping[str, Offer], ranks: Mapping[str, tuple[int, ...]]) -> Placement:
        """A plan in this space."""
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

    def from_torchrec(self, plan: Sequence[Chosen]) -> Placement:
        """TorchRec's plan in our terms; its cached tables keep the share of rows that its model assumes."""
        taken, ranks = {}, {}
        for chosen in plan:
            same = [
                offer
                for offer in self.offers[chosen.table]
                if (offer.sharding, offer.kernel) == (chosen.sharding, chosen.kernel) and offer.tier != "ssd"
            ]
            rows = max(shard.row + shard.rows for shard in same[0].layout.shards)
            taken[chosen.table] = min(same, key=lambda offer: abs(offer.cache_rows - STOCK_CACHE * rows))
            ranks[chosen.table] = chosen.ranks
        return self.placement({name: taken[name] for name in self.offers}, ranks)


class Weights(NamedTuple):
    """What a shard's cost is made of: our step, our work beside it, TorchRec's total."""

    step: float
    beside: float
    stock: float


def anywhere(space: Space) -> Placement | None:
    """The assignment's plan, None where it finds none: the quick answer to whether the tables fit."""
    found = _assigned(space, Weights(0.5, 0.5, 0.0), math.inf, math.inf)
    return found[0] if found else None


def best(space: Space, torchrec: Sequence[Placement]) -> Found | None:
    """The plan to take; ``torchrec``: what its searches found, its stock one first. None where nothing fits."""
    known = [plan for plan in torchrec if plan.fits(space.room.each)]
    ours = _ours(space)
    if not ours:
        return _without_bound(known)
    bound = max(bound for _, bound in ours)
    plans = [plan for plan, _ in ours]
    if known:
        stock = _assigned(space, Weights(0.0, 0.0, 1.0), STOCK_TOLERANCE, STOCK_TOLERANCE)
        plans += [*known, *([stock[0]] if stock else [])]
    placement, remark = _choose(plans, known)
    return Found(placement=placement, gap=max(0.0, placement.step_ms / bound - 1), remark=remark)


def _ours(space: Space) -> list[tuple[Placement, float]]:
    """Plans for our model alone, each with a bound that no plan's step can be below.

    Where the first one's steps do not wait for what goes on beside them, it is as good as the others could be.
    """
    found: list[tuple[Placement, float]] = []
    for share in BESIDE_SHARES:
        plan = _assigned(space, Weights(1 - share, share, 0.0), TOLERANCE, EXACT_GAP)
        if plan is None:
            break
        found.append(plan)
        if not found[0][0].waits:
            break
    return found


def _assigned(space: Space, weights: Weights, tolerance: float, whole: float) -> tuple[Placement, float] | None:
    found = assign(space.problem(weights), tolerance=tolerance, whole=whole)
    if found is None:
        return None
    offers = {name: space.offers[name][index] for name, index in found.chosen.items()}
    return space.placement(offers, found.ranks), found.bound


def _without_bound(known: Sequence[Placement]) -> Found | None:
    if not known:
        return None
    return Found(placement=min(known, key=_step), gap=1.0, remark="found by TorchRec's search alone: no bound is known")


def _choose(plans: list[Placement], known: Sequence[Placement]) -> tuple[Placement, str]:
    """Best in ours among those that are no worse than TorchRec's in either model, and near the best in its own."""
    if not known:
        return min(plans, key=_step), ""
    default = known[0]
    fair = [p for p in plans if p.stock_ms <= default.stock_ms * ROUNDING and p.step_ms <= default.step_ms * ROUNDING]
    # Where all is in plain memory, TorchRec's model misses little: stay near the best it knows. Else it knows no hits.
    near = STOCK_SLACK * min(plan.stock_ms for plan in plans)
    close = [p for p in fair if p.stock_ms <= near and all(not offer.cache_rows for offer in p.offers.values())]
    return min(close or fair, key=_step), ""


def _step(plan: Placement) -> float:
    return plan.step_ms
