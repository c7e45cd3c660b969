"""A version with a calibrator: fitted on rows that the gate does not judge, served, shown, and rolled back."""

from pathlib import Path

import numpy as np
import polars as pl
import pytest

from pipeline.cli import main
from pipeline.core.errors import ArtifactError
from pipeline.evaluation.calibration_curves import applied, shifts_of
from pipeline.publishing.served import ServedModel
from pipeline.records import CalibratorRecord, GateRecord, read
from pipeline.store import Store
from tests.commands import nightjar

STAGES = "ingest,plan,partition,train,evaluate,publish"
RUN = [
    "data=csv",
    "data.name=ads",
    "data.label.column=click",
    "+data.dense.price={}",
    "+data.sparse.site={rows: 20}",
    "+data.sparse.ad={rows: 60}",
    "+data.tasks.buy={given: click}",
    "+data.tasks.spend={kind: value}",
    "data.split.test_share=0.5",
    "model.embedding_dim=4",
    "model.bottom_mlp=[8]",
    "model.top_mlp=[8]",
    "train.threads_per_rank=1",
    "train.global_batch=256",
    "train.warmup_steps=2",
    "train.precision=fp32",
    "train.epochs=2",
    f"stages=[{STAGES}]",
    f"launch.inline=[{STAGES}]",
    "gate.max_calibration_error=null",
    "gate.max_ne=null",
    "gate.min_baseline_gain=null",
    "gate.max_ne_increase=null",
    "gate.best_of_last=1",
    "gate.max_psi=null",
    "gate.max_label_shift=null",
    "gate.max_ne_drift=null",
    "gate.max_serving_gap=0.01",
    "gate.slices=[ad]",
    "+gate.tasks.buy={max_ne: null, max_calibration_error: null}",
    "+gate.tasks.spend={max_calibration_error: null, max_increase: null}",
]
CALIBRATED = ["publish.calibrator.method=isotonic", "publish.calibrator.slices=site"]


@pytest.fixture(scope="module")
def store(tmp_path_factory) -> Store:
    """A training, published without a calibrator and then with one."""
    folder = tmp_path_factory.mktemp("calibrated")
    rng = np.random.default_rng(0)
    rows = 8_000
    site, ad, price = rng.integers(0, 8, rows), rng.integers(0, 40, rows), rng.lognormal(1, 1, rows)
    odds = 0.5 * np.sin(site) + 0.8 * np.cos(ad) - 1.0 - 0.2 * np.log(price)
    click = rng.random(rows) < 1 / (1 + np.exp(-odds))
    buy = click & (rng.random(rows) < 0.4)
    log = pl.DataFrame(
        {
            "click": click.astype(int),
            "buy": buy.astype(int),
            "spend": price.round(2),
            "price": price.round(2),
            "site": site,
            "ad": ad,
        }
    )
    log.write_csv(folder / "log.csv")
    place = Store(str(folder / "store"))
    for more in ([], CALIBRATED):
        done = nightjar("run", *RUN, f"data.path={folder}/log.csv", "run=mon", f"store={place.url}", *more)
        assert done.returncode == 0, done.stdout + done.stderr
    return place


def version(store: Store, number: int) -> str:
    name = next(n for n in store.names("models/ads") if n.startswith(f"v{number:05d}"))
    return f"models/ads/{name}"


def test_the_version_has_a_curve_for_each_task_with_classes_in_its_manifest(store: Store) -> None:
    path = version(store, 2)
    record = read(CalibratorRecord, store, f"{path}/calibrator.json")
    assert (record.method, record.slices, list(record.curves)) == ("isotonic", "site", ["click", "buy"])
    assert record.curves["click"].clicks > record.curves["buy"].clicks > 100
    assert "calibrator.json" in store.get(path, "publish").files
    assert store.read_json(f"{path}/serving.json")["calibrator"] == "calibrator.json"
    assert "calibrator.json" not in store.get(version(store, 1), "publish").files
    assert "calibrator" not in store.read_json(f"{version(store, 1)}/serving.json")


def test_the_gate_judges_the_calibrated_model_on_the_other_rows_and_shows_both(store: Store) -> None:
    plain, gate = (read(GateRecord, store, f"{version(store, number)}/gate.json") for number in (1, 2))
    assert plain.calibrated is None and set(plain.reliability or {}) == {"candidate"}
    assert set(gate.reliability or {}) == {"candidate", "uncalibrated"}
    about = gate.calibrated
    assert about is not None and about.before is not None and gate.candidate is not None
    assert about.rows + gate.rows == plain.rows and about.rows == pytest.approx(plain.rows / 2, rel=0.1)
    assert about.before.ne.point == pytest.approx(gate.serving.trained_ne if gate.serving else 0, rel=1e-3)
    assert abs(gate.candidate.calibration.point - 1) < 0.08
    assert gate.tasks is not None and abs(gate.tasks["buy"].calibration.point - 1) < 0.15
    assert gate.serving is not None and gate.serving.gap == pytest.approx(0, abs=1e-3), "compared without a calibrator"
    pages = [path.read_text() for path in Path(store.full("runs/mon/publish")).glob("*/gate.*")]
    assert sum("The calibrator is isotonic on" in page for page in pages) == 2


def test_predict_and_the_served_model_calibrate(store: Store, tmp_path: Path) -> None:
    config = (Path(store.full(version(store, 1))) / "config.yaml").read_text()
    log = next(line.split(": ")[1] for line in config.splitlines() if line.strip().startswith("path: ")).strip()
    scores = []
    for number in (1, 2):
        out = tmp_path / f"{number}.parquet"
        name = version(store, number).rpartition("/")[2]
        assert main(["predict", log, "--store", store.url, "--version", name, "--out", str(out)]) == 0
        scores.append(pl.read_parquet(out))
    record = read(CalibratorRecord, store, f"{version(store, 2)}/calibrator.json")
    sites = pl.read_csv(log)["site"]
    vocabulary = pl.read_parquet(f"{store.full(version(store, 2))}/vocab/site.parquet")
    rows = dict(zip(vocabulary["id"].to_list(), vocabulary["row"].to_list(), strict=True))
    codes = np.array([rows.get(str(site), 1) for site in sites])
    for column, task in (("probability", "click"), ("buy", "buy")):
        raw, ours = (each[column].to_numpy() for each in scores)
        curve = record.curves[task]
        expected = applied(curve, np.log(raw / (1 - raw))) + shifts_of(curve, codes)
        assert np.log(ours / (1 - ours)) == pytest.approx(expected, abs=1e-4)
    assert scores[0]["spend"].equals(scores[1]["spend"])


def test_models_show_says_it_and_a_rollback_serves_without(store: Store, capfd) -> None:
    flags = ["--store", store.url]
    assert main(["models", "show", "ads", *flags]) == 0
    shown = capfd.readouterr().out
    assert "calibrator isotonic on " in shown and "by site (" in shown and "before it calibration" in shown
    assert "Calibrator: isotonic on " in (Path(store.full(version(store, 2))) / "README.md").read_text()
    assert main(["rollback", "ads", *flags]) == 0
    assert main(["models", "show", "ads", *flags]) == 0
    assert "calibrator" not in capfd.readouterr().out
    assert main(["models", "promote", "ads", version(store, 2).rpartition("/")[2], *flags]) == 0
    assert main(["models", "show", "ads", *flags]) == 0
    assert "calibrator isotonic on " in capfd.readouterr().out


def test_a_damaged_or_missing_calibrator_scores_nothing(store: Store) -> None:
    folder = Path(store.full(version(store, 2)))
    file, sound = folder / "calibrator.json", (folder / "calibrator.json").read_text()
    try:
        file.write_text(sound.replace("nightjar-calibrator-1", "nightjar-calibrator-9"))
        with pytest.raises(ArtifactError, match="has format nightjar-calibrator-9, expected nightjar-calibrator-1"):
            ServedModel(folder, 1 << 20)
        file.unlink()
        with pytest.raises(ArtifactError, match="is no calibrator: .*No such file"):
            ServedModel(folder, 1 << 20)
        assert ServedModel(folder, 1 << 20, calibrate=False).calibrator is None
    finally:
        file.write_text(sound)


def test_a_slice_must_be_a_feature() -> None:
    done = nightjar("run", *RUN, *CALIBRATED[:1], "publish.calibrator.slices=sit", "data.path=x", "run=other")
    assert done.returncode == 2
    assert "publish.calibrator.slices is 'sit', expected a categorical feature" in done.stderr
    assert "publish.calibrator.slices=site" in done.stderr
