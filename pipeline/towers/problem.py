"""The constraints of the clustering: items that stay together, loads by tower, pins.

Loads are figures by feature (their number, predicted ms, bytes). Of each a tower may hold ``1 + imbalance`` times an
even share, or more for the largest single item, or up to the given room.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


@dataclass(frozen=True, kw_only=True)
class Problem:
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
) -> Problem:
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
    return Problem(towers=towers, items=items, loads=np.array(rows), capacity=np.array(capacity), pinned=pinned)
