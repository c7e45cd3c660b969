"""The learning rates over a training: a linear warm-up, then constant or falling to the last planned step.

Both rates, of the dense part and of the tables, are their setting times a factor of the step alone: a resumed run, on
any number of ranks, goes on with the rates of the uninterrupted one.
"""

from __future__ import annotations

import math

from pipeline.config import TrainConfig


def planned_steps(train: TrainConfig, rows: int) -> int:
    """Steps of the whole training on ``rows`` rows: of its epochs, a short last batch each, or ``max_steps``."""
    steps = train.epochs * -(-rows // train.global_batch)
    return steps if train.max_steps is None else min(steps, train.max_steps)


def lr_factor(train: TrainConfig, step: int, total: int) -> float:
    """What both learning rates are multiplied with in ``step`` (from 0) of ``total``.

    The warm-up rises to 1 in step ``warmup_steps`` - 1. In the last ``decay_share`` of the steps from there on
    ``train.schedule`` linear falls evenly, cosine by half a cosine (SGDR, Loshchilov and Hutter 2017, one cycle), both
    to ``min_lr_share`` in the last step. A share below 1 is warm-up, stable, decay (Hu et al. 2024, section 4).
    """
    peak = max(1, train.warmup_steps) - 1
    if step < peak:
        return (step + 1) / train.warmup_steps
    if train.schedule == "constant" or total - 1 <= peak:
        return 1.0
    steps, share = total - 1 - peak, train.decay_share
    done = min(1.0, max(0.0, (step - peak - (1.0 - share) * steps) / (share * steps)))
    left = 1.0 - done if train.schedule == "linear" else (1.0 + math.cos(math.pi * done)) / 2
    return train.min_lr_share + (1.0 - train.min_lr_share) * left
