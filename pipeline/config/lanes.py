"""How many lanes the rows of a training are dealt to (``train.lanes``)."""

from __future__ import annotations

# Row groups that lie across the end of a lane are decoded for both: an eighth of the groups, at most.
GROUPS_A_LANE = 8


def fitting_lanes(lanes: int, global_batch: int, groups: int) -> int:
    """The largest divisor of ``lanes`` that divides the global batch and leaves each lane eight of the row groups.

    One lane, where a dataset has fewer than sixteen row ``groups``. Ranks and hardware do not matter.
    """
    most = min(lanes, groups // GROUPS_A_LANE)
    return max((n for n in range(1, most + 1) if lanes % n == 0 and global_batch % n == 0), default=1)
