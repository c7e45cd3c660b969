"""Metrics against brute force, against their algebra, and over every permutation of the rows."""

import gc
import math
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.core.errors import DataError
from pipeline.evaluation import evaluate
from pipeline.evaluation import metrics as metrics_module
from pipeline.evaluation.metrics import base_entropy, entropy_of_rate, grouped_auc

# Few distinct values, so that ties are the rule.
TIED = st.integers(-6, 6).map(lambda value: value / 2)
FINITE = st.floats(-60, 60, width=32, allow_subnormal=False)


@st.composite
def cases(draw, logits=TIED | FINITE, most=60):
    rows = draw(st.integers(2, most))
    labels = draw(st.lists(st.integers(0, 1), min_size=rows, max_size=rows).filter(lambda found: 0 < sum(found) < rows))
    return np.array(labels), np.array(draw(st.lists(logits, min_size=rows, max_size=rows)))


def brute_auc(labels, logits):
    pairs = [(p > n) + (p == n) / 2 for p in logits[labels == 1] for n in logits[labels == 0]]
    return sum(pairs) / len(pairs)


def brute_loss(labels, logits):
    return math.fsum(
        math.log1p(math.exp(-abs(x))) + max(x, 0) - x * y for y, x in zip(labels, logits, strict=True)
    ) / len(labels)


def entropy(labels):
    rate = labels.mean()
    return -(rate * math.log(rate) + (1 - rate) * math.log(1 - rate))


@given(cases())
def test_every_figure_equals_brute_force(case):
    labels, logits = case
    found = evaluate(labels, logits)
    assert found["samples"] == len(labels)
    assert found["auc"] == pytest.approx(brute_auc(labels, logits), abs=1e-15)
    assert found["logloss"] == pytest.approx(brute_loss(labels, logits), rel=1e-13)
    assert found["ne"] == pytest.approx(brute_loss(labels, logits) / entropy(labels), rel=1e-13)
    assert found["calibration"] == pytest.approx((1 / (1 + np.exp(-logits))).sum() / labels.sum(), rel=1e-13)


@given(cases(), st.randoms(use_true_random=False))
def test_the_order_of_rows_changes_no_bit(case, random):
    labels, logits = case
    truth = 1 / (1 + np.exp(-logits))
    order = list(range(len(labels)))
    random.shuffle(order)
    assert evaluate(labels, logits, truth) == evaluate(labels[order], logits[order], truth[order])


@given(cases())
def test_turning_labels_and_logits_round_keeps_loss_and_auc(case):
    labels, logits = case
    found, turned = evaluate(labels, logits), evaluate(1 - labels, -logits)
    assert turned["auc"] == found["auc"]
    assert turned["logloss"] == pytest.approx(found["logloss"], rel=1e-14)


@given(cases(logits=TIED))
def test_a_rising_function_of_the_logits_keeps_the_auc(case):
    labels, logits = case
    assert evaluate(labels, logits)["auc"] == evaluate(labels, np.exp(logits) - 3)["auc"]


@given(cases(), st.integers(2, 4))
def test_repeating_all_rows_keeps_the_figures(case, times):
    labels, logits = case
    once, often = evaluate(labels, logits), evaluate(np.tile(labels, times), np.tile(logits, times))
    assert often["samples"] == times * once["samples"]
    for name in ("ne", "auc", "logloss", "calibration"):
        assert often[name] == pytest.approx(once[name], rel=1e-13)


def test_predicting_the_base_rate_gives_ne_one_auc_half_and_calibration_one():
    labels = np.array([1, 0, 0, 0])
    found = evaluate(labels, np.full(4, math.log(0.25 / 0.75)))
    assert found["ne"] == pytest.approx(1, abs=1e-15)
    assert found["auc"] == 0.5
    assert found["calibration"] == pytest.approx(1, abs=1e-15)
    assert "bayes_ne" not in found


def test_bayes_ne_is_the_ne_of_the_true_probabilities_and_is_best():
    random = np.random.default_rng(1)
    logits = random.normal(-1, 1.5, 200_000)
    truth = 1 / (1 + np.exp(-logits))
    labels = (random.random(len(truth)) < truth).astype(np.float32)
    exact = evaluate(labels, logits, truth)
    assert exact["bayes_ne"] == pytest.approx(exact["ne"], rel=1e-12)
    for wrong in (logits * 0.8, logits + 0.3, logits + random.normal(0, 0.5, len(logits))):
        found = evaluate(labels, wrong.astype(np.float32), truth.astype(np.float32))
        assert found["ne"] > found["bayes_ne"] == pytest.approx(exact["bayes_ne"], rel=1e-6)


def test_extreme_logits_cost_what_they_say_and_never_overflow():
    found = evaluate([1, 0], np.array([-1000.0, 1000.0], dtype=np.float32))
    assert found["logloss"] == 1000.0
    assert found["auc"] == 0.0
    assert evaluate([1, 0], [1000.0, -1000.0])["logloss"] == 0.0


def test_a_certain_truth_that_float32_rounded_stays_finite():
    assert math.isfinite(evaluate([1, 0, 0], [0.0, 0.0, 0.0], np.array([0, 1, 0.5], dtype=np.float32))["bayes_ne"])


def test_blocks_change_nothing_but_the_last_bits(monkeypatch):
    random = np.random.default_rng(2)
    labels, logits = random.integers(0, 2, 5000), random.normal(size=5000).round(1)
    whole = evaluate(labels, logits)
    monkeypatch.setattr(metrics_module, "BLOCK_ROWS", 7)
    blocks = evaluate(labels, logits)
    assert blocks["auc"] == whole["auc"]
    assert blocks == pytest.approx(whole, rel=1e-14)


@settings(max_examples=20)
@given(cases(logits=FINITE))
def test_float32_logits_give_what_their_float64_values_give(case):
    labels, logits = case
    assert evaluate(labels.astype(np.float32), logits.astype(np.float32)) == evaluate(labels.astype(bool), logits)


def steps_of(function, *arguments):
    """What ``function`` returns, and how many instructions Python executes for it: loops in NumPy are none."""
    steps = [0]

    def count(frame, event, _argument):
        frame.f_trace_opcodes = True
        steps[0] += event == "opcode"
        return count

    former = sys.gettrace()
    gc.collect()
    gc.disable()  # a collection would run what earlier tests left, whose instructions count as well
    sys.settrace(count)
    try:
        return function(*arguments), steps[0]
    finally:
        sys.settrace(former)
        gc.enable()


def test_ten_million_rows_take_a_few_steps_a_block_so_seconds():
    """``make bench-gate`` has the seconds."""
    random = np.random.default_rng(3)
    logits = random.standard_normal(10_000_000, dtype=np.float32)
    labels = (random.random(len(logits), dtype=np.float32) < 0.25).astype(np.float32)
    evaluate(labels[:1000], logits[:1000])  # what it imports, it imports once
    few, block = (steps_of(evaluate, labels[:rows], logits[:rows])[1] for rows in (1000, metrics_module.BLOCK_ROWS))
    found, steps = steps_of(evaluate, labels, logits)
    assert 0 < few == block < 20_000
    assert steps <= 10 * block
    assert found["samples"] == 10_000_000
    assert found["auc"] == pytest.approx(0.5, abs=1e-3)


@pytest.mark.parametrize(
    ("labels", "logits", "truth", "message", "hint"),
    [
        ([], [], None, "no rows to evaluate", "data.split.test_share"),
        ([1, 1, 1], [0, 1, 2], None, "all 3 evaluated rows have label 1", "data.label.positive"),
        ([0, 0], [0, 1], None, "all 2 evaluated rows have label 0", "data.split.test_share"),
        ([0, 1, 2, 3], [0, 0, 0, 0], None, "2 of 4 labels are neither 0 nor 1, the first is 2", "data.label.negative"),
        ([0, 1, math.nan], [0, 0, 0], None, "1 of 3 labels are neither 0 nor 1, the first is nan", "data.label"),
        (
            [0, 1, 0, 1],
            [math.nan, math.inf, -math.inf, 0],
            None,
            "3 of 4 logits are not finite (1 NaN, 2 infinite)",
            "train.lr",
        ),
        ([0, 1], [0, 1], [0.5, 1.5], "1 of 2 true probabilities lie outside [0, 1], the first is 1.5", "force=true"),
    ],
)
def test_bad_rows_are_data_errors_with_a_hint(labels, logits, truth, message, hint):
    with pytest.raises(DataError) as caught:
        evaluate(np.array(labels), np.array(logits, dtype=np.float64), truth)
    assert message in caught.value.message
    assert hint in caught.value.hint
    assert caught.value.exit_code == 3


@pytest.mark.parametrize("logits", [[0.0], [[0.0, 1.0]]])
def test_unequal_lengths_are_the_callers_fault(logits):
    with pytest.raises(ValueError, match="expected"):
        evaluate([0, 1], logits)


def test_auc_of_groups():
    assert grouped_auc(np.array([10, 10]), np.array([0, 10])) == 1.0
    assert grouped_auc(np.array([10, 10]), np.array([10, 0])) == 0.0
    assert grouped_auc(np.array([10, 10]), np.array([5, 5])) == 0.5
    assert grouped_auc(np.array([10]), np.array([10])) == 0.5
    assert grouped_auc(np.array([2, 2]), np.array([1, 2])) == pytest.approx((1 * 0.5 + 2 * 1) / 3)


@given(cases())
def test_auc_of_groups_is_that_of_their_rows(case):
    labels, logits = case
    scores, place = np.unique(logits, return_inverse=True)
    clicks = np.bincount(place, labels, minlength=len(scores))
    assert grouped_auc(np.bincount(place), clicks) == pytest.approx(evaluate(labels, logits)["auc"], abs=1e-12)


@given(cases())
def test_entropies_of_rates_and_of_counts_are_the_same(case):
    labels, _ = case
    clicks, rows = int(labels.sum()), len(labels)
    assert entropy_of_rate(np.array([clicks / rows]), np.log, np.log1p)[0] == pytest.approx(
        base_entropy(clicks, rows - clicks), rel=1e-13
    )


@given(cases())
def test_training_reports_the_ne_that_evaluation_finds(case):
    from pipeline.training.train_metrics import Sums

    labels, logits = case
    figures = evaluate(labels, logits)
    sums = Sums(rows=float(len(labels)), positives=float(labels.sum()), loss=figures["logloss"] * len(labels))
    assert sums.ne == pytest.approx(figures["ne"], rel=1e-14)
    assert Sums(rows=3.0, positives=3.0, loss=1.0).ne is None


@given(st.integers(2, 10**7), st.floats(0.01, 3.0), st.data())
def test_the_window_of_training_rounds_as_it_always_did(rows, loss, data):
    from pipeline.training.train_metrics import Sums

    clicks = data.draw(st.integers(1, rows - 1))
    rate, mean = clicks / rows, (loss * rows) / rows
    known = mean / -(rate * math.log(rate) + (1 - rate) * math.log1p(-rate))
    assert Sums(rows=float(rows), positives=float(clicks), loss=loss * rows).ne == known
