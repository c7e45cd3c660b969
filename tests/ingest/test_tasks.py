"""Labels of further tasks and weights of rows, from CSV to Parquet; what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pipeline.config import Config
from pipeline.config.compose import compose
from pipeline.core.errors import ConfigError, DataError
from pipeline.ingest.schema_of_config import data_spec
from pipeline.records import DatasetSchema, TaskColumn, read
from pipeline.specs.stage import StageIO
from pipeline.stages.execution import run_stage
from pipeline.stages.steps import steps
from pipeline.store import Store
from pipeline.training.parquet import SplitReader

LABELS = [
    "+data.tasks.buy={given: click}",
    "+data.tasks.items={kind: count}",
    "+data.tasks.spend={kind: value}",
    "data.weight=w",
]
ROWS = [
    # click, buy, items, spend, w
    ("1", "1", "2", "9.5", "1"),
    ("1", "", "0", "-1", "2"),
    ("0", "", "", "", "0.5"),
    ("1", "0", "1", "", "1"),
    ("0", "0", "3", "4", "0"),
]
BAD = {
    "buy is 'maybe', expected '1' or '0'": ("1", "maybe", "", "", "1"),
    "buy is '1', but the row has no click (data.tasks.buy.given)": ("0", "1", "", "", "1"),
    "items is 1.5, expected a whole number from 0 on": ("1", "", "1.5", "", "1"),
    "items is -2, expected a whole number from 0 on": ("1", "", "-2", "", "1"),
    "spend is 'much', expected a finite number": ("1", "", "", "much", "1"),
    "w is None, expected a number from 0 on": ("1", "", "", "", ""),
    "w is -1.0, expected a number from 0 on": ("1", "", "", "", "-1"),
}


def configured(folder: Path, rows: list[Any], *more: str, labels: list[str] = LABELS) -> Config:
    lines = ["label,buy,items,spend,w,id", *(f"{','.join(row)},{number % 7}" for number, row in enumerate(rows))]
    (folder / "log.csv").write_text("\n".join(lines) + "\n")
    return compose(
        [
            "data=csv",
            "data.name=log",
            f"data.path={folder}/log.csv",
            "+data.sparse.id={}",
            f"store={folder}/store",
            "data.split.test_share=0.3",
            "data.checks.leak=off",
            "data.max_quarantine_share=1",
            *labels,
            *more,
        ]
    )


def ingested(config: Config) -> tuple[Store, Any]:
    store = Store(config.store)
    step = next(each for each in steps(config, store) if each.name == "ingest")
    run_stage(step, config, store, StageIO())
    return store, store.get(step.path, "ingest")


def test_tasks_keep_their_places_however_the_configuration_lists_them(tmp_path: Path) -> None:
    """Heads of a model are told apart by place, and the records of both configurations are the same."""
    labels = ["+data.tasks.spend={kind: value}", "+data.tasks.buy={given: click}", "+data.tasks.again={given: buy}"]
    places = []
    for order in (labels, [*labels[1:], labels[0]]):
        tasks = data_spec(configured(tmp_path, ROWS, labels=order).data).tasks
        places.append([task.name for task in tasks])
    assert places == [["buy", "spend", "again"]] * 2


def test_train_rows_without_any_weight_are_refused(tmp_path: Path) -> None:
    rows = [(*row[:4], "0") for row in ROWS * 10]
    with pytest.raises(DataError, match=r"the weight of all \d+ train rows is 0 \(w\)") as error:
        ingested(configured(tmp_path, rows))
    assert "data.weight=null" in str(error.value.hint)


def test_labels_weights_and_gaps_are_stored(tmp_path: Path) -> None:
    store, dataset = ingested(configured(tmp_path, ROWS * 40))
    schema = read(DatasetSchema, store, f"{dataset.path}/schema.json")
    assert schema.tasks == (
        TaskColumn(name="buy", kind="binary", given="click"),
        TaskColumn(name="items", kind="count"),
        TaskColumn(name="spend", kind="value"),
    )
    assert schema.row_weights
    rows = set()
    for split in ("train", "test"):
        reader = SplitReader(store, dataset, split)
        columns = np.stack([reader.column("label"), *reader.labels().values(), reader.row_weights()], axis=1)
        rows |= {tuple(None if np.isnan(value) else float(value) for value in row) for row in columns}
    assert rows == {
        (1, 1, 2, 9.5, 1),
        (1, None, 0, -1, 2),
        (0, 0, None, None, 0.5),
        (1, 0, 1, None, 1),
        (0, 0, 3, 4, 0),
    }


def test_the_profile_has_figures_of_every_label(tmp_path: Path) -> None:
    store, dataset = ingested(configured(tmp_path, ROWS * 40))
    profile = store.read_json(f"{dataset.path}/profile.json")
    train = SplitReader(store, dataset, "train")
    for name, labels in train.labels().items():
        there = labels[~np.isnan(labels)]
        figures = profile["tasks"][name]
        assert figures["mean"] == pytest.approx(there.mean(dtype=np.float64))
        assert figures["missing_share"] == pytest.approx(1 - len(there) / len(labels))
    assert profile["row_weight"]["maximum"] == 2.0
    starts = train.task_starts()
    assert 1 / (1 + np.exp(-starts[0])) == pytest.approx(profile["tasks"]["buy"]["mean"], abs=0.01)
    assert np.exp(starts[1]) == pytest.approx(profile["tasks"]["items"]["mean"], abs=0.02)
    assert starts[2] == pytest.approx(profile["tasks"]["spend"]["mean"])


def test_a_label_that_does_not_parse_sends_the_row_to_quarantine_and_a_missing_one_does_not(tmp_path: Path) -> None:
    store, dataset = ingested(configured(tmp_path, [*ROWS * 40, *BAD.values()]))
    with store.open(f"{dataset.path}/quarantine.jsonl") as source:
        lines = source.read().decode().splitlines()
    assert len(lines) == len(BAD)
    for line, reason in zip(lines, BAD, strict=True):
        assert reason in line


@pytest.mark.parametrize(
    ("label", "hint"),
    [
        ("+data.tasks.buy={column: spend}", "data.tasks.buy.positive=<"),
        ("+data.tasks.buy={column: spend, kind: count}", "data.tasks.buy.kind=value, or data.tasks.buy.column=<"),
    ],
)
def test_a_column_that_is_no_label_of_a_task_is_mended_by_the_settings_of_the_task(
    tmp_path: Path, label: str, hint: str
) -> None:
    rows = [("1", "", "", "9.5", "1")] * 5
    with pytest.raises(DataError, match=r"none of the 5 rows") as caught:
        ingested(configured(tmp_path, rows, labels=[label]))
    assert caught.value.hint.startswith(hint)


def test_a_log_without_tasks_has_the_key_that_it_had(tmp_path: Path) -> None:
    config = configured(tmp_path, ROWS, labels=[])
    covered = next(each for each in steps(config, Store(config.store)) if each.name == "ingest").config
    assert "tasks" not in covered["data"]  # type: ignore[operator]
    assert "weight" not in covered["data"]  # type: ignore[operator]


def test_a_task_that_no_train_row_speaks_of_stops_the_stage(tmp_path: Path) -> None:
    silent = [(click, "", items, spend, w) for click, _, items, spend, w in ROWS] * 40
    labels = ["+data.tasks.buy={}"]
    with pytest.raises(DataError, match=r"task 'buy': of \d+ train rows, 0 have a label \(buy\)"):
        ingested(configured(tmp_path, silent, labels=labels))
    only = [(click, "0", items, spend, w) for click, _, items, spend, w in ROWS] * 40
    with pytest.raises(DataError, match="and all of these are '0'"):
        ingested(configured(tmp_path, only, labels=labels))


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["+data.tasks.line={column: buy}"], r"data.tasks has a task 'line', expected letters"),
        (["+data.tasks.label_buy={}", "+data.tasks.buy={}"], r"into a column 'label_buy'"),
        (["+data.tasks.buy={given: items}"], r"data.tasks.buy.given is 'items', expected a binary task before it"),
        (["+data.tasks.buy={kind: count, given: click}"], r"only a binary task has it"),
        (["+data.tasks.buy={positive: a, negative: a}"], r"are both 'a', expected two values"),
        (["model.tasks=mmoe"], r"model.tasks is mmoe or has options, but data.tasks is empty"),
        (["+data.tasks.buy={}", "model.tasks=esmm"], r"no task of data.tasks is given another one"),
        (["+data.tasks.buy={}", "model.task_options.experts=2"], r"does not have this option"),
        (["+data.tasks.buy={}", "+train.tasks.by.weight=2"], r"train.tasks names 'by', expected one of: click, buy"),
        (["+train.tasks.click.weight=2"], r"train.tasks names 'click', but data.tasks is empty"),
        (["+data.tasks.buy={}", "+gate.tasks.buy.max_rmse=2"], r"of kind binary, which has no such figure"),
    ],
)
def test_settings_that_contradict_each_other_are_refused(tmp_path: Path, overrides: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        configured(tmp_path, ROWS, labels=overrides)
    assert caught.value.hint
