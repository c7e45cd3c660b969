"""The log loss of some rows in parts: what it takes to tell later whether another model's NE differs by chance."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from pipeline.evaluation.bootstrap import block_of_rows

PARTS = 100


def loss_parts(
    labels: NDArray[np.floating], logits: NDArray[np.floating], weights: NDArray[np.floating] | None = None
) -> list[float]:
    """What each of ``PARTS`` blocks of rows, one behind the other, adds to the mean log loss (nats per row).

    ``labels``, ``logits`` and ``weights`` (None: 1 each) [n]; fewer parts where there are fewer rows.
    """
    values, clicked = logits.astype(np.float64), labels == 1
    counted = np.ones(len(values)) if weights is None else weights.astype(np.float64)
    loss = np.logaddexp(0.0, np.where(clicked, -values, values)) * counted / counted.sum()
    parts: list[float] = np.bincount(block_of_rows(len(values), PARTS), loss).tolist()
    return parts
