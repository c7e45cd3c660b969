"""Choosing an ensemble's members, and what they count."""

import numpy as np
import pytest

from pipeline.evaluation.metrics import compute_member_shares, compute_ne
from pipeline.plugins.ensembles.snapshots import choose, fitted_weights


@pytest.fixture(scope="module")
def rows():
    """True logits [n] and labels of 40,000 rows."""
    rng = np.random.default_rng(0)
    truth = rng.normal(-1.0, 1.5, 40_000)
    return truth, (rng.random(len(truth)) < 1 / (1 + np.exp(-truth))).astype(np.float32)


def test_ne_is_that_of_the_evaluation(rows):
    from pipeline.evaluation import evaluate

    logits, labels = rows
    weights = np.random.default_rng(1).integers(0, 3, len(labels)).astype(np.float32)
    assert compute_ne(logits, labels) == pytest.approx(evaluate(labels, logits)["ne"], rel=1e-12)
    assert compute_ne(logits, labels, weights) == pytest.approx(
        evaluate(labels, logits, weights=weights)["ne"], rel=1e-12
    )


def test_members_are_good_and_differ_from_each_other(rows):
    truth, labels = rows
    rng = np.random.default_rng(2)
    error, other = rng.normal(0, 0.6, (2, len(truth)))
    # The second is the first one again, the third errs elsewhere, the last one is bad.
    logits = np.stack([truth + error, truth + 1.001 * error, truth + 1.1 * other, truth + rng.normal(0, 3, len(truth))])
    assert sorted(choose(logits, labels, None, 2)) == [0, 2]
    alone = sorted(range(4), key=lambda at: compute_ne(logits[at], labels))
    assert alone[:2] == [0, 1]
    assert sorted(choose(logits, labels, None, 9)) == [0, 1, 2, 3]


def test_of_equal_models_the_newest_are_members(rows):
    truth, labels = rows
    assert sorted(choose(np.stack([truth] * 4), labels, None, 2)) == [2, 3]


def test_fitted_weights_make_up_for_logits_that_are_too_small_and_shrink_towards_equal_ones(rows):
    truth, labels = rows
    rng = np.random.default_rng(3)
    logits = 0.7 * truth + np.stack([rng.normal(0, 0.3, len(truth)), rng.normal(0, 1.0, len(truth))])
    weights = fitted_weights(logits, labels)
    assert weights[0] > 0.5 > weights[1] > 0 and weights.sum() > 1.2
    assert compute_ne(weights @ logits, labels) < compute_ne(logits.mean(axis=0), labels)
    few = fitted_weights(logits[:, :50], labels[:50])
    assert np.abs(few - 0.5).max() < 0.1


def test_rows_count_by_their_weights(rows):
    truth, labels = rows
    logits = np.stack([truth, 0.5 * truth])
    twice = np.concatenate([np.full(100, 2.0), np.ones(900)]).astype(np.float32)
    doubled = np.concatenate([logits[:, :100], logits[:, :1000]], axis=1)
    ours = fitted_weights(logits[:, :1000], labels[:1000], twice)
    theirs = fitted_weights(doubled, np.concatenate([labels[:100], labels[:1000]]))
    assert ours == pytest.approx(theirs, abs=0.02)


def test_further_tasks_take_the_plain_mean():
    assert compute_member_shares([0.7, 0.5], 0).tolist() == [0.7, 0.5]
    assert compute_member_shares([0.7, 0.5], 2).tolist() == [[0.7, 0.5, 0.5], [0.5, 0.5, 0.5]]
