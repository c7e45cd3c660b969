"""Intervals beside the figures of an evaluation, and the warning where the rows cannot tell."""

import math

import numpy as np
import pytest

from pipeline.evaluation import evaluate
from pipeline.evaluation.bootstrap import FEWEST, evaluation_intervals, placements
from pipeline.records import Evaluation, Result
from pipeline.report.html import ReportData, render
from pipeline.report.summary import doubts
from pipeline.specs import STAGES


def drawn(rows: int, seed: int, spread: float = 1.0) -> tuple[np.ndarray, np.ndarray]:
    """Labels and logits of a model that knows the log odds, which are normal with that ``spread``."""
    rng = np.random.default_rng(seed)
    logits = rng.normal(-1.0, spread, rows)
    return (rng.random(rows) < 1 / (1 + np.exp(-logits))).astype(np.int8), logits.astype(np.float32)


def test_the_figures_of_many_rows_lie_in_most_intervals_of_few():
    many = evaluate(*drawn(2_000_000, seed=0))
    held = {"ne_interval": 0, "auc_interval": 0}
    for seed in range(1, 101):
        for name, (low, high) in evaluation_intervals(*drawn(1_000, seed)).items():
            held[name] += low < many[name.removesuffix("_interval")] < high
    # Of 100 intervals of 95 %, fewer than 88 hold with a probability of 3 in 1,000.
    assert min(held.values()) >= 88


def test_more_rows_narrow_the_interval_as_their_root():
    low, high = (np.ptp(evaluation_intervals(*drawn(rows, 3))["ne_interval"]) for rows in (2_000, 200_000))
    assert low / high == pytest.approx(10, rel=0.3)


def test_rows_that_count_as_none_change_nothing_but_the_blocks():
    labels, logits = drawn(5_000, 1)
    weights = np.ones(10_000, np.float32)
    weights[5_000:] = 0
    twice = evaluation_intervals(np.tile(labels, 2), np.tile(logits, 2), weights)
    once = evaluation_intervals(labels, logits)
    for name, ends in once.items():
        assert twice[name] == pytest.approx(ends, abs=0.01)


@pytest.mark.parametrize("label", [0, 1])
def test_a_class_of_few_rows_allows_no_interval(label):
    labels = np.full(1_000, 1 - label, np.int8)
    labels[: FEWEST - 1] = label
    logits = np.random.default_rng(0).normal(size=1_000).astype(np.float32)
    assert evaluation_intervals(labels, logits) == {}
    labels[FEWEST - 1] = label
    ends = evaluation_intervals(labels, logits)
    assert all(0 <= low < high and math.isfinite(high) for low, high in ends.values())
    assert ends["auc_interval"][1] <= 1


@pytest.mark.parametrize("label", [0, 1])
def test_a_class_that_lies_in_few_blocks_allows_no_interval(label):
    """A log in the order of sessions or labels: replicates draw blocks, and many would draw none of these rows."""
    labels = np.full(100_000, 1 - label, np.int8)
    labels[500:540] = label
    logits = np.random.default_rng(0).normal(size=100_000).astype(np.float32)
    assert evaluation_intervals(labels, logits) == {}
    labels[:: 100_000 // FEWEST] = label
    ends = evaluation_intervals(labels, logits)
    assert ends and all(math.isfinite(low) and low < high for low, high in ends.values())
    (line,) = doubts(Evaluation(samples=100_000, clicks=40, ne=0.9))
    assert "lie too close together" in line


@pytest.mark.parametrize(
    ("figures", "said"),
    [
        ({"samples": 3, "clicks": 1, "ne": 0.2, "auc": 1.0}, "too few"),
        ({"samples": 900, "clicks": 300, "ne": 0.99, "ne_interval": (0.97, 1.01)}, "may be as high as 1.010; 1 is"),
        ({"samples": 900, "clicks": 300, "ne": 0.9, "ne_interval": (0.88, 0.92)}, None),
        ({"samples": 900, "clicks": 300, "ne": 1.1, "ne_interval": (1.0, 1.2)}, None),  # its own lines say so
        ({"samples": 900, "ne": 0.9}, None),  # of an earlier release
        ({}, None),
    ],
)
def test_rows_that_cannot_tell_are_a_warning_with_what_to_do(figures, said):
    lines = doubts(Evaluation(**figures))
    assert len(lines) == (said is not None)
    assert all(said in text and "data.split.test_share" in text for text in lines)


def test_the_text_and_the_page_of_a_run_have_intervals_and_warnings():
    figures = Evaluation(samples=3, clicks=1, ne=0.2, auc=1.0, ne_interval=(0.1, 1.01), auc_interval=(0.4, 1.0))
    result = Result(run="r", status="done", eval=figures)
    lines = STAGES.get("evaluate").lines(result)["eval"]
    assert "on 3 test rows" in lines and any(line.startswith("warning: NE may be as high as 1.010") for line in lines)
    assert "95% intervals: NE 0.10000 to 1.01000, AUC 0.40000 to 1.00000" in lines
    page = render(ReportData(result=result))
    assert "<h2>Warnings</h2>" in page and "NE may be as high as 1.010" in page


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("digits", [0, 12])
def test_placements_are_shares_of_the_rows_of_the_other_class(weighted: bool, digits: int) -> None:
    """To the bit what searching each score among the sorted ones gives; few digits make ties."""
    rng = np.random.default_rng(4)
    values, clicked = np.round(rng.normal(0, 2, 4000), digits), rng.random(4000) < 0.3
    weights = rng.choice([0.0, 0.7, 2.0], 4000) if weighted else None
    above, below = placements(clicked, values, weights)

    def lower_share(others: np.ndarray) -> np.ndarray:
        order = np.argsort(values[others], kind="stable")
        ranked, counts = values[others][order], np.ones(others.sum()) if weights is None else weights[others][order]
        sums = np.append(0.0, np.cumsum(counts))
        ends = (sums[np.searchsorted(ranked, values[~others], side)] for side in ("left", "right"))
        return sum(ends) / (2.0 * sums[-1])

    assert np.array_equal(above[clicked], lower_share(~clicked)) and not above[~clicked].any()
    assert np.array_equal(below[~clicked], 1 - lower_share(clicked)) and not below[clicked].any()


@pytest.mark.parametrize("share", [0.0, 1.0])
def test_placements_of_one_class_are_0(share: float) -> None:
    clicked = np.random.default_rng(0).random(50) < share
    assert not np.any(placements(clicked, np.arange(50.0)))
    other = np.arange(50) < 10
    assert not np.any(placements(other, np.arange(50.0), np.where(other, 1.0, 0.0))), "no other row has a weight"
