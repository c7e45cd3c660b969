"""Better towers by single moves and swaps of items (the neighbourhood of Kernighan and Lin 1970).

The cost is the sum of all distances inside towers, by feature. k-means divides its own cost by the size of each tower,
which draws features into loose towers; this one does not. Load over the capacities costs more than any distance.
"""

from __future__ import annotations

import numpy as np

from pipeline.towers.distances import Matrix
from pipeline.towers.problem import Floats, Ints, Problem

MOST_PASSES = 50
TOLERANCE = 1e-9
EXCESS_PRICE = 1e6  # of a load over its capacity by the capacity; distances are at most 1 and features fewer


class Exchange:
    """A descent from ``assigned`` [items].

    ``_pair`` [items, items] is the sum of the distances between two items' features, divided by the number of all
    features; ``_near`` [items, T] is the same between an item and a tower.
    """

    def __init__(self, problem: Problem, assigned: Ints, distances: Matrix) -> None:
        self.problem, self.assigned = problem, assigned.copy()
        self._pair = problem.membership @ distances @ problem.membership.T / len(distances)
        self._own = np.diag(self._pair).copy()
        self._loads = problem.loads / problem.capacity[:, None]
        self._free = np.array([i for i in range(len(problem.items)) if i not in problem.pinned], dtype=np.int64)
        self._count()
        for tower in np.flatnonzero(self._items == 0):  # rounding may leave a tower empty
            self._fill(int(tower))

    def _fill(self, tower: int) -> None:
        """Give an empty tower the free item that is farthest from the others of its own tower."""
        spare = self._free[self._items[self.assigned[self._free]] > 1]
        self.assigned[spare[self._near[spare, self.assigned[spare]].argmax()]] = tower
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
        """Compute what depends on ``assigned``."""
        towers = np.eye(self.problem.towers)[self.assigned]
        self._near = self._pair @ towers
        self._items = towers.sum(0)
        self._used = self._loads @ towers

    def _over(self, used: Floats) -> Floats:
        """The shares by which loads [L, ...] exceed their capacities, summed over the loads."""
        return np.maximum(used - 1.0 - TOLERANCE, 0.0).sum(0)

    def _improve(self, item: int) -> bool:
        """Make the best move or swap of ``item`` if it helps; whether it did."""
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
        """Change of cost by moving ``item`` to each tower [T]; infinite where the move is not allowed."""
        own, load = self.assigned[item], self._loads[:, item, None]
        cost = 2 * (self._near[item] - self._near[item, own] + self._own[item])
        now = self._over(self._used)
        excess = self._over(self._used + load) - now + self._over(self._used[:, own, None] - load) - now[own]
        bad = (np.arange(self.problem.towers) == own) | (self._items[own] <= 1)
        return np.where(bad, np.inf, cost + EXCESS_PRICE * excess)

    def _swaps(self, item: int) -> Floats:
        """Change of cost by swapping ``item`` with each free item; infinite within its own tower."""
        others, own = self._free, self.assigned[item]
        there = self.assigned[others]
        near = self._near
        cost = near[others, own] - near[item, own] + near[item, there] - near[others, there]
        cost = 2 * (cost - 2 * self._pair[item, others] + self._own[item] + self._own[others])
        extra, now = self._loads[:, others] - self._loads[:, item, None], self._over(self._used)
        excess = self._over(self._used[:, own, None] + extra) - now[own]
        excess += self._over(self._used[:, there] - extra) - now[there]
        return np.where(there == own, np.inf, cost + EXCESS_PRICE * excess)
