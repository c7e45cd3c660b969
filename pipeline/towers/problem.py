"""What the clustering has to keep to: items that stay together, loads by tower, pins.

Loads are any number of figures by feature (how many, predicted ms, bytes). A tower may hold ``1 + imbalance`` times an
even share of each, or the largest single item or what there is room for anyway where that is more.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


@dataclass(frozen=True, kw_only=True)
class Problem:
    """What is to be divided among ``towers``: items (features that stay together, by index) and their bounds.

    ``loads``: [L, items]; ``capacity``: [L], of a tower; ``pinned``: {item: tower}.
    """

    towers: int
    items: Sequence[Sequence[int]]
    loads: Floats
    capacity: Floats
    pinned: Mapping[int, int]

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
    """The bounds for ``items``; ``loads``: by name, [F] each, any unit. One that is zero everywhere binds nothing.

    ``room``: by name, the share of a load that a tower may always hold, even or not.
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
