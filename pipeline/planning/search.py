"""The search: our assignment at several blends of the two cost models, TorchRec's own searches, and the choice between.

The rule: best in our model among the plans that neither model rates worse than what TorchRec's planner finds.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from pipeline.config import Config
from pipeline.planning.assign import Assignment, Candidate, Piece, Problem, assign
from pipeline.planning.candidates import STOCK_CACHE, Chosen, Offer, places
from pipeline.planning.hardware import Capacity
from pipeline.planning.placement import Fixed, Placement

# Weights of TorchRec's model beside ours, each scaled to its own best plan.
BLENDS = (0.0, 0.3, 0.7, 1.0)
# A plan's cost in TorchRec's model may exceed the best plan known there by this much, where all is in fast memory.
STOCK_SLACK = 1.08
ROUNDING = 1 + 1e-9


@dataclass(frozen=True, kw_only=True)
class Found:
    """The plan taken, how far from the best it may be (share), and a remark where the rule could not be kept."""

    placement: Placement
    gap: float
    remark: str = ""


@dataclass(frozen=True, kw_only=True)
class Space:
    """All offers of all tables, what every rank may hold and what it spends anyhow."""

    config: Config
    offers: Mapping[str, list[Offer]]
    room: Capacity
    fixed: Fixed

    def placement(self, offers: Mapping[str, Offer], ranks: Mapping[str, tuple[int, ...]], source: str) -> Placement:
        """A plan in this space."""
        world = self.config.world_size
        return Placement(offers=offers, ranks=ranks, world_size=world, fixed=self.fixed, source=source)

    def problem(self, ours: float, stock: float) -> Problem:
        """The assignment problem with shard costs ``ours`` x our ms + ``stock`` x TorchRec's."""
        hardware, world = self.config.hardware, self.config.world_size
        candidates = {
            name: tuple(
                Candidate(
                    pieces=tuple(
                        Piece(ms=ours * own + stock * theirs, bytes=size)
                        for own, theirs, size in zip(offer.ms, offer.stock_ms, offer.bytes, strict=True)
                    ),
                    places=places(hardware, offer.layout),
                )
                for offer in offered
            )
            for name, offered in self.offers.items()
        }
        return Problem(
            candidates=candidates, capacity=(self.room.each,) * world, base_ms=(ours * self.fixed.ms,) * world
        )

    def from_torchrec(self, plan: Sequence[Chosen], source: str) -> Placement:
        """TorchRec's plan in our terms; its cached tables keep the share of rows that its model assumes."""
        taken, ranks = {}, {}
        for chosen in plan:
            same = [o for o in self.offers[chosen.table] if (o.sharding, o.kernel) == (chosen.sharding, chosen.kernel)]
            rows = max(shard.row + shard.rows for shard in same[0].layout.shards)
            taken[chosen.table] = min(
                (offer for offer in same if offer.tier != "ssd"), key=lambda o: abs(o.cache_rows - STOCK_CACHE * rows)
            )
            ranks[chosen.table] = chosen.ranks
        return self.placement({name: taken[name] for name in self.offers}, ranks, source)


def assigned(space: Space, ours: float, stock: float, source: str) -> tuple[Placement, Assignment] | None:
    """The assignment's plan for a blend of the two models; None where nothing fits."""
    found = assign(space.problem(ours, stock))
    if found is None:
        return None
    offers = {name: space.offers[name][index] for name, index in found.chosen.items()}
    return space.placement(offers, found.ranks, source), found


def best(space: Space, torchrec: Sequence[Placement]) -> Found | None:
    """The plan to take; ``torchrec``: what its searches found, its stock one first. None where nothing fits."""
    first = assigned(space, 1.0, 0.0, "assignment")
    known = [plan for plan in torchrec if plan.fits(space.room.each)]
    if first is None:
        return _without_bound(known)
    plans = [first[0], *known]
    last = assigned(space, 0.0, 1.0, "assignment in TorchRec's model")
    if last is not None:
        plans.append(last[0])
        for blend in BLENDS[1:-1]:
            mixed = assigned(
                space, (1 - blend) / first[0].summed_ms, blend / max(last[0].stock_ms, 1e-9), f"blend {blend}"
            )
            plans += [mixed[0]] if mixed else []
    placement, remark = _choose(plans, known)
    return Found(placement=placement, gap=max(0.0, placement.summed_ms / first[1].bound - 1), remark=remark)


def _without_bound(known: Sequence[Placement]) -> Found | None:
    if not known:
        return None
    placement = min(known, key=lambda plan: plan.step_ms)
    return Found(placement=placement, gap=1.0, remark="found by TorchRec's search alone: no bound is known")


def _choose(plans: list[Placement], known: Sequence[Placement]) -> tuple[Placement, str]:
    """Best in ours among those that are no worse than TorchRec's in either model, and near the best in its own."""
    if not known:
        return min(plans, key=lambda plan: plan.step_ms), "TorchRec's own planner finds no plan here to compare with"
    default = known[0]
    fair = [p for p in plans if p.stock_ms <= default.stock_ms * ROUNDING and p.step_ms <= default.step_ms * ROUNDING]
    # Where all is in plain memory, TorchRec's model misses little: stay near the best it knows. Else it knows no hits.
    near = STOCK_SLACK * min(plan.stock_ms for plan in plans)
    close = [p for p in fair if p.stock_ms <= near and all(not offer.cache_rows for offer in p.offers.values())]
    if fair:
        return min(close or fair, key=lambda plan: plan.step_ms), ""
    ours = min(plans, key=lambda plan: plan.step_ms)
    return ours, (
        f"no plan found is at least as good as TorchRec's in both models: this one takes {ours.stock_ms:.3f} ms in "
        f"TorchRec's model, its own {default.stock_ms:.3f} ms"
    )
