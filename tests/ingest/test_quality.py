"""Checks of what is in the logs: quarantine's share, drift from the day before, features that give the label away."""

import numpy as np
import pytest

from pipeline.config import ChecksConfig, DenseFeature, DriftLimits, SparseFeature, SplitConfig
from pipeline.core.errors import DataError
from pipeline.ingest.quality import BINS, left_out_auc, psi
from pipeline.ingest.sketch import Sketch

from .conftest import csv_config
from .test_days import Nights, config_of, write_day


@pytest.fixture
def nights(tmp_path):
    return Nights(tmp_path)


def day_lines(day, rows=2000, *, rate=0.3, shift=0.0, ids=20, missing=0.0, seed=0):
    rng = np.random.default_rng(seed)
    lines = []
    for value, name in zip(rng.normal(50 + shift, 10, rows), rng.integers(0, ids, rows), strict=True):
        x = "" if rng.random() < missing else f"{value:.3f}"
        lines.append(f"{int(rng.random() < rate)},{x},id{name},{day}")
    return lines


def two_days(nights, tmp_path, checks=None, **second):
    write_day(tmp_path, "2026-01-01", day_lines("2026-01-01"))
    write_day(tmp_path, "2026-01-02", day_lines("2026-01-02", seed=1, **second))
    nights.ingest(config_of(tmp_path, "2026-01-01"))
    sparse = {
        "c": SparseFeature(),
        "h": SparseFeature(column="c", mapping="hash", rows=12),
        "b": SparseFeature(column="x", bins=5),
    }
    nights.ingest(config_of(tmp_path, "2026-01-01", sparse=sparse))
    nights.said.clear()
    return nights.ingest(config_of(tmp_path, "2026-01-02", checks=checks or ChecksConfig(), sparse=sparse))


def test_a_number_that_was_the_same_in_all_rows_has_moved_when_it_is_another_one() -> None:
    """A weekday in a log of one day."""
    days = [Sketch(), Sketch(), Sketch()]
    for day, value in zip(days, (3.0, 4.0, 3.0), strict=True):
        day.add(np.full(100, value), np.zeros(100, np.int64))
    then = days[0].distribution(BINS)
    first = np.array(then["shares"])
    assert psi(first, days[1].shares_of(then)) > 1 and psi(first, days[2].shares_of(then)) == 0


def test_days_alike_say_nothing(nights, tmp_path, caplog):
    dataset = two_days(nights, tmp_path)
    report = dataset.json("quality.json")
    assert report["checks"]["warnings"] == dataset.summary["warnings"] == []
    assert report["checks"]["against"].startswith("datasets/d/2026-01-01/")
    figures = report["checks"]["drift"]
    assert all(figures[name]["psi"] < 0.05 for name in "xchb")
    assert set(figures) == {"label", "x", "c", "h", "b"}
    assert not [record for record in caplog.records if record.levelname == "WARNING"]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"rate": 0.5}, ["label rate was 0."]),
        ({"shift": 15.0}, ["feature 'x': its values moved, PSI ", "feature 'b': its values moved, PSI "]),
        (
            {"missing": 0.2},
            ["feature 'x': missing share was 0, is now 0.", "feature 'b': missing share was 0, is now 0."],
        ),
        (
            {"ids": 60},
            [
                "feature 'c': number of distinct values was 20, is now 60",
                "feature 'c': its values moved, PSI",
                "feature 'h': number of distinct values was 20, is now 60",
            ],
        ),
    ],
)
def test_what_moves_is_named(nights, tmp_path, change, said, caplog):
    warnings = two_days(nights, tmp_path, **change).summary["warnings"]
    for text in said:
        assert any(text in line for line in warnings), (text, warnings)
    assert [record.message for record in caplog.records if record.levelname == "WARNING"] == warnings


def test_missing_values_are_named_before_values_that_moved_and_those_by_how_far(nights, tmp_path):
    warnings = two_days(nights, tmp_path, missing=0.2, shift=15.0, rate=0.5).summary["warnings"]
    kinds = [line.partition(": ")[2].split(" ")[0] for line in warnings[1:]]
    assert warnings[0].startswith("label rate was ") and kinds == sorted(kinds, key=["missing", "number", "its"].index)
    indices = [float(line.rpartition("PSI ")[2]) for line in warnings if "PSI" in line]
    assert len(indices) > 1 and indices == sorted(indices, reverse=True)


def test_features_that_are_left_out_are_not_lost_and_not_found_again(nights, tmp_path):
    left_out = {"2026-01-01": [], "2026-01-02": ["x", "c"], "2026-01-03": []}
    for seed, (day, names) in enumerate(left_out.items()):
        write_day(tmp_path, day, day_lines(day, seed=seed))
        checks = nights.ingest(config_of(tmp_path, day, leave_out=names)).json("quality.json")["checks"]
        assert checks["warnings"] == [] and set(checks["drift"]) <= {"label"}


def test_thresholds_hold_a_day(nights, tmp_path):
    checks = ChecksConfig(hold=DriftLimits(psi=0.5))
    with pytest.raises(DataError, match="hold the logs of 2026-01-02: feature 'x': its values moved") as caught:
        two_days(nights, tmp_path, checks=checks, shift=20.0)
    assert caught.value.exit_code == 3
    assert caught.value.hint == "data.checks.hold.psi=null, once the reason is known"
    assert "compared with datasets/d/2026-01-01/" in caught.value.message
    assert not nights.store.names("datasets/d/2026-01-02")


def test_a_label_rate_that_trebles_is_the_gates_question_unless_it_is_told_to_hold(nights, tmp_path):
    dataset = two_days(nights, tmp_path, rate=0.9)
    assert [line for line in dataset.summary["warnings"] if line.startswith("label rate was 0.")]
    checks = ChecksConfig(hold=DriftLimits(label_rate=1.0))
    with pytest.raises(DataError, match="hold the logs of 2026-01-02: label rate was 0.*is now 0.9"):
        two_days(Nights(tmp_path / "held"), tmp_path, checks=checks, rate=0.9)


def test_population_stability_index():
    assert psi(np.array([0.5, 0.5]), np.array([0.5, 0.5])) == 0
    assert psi(np.array([0.5, 0.5]), np.array([0.2, 0.8])) == pytest.approx(0.3 * np.log(2.5) + 0.3 * np.log(1.6))
    assert psi(np.array([1.0, 0.0]), np.array([0.9, 0.1])) > 0.5


def leaky_lines(kind, rows=1500):
    rng = np.random.default_rng(0)
    lines = []
    for i in range(rows):
        click = int(rng.random() < 0.3)
        x, c = rng.normal(), f"id{rng.integers(200)}"
        if kind == "dense":
            x = click * 10 + rng.random()
        if kind == "missing":
            x = "" if click else x
        if kind == "sparse":
            c = f"{'bought' if click else 'left'}{rng.integers(5)}"
        if kind == "unique":
            c = f"row{i}"
        lines.append(f"{click},{x},{c}")
    return lines


@pytest.mark.parametrize(("kind", "name"), [("dense", "x"), ("missing", "x"), ("sparse", "c")])
def test_a_feature_that_gives_the_label_away_stops_the_run(run_ingest, tmp_path, kind, name):
    path = tmp_path / "a.csv"
    path.write_text("\n".join(["label,x,c", *leaky_lines(kind)]))
    group = "sparse" if name == "c" else "dense"
    with pytest.raises(DataError, match=f"feature '{name}' alone predicts the label with AUC (0.99|1.0)") as caught:
        run_ingest(csv_config(path))
    assert caught.value.hint == f"~data.{group}.{name}, or data.checks.leak=warn"
    dataset = run_ingest(csv_config(path, checks=ChecksConfig(leak="warn")))
    assert dataset.json("quality.json")["checks"]["leaks"][name] > 0.99
    assert run_ingest(csv_config(path, checks=ChecksConfig(leak="off"))).summary["warnings"] == []


@pytest.mark.parametrize("kind", ["", "unique"])
def test_features_that_do_not_are_let_through(run_ingest, tmp_path, kind):
    path = tmp_path / "a.csv"
    path.write_text("\n".join(["label,x,c", *leaky_lines(kind)]))
    tags = {"c": SparseFeature(), "t": SparseFeature(column="c", separator="d")}
    assert run_ingest(csv_config(path, sparse=tags)).json("quality.json")["checks"]["leaks"] == {}


def test_a_rows_own_label_does_not_count():
    assert left_out_auc(np.ones(100, np.int64), np.r_[np.ones(50), np.zeros(50)]) == 0.5
    assert left_out_auc(np.array([50, 50]), np.array([50, 0])) == 1.0


def test_too_much_quarantine_stops_the_run(run_ingest, tmp_path):
    path = tmp_path / "a.csv"
    lines = [f"{i % 2},{'many' if i % 4 == 0 else i},a" for i in range(100)] + ["1,2"] * 3
    path.write_text("\n".join(["label,x,c", *lines]))
    config = csv_config(path, max_quarantine_share=0.2)
    with pytest.raises(DataError) as caught:
        run_ingest(config)
    assert "28 of 103 rows (27.2%) are quarantined, expected at most 20.0%" in caught.value.message
    assert "most are wrong in x (25), the line (3)" in caught.value.message
    assert "for example a.csv line 2: x is 'many', expected a finite number" in caught.value.message
    assert "data.max_quarantine_share=0.28" in caught.value.hint
    report = run_ingest(csv_config(path, max_quarantine_share=0.28)).json("quality.json")["quarantine"]
    assert (report["rows"], report["columns"]) == (28, {"x": 25, "(the line)": 3})
    assert report["reasons"] == {"x is not a finite number": 25, "wrong number of fields": 3}


def test_one_feature_that_is_a_number_and_one_that_is_none(run_ingest, tmp_path):
    """Checks run where there is nothing dense, and where a feature has no values at all."""
    path = tmp_path / "a.csv"
    path.write_text("\n".join(["label,x,c", *(f"{i % 2},,id{i % 3}" for i in range(1200))]))
    dataset = run_ingest(csv_config(path, dense={"x": DenseFeature()}, split=SplitConfig(test_share=0.0)))
    assert dataset.json("quality.json")["distribution"]["features"]["x"]["missing"] == 1
    assert run_ingest(csv_config(path, dense={})).summary["warnings"] == []
