"""Which share of an epoch's rows a rank decodes: what predictions and dry runs go by."""

from __future__ import annotations

from pipeline.config import TrainConfig
from pipeline.config.train import fitting_lanes


def decoded_share(train: TrainConfig, world_size: int, groups: int) -> float:
    """The share of the rows in ``groups`` row groups that a rank decodes: of ``world_size`` ranks the one with most.

    A rank decodes the lanes that it takes rows of, each whole (``order.Deal``). Left out are the row groups on the
    border of two lanes, which are decoded for both.
    """
    lanes = fitting_lanes(train.dealt_lanes, train.batch, groups)
    size, quota = -(-train.batch // world_size), train.batch // lanes
    starts = range(0, train.batch, size)
    return max(-(-min(start + size, train.batch) // quota) - start // quota for start in starts) / lanes
