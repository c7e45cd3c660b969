"""Assignment problems for tests, and the answer by trying everything."""

from __future__ import annotations

import itertools

import numpy as np

from pipeline.planning.assign import Assignment
from pipeline.planning.assign_model import AssignmentProblem, Candidate, ShardCost

# slowdown against HBM, bytes in HBM, DDR and SSD as shares of the table
TIERS = ((1.0, 1.0, 0.0, 0.0), (1.4, 0.2, 1.0, 0.0), (2.2, 0.05, 1.0, 0.0), (6.0, 0.01, 0.05, 1.0))


def small_problem(seed: int) -> AssignmentProblem:
    """At most 6 tables on 2 ranks and 3 tiers; capacities from ample to too little, ranks equal or not."""
    rng = np.random.default_rng(seed)
    tables = {f"T{t}": _small_table(rng) for t in range(rng.integers(1, 7))}
    most = [np.max([np.sum([p.usage for p in c.shards], axis=0) for c in cs], axis=0) for cs in tables.values()]
    room = np.sum(most, axis=0) / 2 * rng.uniform(0.35, 1.6, size=(2, 3) if rng.random() < 0.5 else (1, 3))
    capacity = np.broadcast_to(np.ceil(room), (2, 3)).astype(int)
    base = rng.uniform(0, 2, 2) if rng.random() < 0.5 else np.full(2, 0.5)
    return AssignmentProblem(
        candidates=tables, capacity=tuple(map(tuple, capacity.tolist())), base_ms=tuple(base.tolist())
    )


def _small_table(rng: np.random.Generator) -> tuple[Candidate, ...]:
    size, cost = int(rng.integers(1, 40)) * int(rng.choice([1, 1_000_003])), float(rng.lognormal(0, 1))
    kinds = rng.choice(["table", "column", "row", "first", "pairs"], size=rng.integers(1, 4), replace=False)
    options = []
    for kind in kinds:
        tiers = rng.choice(["hbm", "cached", "ddr", "ssd"], size=rng.integers(1, 3), replace=False)
        options.extend(_candidate(rng, str(kind), str(tier), size, cost) for tier in tiers)
    return tuple(options)


def _candidate(rng: np.random.Generator, kind: str, tier: str, size: int, cost: float) -> Candidate:
    count = 1 if kind in ("table", "first") else 2
    slow = {"hbm": 1.0, "cached": 1.6, "ddr": 3.0, "ssd": 9.0}[tier] * rng.uniform(0.8, 1.3)
    part = -(-size // count)
    held = {"hbm": (part, 0, 0), "cached": (part // 4, part, 0), "ddr": (0, part, 0), "ssd": (0, part // 8, part)}[tier]
    skew = rng.uniform(0.5, 1.5) if kind == "row" else 1.0
    ms = [cost * slow / count * (1.15 if count > 1 else 1) * s for s in (skew, 2 - skew)[:count]]
    places = {"row": ((0, 1),), "first": ((0,),), "pairs": ((0, 1), (1, 0))}.get(kind)
    return Candidate(shards=tuple(ShardCost(ms=m, usage=held) for m in ms), places=places)


def brute_force(problem: AssignmentProblem) -> float | None:
    """The least ms of the slowest rank over every assignment; None: none fits."""
    ranks = len(problem.base_ms)
    capacity = np.array(problem.capacity).ravel()
    load, used = np.array([problem.base_ms]), np.zeros((1, ranks * 3))
    for candidates in problem.candidates.values():
        ways = [way for candidate in candidates for way in _ways(candidate, ranks)]
        ms, size = np.array([way[0] for way in ways]), np.array([way[1].ravel() for way in ways])
        load = (load[:, None] + ms).reshape(-1, ranks)
        used = (used[:, None] + size).reshape(-1, ranks * 3)
        fits = (used <= capacity).all(axis=1)
        load, used = load[fits], used[fits]
    return float(load.max(axis=1).min()) if len(load) else None


def _ways(candidate: Candidate, ranks: int) -> list[tuple[np.ndarray, np.ndarray]]:
    places = candidate.places or tuple(itertools.product(range(ranks), repeat=len(candidate.shards)))
    ways = []
    for place in places:
        ms, size = np.zeros(ranks), np.zeros((ranks, 3))
        for piece, rank in zip(candidate.shards, place, strict=True):
            ms[rank] += piece.ms
            size[rank] += piece.usage
        ways.append((ms, size))
    return ways


def check(problem: AssignmentProblem, assignment: Assignment) -> None:
    """Every capacity is kept, every place is an offered one, and the ms are what the pieces sum to."""
    load, used = np.array(problem.base_ms), np.zeros((len(problem.base_ms), 3), np.int64)
    assert set(assignment.chosen) == set(assignment.ranks) == set(problem.candidates)
    for table, number in assignment.chosen.items():
        candidate, ranks = problem.candidates[table][number], assignment.ranks[table]
        assert len(ranks) == len(candidate.shards)
        assert candidate.places is None or ranks in candidate.places
        for piece, rank in zip(candidate.shards, ranks, strict=True):
            load[rank] += piece.ms
            used[rank] += piece.usage
    assert (used <= np.array(problem.capacity)).all()
    assert abs(assignment.ms - load.max()) <= 1e-9 * load.max()
    assert (
        0 <= assignment.bound <= assignment.ms and abs(assignment.gap - (assignment.ms / assignment.bound - 1)) < 1e-12
    )


def cluster_problem(
    seed: int, *, tables: int, ranks: int, splits: tuple[int, ...], tightness: float
) -> AssignmentProblem:
    """Tables of Criteo-like sizes on hosts of 8 ranks: whole, by column, by row on a host or on all ranks; each in HBM,
    behind one of two caches, or on SSD. ``tightness``: bytes of all tables over all HBM."""
    rng = np.random.default_rng(seed)
    rows = np.exp(rng.uniform(np.log(1e3), np.log(4e7), tables))
    lookups = rng.lognormal(0, 1, tables) + 0.2
    hbm = int(rows.sum() * 516 / ranks / tightness)
    hosts = tuple(tuple(range(h, min(h + 8, ranks))) for h in range(0, ranks, 8))
    candidates = {}
    for t in range(tables):
        size, cost = int(rows[t]) * 516, float(lookups[t])
        options = []
        for slow, device, behind, ssd in TIERS:
            for count, places in [(n, None) for n in splits] + [
                (len(hosts[0]), hosts),
                (ranks, (tuple(range(ranks)),)),
            ]:
                held = tuple(-(-int(size * share) // count) for share in (device, behind, ssd))
                piece = ShardCost(ms=cost * slow / count + 0.004 + 0.01 * cost * (places is not None), usage=held)
                options.append(Candidate(shards=(piece,) * count, places=places))
        candidates[f"T{t}"] = tuple(options)
    return AssignmentProblem(
        candidates=candidates, capacity=((hbm, 4 * hbm, 40 * hbm),) * ranks, base_ms=(0.5,) * ranks
    )
