"""GAUC: does a model rank the rows of each user? AUC also counts pairs of rows of two users, which no page shows.

The AUC of every user with rows of both classes, averaged with the users' rows as weights (Zhu et al., "Optimized Cost
per Click in Taobao Display Advertising", KDD 2017). The bootstrap draws users, the same ones for both models. What a
user is here may be any group of rows that is ranked together, such as a request.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pipeline.evaluation.bootstrap import (
    BLOCKS,
    CONFIDENCE,
    FEWEST,
    REPLICATES,
    Resampled,
    block_of_rows,
    difference,
    poisson_weights,
)
from pipeline.records.gate import UserAuc
from pipeline.specs.gate_check import ScoredRows

Floats = NDArray[np.floating]


def compare_gauc(scored: ScoredRows, confidence: float, replicates: int, blocks: int, seed: int) -> UserAuc | None:
    """Measure GAUC of candidate and incumbent on the users of ``scored``, and its change.

    Args:
        scored: Rows with finite logits; those whose user is negative, or which have no weight, are left out.
        confidence: The confidence of the intervals.
        replicates: The number of bootstrap replicates.
        blocks: Users are drawn in as many blocks, or one by one if they are fewer.
        seed: The seed of the draws.

    Returns:
        None if the rows have no users. There are no figures if no user has rows of both classes.
    """
    if scored.users is None:
        return None
    clicked = scored.labels == 1
    users = scored.users
    ranked = users >= 0
    if scored.weights is not None:
        ranked &= scored.weights > 0
    count = max(int(users.max(initial=-1)) + 1, 1)
    with_click = np.bincount(users[ranked & clicked], minlength=count) > 0
    without_click = np.bincount(users[ranked & ~clicked], minlength=count) > 0
    both = with_click & without_click
    rows = np.flatnonzero(ranked & both[users])
    if not len(rows):
        return UserAuc(users=0, rows=0)

    # Number the users that can be ranked anew, without gaps, in the order of their codes.
    user = (np.cumsum(both) - 1)[users[rows]]
    weights = np.ones(len(rows))
    if scored.weights is not None:
        weights = scored.weights[rows].astype(np.float64)
    user_weights: NDArray[Any] = np.bincount(user, weights)

    # Draw users, because rows of one user are not independent. Both models share the draws.
    count = min(blocks, len(user_weights))
    draws = poisson_weights(replicates, count, seed)
    block = block_of_rows(len(user_weights), count)
    totals = np.bincount(block, user_weights, minlength=count)

    def resample(logits: Floats) -> Resampled:
        aucs = auc_of_users(user, clicked[rows], logits[rows], weights)
        sums = np.bincount(block, user_weights * aucs, minlength=count)
        # A replicate may draw no block at all; its mean is NaN, which the interval ignores.
        with np.errstate(divide="ignore", invalid="ignore"):
            return Resampled(float(sums.sum() / totals.sum()), (draws @ sums) / (draws @ totals))

    candidate = resample(scored.candidate)
    record = UserAuc(users=len(user_weights), rows=len(rows), candidate=candidate.interval(confidence))
    if scored.incumbent is None:
        return record
    incumbent = resample(scored.incumbent)
    change = difference(candidate, incumbent).interval(confidence)
    return replace(record, incumbent=incumbent.interval(confidence), change=change)


def evaluation_gauc(scored: ScoredRows) -> dict[str, Any]:
    """Measure GAUC of the candidate as an evaluation reports it.

    Returns:
        ``gauc_groups`` and ``gauc_rows``: the groups that can be ranked and their rows. Where there are some, ``gauc``;
        where they are at least ``FEWEST``, the ends of its 95 % interval in ``gauc_interval``. Nothing where the
        rows have no groups.
    """
    found = compare_gauc(replace(scored, incumbent=None), CONFIDENCE, REPLICATES, BLOCKS, seed=0)
    if found is None:
        return {}
    figures: dict[str, Any] = {"gauc_groups": found.users, "gauc_rows": found.rows}
    if found.candidate is not None:
        figures["gauc"] = found.candidate.point
        if found.users >= FEWEST:
            figures["gauc_interval"] = (max(found.candidate.low, 0.0), min(found.candidate.high, 1.0))
    return figures


def auc_of_users(
    user: NDArray[np.integer], clicked: NDArray[np.bool_], logits: Floats, weights: NDArray[np.float64]
) -> NDArray[np.float64]:
    """Return the AUC within each user, a tie counting one half.

    Args:
        user: Numbers from 0 on, without gaps, [n]; each user has rows of both classes with a weight above 0.
        clicked: Whether each row was clicked, [n].
        logits: The logits of the same rows, [n].
        weights: How many rows each row counts as, [n].

    Returns:
        [users], in float64.
    """
    order = np.lexsort((logits, user))
    user, logits = user[order], logits[order]
    clicked_weight = np.where(clicked[order], weights[order], 0.0)
    other_weight = weights[order] - clicked_weight

    # Rows of a user with the same logit are a tie, so their weights are added up.
    is_first = np.append(True, (user[1:] != user[:-1]) | (logits[1:] != logits[:-1]))
    first = np.flatnonzero(is_first)
    user = user[first]
    clicked_weight = np.add.reduceat(clicked_weight, first)
    other_weight = np.add.reduceat(other_weight, first)

    # Compute the weight of the same user's other rows that score lower: the running sum, less its value before the
    # user.
    running = np.cumsum(other_weight)
    first_of_user = np.flatnonzero(np.append(True, user[1:] != user[:-1]))
    before_user = np.append(0.0, running)[first_of_user]
    lower = running - other_weight - before_user[user]
    pairs_won = np.add.reduceat(clicked_weight * (lower + 0.5 * other_weight), first_of_user)
    pairs = np.add.reduceat(clicked_weight, first_of_user) * np.add.reduceat(other_weight, first_of_user)
    return pairs_won / pairs
