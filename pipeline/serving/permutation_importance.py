"""What each feature is worth to a version: how far NE rises where the feature's values change places between rows.

Permutation importance (Breiman 2001, Random Forests, section 10) on held-out rows, with the model as it is served.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from pipeline.evaluation.metrics import entropy_of_rate
from pipeline.records.gate import Importance
from pipeline.serving.scorer import one_thread, run_in_threads
from pipeline.serving.scores import score_columns

if TYPE_CHECKING:
    from pipeline.publishing.served import ServedModel
    from pipeline.training.parquet import DecodedColumns, SplitReader

MOST_GROUPS = 8  # row groups that the rows are taken from: each is decoded whole


def importance(
    split: SplitReader, model: ServedModel, groups: Mapping[str, Sequence[str]], rows: int, seed: int
) -> dict[str, Importance]:
    """Rises of NE by the names of ``groups`` of features; features of a group change places together.

    On about ``rows`` rows, evenly spread over ``split``; the same for the same ``seed``. Empty where these rows are of
    one class, or where the model gives one of them no finite logit; a group that brings such logits is left out. Groups
    are scored side by side, in torch's threads.
    """
    columns = sampled(split, rows)
    labels, weights = columns.labels, split.counted_for(columns)
    counted = np.ones(len(labels)) if weights is None else weights.astype(np.float64)
    rate = float((labels * counted).sum() / counted.sum()) if counted.any() else 0.0
    if not 0 < rate < 1:
        return {}
    entropy = entropy_of_rate(rate, np.log, np.log1p)
    moved = np.random.default_rng(seed).permutation(len(labels))
    with one_thread():
        losses = _losses(labels, score_columns(split, columns, model))
    if not np.isfinite(losses).all():
        return {}

    def rise(features: Sequence[str]) -> Importance | None:
        changed = _losses(labels, score_columns(split, _permuted(split, columns, features, moved), model))
        return _rise((changed - losses) / entropy, counted) if np.isfinite(changed).all() else None

    rises = zip(groups, run_in_threads(rise, groups.values()), strict=True)
    return {name: each for name, each in rises if each is not None}


def sampled(split: SplitReader, rows: int) -> DecodedColumns:
    """About ``rows`` rows of ``split``, decoded: every n-th of at most eight row groups, evenly spread."""
    from pipeline.training.parquet import join, take_each

    count = min(len(split.groups), MOST_GROUPS)
    chosen = [split.groups[i * len(split.groups) // count] for i in range(count)]
    step = max(1, sum(group.rows for group in chosen) // rows)
    parts = []
    for group in chosen:
        columns = split.allocate(group.rows)
        columns.ragged = split.read(group, columns, 0)
        parts += take_each(columns, [np.arange(0, group.rows, step)])
    return join(parts)


def _permuted(
    split: SplitReader, columns: DecodedColumns, features: Sequence[str], moved: NDArray[np.integer]
) -> DecodedColumns:
    """``columns`` with row i's values of ``features`` taken from row ``moved[i]``."""
    dense, single, ragged = columns.dense.copy(), columns.single.copy(), dict(columns.ragged)
    for name in features:
        if name in ragged:
            ragged[name] = ragged[name].take(moved)
        elif name in split.single:
            place = split.single.index(name)
            single[place] = single[place][moved]
        else:
            place = split.schema.dense.index(name)
            dense[place] = dense[place][moved]
    return replace(columns, dense=dense, single=single, ragged=ragged)


def _losses(labels: NDArray[np.floating], logits: NDArray[np.floating]) -> NDArray[np.float64]:
    """Log loss of each row, in nats; of several tasks that of the main one."""
    main = (logits if logits.ndim == 1 else logits[:, 0]).astype(np.float64)
    return np.logaddexp(0.0, main) - labels * main


def _rise(differences: NDArray[np.float64], counted: NDArray[np.float64]) -> Importance:
    """Mean of the rows' ``differences``, which count ``counted`` times, and its standard error."""
    total = counted.sum()
    mean = float((differences * counted).sum() / total)
    error = float(np.sqrt((((differences - mean) * counted) ** 2).sum()) / total)
    return Importance(rise=mean, error=error)
