"""TorchRec's default search, over our offers: its proposers and its partitioner (``torchrec.distributed.planner``).

A plan of ours is taken only if neither cost model rates it worse than the plan that this search finds. TorchRec's own
code copies every shard for every proposal, which takes longer than all the rest of a plan.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence

from pipeline.config.hardware import HardwareConfig
from pipeline.planning.candidates import STOCK_CACHE, Offer, allowed_places
from pipeline.planning.choices import ROW_WISE, TABLE_ROW_WISE
from pipeline.planning.search import Placement, PlacementSpace

# TorchRec's grid has at most so many proposals; one costs about a microsecond for every (table, rank) pair it places.
GRID_PROPOSALS, SEARCH_BUDGET = 10_000, 3_000_000

Ranks = tuple[int, ...]
Proposal = dict[str, Offer]


def default_plan(space: PlacementSpace) -> Placement | None:
    """Find the plan with the least cost in TorchRec's model that its default planner finds; None where none fits."""
    options = {name: _select_known(space.hardware, offers) for name, offers in space.offers.items()}
    if not all(options.values()):
        return None
    best, tried = None, set()
    budget = SEARCH_BUDGET // (len(options) * (space.hardware.world_size + 8))
    for proposal in itertools.islice(_propose(options, budget), max(budget, 30)):
        key = tuple(id(offer) for offer in proposal.values())
        if key in tried:
            continue
        tried.add(key)
        ranks = _partition(space, proposal, best.stock_ms if best else math.inf)
        if ranks is not None:
            placement = space.placement(proposal, ranks)
            if best is None or placement.stock_ms < best.stock_ms:
                best = placement
    return best


def _select_known(hardware: HardwareConfig, offers: Sequence[Offer]) -> list[Offer]:
    # TorchRec's sharder offers no row-wise types on CPUs, though its execution has them; they count where there is
    # nothing else.
    usual = list(offers)
    if hardware.device == "cpu":
        usual = [offer for offer in offers if offer.sharding not in (ROW_WISE, TABLE_ROW_WISE)]
    # It has no tables on SSD, and one cache size: ours that is nearest to it stands for it.
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
    """What TorchRec's proposers propose: a grid if it is small, greedy descents by depth and by sum, uniform types."""
    by_depth = _sort_offers(options, lambda offer: max(offer.stock_ms))
    by_sum = _sort_offers(options, lambda offer: sum(offer.stock_ms))
    if math.prod(len(offers) for offers in options.values()) <= min(GRID_PROPOSALS, budget):
        for offers in itertools.product(*by_depth.values()):
            yield dict(zip(options, offers, strict=True))
    yield from _descend(by_depth)
    yield from _descend(by_sum)
    shardings = dict.fromkeys(offer.sharding for offer in itertools.chain(*options.values()))
    for sharding in shardings:
        uniform = {}
        for name, sorted_offers in by_depth.items():
            for offer in sorted_offers:
                if offer.sharding == sharding:
                    uniform[name] = offer
                    break
        if len(uniform) == len(options):
            yield uniform


def _sort_offers(options: Mapping[str, list[Offer]], key: Callable[[Offer], float]) -> dict[str, list[Offer]]:
    return {name: sorted(offers, key=key) for name, offers in options.items()}


def _descend(options: Mapping[str, list[Offer]]) -> Iterator[Proposal]:
    """Every table's first option; then, again and again, the next one of the table that takes most memory."""
    at = dict.fromkeys(options, 0)
    while True:
        proposal = {name: options[name][index] for name, index in at.items()}
        yield proposal
        # Memory is compared by HBM of the largest shard and in all, then DDR; of equal tables the first counts.
        fullest, most = None, (-1, -1, -1, -1)
        for name, offer in proposal.items():
            if at[name] + 1 < len(options[name]):
                hbm, ddr, _ = zip(*offer.bytes, strict=True)
                storage = (max(hbm), sum(hbm), max(ddr), sum(ddr))
                if storage > most:
                    fullest, most = name, storage
        if fullest is None:
            return
        at[fullest] += 1


def _partition(space: PlacementSpace, proposal: Proposal, limit: float) -> dict[str, Ranks] | None:
    """The ranks of all shards: tables on every rank first, then the largest, each where there is least to do.

    None where a shard does not fit, or once a rank costs more than ``limit``.
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
    for offer, places in everywhere + anywhere:
        at: Ranks | None
        if places is None:
            at = _find_ranks(offer, load, free, local)
        elif len(places) == 1:
            at = places[0]
        else:
            at = _find_host(offer, places, load, free, local)
        if at is None:
            return None
        for rank, ms, size in zip(at, offer.stock_ms, offer.bytes, strict=True):
            load[rank] += ms
            free[rank] = _subtract(free[rank], size)
            if min(free[rank]) < 0:
                return None
        if max(load) >= limit:
            return None
        ranks[offer.table] = at
    return {name: ranks[name] for name in proposal}


def _find_host(
    offer: Offer, places: Sequence[Ranks], load: list[float], free: list[list[int]], local: int
) -> Ranks | None:
    def host_load(at: Ranks) -> float:
        first = at[0] // local * local
        return sum(load[first : first + local])

    for at in sorted(places, key=host_load):
        if all(_has_room(free[rank], size) for rank, size in zip(at, offer.bytes, strict=True)):
            return at
    return None


def _find_ranks(offer: Offer, load: list[float], free: list[list[int]], local: int) -> Ranks | None:
    spent, room = list(load), list(free)
    at = []
    for ms, size in zip(offer.stock_ms, offer.bytes, strict=True):
        # The rank with least to do; of equal ones the first of its host.
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
        at.append(best)
    return tuple(at)


def _has_room(free: list[int], size: tuple[int, int, int]) -> bool:
    return size[0] <= free[0] and size[1] <= free[1] and size[2] <= free[2]


def _subtract(free: list[int], size: tuple[int, int, int]) -> list[int]:
    return [free[0] - size[0], free[1] - size[1], free[2] - size[2]]
