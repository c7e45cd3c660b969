"""Better towers by single moves and swaps of items (the neighbourhood of Kernighan and Lin 1970), bounds first.

The cost is the sum over towers of (distances of all ordered pairs inside) / (features inside): what k-means minimises
for squared Euclidean distances, here for any matrix. Load over the capacities costs more than any distance.
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

    ``_pair`` [items, items] sums the distances between two items' features, ``_inside`` [T] those within a tower.
    """

    def __init__(self, problem: Problem, assigned: Ints, distances: Matrix) -> None:
        self.problem, self.assigned = problem, assigned.copy()
        member = np.zeros((len(problem.items), len(distances)))
        for index, item in enumerate(problem.items):
            member[index, list(item)] = 1.0
        self._pair = member @ distances @ member.T
        self._own = np.diag(self._pair).copy()
        self._features = member.sum(1)
        self._loads = problem.loads / problem.capacity[:, None]
        self._free = np.array([i for i in range(len(problem.items)) if i not in problem.pinned], dtype=np.int64)
        self._count()
        for tower in np.flatnonzero(self._items == 0):  # rounding can do that
            self._fill(int(tower))

    def _fill(self, tower: int) -> None:
        """Give an empty tower the free item that is farthest from its own one's others."""
        spare = self._free[self._items[self.assigned[self._free]] > 1]
        far = self._near[spare, self.assigned[spare]] / self._size[self.assigned[spare]]
        self.assigned[spare[far.argmax()]] = tower
        self._count()

    def run(self) -> tuple[Ints, float]:
        """Change until no move or swap helps; returns (towers [items], their cost)."""
        for _ in range(MOST_PASSES):
            changed = [self._improve(int(item)) for item in self._free]
            if not any(changed):
                break
        inside = float((self._inside / np.maximum(self._size, 1.0)).sum())
        return self.assigned, inside + EXCESS_PRICE * float(self._over(self._used).sum())

    def _count(self) -> None:
        """Everything that follows from ``assigned``."""
        towers = np.eye(self.problem.towers)[self.assigned]
        self._near = self._pair @ towers
        self._inside = (towers * self._near).sum(0)
        self._size = self._features @ towers
        self._items = towers.sum(0)
        self._used = self._loads @ towers

    def _over(self, used: Floats) -> Floats:
        """The shares by which loads [L, ...] exceed their capacities, summed over the loads."""
        return np.maximum(used - 1.0 - TOLERANCE, 0.0).sum(0)

    def _improve(self, item: int) -> bool:
        """The best move or swap of ``item``, done if it helps."""
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
        """Change of cost by moving ``item`` to each tower [T]; infinite where that must not be."""
        own, load = self.assigned[item], self._loads[:, item, None]
        left = self._inside[own] - 2 * self._near[item, own] + self._own[item]
        joined = self._inside + 2 * self._near[item] + self._own[item]
        cost = joined / (self._size + self._features[item]) - self._inside / self._size
        cost += left / max(self._size[own] - self._features[item], 1.0) - self._inside[own] / self._size[own]
        now = self._over(self._used)
        excess = self._over(self._used + load) - now + self._over(self._used[:, own, None] - load) - now[own]
        bad = (np.arange(self.problem.towers) == own) | (self._items[own] <= 1)
        return np.where(bad, np.inf, cost + EXCESS_PRICE * excess)

    def _swaps(self, item: int) -> Floats:
        """Change of cost by swapping ``item`` with each free item; infinite within its own tower."""
        others, own = self._free, self.assigned[item]
        there = self.assigned[others]
        across = 2 * self._pair[item, others]
        both = self._own[item] + self._own[others]
        here_now = self._inside[own] - 2 * self._near[item, own] + 2 * self._near[others, own] - across + both
        there_now = self._inside[there] - 2 * self._near[others, there] + 2 * self._near[item, there] - across + both
        grown = self._features[others] - self._features[item]
        cost = here_now / (self._size[own] + grown) + there_now / (self._size[there] - grown)
        cost -= self._inside[own] / self._size[own] + self._inside[there] / self._size[there]
        extra, now = self._loads[:, others] - self._loads[:, item, None], self._over(self._used)
        excess = self._over(self._used[:, own, None] + extra) - now[own]
        excess += self._over(self._used[:, there] - extra) - now[there]
        return np.where(there == own, np.inf, cost + EXCESS_PRICE * excess)
