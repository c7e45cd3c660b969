"""Features into towers of bounded load: k-means whose assignment step is an integer program, then exchanges.

Where no assignment keeps the bounds, the result exceeds them a little.
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

    k-means on ``positions`` [F, d] from several starts; ``Exchange`` improves each on ``distances`` [F, F], which
    the positions only approximate. Equal inputs give equal towers.
    """
    attempts = []
    for start in range(STARTS):
        assigned = _kmeans(problem, positions, np.random.default_rng([seed, start]))
        attempts.append(Exchange(problem, assigned, distances).run())
    return min(attempts, key=lambda attempt: attempt[1])[0]


def _kmeans(problem: Problem, positions: Floats, rng: np.random.Generator) -> Ints:
    """Lloyd's rounds without bounds for the centres, then rounds with bounds until nothing moves."""
    centres = _first_centres(problem, positions, rng)
    for bounded, rounds in ((False, LLOYD_ROUNDS), (True, ROUNDS)):
        last = None
        for _ in range(rounds):
            cost = _costs(problem, positions, centres)
            assigned = _bounded(problem, cost) if bounded else _nearest(problem, cost)
            if last is not None and np.array_equal(assigned, last):
                break
            last = assigned
            member = np.eye(problem.towers)[assigned].T @ problem.membership
            held = member.sum(1) > 0
            centres[held] = (member @ positions)[held] / member.sum(1)[held, None]
    return assigned


def _first_centres(problem: Problem, positions: Floats, rng: np.random.Generator) -> Floats:
    """k-means++ (Arthur and Vassilvitskii 2007); a tower with pins starts at the mean of its pinned features."""
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
    """The cheapest assignment within the capacities, or with a small excess where there is none: [items].

    An integer program for HiGHS. Its columns are item i in tower k, row by row, then the excess; every item goes to one
    tower, and every tower gets an item. Large problems are relaxed and rounded; ``Exchange`` then mends the loads.
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
    if done.x is None:  # HiGHS met its node limit before it found an assignment
        return _nearest(problem, cost)
    return np.asarray(done.x[:-1].reshape(items, towers).argmax(1), dtype=np.int64)
