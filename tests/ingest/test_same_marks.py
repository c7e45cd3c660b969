"""Logs whose files have equal names, sizes and times: what was read is known by its folder, else by its bytes."""

from __future__ import annotations

import os
import shutil
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest

from pipeline.cli import main
from pipeline.config import Config
from pipeline.config.compose import compose
from pipeline.core.errors import ArtifactError, LaunchError
from pipeline.ingest import delivered
from pipeline.ingest.rawfiles import tells_content
from pipeline.records.runs import Step
from pipeline.specs import STAGES
from pipeline.specs.stage import StageIO
from pipeline.stages.steps import steps
from pipeline.store import Store
from pipeline.store.manifest import sealed, unsealed

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


def test_datasets_of_earlier_releases_stay_what_they_are(tmp_path: Path) -> None:
    store = Store(str(tmp_path / "store"))
    first, _ = ingested(write(tmp_path / "first"), store)
    shutil.rmtree(tmp_path / "store/sources")  # which they did not keep
    assert ingested(write(tmp_path / "other"), store) == (first, True)


def test_a_dataset_of_an_earlier_release_is_used_with_a_warning_that_its_log_is_unknown(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    log = write(tmp_path / "first")

    def warned(*overrides: str) -> bool:
        assert main(["ingest", *SETTINGS, f"store={tmp_path / 'store'}", *overrides]) == 0
        return "of a release that kept no checksum of logs" in " ".join("".join(capsys.readouterr()).split())

    assert not warned(f"data.path={log}") and not warned(f"data.path={log}")
    # As releases left it that kept neither checksums nor folders.
    shutil.rmtree(tmp_path / "store/sources")
    (dataset,) = (tmp_path / "store/datasets/d").iterdir()
    manifest = unsealed((dataset / "manifest.json").read_bytes())
    del manifest["files"]["sources.json"]
    (dataset / "manifest.json").write_bytes(sealed(manifest))
    other = write(tmp_path / "other", inverted=True)
    assert warned(f"data.path={other}")
    assert not warned(f"data.path={other}", "force=true"), "made again, it has its checksum"
    assert not warned(f"data.path={other}")
    assert not warned(f"data.path={log}")
    assert len(list((tmp_path / "store/datasets/d").iterdir())) == 2


def test_a_file_link_that_leads_elsewhere_is_another_log(tmp_path: Path) -> None:
    store, link = Store(str(tmp_path / "store")), tmp_path / "logs/log.csv"
    link.parent.mkdir()
    link.symlink_to(write(tmp_path / "first") / "log.csv")
    first, _ = ingested(link, store)
    assert ingested(link.parent, store) == (first, True)
    link.unlink()
    link.symlink_to(write(tmp_path / "other", inverted=True) / "log.csv")
    assert ingested(link, store)[0].key != first.key


def test_a_key_stays_that_of_its_log_when_the_dataset_is_gone(tmp_path: Path) -> None:
    """A training whose key names it would else be taken for one of another log."""
    store = Store(str(tmp_path / "store"))
    first, _ = ingested(write(tmp_path / "first"), store)
    shutil.rmtree(store.full(first.path))
    other, _ = ingested(write(tmp_path / "other", inverted=True), store)
    assert other.key != first.key
    assert ingested(tmp_path / "first", store) == (first, False)


def step_of(folder: Path, store: Store, *more: str) -> tuple[Step, Config]:
    config = compose([*SETTINGS, f"data.path={folder}", *more])
    return steps(config, store, last="ingest")[0], config


def test_of_two_runs_at_once_the_later_one_does_not_take_the_dataset_of_the_other_log(tmp_path: Path) -> None:
    store, stage = Store(str(tmp_path / "store")), STAGES.get("ingest")
    first, one = step_of(write(tmp_path / "first"), store)
    second, other = step_of(write(tmp_path / "other", inverted=True), store)
    assert first == second  # neither has been read
    stage.run(first, one, store, {}, StageIO())
    stage.require_meant(first, one, store)
    with pytest.raises(LaunchError, match="another run has meanwhile read another log") as caught:
        stage.require_meant(second, other, store)
    assert "the same command again" in caught.value.hint
    again, _ = step_of(tmp_path / "other", store)
    assert again.key != first.key


def test_of_two_runs_with_other_settings_the_later_one_commits_nothing_under_the_mark_of_the_first(
    tmp_path: Path,
) -> None:
    store, stage = Store(str(tmp_path / "store")), STAGES.get("ingest")
    first, one = step_of(write(tmp_path / "first"), store)
    second, other = step_of(write(tmp_path / "other", inverted=True), store, "data.split.test_share=0.4")
    stage.run(first, one, store, {}, StageIO())
    with pytest.raises(LaunchError, match="another run has meanwhile read another log"):
        stage.run(second, other, store, {}, StageIO())
    assert store.find(second.path) is None
    again, other = step_of(tmp_path / "other", store, "data.split.test_share=0.4")
    stage.run(again, other, store, {}, StageIO())
    stage.require_meant(again, other, store)


def test_a_log_is_compared_once_not_at_each_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store, read = Store(str(tmp_path / "store")), []
    real = delivered._checksum

    def counted(files: list, stopped: threading.Event) -> str:
        read.extend(name for _, name in files)
        return real(files, stopped)

    monkeypatch.setattr(delivered, "_checksum", counted)
    first, _ = ingested(write(tmp_path / "first"), store)
    other, _ = ingested(write(tmp_path / "other", inverted=True), store)
    moved = shutil.copytree(tmp_path / "first", tmp_path / "moved")
    for _ in range(3):
        assert ingested(moved, store) == (first, True) and ingested(tmp_path / "other", store) == (other, True)
    assert sorted(read) == sorted(f"{tmp_path}/{name}/log.csv" for name in ("first", "moved", "other"))


def test_who_may_only_read_the_store_compares_all_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = Store(str(tmp_path / "store"))
    first, _ = ingested(write(tmp_path / "first"), store)
    shutil.copytree(tmp_path / "first", tmp_path / "copy")

    def refused(*_: object) -> None:
        raise ArtifactError("the store refuses writing")

    monkeypatch.setattr(Store, "write_json", refused)
    assert ingested(tmp_path / "copy", store) == (first, True)


def test_an_ingestion_that_fails_stops_reading(tmp_path: Path) -> None:
    store = Store(str(tmp_path / "store"))
    config = compose([*SETTINGS, f"data.path={write(tmp_path / 'first')}"])
    with pytest.raises(ZeroDivisionError), delivered.compared(config.data, store, "mark") as sources:
        raise ZeroDivisionError
    assert sources._stopped.is_set() and store.names("sources") == []


@pytest.mark.parametrize(
    ("protocol", "info", "tells"),
    [
        ("s3", {"ETag": "1", "LastModified": "x"}, True),
        (("gs", "gcs"), {"etag": "1"}, True),
        (("http", "https"), {"ETag": "663a-1a2b", "size": 9}, False),
        ("webdav", {"etag": "663a"}, False),
        (("file", "local"), {"mtime": 1.0}, False),
        ("webhdfs", {"checksum": "1"}, True),
        ("s3", {"ETag": ""}, False),
    ],
)
def test_an_etag_tells_the_content_only_where_every_write_gives_a_new_one(protocol, info, tells) -> None:
    assert tells_content(SimpleNamespace(protocol=protocol), info) is tells
