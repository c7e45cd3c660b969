"""The publish stage without models: whether the verdict promotes, and what a version says of itself."""

import dataclasses
from pathlib import Path
from types import SimpleNamespace

import pytest

from pipeline.config.model import TableConfig
from pipeline.publishing import promotion
from pipeline.publishing.versions import version_path
from pipeline.records import GATE, ModelFigures, TableLayout
from pipeline.records.gate import TaskComparison
from pipeline.records.runs import Step
from pipeline.stages.release import _card_figures, _description, _mappings, publish
from pipeline.store import Store
from tests.publishing.made import SCHEMA, config
from tests.records.made import figures, gate_record, interval


@pytest.mark.parametrize(("verdict", "promoted"), [("PASS", True), ("HOLD", False)])
def test_a_version_serves_if_and_only_if_the_gate_let_it_pass(tmp_path: Path, verdict: str, promoted: bool) -> None:
    """Of a version that is whole and judged: the same command goes on from there."""
    store, made, name = Store(str(tmp_path)), config(), f"v00001-{'c' * 8}"
    step = Step(name="publish", key="c" * 32, path="runs/r/publish/c")
    record = gate_record(verdict=verdict, model=made.model_name, version=name)
    path = version_path(made.model_name, name)
    with store.draft(path, kind="model", key=step.key, config={}, inputs={}) as draft:
        draft.write_json(GATE, record.to_json())
        draft.commit({"verdict": verdict})
    with store.draft(step.path, kind="publish", key=step.key, config={}, inputs={}) as draft:
        summary = publish(made, store, step, {"train": SimpleNamespace(key="t")}, draft)
    assert promotion.read_current(store, made.model_name).version == (name if promoted else None)
    assert summary["gate"]["verdict"] == verdict
    assert summary.get("model") == ({"name": made.model_name, "version": name, "uri": path} if promoted else None)


def test_a_card_has_the_figures_of_every_task_that_allows_some() -> None:
    ours = figures(kind=ModelFigures, calibration_by_prediction=0.1)
    assert list(_card_figures(ours, gate_record())) == ["ne", "auc", "calibration"]
    tasks = {
        "buy": TaskComparison(kind="binary", figure="NE", candidate=interval(0.7)),
        "price": TaskComparison(kind="regression", figure="RMSE", candidate=interval(3.0)),
        "rare": TaskComparison(kind="binary", figure="NE"),
    }
    found = _card_figures(ours, gate_record(tasks=tasks))
    assert found["ne"] == ours.ne
    assert {name: found[name].point for name in found if "_" in name} == {"buy_ne": 0.7, "price_rmse": 3.0}


def test_a_version_says_which_tables_are_pooled_by_their_mean() -> None:
    made = config()
    tables = {"a": TableConfig(pooling="mean"), "long": TableConfig(pooling="sum")}
    made = dataclasses.replace(made, model=dataclasses.replace(made.model, tables=tables))
    layouts = {
        name: TableLayout(file=name, rows=9, dim=4, coding="fp32", record_bytes=16, block_rows=9)
        for name in ("a", "b/c", "long")
    }
    described = _description(made, SCHEMA, layouts, members=1)
    assert described.mean == ("a",)
    assert _description(made, SCHEMA, layouts, members=3).dim == 3 * described.dim


def test_a_version_takes_along_what_translates_raw_rows() -> None:
    files = dict.fromkeys(["schema.json", "transforms.json", "vocab/a.parquet", "train/part-0.parquet", "vocabulary"])
    assert _mappings(SimpleNamespace(files=files)) == ["transforms.json", "vocab/a.parquet"]
