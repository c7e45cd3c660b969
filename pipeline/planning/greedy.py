"""TorchRec's default search, over our offers: its proposers and its partitioner (``torchrec.distributed.planner``).

A plan of ours is taken only if neither cost model rates it worse than the plan that this search finds. TorchRec's own
code copies every shard for every proposal, which takes longer than all the rest of a plan.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence

from pipeline.config.hardware import HardwareConfig
from pipeline.planning.candidates import STOCK_CACHE, Offer, places
from pipeline.planning.choices import ROW_WISE, TABLE_ROW_WISE
from pipeline.planning.search import Placement, PlacementSpace

# TorchRec's grid has at most so many proposals; one costs about a microsecond for every (table, rank) pair it places.
GRID_PROPOSALS, SEARCH_BUDGET = 10_000, 3_000_000

Ranks = tuple[int, ...]
Proposal = dict[str, Offer]


def default_plan(space: PlacementSpace) -> Placement | None:
    """The plan with the least cost in TorchRec's model that its default planner finds; None where none fits."""
    options = {name: _known(space.hardware, offers) for name, offers in space.offers.items()}
    if not all(options.values()):
        return None
    best, seen = None, set()
    budget = SEARCH_BUDGET // (len(options) * (space.hardware.world_size + 8))
    for proposal in itertools.islice(_proposals(options, budget), max(budget, 30)):
        key = tuple(map(id, proposal.values()))
        if key in seen:
            continue
        seen.add(key)
        ranks = _partition(space, proposal, best.stock_ms if best else math.inf)
        if ranks is not None:
            placement = space.placement(proposal, ranks)
            best = placement if best is None or placement.stock_ms < best.stock_ms else best
    return best


def _known(hardware: HardwareConfig, offers: Sequence[Offer]) -> list[Offer]:
    """The offers that TorchRec knows: none on SSD, and of a cached table the cache size nearest to its model's.

    Its sharder offers no rows of tables on CPUs, though its execution has them; they count where there is nothing else.
    """
    usual = [o for o in offers if hardware.device != "cpu" or o.sharding not in (ROW_WISE, TABLE_ROW_WISE)]
    nearest: dict[tuple[str, str], Offer] = {}
    for offer in usual or offers:
        if offer.tier != "ssd":
            key = (offer.sharding, offer.kernel)
            nearest[key] = min(nearest.get(key, offer), offer, key=lambda o: abs(o.cache_rows - STOCK_CACHE * o.rows))
    return list(nearest.values())


def _proposals(options: Mapping[str, list[Offer]], budget: int) -> Iterator[Proposal]:
    """What TorchRec's proposers propose: a grid if it is small, greedy descents by depth and by sum, uniform types."""
    by_depth = {name: sorted(offers, key=lambda o: max(o.stock_ms)) for name, offers in options.items()}
    if math.prod(map(len, options.values())) <= min(GRID_PROPOSALS, budget):
        for offers in itertools.product(*by_depth.values()):
            yield dict(zip(options, offers, strict=True))
    yield from _descent(by_depth)
    yield from _descent({name: sorted(offers, key=lambda o: sum(o.stock_ms)) for name, offers in options.items()})
    for sharding in dict.fromkeys(offer.sharding for offers in options.values() for offer in offers):
        same = {name: [o for o in offers if o.sharding == sharding] for name, offers in by_depth.items()}
        if all(same.values()):
            yield {name: offers[0] for name, offers in same.items()}


def _descent(options: Mapping[str, list[Offer]]) -> Iterator[Proposal]:
    """Every table's first option; then, again and again, the next one of the table that takes most memory."""
    at = dict.fromkeys(options, 0)
    while True:
        yield {name: options[name][index] for name, index in at.items()}
        left = [name for name, index in at.items() if index + 1 < len(options[name])]
        if not left:
            return
        at[max(left, key=lambda name: _storage(options[name][at[name]]))] += 1


def _storage(offer: Offer) -> tuple[int, int, int, int]:
    """What a descent compares: HBM of the largest shard and in all, then DDR."""
    hbm, ddr, _ = zip(*offer.bytes, strict=True)
    return max(hbm), sum(hbm), max(ddr), sum(ddr)


def _partition(space: PlacementSpace, proposal: Proposal, limit: float) -> dict[str, Ranks] | None:
    """The ranks of all shards: tables on every rank first, then the largest, each where there is least to do.

    None where a shard does not fit, or once a rank costs more than ``limit``.
    """
    world, local = space.hardware.world_size, space.hardware.ranks_per_host
    load, free = [0.0] * world, [list(space.room.each) for _ in range(world)]
    ranks: dict[str, Ranks] = {}
    order = sorted(proposal.values(), key=lambda o: (not _everywhere(space, o), *(-size for size in o.total_bytes)))
    for offer in order:
        at = _everywhere(space, offer) or _cheapest(space, offer, load, free, local)
        if at is None or not _take(offer, at, load, free) or max(load) >= limit:
            return None
        ranks[offer.table] = at
    return {name: ranks[name] for name in proposal}


def _everywhere(space: PlacementSpace, offer: Offer) -> Ranks | None:
    """The ranks of a table that has a shard on each of them."""
    alternatives = places(space.hardware, offer.layout)
    return alternatives[0] if alternatives is not None and len(alternatives) == 1 else None


def _cheapest(
    space: PlacementSpace, offer: Offer, load: list[float], free: list[list[int]], local: int
) -> Ranks | None:
    """The ranks with least to do that have room: for each shard, or for a table on one host all of that host's."""
    alternatives = places(space.hardware, offer.layout)
    if alternatives is not None:
        hosts = sorted(
            alternatives,
            key=lambda at: sum(load[rank] for rank in range(at[0] // local * local, at[0] // local * local + local)),
        )
        return next((at for at in hosts if _fits(offer, at, free)), None)
    taken, left = [], [list(each) for each in free] if len(offer.bytes) > 1 else free
    spent = list(load)
    for ms, size in zip(offer.stock_ms, offer.bytes, strict=True):
        able = [rank for rank, room in enumerate(left) if all(s <= r for s, r in zip(size, room, strict=True))]
        if not able:
            return None
        rank = min(able, key=lambda r: (spent[r], r % local, r))
        spent[rank] += ms
        if left is not free:
            left[rank] = [r - s for r, s in zip(left[rank], size, strict=True)]
        taken.append(rank)
    return tuple(taken)


def _fits(offer: Offer, at: Ranks, free: list[list[int]]) -> bool:
    return all(
        s <= r for rank, size in zip(at, offer.bytes, strict=True) for s, r in zip(size, free[rank], strict=True)
    )


def _take(offer: Offer, at: Ranks, load: list[float], free: list[list[int]]) -> bool:
    """Put the shards on their ranks; whether they fit there."""
    for rank, ms, size in zip(at, offer.stock_ms, offer.bytes, strict=True):
        load[rank] += ms
        free[rank] = [room - s for room, s in zip(free[rank], size, strict=True)]
        if min(free[rank]) < 0:
            return False
    return True
