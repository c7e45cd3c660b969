"""Features into towers of bounded load: k-means whose assignment step is an integer programme, then exchanges.

Where no assignment keeps to the bounds, one with little excess is taken.
"""

from __future__ import annotations

import numpy as np

from pipeline.towers.distances import Matrix
from pipeline.towers.exchange import Exchange
from pipeline.towers.placement import between
from pipeline.towers.problem import Floats, Ints, Problem

STARTS = 8
ROUNDS = 8
LLOYD_ROUNDS = 50
EXCESS_PRICE = 10.0  # of twice the capacity, for every item; the costs of one are at most 1
MOST_EXACT = 2_000  # pairs of item and tower
_OPTIONS = {"node_limit": 500, "mip_rel_gap": 1e-3}  # nodes, not seconds: the same towers on every machine


def cluster(problem: Problem, positions: Floats, distances: Matrix, seed: int) -> Ints:
    """The tower of every item: [items].

    k-means on ``positions`` [F, d] from several starts, each bettered by ``exchange`` on ``distances`` [F, F], of which
    the plane shows only a part. The same answer for the same input.
    """
    found = []
    for start in range(STARTS):
        assigned = _kmeans(problem, positions, np.random.default_rng([seed, start]))
        found.append(Exchange(problem, assigned, distances).run())
    return min(found, key=lambda each: each[1])[0]


def _membership(problem: Problem, assigned: Ints) -> Floats:
    """1 where the tower [T] has the feature [F]."""
    member = np.zeros((problem.towers, sum(len(item) for item in problem.items)))
    for item, tower in zip(problem.items, assigned, strict=True):
        member[tower, list(item)] = 1.0
    return member


def _kmeans(problem: Problem, positions: Floats, rng: np.random.Generator) -> Ints:
    """Lloyd's rounds without bounds for the centres, then rounds with the bounds until nothing moves."""
    centres = _first_centres(problem, positions, rng)
    for bounded, rounds in ((False, LLOYD_ROUNDS), (True, ROUNDS)):
        last = None
        for _ in range(rounds):
            cost = _costs(problem, positions, centres)
            assigned = _bounded(problem, cost) if bounded else _nearest(problem, cost)
            if last is not None and np.array_equal(assigned, last):
                break
            last = assigned
            member = _membership(problem, assigned)
            held = member.sum(1) > 0
            centres[held] = (member @ positions)[held] / member.sum(1)[held, None]
    return assigned


def _first_centres(problem: Problem, positions: Floats, rng: np.random.Generator) -> Floats:
    """k-means++ (Arthur and Vassilvitskii 2007); a tower with pins starts at the mean of what is pinned to it."""
    centres: dict[int, Floats] = {}
    for tower in set(problem.pinned.values()):
        held = [f for item, where in problem.pinned.items() if where == tower for f in problem.items[item]]
        centres[tower] = positions[held].mean(0)
    for tower in range(problem.towers):
        if tower not in centres:
            far = np.square(between(positions, np.array(list(centres.values())))).min(1) if centres else None
            odds = far / far.sum() if far is not None and far.sum() > 0 else None
            centres[tower] = positions[rng.choice(len(positions), p=odds)]
    return np.array([centres[tower] for tower in range(problem.towers)])


def _costs(problem: Problem, positions: Floats, centres: Floats) -> Floats:
    """Squared distances of every item's features to every centre, summed: [items, T]."""
    square = np.square(between(positions, centres))
    return np.array([square[list(item)].sum(0) for item in problem.items])


def _nearest(problem: Problem, cost: Floats) -> Ints:
    assigned = cost.argmin(1)
    for item, tower in problem.pinned.items():
        assigned[item] = tower
    return assigned


def _bounded(problem: Problem, cost: Floats) -> Ints:
    """The cheapest assignment within the capacities, or with little excess where there is none: [items].

    An integer programme, by HiGHS: item i in tower k, row by row, and last the excess; every item goes somewhere,
    every tower gets one. Large ones are relaxed and rounded, and ``Exchange`` mends what that does to the loads.
    """
    from scipy.optimize import Bounds, LinearConstraint, milp
    from scipy.sparse import csr_array, eye_array, hstack, kron, vstack

    items, towers = cost.shape
    every, loads = eye_array(towers), csr_array(problem.loads.reshape(-1, items))
    body = vstack([kron(eye_array(items), np.ones((1, towers))), kron(np.ones((1, items)), every), kron(loads, every)])
    capacity = np.repeat(problem.capacity, towers)
    excess = csr_array(np.concatenate([np.zeros(items + towers), -capacity])[:, None])
    lower = np.concatenate([np.ones(items + towers), np.full(len(capacity), -np.inf)])
    upper = np.concatenate([np.ones(items), np.full(towers, np.inf), capacity + 1e-9])
    fixed = np.zeros((items, towers))
    for item, tower in problem.pinned.items():
        fixed[item, tower] = 1.0
    scale = max(float(cost.max(initial=0.0)), 1e-12)  # HiGHS' tolerances are absolute
    done = milp(
        np.append(cost.ravel() / scale, EXCESS_PRICE * items),
        integrality=np.append(np.full(items * towers, items * towers <= MOST_EXACT, dtype=int), 0),
        bounds=Bounds(np.append(fixed.ravel(), 0.0), np.append(np.ones(items * towers), np.inf)),
        constraints=LinearConstraint(hstack([csr_array(body), excess]), lower, upper),
        options=_OPTIONS,
    )
    if done.x is None:  # the node limit came before any assignment
        return _nearest(problem, cost)
    return np.asarray(done.x[:-1].reshape(items, towers).argmax(1), dtype=np.int64)
