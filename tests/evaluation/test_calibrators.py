"""Calibrators: they rise strictly, keep the order and so the AUC, match the clicks, and shrink the shifts of slices."""

import json

import numpy as np
import pytest

from pipeline.config.publish import CalibratorConfig, CalibratorOptions
from pipeline.core.errors import ConfigError, DataError
from pipeline.evaluation import evaluate
from pipeline.evaluation.calibration_curves import applied, calibrated, fit_curve, shifts_of
from pipeline.evaluation.metrics import sigmoid
from pipeline.records import CalibrationCurve, CalibratorRecord
from pipeline.specs import CALIBRATORS

ALL = [*CALIBRATORS]
ISOTONIC = CALIBRATORS.get("isotonic")


def drawn(rows: int, rate: float = -2.0, seed: int = 0, slices: int = 0):
    """Labels, distorted logits (float32), slice of each row, and the true probabilities."""
    rng = np.random.default_rng(seed)
    true = rng.normal(rate, 1.3, rows)
    codes = rng.integers(0, max(slices, 1), rows)
    off = rng.normal(0, 0.5, max(slices, 1))[codes] if slices else 0.0
    logits = (0.6 * true + 0.05 * (true - rate) ** 2 + 1 - off).astype(np.float32)
    truth = sigmoid(true)
    return (rng.random(rows) < truth).astype(np.float32), logits, codes, truth


@pytest.mark.parametrize("method", ALL, ids=lambda spec: spec.name)
def test_a_curve_rises_strictly_keeps_the_auc_and_predicts_as_many_clicks_as_there_are(method) -> None:
    labels, logits, _, truth = drawn(60_000)
    curve = fit_curve(method, labels, logits)
    far = applied(curve, np.linspace(-60, 60, 100_001))
    assert (np.diff(far) > 0).all() and np.isfinite(far).all()
    values = applied(curve, logits)
    before, after = evaluate(labels, logits), evaluate(labels, values.astype(np.float32))
    assert after["auc"] == pytest.approx(before["auc"], abs=1e-6)
    assert after["calibration"] == pytest.approx(1, abs=1e-5) and abs(before["calibration"] - 1) > 0.5
    assert after["ne"] < before["ne"]
    assert sigmoid(values).sum() == pytest.approx(truth.sum(), rel=0.03)
    assert (curve.rows, curve.clicks) == (60_000, int(labels.sum()))


@pytest.mark.parametrize("method", ALL, ids=lambda spec: spec.name)
def test_any_order_of_the_rows_gives_the_same_bits(method) -> None:
    labels, logits, codes, _ = drawn(5_000, slices=7)
    weights = np.random.default_rng(3).choice([0.0, 0.5, 2.0], 5_000)
    order = np.random.default_rng(1).permutation(5_000)
    one = fit_curve(method, labels, logits, weights, codes)
    assert fit_curve(method, labels[order], logits[order], weights[order], codes[order]) == one


def test_isotonic_follows_a_curve_that_no_line_fits() -> None:
    rng = np.random.default_rng(0)
    logits = rng.uniform(-3, 3, 200_000)
    truth = sigmoid(np.where(logits < 0, -3.0 + 0.2 * logits, -3.0 + 1.5 * logits))
    labels = (rng.random(200_000) < truth).astype(float)
    off = {}
    for name in ("platt", "isotonic", "histogram"):
        values = sigmoid(applied(fit_curve(CALIBRATORS.get(name), labels, logits), logits))
        off[name] = max(abs(values[part].mean() / truth[part].mean() - 1) for part in (logits < 0, logits > 2))
    assert off["isotonic"] < 0.05 and off["histogram"] < 0.12 and off["platt"] > 0.2


@pytest.mark.parametrize("method", ALL, ids=lambda spec: spec.name)
def test_few_rows_give_no_probability_of_0_or_1(method) -> None:
    logits = np.array([-3.0, -2, -1, 0, 1, 2], np.float32)
    labels = np.array([0.0, 0, 0, 1, 1, 1])  # a threshold separates them
    curve = fit_curve(method, labels, logits)
    predicted = sigmoid(applied(curve, logits))
    assert (predicted > 0.001).all() and (predicted < 0.999).all() and predicted.mean() == pytest.approx(0.5)
    one = fit_curve(method, np.array([0.0, 1.0]), np.array([0.5, 0.5]))
    assert sigmoid(applied(one, np.array([0.5]))) == pytest.approx(0.5)


def test_a_block_has_rows_of_both_classes_and_equal_logits_share_one() -> None:
    labels, logits, _, _ = drawn(20_000)
    rounded = np.round(logits, 1)
    curve = fit_curve(ISOTONIC, labels, rounded)
    assert 5 < len(curve.x) < len(np.unique(rounded)) and (np.diff(curve.x) > 0).all() and (np.diff(curve.y) > 0).all()


def test_a_model_that_ranks_backwards_still_gets_a_rising_curve() -> None:
    labels, logits, _, _ = drawn(5_000)
    for method in ALL:
        curve = fit_curve(method, labels, -logits)
        assert curve.slope > 0 and (np.diff(applied(curve, np.linspace(-9, 9, 100))) > 0).all()


def test_weights_count_as_so_many_rows() -> None:
    labels, logits, _, _ = drawn(4_000)
    weights = np.random.default_rng(0).integers(0, 4, 4_000)
    again = np.repeat(np.arange(4_000), weights)
    weighted = fit_curve(CALIBRATORS.get("platt"), labels, logits, weights)
    repeated = fit_curve(CALIBRATORS.get("platt"), labels[again], logits[again])
    assert (weighted.slope, *weighted.y) == pytest.approx((repeated.slope, *repeated.y), rel=2e-3)


def test_rows_of_one_class_are_refused() -> None:
    with pytest.raises(DataError, match="3 rows, 0 of them with a click, expected both classes") as raised:
        fit_curve(ISOTONIC, np.zeros(3), np.arange(3.0))
    assert "publish.calibrator.share" in raised.value.hint


def test_slices_get_what_their_rows_tell_and_no_more() -> None:
    labels, logits, codes, truth = drawn(200_000, slices=10)
    plain, sliced = (fit_curve(ISOTONIC, labels, logits, None, each) for each in (None, codes))

    def worst(values) -> float:
        return max(abs(sigmoid(values[codes == c]).sum() / truth[codes == c].sum() - 1) for c in range(10))

    assert plain.shifts is None and worst(applied(plain, logits)) > 0.2
    assert worst(applied(sliced, logits) + shifts_of(sliced, codes)) < 0.05
    few = np.where(np.arange(200_000) < 20, 99, codes)  # one slice more, of twenty rows, most without a click
    small = fit_curve(ISOTONIC, labels, logits, None, few)
    assert abs(small.shifts["99"]) < 0.5 * max(map(abs, small.shifts.values()))


def test_slices_that_do_not_differ_get_almost_nothing() -> None:
    labels, logits, _, _ = drawn(50_000)
    curve = fit_curve(ISOTONIC, labels, logits, None, np.arange(50_000) % 50)
    assert max(map(abs, (curve.shifts or {"0": 0.0}).values())) < 0.05


def test_only_the_largest_slices_have_shifts() -> None:
    labels, logits, codes, _ = drawn(20_000, slices=10)
    codes = np.where(codes < 5, codes, 0)
    curve = fit_curve(ISOTONIC, labels, logits, None, codes, 2)
    assert len(curve.shifts) == 2 and "0" in curve.shifts


def test_a_record_gives_the_same_bits_after_it_was_written_and_covers_tasks() -> None:
    labels, logits, codes, _ = drawn(5_000, slices=4)
    curve = fit_curve(ISOTONIC, labels, logits, None, codes)
    record = CalibratorRecord(method="isotonic", share=0.5, slices="C1", curves={"click": curve, "sale": curve})
    again = CalibratorRecord.from_json(json.loads(json.dumps(record.to_json())))
    assert again == record
    one = calibrated(again, None, logits, {"C1": codes})
    three = calibrated(again, ["spent", "sale"], np.stack([logits] * 3, axis=1), {"C1": codes})
    assert one.dtype == np.float32 and np.array_equal(three, np.stack([one, logits, one], axis=1))


def test_a_line_goes_on_beyond_the_knots() -> None:
    curve = CalibrationCurve(x=[-1.0, 1.0], y=[-2.0, 0.0], slope=0.5)
    assert applied(curve, np.array([-3.0, -1, 0, 1, 5])).tolist() == [-3.0, -2.0, -1.0, 0.0, 2.0]


def test_options_belong_to_their_calibrator() -> None:
    CalibratorConfig(method="isotonic", options=CalibratorOptions(min_clicks=10)).check("publish.calibrator")
    with pytest.raises(ConfigError, match="options.bins is 5, but publish.calibrator.method=isotonic"):
        CalibratorConfig(method="isotonic", options=CalibratorOptions(bins=5)).check("publish.calibrator")
    with pytest.raises(ConfigError, match="method=platt does not have this option; it has: none"):
        CalibratorConfig(method="platt", options=CalibratorOptions(min_clicks=10)).check("publish.calibrator")
    with pytest.raises(ConfigError, match="method is null: there is no calibrator"):
        CalibratorConfig(share=0.2).check("publish.calibrator")


@pytest.mark.parametrize("method", ALL, ids=lambda spec: spec.name)
@pytest.mark.parametrize("shift", [60.0, -60.0])
def test_a_model_that_is_sure_of_every_row_is_calibrated_for_the_gate(method, shift):
    """Its probabilities are all 1, or nearly 0: the gate judges such a model, so no calibrator may fail on it."""
    rng = np.random.default_rng(0)
    labels = (rng.random(5000) < 0.1).astype(np.float32)
    logits = (rng.normal(size=5000) + labels + shift).astype(np.float32)
    curve = fit_curve(method, labels, logits)
    assert sigmoid(applied(curve, logits)).sum() == pytest.approx(labels.sum(), rel=1e-3)
