"""Vectors, lists with weights and maps, from the log to scores: published, judged and served as they were trained."""

import json
from pathlib import Path

import numpy as np
import polars as pl
import pytest

from pipeline import cli
from pipeline.evaluation import evaluate
from pipeline.evaluation.calibration_curves import applied, shifts_of
from pipeline.evaluation.metrics import sigmoid
from pipeline.ingest.record_transform import RecordTransform
from pipeline.publishing.served import ServedModel
from pipeline.records import CalibratorRecord, GateRecord, read, weight_column
from pipeline.serving.scorer import _Lists
from pipeline.stages.release_gate import chosen_rows
from pipeline.store import Store
from pipeline.training.parquet import SplitReader
from tests.publishing import made

ROWS, SEED = 3000, 7
STAGES = "ingest,plan,partition,train,evaluate,publish"
RUN = [
    "data.name=ads",
    "data.label.column=click",
    "data.sparse_defaults.min_count=1",
    "+data.dense.price={}",
    "+data.dense.vector={width: 3}",
    "+data.dense.direction={width: 3, transform: unit}",
    "+data.sparse.ad={}",
    "+data.sparse.pages={holds: list}",
    "+data.sparse.topics={weights: scores, max_ids: 3}",
    "+data.sparse.interests={holds: map}",
    "data.split.test_share=0.4",
    "model.embedding_dim=4",
    "model.bottom_mlp=[8]",
    "model.top_mlp=[8]",
    "train.threads_per_rank=1",
    "train.global_batch=128",
    "train.warmup_steps=2",
    "train.precision=fp32",
    "train.lr=0.01",
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
    "gate.min_rows=100",
    "gate.replicates=50",
    "publish.quantise=fp32",
    "run=mon",
    f"seed={SEED}",
]
CALIBRATED = ["publish.calibrator.method=platt", "publish.calibrator.slices=topics"]


def log_of(rows: int, seed: int) -> pl.DataFrame:
    """A log of every kind of column, with missing values of each."""
    rng = np.random.default_rng(seed)

    def some(values: list, share: float = 0.05) -> list:
        return [None if gone else value for gone, value in zip(rng.random(rows) < share, values, strict=True)]

    ids = [rng.choice(12, rng.integers(0, 5), replace=False) for _ in range(rows)]
    weights = [np.round(rng.random(len(each)), 3) for each in ids]
    vector, ad = np.round(rng.normal(size=(rows, 3)), 4), rng.integers(0, 20, rows)
    lift = np.array([float((np.cos(each) * weight).sum()) for each, weight in zip(ids, weights, strict=True)])
    click = rng.random(rows) < 1 / (1 + np.exp(1 - vector[:, 0] - np.sin(ad) - lift))
    gone = rng.random(rows) < 0.05
    topics = [None if no else [f"t{one}" for one in each] for no, each in zip(gone, ids, strict=True)]
    return pl.DataFrame(
        {
            "click": click.astype(np.int8),
            "ad": [f"a{each}" for each in ad],
            "price": some(rng.lognormal(1, 1, rows).tolist()),
            "vector": some(vector.tolist()),
            "direction": some((vector[:, ::-1] * 5).tolist()),
            "pages": some([each.tolist() for each in ids]),
            "topics": topics,
            "scores": [None if no else each.tolist() for no, each in zip(gone, weights, strict=True)],
            "interests": some(
                [
                    [{"key": f"i{one}", "value": float(weight)} for one, weight in zip(each, own, strict=True)]
                    for each, own in zip(ids, weights, strict=True)
                ]
            ),
        }
    )


def write_jsonl(log: pl.DataFrame, path: Path) -> None:
    """The same rows as JSON, maps as objects."""
    with path.open("w") as sink:
        for row in log.iter_rows(named=True):
            if row["interests"] is not None:
                row["interests"] = {pair["key"]: pair["value"] for pair in row["interests"]}
            sink.write(json.dumps(row) + "\n")


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """Two days' logs, and a store with a version of each: of Parquet, then calibrated and of JSON lines."""
    folder = tmp_path_factory.mktemp("columns")
    log_of(ROWS, 0).write_parquet(folder / "mon.parquet")
    write_jsonl(log_of(ROWS, 1), folder / "tue.jsonl")
    for file, more in (("mon.parquet", ["data=parquet"]), ("tue.jsonl", ["data=jsonl", *CALIBRATED])):
        assert cli.main(["run", *more, *RUN, f"data.path={folder}/{file}", f"store={folder}/store"]) == 0
    return folder


def version(folder: Path, number: int) -> Path:
    return next((folder / "store/models/ads").glob(f"v{number:05d}-*"))


def evaluated(store: Store, path: Path) -> tuple[str, np.ndarray]:
    """The dataset of the version at ``path``, and the logits of training's evaluation."""
    manifest = store.get(f"models/ads/{path.name}", "publish")
    key = manifest.inputs["evaluate"]
    with store.open(f"runs/mon/evaluate/{key}/logits.npy") as source:
        return str(manifest.summary["dataset"]), np.load(source, allow_pickle=False)


def ids_of(inputs: pl.DataFrame, served: ServedModel) -> dict:
    ids = {}
    for name, multi in served.description.sparse.items():
        if not multi:
            ids[name] = inputs[name].to_numpy()
            continue
        offsets = np.concatenate([[0], np.cumsum(inputs[name].list.len().to_numpy(), dtype=np.int64)])
        weights = weight_column(name)
        ids[name] = _Lists(
            offsets,
            inputs[name].explode().to_numpy(),
            inputs[weights].explode().to_numpy() if weights in inputs.columns else None,
        )
    return ids


def held_out(folder: Path, dataset: str) -> pl.DataFrame:
    files = sorted((folder / "store" / dataset / "test").glob("*.parquet"))
    return pl.concat([pl.read_parquet(file) for file in files])


@pytest.mark.parametrize("number", [1, 2])
def test_the_program_scores_the_held_out_rows_as_training_did(folder: Path, number: int) -> None:
    path = version(folder, number)
    dataset, logits = evaluated(Store(str(folder / "store")), path)
    served, rows = ServedModel(path, 1 << 20, calibrate=False), held_out(folder, dataset)
    dense = np.ascontiguousarray(rows.select(served.description.dense).to_numpy().astype(np.float32))
    assert [*served.description.dense] == [
        "price",
        *(f"{name}_{at}" for name in ("vector", "direction") for at in range(3)),
    ]
    ours = served.score(dense, ids_of(rows, served))
    assert np.abs(ours - logits).max() <= made.MOST_ULPS * 2**-23
    gate = read(GateRecord, Store(str(folder / "store")), f"models/ads/{path.name}/gate.json")
    assert gate.serving is not None and gate.serving.ulps is not None and gate.serving.ulps <= made.MOST_ULPS


def inputs_of(folder: Path, number: int) -> pl.DataFrame:
    """What ``RecordTransform`` makes of the records of the day's log."""
    dataset, _ = evaluated(Store(str(folder / "store")), version(folder, number))
    records = log_of(ROWS, number - 1).drop("click").to_dicts()
    for record in records:
        if record["interests"] is not None:
            record["interests"] = {pair["key"]: pair["value"] for pair in record["interests"]}
    return RecordTransform.read(Store(str(folder / "store")), dataset)(records)


def scored(inputs: pl.DataFrame, served: ServedModel) -> np.ndarray:
    dense = np.ascontiguousarray(inputs.select(served.description.dense).to_numpy().astype(np.float32))
    return served.score(dense, ids_of(inputs, served))


def predicted(folder: Path, number: int, file: str) -> pl.DataFrame:
    """What ``nightjar predict`` says of a log."""
    flags = ["--store", f"{folder}/store", "--model", "ads", "--version", version(folder, number).name]
    assert cli.main(["predict", str(folder / file), *flags, "--out", str(folder / "scores.parquet")]) == 0
    return pl.read_parquet(folder / "scores.parquet")


def rows_held_out(folder: Path, number: int) -> tuple[np.ndarray, np.ndarray]:
    """The log's row of each held-out row, by its logit (two may have one), and how far the logits of both are apart."""
    path = version(folder, number)
    _, logits = evaluated(Store(str(folder / "store")), path)
    raw = scored(inputs_of(folder, number), ServedModel(path, 1 << 20, calibrate=False))
    apart = np.abs(raw[None, :] - logits[:, None])
    return apart.argmin(axis=1), apart.min(axis=1)


@pytest.mark.parametrize(("number", "file"), [(2, "tue.jsonl"), pytest.param(1, "mon.parquet", marks=pytest.mark.slow)])
def test_predict_and_records_score_as_training_did(folder: Path, number: int, file: str) -> None:
    path, inputs = version(folder, number), inputs_of(folder, number)
    served = scored(inputs, ServedModel(path, 1 << 20))
    assert sigmoid(served) == pytest.approx(predicted(folder, number, file)["probability"].to_numpy(), abs=1e-6)
    _, apart = rows_held_out(folder, number)
    assert apart.max() < 1e-5, "every held-out row scores as one of the log's"
    if number == 1:
        return
    record = Store(str(folder / "store")).read_json(f"models/ads/{path.name}/calibrator.json")
    curve, topics = CalibratorRecord.from_json(record).curves["click"], ids_of(inputs, ServedModel(path, 0))["topics"]
    raw = scored(inputs, ServedModel(path, 1 << 20, calibrate=False))
    expected = applied(curve, raw) + shifts_of(curve, topics.values[topics.offsets[:-1]])
    assert curve.shifts and served == pytest.approx(expected, abs=1e-5)


def test_the_gate_scores_both_days_models_as_predict_does(folder: Path) -> None:
    """Monday's version has other ids, weights and scales: its figures on Tuesday's rows are those of its own scores."""
    store, path = Store(str(folder / "store")), version(folder, 2)
    gate = read(GateRecord, store, f"models/ads/{path.name}/gate.json")
    dataset, _ = evaluated(store, path)
    split = SplitReader(store, store.get(dataset, "ingest"), "test")
    judged = rows_held_out(folder, 2)[0][~chosen_rows(split, 0.5, SEED)]
    assert gate.not_comparable is None and gate.rows == len(judged)
    for number, figures in ((1, gate.incumbent), (2, gate.candidate)):
        scores = predicted(folder, number, "tue.jsonl")[judged]
        chances = scores["probability"].to_numpy()
        told = evaluate(scores["label"].to_numpy(), np.log(chances / (1 - chances)))
        assert figures is not None and figures.ne.point == pytest.approx(told["ne"], rel=2e-3)
        assert figures.auc.point == pytest.approx(told["auc"], rel=2e-3)
