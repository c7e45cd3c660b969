"""A quick model that a first one is compared with: logistic regression on the same columns, one pass of Adagrad.

Every row of an embedding table has a weight here, every dense feature one; weights learn at rates of their own (Duchi
et al. 2011; for click logs McMahan et al., "Ad Click Prediction: a View from the Trenches", 2013). Memory is bounded:
large tables share ``MOST_WEIGHTS`` weights by their row number. NumPy alone, some seconds for a million rows.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pipeline.evaluation.metrics import fill_weights

MOST_WEIGHTS = 1 << 22
BATCH_ROWS = 512
RATE = 0.1
# Dense values are clipped to this many standard deviations.
_LARGEST = 8.0
# Initial sum of squared gradients, which keeps the steps of the first batches small.
_FIRST_SUM = 1.0
# For every lookup, the place of its weight, its row in the batch, and its factor.
_Lookups = tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.float64]]


@dataclass(frozen=True)
class BaselineRows:
    """Rows: ``labels`` [n], ``dense`` [n, d] (NaN: missing), and by sparse feature its lookups.

    Lookups are row numbers [n], or (row numbers [m], the place in the block of each [m], weights [m] or None).
    ``weights`` [n]: how many rows each row counts for; None: one.
    """

    labels: NDArray[np.floating]
    dense: NDArray[np.floating]
    ids: Mapping[str, Any]
    weights: NDArray[np.floating] | None = None


class Baseline:
    """The model of tables with ``rows`` by sparse feature and ``dense`` features; ``fit``, then ``score``."""

    def __init__(self, rows: Mapping[str, int], dense: int) -> None:
        cap = max(MOST_WEIGHTS // max(len(rows), 1), 1)
        self._sizes = {name: min(count, cap) for name, count in rows.items()}
        starts = np.concatenate([[0], np.cumsum(list(self._sizes.values()), dtype=np.int64)])
        self._starts = {name: int(start) for name, start in zip(rows, starts, strict=False)}
        self._weights = np.zeros(int(starts[-1]))
        self._sums = np.full(int(starts[-1]), _FIRST_SUM)
        self._buffer = np.zeros(int(starts[-1]))
        self._dense, self._dense_sums = np.zeros(dense + 1), np.full(dense + 1, _FIRST_SUM)
        self._mean, self._std = np.zeros(dense), np.ones(dense)

    def fit(self, blocks: Iterable[BaselineRows]) -> None:
        """Learn from the rows of ``blocks``, in that order."""
        # Scales and base rate come from the first block that has rows, so that all rows are read only once.
        begun = False
        for block in blocks:
            if not begun and len(block.labels):
                self._begin(block)
                begun = True
            for batch in _batches(block):
                self._step(batch)

    def score(self, block: BaselineRows) -> NDArray[np.float32]:
        """Return the logits [n] of the rows of ``block``."""
        logits = [np.zeros(0)]
        for batch in _batches(block):
            logits.append(self._forward(batch)[0])
        return np.concatenate(logits).astype(np.float32)

    def _begin(self, block: BaselineRows) -> None:
        # Compute the scales of the dense features and the base rate from the first block.
        if block.dense.shape[1]:
            known = np.where(np.isfinite(block.dense), block.dense, np.nan)
            counts = np.maximum((~np.isnan(known)).sum(0), 1)
            self._mean = np.nansum(known, 0) / counts
            spread = np.sqrt(np.nansum((known - self._mean) ** 2, 0) / counts)
            self._std = np.where(spread > 0, spread, 1.0)
        counted = fill_weights(block.labels, block.weights)
        # Add half a row with a click and half a row without one, so that the logit is finite even without clicks.
        clicks, rows = float((block.labels * counted).sum()) + 0.5, float(counted.sum()) + 1.0
        self._dense[-1] = np.log(clicks / (rows - clicks))

    def _forward(self, batch: BaselineRows) -> tuple[NDArray[np.float64], NDArray[np.float64], _Lookups]:
        # Return the logits, and what they are made of: the inputs and the lookups.
        # 1. Standardised dense values and a one for the bias, [n, d + 1]; 0 for a missing value.
        scaled = np.nan_to_num((batch.dense - self._mean) / self._std, nan=0.0)
        inputs = np.column_stack([scaled.clip(-_LARGEST, _LARGEST), np.ones(len(batch.labels))])

        # 2. The lookups of all features together. The lists begin with empty arrays, because ``concatenate`` needs at
        #    least one, and a model may have no sparse features.
        places, in_batch, factors = [np.zeros(0, np.int64)], [np.zeros(0, np.int64)], [np.zeros(0)]
        for name, ids in batch.ids.items():
            if isinstance(ids, tuple):
                values, rows, weights = ids
            else:
                values, rows, weights = ids, np.arange(len(ids)), None
            # Rows of a table above the cap share weights, as in a hash table.
            places.append(self._starts[name] + values.astype(np.int64) % self._sizes[name])
            in_batch.append(rows)
            factors.append(fill_weights(values, weights))
        lookups = np.concatenate(places), np.concatenate(in_batch), np.concatenate(factors)

        # 3. The sum of the weights that each row looks up.
        products = self._weights[lookups[0]] * lookups[2]
        looked_up = np.bincount(lookups[1], products, minlength=len(batch.labels))
        return np.asarray(inputs @ self._dense + looked_up), inputs, lookups

    def _step(self, batch: BaselineRows) -> None:
        logits, inputs, (places, in_batch, factors) = self._forward(batch)
        errors = 1 / (1 + np.exp(-np.clip(logits, -60, 60))) - batch.labels
        if batch.weights is not None:
            errors = errors * batch.weights
        # Gradients of one weight are summed up before Adagrad squares them, because a batch is one step.
        np.add.at(self._buffer, places, errors[in_batch] * factors)
        gradient = self._buffer[places]
        sums = self._sums[places] + gradient**2
        # A weight that is looked up several times gets the same values each time.
        self._weights[places] = self._weights[places] - RATE * gradient / np.sqrt(sums)
        self._sums[places] = sums
        self._buffer[places] = 0.0
        slope = errors @ inputs
        self._dense_sums += slope**2
        self._dense -= RATE * slope / np.sqrt(self._dense_sums)


def _batches(block: BaselineRows) -> Iterator[BaselineRows]:
    for start in range(0, len(block.labels), BATCH_ROWS):
        stop = start + BATCH_ROWS
        ids = {}
        for name, lookups in block.ids.items():
            if not isinstance(lookups, tuple):
                ids[name] = lookups[start:stop]
                continue
            # In lists, a row has any number of lookups, and lookups are in the order of their rows.
            values, rows, list_weights = lookups
            low, high = np.searchsorted(rows, (start, stop))
            if list_weights is not None:
                list_weights = list_weights[low:high]
            ids[name] = values[low:high], rows[low:high] - start, list_weights
        weights = block.weights[start:stop] if block.weights is not None else None
        yield BaselineRows(block.labels[start:stop], block.dense[start:stop], ids, weights)
