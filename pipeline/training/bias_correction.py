"""The level of a model that was trained without most rows without a click, set at the end by the clicks of train rows.

Rows that are left out are steps that are not taken. The last steps of a short training leave the mean prediction a few
percent above or below the clicks, by the rows that happened to come last (docs/measurements/training.md). A shift of
the logit takes that out, and leaves the order of predictions as it is. Only what is published has it: training goes on
without.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

from pipeline.checkpoint.collectives import all_gather_records
from pipeline.records.dataset import BY_LOGIT, LABEL, NEGATIVE_RATE, ROW_WEIGHT, DatasetSchema
from pipeline.training.data import BatchReader
from pipeline.training.parquet import SplitReader
from pipeline.training.predict import score
from pipeline.training.sampler import Order
from pipeline.training.step import StepExecutor

# Row groups of so many rows tell the level to a few thousandths.
MOST_ROWS = 1 << 20
# Halvings of the interval that holds the level.
_HALVINGS = 60
# The interval goes this far beyond the largest logit, where predictions are all 0, or all 1.
_REACH = 40.0
log = logging.getLogger(__name__)


def levels(schema: DatasetSchema) -> bool:
    """Whether a training on such rows ends with ``set_level``: if its loss is that of the kept rows."""
    return schema.sampled == BY_LOGIT and not schema.tasks


def set_level(executor: StepExecutor, train: SplitReader, order: Order) -> dict[str, list[float]]:
    """Set the last bias of ``executor``'s model, of one task, to the ``level_of`` the train rows. Collective.

    Of many rows, those of evenly spread row groups. Where an average is published, it is the average's bias.

    Returns:
        What training goes on with, by the name of the parameter: the values that the level took the place of.
    """
    rows = SplitReader(train.store, train.dataset, "train")
    rows.spread(MOST_ROWS)
    device = next(iter(executor.dense.values())).device
    with executor.looking() as model, torch.compiler.set_stance("force_eager"):
        before = {name: parameter.detach().clone() for name, parameter in executor.dense.items()}
        executor.dense_part.start_at([0.0])
        with BatchReader(rows, replace(order, shuffle=False), pin=device.type == "cuda") as reader:
            logits = score(model, reader, device, executor.workers)
        level = all_gather_records(None if logits is None else _level(rows, logits))[0]
        executor.dense_part.start_at([level])
        moved = [name for name, parameter in executor.dense.items() if not torch.equal(parameter, before[name])]
    if dist.get_rank() == 0:
        log.info("the last bias is %.4f, by the clicks of %s train rows", level, f"{rows.rows:,}")
    return {name: before[name].flatten().tolist() for name in moved}


@torch.no_grad()
def unset_level(executor: StepExecutor, former: Mapping[str, list[float]]) -> None:
    """Put back what ``set_level`` returned; where an average is published, it must be in the weights' place."""
    for name, values in former.items():
        parameter = executor.dense[name]
        parameter.copy_(torch.tensor(values, dtype=parameter.dtype).view_as(parameter))


def _level(rows: SplitReader, logits: NDArray[np.float32]) -> float:
    """At the rate of the kept rows, where training has the model fit them.

    At the true rate it would be 3 % too high: kept rows without a click would stand for those that were left out, to
    which the model was not fitted.
    """
    kept = logits.astype(np.float64) - np.log(rows.column(NEGATIVE_RATE).astype(np.float64))
    return level_of(rows.column(LABEL), kept, rows.column(ROW_WEIGHT) if rows.schema.row_weights else None)


def level_of(
    labels: NDArray[np.float32], logits: NDArray[np.float64], weights: NDArray[np.float32] | None = None
) -> float:
    """What to add to ``logits`` so that probabilities add up to the clicks of ``labels``; all [rows].

    At least to half a click, and to half a row less than all, since no finite level gives none, or all.
    """
    clicked = (labels > 0).astype(np.float64)
    counts = np.ones(len(labels)) if weights is None else weights.astype(np.float64)
    total = float(counts.sum())
    clicks = min(max(float(counts @ clicked), 0.5), max(total - 0.5, 0.5))
    high = float(np.abs(logits).max(initial=0.0)) + _REACH
    low = -high
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        if float(counts @ (1 / (1 + np.exp(-(logits + middle))))) < clicks:
            low = middle
        else:
            high = middle
    return (low + high) / 2
