"""Features into towers of bounded load: k-means whose assignment step is an integer program, then exchanges.

Items are features that stay together. Loads are figures by feature (their number, predicted ms, bytes): of each a tower
may hold ``1 + imbalance`` times an even share, or more for the largest single item, or up to the given room.

Where no assignment keeps the bounds, the result exceeds them a little.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from pipeline.towers.placement import Matrix, between

STARTS = 8
ROUNDS = 8
LLOYD_ROUNDS = 50
# Of twice the capacity, for every item; the costs of one are at most 1.
EXCESS_COST = 10.0
# Pairs of item and tower that an integer program decides; larger problems are relaxed and rounded.
MOST_EXACT = 2_000
# Nodes, not seconds: the same towers on every machine.
_OPTIONS = {"node_limit": 500, "mip_rel_gap": 1e-3}
Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
MOST_PASSES = 50
TOLERANCE = 1e-9
# Of a load over its capacity by the capacity; distances are at most 1 and features fewer.
EXCESS_PRICE = 1e6


def cluster(problem: ClusteringProblem, positions: Floats, distances: Matrix, seed: int) -> Ints:
    """The tower of every item: [items].

    k-means on ``positions`` [F, d] from several starts; ``ExchangeDescent`` improves each on ``distances`` [F, F],
    which the positions only approximate. Equal inputs give equal towers.
    """
    attempts = []
    for start in range(STARTS):
        assigned = _kmeans(problem, positions, np.random.default_rng([seed, start]))
        attempts.append(ExchangeDescent(problem, assigned, distances).run())
    return min(attempts, key=lambda attempt: attempt[1])[0]


def _kmeans(problem: ClusteringProblem, positions: Floats, rng: np.random.Generator) -> Ints:
    # Lloyd's rounds without bounds for the centres, then rounds with bounds until nothing moves.
    centres = _first_centres(problem, positions, rng)
    for bounded, rounds in ((False, LLOYD_ROUNDS), (True, ROUNDS)):
        last = None
        for _ in range(rounds):
            # Squared distances of every item's features to every centre, summed: [items, T].
            square = np.square(between(positions, centres))
            cost = np.array([square[list(item)].sum(0) for item in problem.items])
            assigned = _bounded(problem, cost) if bounded else _nearest(problem, cost)
            if last is not None and np.array_equal(assigned, last):
                break
            last = assigned
            member = np.eye(problem.towers)[assigned].T @ problem.membership
            held = member.sum(1) > 0
            centres[held] = (member @ positions)[held] / member.sum(1)[held, None]
    return assigned


def _first_centres(problem: ClusteringProblem, positions: Floats, rng: np.random.Generator) -> Floats:
    # k-means++ (Arthur and Vassilvitskii 2007); a tower with pins starts at the mean of its pinned features.
    centres: dict[int, Floats] = {}
    for tower in set(problem.pinned.values()):
        pinned_features: list[int] = []
        for item, pinned_tower in problem.pinned.items():
            if pinned_tower == tower:
                pinned_features += problem.items[item]
        centres[tower] = positions[pinned_features].mean(0)
    for tower in range(problem.towers):
        if tower in centres:
            continue
        # A feature far from all centres is likelier to be the next one.
        odds = None
        if centres:
            nearest = np.square(between(positions, np.array(list(centres.values())))).min(1)
            if nearest.sum() > 0:
                odds = nearest / nearest.sum()
        centres[tower] = positions[rng.choice(len(positions), p=odds)]
    return np.array([centres[tower] for tower in range(problem.towers)])


def _nearest(problem: ClusteringProblem, cost: Floats) -> Ints:
    assigned = cost.argmin(1)
    for item, tower in problem.pinned.items():
        assigned[item] = tower
    return assigned


def _bounded(problem: ClusteringProblem, cost: Floats) -> Ints:
    # The cheapest assignment within the capacities, or with a small excess where there is none: [items]. An integer
    # program for HiGHS. Its columns are item i in tower k, row by row, then the excess; every item goes to one tower,
    # and every tower gets an item. Large problems are relaxed and rounded; ``ExchangeDescent`` then mends the loads.
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
    # HiGHS' tolerances are absolute.
    scale = max(float(cost.max(initial=0.0)), 1e-12)
    done = milp(
        np.append(cost.ravel() / scale, EXCESS_COST * items),
        integrality=np.append(np.full(items * towers, items * towers <= MOST_EXACT, dtype=int), 0),
        bounds=Bounds(np.append(fixed.ravel(), 0.0), np.append(np.ones(items * towers), np.inf)),
        constraints=LinearConstraint(hstack([csr_array(body), excess]), lower, upper),
        options=_OPTIONS,
    )
    if done.x is None:
        # HiGHS met its node limit before it found an assignment.
        return _nearest(problem, cost)
    return np.asarray(done.x[:-1].reshape(items, towers).argmax(1), dtype=np.int64)


@dataclass(frozen=True, kw_only=True)
class ClusteringProblem:
    """The items to divide among ``towers`` (each one or more features, by index) and their bounds.

    ``loads``: [L, items]; ``capacity``: [L], of a tower; ``pinned``: {item: tower}.
    """

    towers: int
    items: Sequence[Sequence[int]]
    loads: Floats
    capacity: Floats
    pinned: Mapping[int, int]

    @cached_property
    def membership(self) -> Floats:
        """1 where the item has the feature: [items, F]."""
        member = np.zeros((len(self.items), sum(map(len, self.items))))
        for index, item in enumerate(self.items):
            member[index, list(item)] = 1.0
        return member

    def used(self, assigned: Ints) -> Floats:
        """The loads of every tower: [L, T]."""
        return np.stack([np.bincount(assigned, weights=load, minlength=self.towers) for load in self.loads])


def make_problem(
    items: Sequence[Sequence[int]],
    towers: int,
    loads: Mapping[str, Floats],
    pinned: Mapping[int, int],
    imbalance: float,
    room: Mapping[str, float] | None = None,
) -> ClusteringProblem:
    """The problem for ``items``; ``loads``: by name, [F] each, in any unit; a load of zeros is left out.

    ``room``: by name, the share of a load that any tower may hold.
    """
    rows, capacity = [], []
    for name, load in loads.items():
        shares = np.array([load[list(item)].sum() for item in items]) / max(load.sum(), 1e-300)
        if shares.sum() > 0:
            # Equal loads come in whole numbers: 26 features in 4 towers are 7 in the largest at best.
            least = -(-len(load) // towers) / len(load) if np.ptp(load) == 0 else 0.0
            rows.append(shares)
            capacity.append(max((1 + imbalance) / towers, least, shares.max(), (room or {}).get(name, 0.0)))
    return ClusteringProblem(
        towers=towers, items=items, loads=np.array(rows), capacity=np.array(capacity), pinned=pinned
    )


class ExchangeDescent:
    """A descent from ``assigned`` [items].

    ``_pair`` [items, items] is the sum of the distances between two items' features, divided by the number of all
    features; ``_near`` [items, T] is the same between an item and a tower.
    """

    def __init__(self, problem: ClusteringProblem, assigned: Ints, distances: Matrix) -> None:
        self.problem, self.assigned = problem, assigned.copy()
        self._pair = problem.membership @ distances @ problem.membership.T / len(distances)
        self._own = np.diag(self._pair).copy()
        self._loads = problem.loads / problem.capacity[:, None]
        self._free = np.array([i for i in range(len(problem.items)) if i not in problem.pinned], dtype=np.int64)
        self._count()
        # Rounding may leave a tower empty: it gets the free item that is farthest from the others of its own tower.
        for tower in np.flatnonzero(self._items == 0):
            spare = self._free[self._items[self.assigned[self._free]] > 1]
            self.assigned[spare[self._near[spare, self.assigned[spare]].argmax()]] = int(tower)
            self._count()

    def run(self) -> tuple[Ints, float]:
        """Change until no move or swap helps; returns (towers [items], their cost)."""
        for _ in range(MOST_PASSES):
            changed = [self._improve(int(item)) for item in self._free]
            if not any(changed):
                break
        inside = float(self._near[np.arange(len(self.assigned)), self.assigned].sum())
        return self.assigned, inside + EXCESS_PRICE * float(self._over(self._used).sum())

    def _count(self) -> None:
        # What depends on ``assigned``.
        towers = np.eye(self.problem.towers)[self.assigned]
        self._near = self._pair @ towers
        self._items = towers.sum(0)
        self._used = self._loads @ towers

    def _over(self, used: Floats) -> Floats:
        # The shares by which loads [L, ...] exceed their capacities, summed over the loads.
        return np.maximum(used - 1.0 - TOLERANCE, 0.0).sum(0)

    def _improve(self, item: int) -> bool:
        # Make the best move or swap of ``item`` if it helps; whether it did.
        gains = np.concatenate([self._moves(item), self._swaps(item)])
        best = int(gains.argmin()) if len(gains) else 0
        if not len(gains) or gains[best] > -TOLERANCE:
            return False
        if best < self.problem.towers:
            self.assigned[item] = best
        else:
            other = self._free[best - self.problem.towers]
            self.assigned[[item, other]] = self.assigned[[other, item]]
        self._count()
        return True

    def _moves(self, item: int) -> Floats:
        # Change of cost by moving ``item`` to each tower [T]; infinite where the move is not allowed.
        own, load = self.assigned[item], self._loads[:, item, None]
        cost = 2 * (self._near[item] - self._near[item, own] + self._own[item])
        now = self._over(self._used)
        excess = self._over(self._used + load) - now + self._over(self._used[:, own, None] - load) - now[own]
        bad = (np.arange(self.problem.towers) == own) | (self._items[own] <= 1)
        return np.where(bad, np.inf, cost + EXCESS_PRICE * excess)

    def _swaps(self, item: int) -> Floats:
        # Change of cost by swapping ``item`` with each free item; infinite within its own tower.
        others, own = self._free, self.assigned[item]
        there = self.assigned[others]
        near = self._near
        cost = near[others, own] - near[item, own] + near[item, there] - near[others, there]
        cost = 2 * (cost - 2 * self._pair[item, others] + self._own[item] + self._own[others])
        extra, now = self._loads[:, others] - self._loads[:, item, None], self._over(self._used)
        excess = self._over(self._used[:, own, None] + extra) - now[own]
        excess += self._over(self._used[:, there] - extra) - now[there]
        return np.where(there == own, np.inf, cost + EXCESS_PRICE * excess)
