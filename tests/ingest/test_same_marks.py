"""Logs whose files have equal names, sizes and times: what was read is known by its folder, else by its bytes."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from pipeline.compose import compose
from pipeline.ingest.delivered import SOURCES
from pipeline.records.step import Step
from pipeline.specs import STAGES
from pipeline.specs.stage import StageIO
from pipeline.stages.steps import steps
from pipeline.store import Store

SETTINGS = ["run=r", "stages=[ingest]", "data=csv", "data.name=d", "data.label.column=click", "+data.sparse.a={}"]
TIME = 1_700_000_000


def write(folder: Path, *, inverted: bool = False) -> Path:
    folder.mkdir(parents=True)
    rows = [f"{(row % 3 == 0) != inverted:d},{row % 7}" for row in range(300)]
    (folder / "log.csv").write_text("\n".join(["click,a", *rows]) + "\n")
    os.utime(folder / "log.csv", (TIME, TIME))
    return folder


def ingested(folder: Path, store: Store) -> tuple[Step, bool]:
    """The ingest step of the log in ``folder``, and whether there was a dataset of it; there is one afterwards."""
    config = compose([*SETTINGS, f"data.path={folder}"])
    step = steps(config, store, last="ingest")[0]
    there = store.find(step.path) is not None
    if not there:
        STAGES.get("ingest").run(step, config, store, {}, StageIO())
    return step, there


def test_a_log_with_the_marks_of_another_one_is_not_taken_for_it(tmp_path: Path) -> None:
    store = Store(str(tmp_path / "store"))
    first, _ = ingested(write(tmp_path / "first"), store)
    other, there = ingested(write(tmp_path / "other", inverted=True), store)
    assert not there and other.key != first.key
    clicks = [store.get(step.path, "ingest").summary["rows_train"] for step in (first, other)]
    assert clicks[0] == clicks[1]
    labels = [store.read_json(f"{step.path}/profile.json")["label_rate"]["train"] for step in (first, other)]
    assert labels[0] < 0.5 < labels[1]
    assert ingested(tmp_path / "first", store) == (first, True)
    assert ingested(tmp_path / "other", store) == (other, True)


def test_a_log_that_moved_is_not_read_again(tmp_path: Path) -> None:
    store = Store(str(tmp_path / "store"))
    first, _ = ingested(write(tmp_path / "first"), store)
    shutil.move(tmp_path / "first", tmp_path / "moved")
    assert ingested(tmp_path / "moved", store) == (first, True)


def test_a_link_that_leads_elsewhere_is_another_log(tmp_path: Path) -> None:
    store, link = Store(str(tmp_path / "store")), tmp_path / "current"
    link.symlink_to(write(tmp_path / "first"))
    first, _ = ingested(link, store)
    link.unlink()
    link.symlink_to(write(tmp_path / "other", inverted=True))
    assert ingested(link, store)[0].key != first.key


def test_datasets_of_earlier_releases_stay_what_they_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = Store(str(tmp_path / "store"))
    with monkeypatch.context() as patch:
        patch.setattr("pipeline.ingest.stage.sources_record", lambda data: None)
        first, _ = ingested(write(tmp_path / "first"), store)
    assert SOURCES not in store.get(first.path, "ingest").files
    assert ingested(write(tmp_path / "other"), store) == (first, True)
