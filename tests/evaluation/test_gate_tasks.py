"""The gate's figures of further tasks and of rows with weights, and its questions about them."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from pipeline.config import GateConfig, TaskLimits
from pipeline.core.errors import DataError
from pipeline.evaluation import ScoredRows, ScoredTask, SliceColumn, evaluate, judge, measure, reliability
from pipeline.evaluation.bootstrap import block_sums, resample
from pipeline.evaluation.metrics import evaluate_tasks
from pipeline.records import GateRecord, TaskColumn

ROWS = 4000
RNG = np.random.default_rng(0)
TRUTH = RNG.normal(-1, 1.2, ROWS).astype(np.float32)
CLICKED = (RNG.random(ROWS) < 1 / (1 + np.exp(-TRUTH))).astype(np.float32)
RARE = np.where(RNG.random(ROWS) < 0.3, np.nan, (RNG.random(ROWS) < 1 / (1 + np.exp(2 - TRUTH)))).astype(np.float32)
COUNT = RNG.poisson(np.exp(0.5 * TRUTH)).astype(np.float32)
NOISE = RNG.normal(0, 1, ROWS).astype(np.float32)
QUIET = {"max_psi": None, "max_ne_drift": None, "max_label_shift": None, "min_coverage": None, "slices": []}


def scored(rare: np.ndarray, count: np.ndarray, **more: np.ndarray) -> ScoredRows:
    return ScoredRows(
        labels=CLICKED,
        candidate=TRUTH,
        incumbent=TRUTH,
        tasks={
            "rare": ScoredTask("binary", RARE, rare, TRUTH - 2, more.get("weights")),
            "count": ScoredTask("count", COUNT, count, 0.5 * TRUTH, more.get("weights")),
        },
        **more,
    )


def judged(first: np.ndarray, second: np.ndarray, **limits: TaskLimits) -> GateRecord:
    settings = GateConfig(tasks=limits, **QUIET)  # type: ignore[arg-type]
    return judge(measure(scored(first, second), settings), settings)


def test_figures_are_those_of_the_rows_with_a_label() -> None:
    record = judged(TRUTH - 2, 0.5 * TRUTH)
    assert record.tasks is not None
    there = ~np.isnan(RARE)
    rare, count = record.tasks["rare"], record.tasks["count"]
    assert (rare.figure, rare.rows, count.figure, count.rows) == ("NE", int(there.sum()), "RMSE", ROWS)
    figures = evaluate(RARE[there], (TRUTH - 2)[there])
    assert rare.candidate.point == pytest.approx(figures["ne"])
    assert rare.auc.point == pytest.approx(figures["auc"])
    assert rare.change == pytest.approx((0, 0, 0))
    error = np.sqrt(np.mean((np.exp(0.5 * TRUTH) - COUNT) ** 2))
    assert count.candidate.point == pytest.approx(error)
    assert GateRecord.from_json(record.to_json()) == record


def test_a_task_that_got_worse_beyond_doubt_holds_the_model_and_names_its_setting() -> None:
    assert judged(TRUTH - 2, 0.5 * TRUTH).reasons == ()
    worse = judged(TRUTH - 2 + 0.8 * NOISE, 0.5 * TRUTH)
    assert [each.split(" is ")[0] for each in worse.reasons] == ["NE of task rare"]
    assert "(gate.tasks.rare.max_increase)" in worse.reasons[0]
    assert judged(TRUTH - 2 + 0.8 * NOISE, 0.5 * TRUTH, rare=TaskLimits(max_increase=None)).reasons == ()
    counts = judged(TRUTH - 2, 0.5 * TRUTH + 0.5 * NOISE)
    assert "RMSE of task count is" in counts.reasons[0]


@pytest.mark.parametrize(
    ("limits", "words"),
    [
        ({"rare": TaskLimits(max_ne=0.5)}, "above 0.5 (gate.tasks.rare.max_ne)"),
        ({"rare": TaskLimits(min_auc=0.99)}, "below 0.99 (gate.tasks.rare.min_auc)"),
        ({"count": TaskLimits(max_rmse=0.1)}, "above 0.1 (gate.tasks.count.max_rmse)"),
    ],
)
def test_every_limit_is_a_question(limits: dict[str, TaskLimits], words: str) -> None:
    assert words in judged(TRUTH - 2, 0.5 * TRUTH, **limits).reasons[0]


def test_calibration_of_a_task_may_have_a_limit() -> None:
    record = judged(TRUTH - 1, 0.5 * TRUTH, rare=TaskLimits(max_calibration_error=0.1, max_increase=None))
    assert "(gate.tasks.rare.max_calibration_error)" in record.reasons[0]


def test_predictions_of_a_task_that_are_not_finite_hold_the_model() -> None:
    bad = TRUTH.copy()
    bad[3] = np.nan
    assert judged(bad, 0.5 * TRUTH).reasons[0] == "1 of the candidate's predictions are not finite"


def test_a_task_without_labels_is_a_warning() -> None:
    one = replace(scored(TRUTH, TRUTH), tasks={"rare": ScoredTask("binary", np.full(ROWS, np.nan, np.float32), TRUTH)})
    settings = GateConfig(**QUIET)  # type: ignore[arg-type]
    record = judge(measure(one, settings), settings)
    assert record.reasons == ()
    assert "no test row has a label of task rare that allows figures" in record.warnings


def test_a_row_of_weight_three_counts_as_three_rows() -> None:
    rng = np.random.default_rng(1)
    weights = rng.integers(0, 4, ROWS)
    each = np.repeat(np.arange(ROWS), weights)
    own = weights.astype(np.float32)
    plain, weighted = evaluate(CLICKED[each], TRUTH[each]), evaluate(CLICKED, TRUTH, weights=own)
    for name in ("ne", "auc", "logloss", "calibration"):
        assert weighted[name] == pytest.approx(plain[name])
    shuffled = rng.permutation(ROWS)
    assert evaluate(CLICKED[shuffled], TRUTH[shuffled], weights=own[shuffled]) == weighted
    tasks = (TaskColumn(name="count", kind="count"),)
    logits = np.stack([TRUTH, 0.5 * TRUTH], axis=1)
    one = evaluate_tasks(tasks, {"count": COUNT}, logits, own)["count"]
    other = evaluate_tasks(tasks, {"count": COUNT[each]}, logits[each])["count"]
    assert (one.rmse, one.unexplained, one.calibration) == pytest.approx(
        (other.rmse, other.unexplained, other.calibration)
    )
    curve = reliability(CLICKED, TRUTH, bins=1, weights=own)
    assert curve.observed == pytest.approx([CLICKED[each].mean(dtype=np.float64)])


def test_the_gates_figures_are_weighted_as_those_of_the_evaluation() -> None:
    weights = np.random.default_rng(2).uniform(0, 3, ROWS).astype(np.float32)
    record = measure(scored(TRUTH, TRUTH, trained=TRUTH, weights=weights), GateConfig(**QUIET))  # type: ignore[arg-type]
    figures = evaluate(CLICKED, TRUTH, weights=weights)
    assert record.candidate is not None
    for name in ("ne", "auc", "calibration"):
        assert getattr(record.candidate, name).point == pytest.approx(figures[name])
    assert record.serving.gap == pytest.approx(0.0)
    ones = np.ones(ROWS)
    blocks, draws = np.zeros(ROWS, np.int64), np.ones((2, 1))
    same = (resample(block_sums(CLICKED == 1, TRUTH, blocks, 1, own), draws) for own in (None, ones))
    first, second = ({name: each.point for name, each in figures.items()} for figures in same)
    assert first == pytest.approx(second)


def test_a_class_without_weight_is_no_class() -> None:
    clicks_only = CLICKED.copy()
    for weights, said in ((np.zeros_like(clicks_only), "0 of 4,000"), (clicks_only, "all of these have label 1")):
        with pytest.raises(DataError, match=said) as error:
            evaluate(CLICKED, TRUTH, weights=weights)
        assert "data.weight" in str(error.value.hint)


def test_a_task_whose_labels_have_no_weight_has_no_figures_and_is_a_warning() -> None:
    few = np.where(np.arange(ROWS) < 50, RARE, np.nan).astype(np.float32)
    weights = (np.arange(ROWS) >= 50).astype(np.float32)
    logits = np.stack([TRUTH, TRUTH, TRUTH], axis=1)
    tasks = (TaskColumn(name="rare", kind="binary"), TaskColumn(name="count", kind="count"))
    figures = evaluate_tasks(tasks, {"rare": few, "count": np.where(np.isnan(few), few, COUNT)}, logits, weights)
    assert [each.samples for each in figures.values()] == [0, 0]
    one = ScoredRows(
        labels=CLICKED,
        candidate=TRUTH,
        tasks={"rare": ScoredTask("binary", few, TRUTH, None, weights)},
        weights=weights,
    )
    settings = GateConfig(**QUIET)  # type: ignore[arg-type]
    record = judge(measure(one, settings), settings)
    assert record.reasons == ()
    assert "no test row has a label of task rare that allows figures" in record.warnings


def test_a_slice_whose_rows_have_no_weight_is_not_judged() -> None:
    codes = (np.arange(ROWS) % 2).astype(np.int64)
    weights = codes.astype(np.float32)
    settings = GateConfig(**{**QUIET, "slices": ["half"]})  # type: ignore[arg-type]
    record = measure(
        ScoredRows(
            labels=CLICKED,
            candidate=TRUTH,
            incumbent=TRUTH,
            slices={"half": SliceColumn(codes=codes)},
            weights=weights,
        ),
        settings,
    )
    assert [each.value for each in record.slices] == ["1"]
    assert judge(record, settings).reasons == ()
