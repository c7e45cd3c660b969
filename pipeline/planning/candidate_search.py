"""Searches placements rated by two cost models: the best one in ours, and the one of TorchRec's default search.

Our plan is only used if neither cost model rates it worse than the plan that TorchRec's proposers and partitioner
(``torchrec.distributed.planner``) find over our offers. They are reimplemented here, because TorchRec's own code copies
every shard for every proposal, which takes longer than all the rest of a plan.
"""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from pipeline.config.hardware import HardwareConfig
from pipeline.planning.assign import assign
from pipeline.planning.assign_model import AssignmentProblem, Candidate, ShardCost
from pipeline.planning.candidates import STOCK_CACHE, Offer, allowed_places
from pipeline.planning.choices import ROW_WISE, TABLE_ROW_WISE
from pipeline.planning.cost import OVERLAPPED, serial_ms, step_ms
from pipeline.planning.hardware import Capacity
from pipeline.records.plan import PHASES

# A step takes the sum of its phases or the overlapping work, whichever is longer. The assignment minimises
# (1 - w) x sum + w x overlapping work, a lower bound of the step for every w; usually the overlapping work is shorter.
OVERLAPPED_WEIGHTS = (1e-5, 0.5, 0.99)
# A plan should be this much better than TorchRec's by TorchRec's own model where possible, since both models may err.
STOCK_GAIN = 1.03
# Steps that differ by less than this factor count as equally fast.
NEAR = 1.003
# The assignment of a large problem may end this far above its bound.
TOLERANCE = 0.01
ROUNDING = 1 + 1e-9
# The costs of a placement in our model and in TorchRec's.
_our_ms, _stock_ms = operator.attrgetter("step_ms"), operator.attrgetter("stock_ms")


@dataclass(frozen=True, kw_only=True, eq=False)
class Placement:
    """One of ``offers`` and the ``ranks`` of its shards by table; ``fixed`` is every rank's fixed ms by phase."""

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
        """The step in our model: the slowest rank's ms, without overlapping work."""
        return max(map(step_ms, self.phases))

    @property
    def waits(self) -> bool:
        """Whether the slowest rank waits for work that overlaps with its step: ids, or rows from SSD."""
        return self.step_ms > max(map(serial_ms, self.phases))

    @cached_property
    def stock_ms(self) -> float:
        """The cost in TorchRec's own model: the largest sum of shard costs on one rank."""
        spent = [0.0] * self.world_size
        for offer, shard, rank in self._shards():
            spent[rank] += offer.stock_ms[shard]
        return max(spent)

    @cached_property
    def memory(self) -> list[tuple[int, int, int]]:
        """The bytes of every rank, in the order of MEMORIES."""
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
    """The chosen placement, how far it may be from the best as a share, and a remark where no bound is known."""

    placement: Placement
    gap: float
    remark: str = ""


class CostWeights(NamedTuple):
    """The weights of a shard's costs: our step, our overlapping work, TorchRec's total."""

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

        Where ``most_stock_ms`` is finite, no rank may cost more in TorchRec's model: its ms are a limit like memory.
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
            usage: tuple[float, ...] = size
            if limited:
                usage = (*size, stock)
            shards.append(ShardCost(ms=ms, usage=usage))
        return Candidate(shards=tuple(shards), places=allowed_places(self.hardware, offer.layout))


def find_feasible(space: PlacementSpace) -> Placement | None:
    """Find any placement that fits, as a quick answer to whether the tables fit."""
    assigned = _assign(space, CostWeights(0.5, 0.5), tolerance=math.inf)
    if assigned is None:
        return None
    placement, _ = assigned
    return placement


def find_best(space: PlacementSpace, default: Placement | None) -> BestPlacement | None:
    """Find the placement to use, None if nothing fits; ``default`` is what TorchRec's planner finds by default.

    It is the fastest in our model among those that TorchRec's model rates better than ``default`` by STOCK_GAIN. If
    none of these is as fast as ``default``, it is the fastest among those that TorchRec's model rates no worse.
    """
    # 1. Find the fastest in our model, whatever its rating in TorchRec's.
    rated = _search_ours(space, math.inf)
    if not rated:
        if default is None:
            return None
        return BestPlacement(placement=default, gap=1.0, remark="found by TorchRec's search alone: no bound is known")
    plans, bounds = zip(*rated, strict=True)
    # 2. Choose the fastest plan that TorchRec's model rates well enough. Without a plan of TorchRec's there is nothing
    # to compare with.
    placement = min(plans, key=_our_ms)
    if default is not None:
        placement = _choose_rated_well(space, plans, default)
    # 3. Every weighting of the costs gives a lower bound of the step, and the best bound counts.
    return BestPlacement(placement=placement, gap=max(0.0, placement.step_ms / max(bounds) - 1))


def _choose_rated_well(space: PlacementSpace, plans: Sequence[Placement], default: Placement) -> Placement:
    # 1. Find the least possible cost in TorchRec's model, which says which limits are worth a search.
    candidates = [*plans, default]
    cheapest = _assign(space, CostWeights(0.0, 0.0, 1.0), thorough=False)
    if cheapest is not None:
        candidates.append(cheapest[0])
    least = min(map(_stock_ms, candidates))
    goal = default.stock_ms / STOCK_GAIN
    # 2. Search by limits. The first one lies between the least cost and the goal, and only adds candidates. A plan that
    # keeps the goal is chosen, else one that keeps the default's own cost, which the default itself does.
    for limit in (math.sqrt(goal * least), goal, default.stock_ms):
        # If the fastest plan so far keeps the limit, a search within the limit adds nothing.
        fastest = min(candidates, key=_our_ms)
        if limit >= least and fastest.stock_ms > limit * ROUNDING:
            for plan, _ in _search_ours(space, limit):
                candidates.append(plan)
        if limit < goal:
            continue
        within = [p for p in candidates if p.stock_ms <= limit * ROUNDING and p.step_ms <= default.step_ms]
        if within:
            # 3. Among those that are as fast within NEAR, choose the one that TorchRec's model rates best.
            least_ms = min(map(_our_ms, within))
            near = [plan for plan in within if plan.step_ms <= least_ms * NEAR]
            return min(near, key=_stock_ms)
    return default


def _search_ours(space: PlacementSpace, most_stock_ms: float) -> list[tuple[Placement, float]]:
    """Search placements for our model alone, each with a lower bound of any placement's step within the limit."""
    assigned: list[tuple[Placement, float]] = []
    for weight in OVERLAPPED_WEIGHTS:
        weights = CostWeights(1 - weight, weight)
        placed = _assign(space, weights, most_stock_ms, thorough=math.isinf(most_stock_ms))
        if placed is None:
            break
        assigned.append(placed)
        # If the first placement's step does not wait for overlapping work, other weights cannot give a better one.
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
    offers = {}
    for name, number in assignment.chosen.items():
        offers[name] = space.offers[name][number]
    return space.placement(offers, assignment.ranks), assignment.bound


# The most proposals of TorchRec's grid, and the budget: a proposal takes about 1 us per (table, rank) pair it places.
GRID_PROPOSALS, SEARCH_BUDGET = 10_000, 3_000_000

Ranks = tuple[int, ...]
Proposal = dict[str, Offer]


def default_plan(space: PlacementSpace) -> Placement | None:
    """Find the plan that TorchRec's default planner finds, with the least cost in its model; None if none fits."""
    options = {}
    for name, offers in space.offers.items():
        options[name] = _select_known(space.hardware, offers)
        if not options[name]:
            return None
    best, least, tried = None, math.inf, set()
    # The budget is in proposals, not in seconds, so that equal inputs give equal plans.
    budget = SEARCH_BUDGET // (len(options) * (space.hardware.world_size + 8))
    for proposal in itertools.islice(_propose(options, budget), max(budget, 30)):
        # Proposers often propose the same. Each offer is a single object, so its identity is the quickest key.
        key = tuple(map(id, proposal.values()))
        if key in tried:
            continue
        tried.add(key)
        ranks = _partition(space, proposal, least)
        if ranks is not None:
            placement = space.placement(proposal, ranks)
            if placement.stock_ms < least:
                best, least = placement, placement.stock_ms
    return best


def _select_known(hardware: HardwareConfig, offers: Sequence[Offer]) -> list[Offer]:
    # TorchRec's sharder offers no row-wise types on CPUs, although its execution has them, so they count only where
    # nothing else is offered.
    usual = list(offers)
    if hardware.device == "cpu":
        usual = [offer for offer in offers if offer.sharding not in (ROW_WISE, TABLE_ROW_WISE)]
    # TorchRec has no tables on SSD, and a single cache size, for which our nearest size stands.
    nearest: dict[tuple[str, str], Offer] = {}
    for offer in usual or offers:
        if offer.tier == "ssd":
            continue
        known = nearest.setdefault((offer.sharding, offer.kernel), offer)
        distance = abs(offer.cache_rows - STOCK_CACHE * offer.rows)
        if distance < abs(known.cache_rows - STOCK_CACHE * known.rows):
            nearest[offer.sharding, offer.kernel] = offer
    return list(nearest.values())


def _propose(options: Mapping[str, list[Offer]], budget: int) -> Iterator[Proposal]:
    """Yield what TorchRec's proposers do: a small grid, greedy descents by depth and by sum, uniform types."""
    by_depth, by_sum = {}, {}
    shardings: dict[str, None] = {}
    for name, offers in options.items():
        by_depth[name] = sorted(offers, key=lambda offer: max(offer.stock_ms))
        by_sum[name] = sorted(offers, key=lambda offer: sum(offer.stock_ms))
        for offer in offers:
            shardings[offer.sharding] = None
    if math.prod(map(len, options.values())) <= min(GRID_PROPOSALS, budget):
        for combination in itertools.product(*by_depth.values()):
            yield dict(zip(options, combination, strict=True))
    yield from _descend(by_depth)
    yield from _descend(by_sum)
    for sharding in shardings:
        uniform = {}
        for name, sorted_offers in by_depth.items():
            for offer in sorted_offers:
                if offer.sharding == sharding:
                    uniform[name] = offer
                    break
        if len(uniform) == len(options):
            yield uniform


def _descend(options: Mapping[str, list[Offer]]) -> Iterator[Proposal]:
    """Yield every table's first option, then again and again advance the table that takes the most memory."""
    indices = dict.fromkeys(options, 0)
    while True:
        proposal = {name: options[name][index] for name, index in indices.items()}
        yield proposal
        # Compare by HBM of the largest shard, then all HBM, then DDR likewise; of equal tables the first counts.
        fullest, most = None, (-1, -1, -1, -1)
        for name, offer in proposal.items():
            if indices[name] + 1 < len(options[name]):
                hbm, ddr, _ = zip(*offer.bytes, strict=True)
                storage = (max(hbm), sum(hbm), max(ddr), sum(ddr))
                if storage > most:
                    fullest, most = name, storage
        if fullest is None:
            return
        indices[fullest] += 1


def _partition(space: PlacementSpace, proposal: Proposal, limit: float) -> dict[str, Ranks] | None:
    """Choose the ranks of all shards: tables on every rank first, then the largest, each where there is least to do.

    Returns None if a shard does not fit, or once a rank costs more than ``limit``.
    """
    world, local = space.hardware.world_size, space.hardware.ranks_per_host
    load, free = [0.0] * world, [list(space.room.each) for _ in range(world)]
    everywhere: list[tuple[Offer, tuple[Ranks, ...] | None]] = []
    anywhere: list[tuple[Offer, tuple[Ranks, ...] | None]] = []
    for offer in proposal.values():
        places = allowed_places(space.hardware, offer.layout)
        if places is not None and len(places) == 1:
            everywhere.append((offer, places))
        else:
            anywhere.append((offer, places))
    for group in (everywhere, anywhere):
        group.sort(key=lambda entry: entry[0].total_bytes, reverse=True)
    ranks: dict[str, Ranks] = {}
    # As in TorchRec's partitioner, the largest tables go first, each to the least loaded place, and nothing is moved
    # again: a table that does not fit ends the proposal.
    for offer, places in everywhere + anywhere:
        chosen: Ranks | None
        if places is None:
            chosen = _find_ranks(offer, load, free, local)
        elif len(places) == 1:
            chosen = places[0]
        else:
            chosen = _find_host(offer, places, load, free, local)
        if chosen is None:
            return None
        for rank, ms, size in zip(chosen, offer.stock_ms, offer.bytes, strict=True):
            load[rank] += ms
            free[rank] = _subtract(free[rank], size)
            if min(free[rank]) < 0:
                return None
        if max(load) >= limit:
            return None
        ranks[offer.table] = chosen
    return {name: ranks[name] for name in proposal}


def _find_host(
    offer: Offer, places: Sequence[Ranks], load: list[float], free: list[list[int]], local: int
) -> Ranks | None:
    # Compare alternatives by the load of their whole host, as TorchRec does, even if they use only a part of it.
    host_loads = [sum(load[first : first + local]) for first in range(0, len(load), local)]
    for ranks in sorted(places, key=lambda ranks: host_loads[ranks[0] // local]):
        # The shards lie on different ranks, so each can be checked by itself.
        if all(_has_room(free[rank], size) for rank, size in zip(ranks, offer.bytes, strict=True)):
            return ranks
    return None


def _find_ranks(offer: Offer, load: list[float], free: list[list[int]], local: int) -> Ranks | None:
    spent, room = list(load), list(free)
    ranks = []
    for ms, size in zip(offer.stock_ms, offer.bytes, strict=True):
        # Find the rank with the least to do; of equal ones the first of its host.
        best = -1
        for rank in range(len(spent)):
            if _has_room(room[rank], size):
                key = (spent[rank], rank % local, rank)
                if best < 0 or key < (spent[best], best % local, best):
                    best = rank
        if best < 0:
            return None
        spent[best] += ms
        room[best] = _subtract(room[best], size)
        ranks.append(best)
    return tuple(ranks)


def _has_room(free: list[int], size: tuple[int, int, int]) -> bool:
    return size[0] <= free[0] and size[1] <= free[1] and size[2] <= free[2]


def _subtract(free: list[int], size: tuple[int, int, int]) -> list[int]:
    return [free[0] - size[0], free[1] - size[1], free[2] - size[2]]
