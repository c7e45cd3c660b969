"""What others do meanwhile: logs that change while they are read, and a second run that makes the same dataset."""

import multiprocessing
import os
from contextlib import ExitStack

import numpy as np
import polars as pl
import pytest

from pipeline.config import IngestConfig
from pipeline.core.errors import ArtifactError, DataError, LaunchError
from pipeline.ingest import stage
from pipeline.ingest.output import PartWriter
from pipeline.ingest.stage import raw_fingerprint
from pipeline.store import Store
from tests.waits import PATIENCE

from .conftest import csv_config, write_rows
from .test_days import Nights, config_of, day_rows, nights, write_day  # noqa: F401


@pytest.mark.parametrize("what", ["grows", "gets a file", "loses one", "loses a listed one", "gets other columns"])
def test_logs_that_change_while_they_are_read_make_no_dataset(nights, tmp_path, monkeypatch, what):  # noqa: F811
    for name in ("part-0.csv", "part-1.csv"):
        write_day(tmp_path, "2026-01-01", day_rows("2026-01-01", 20), name)
    config, read = config_of(tmp_path, "2026-01-01"), stage.find_files

    def changed(path):
        files = read(path)
        if what == "loses one":
            (tmp_path / "2026-01-01/part-1.csv").rename(tmp_path / "elsewhere.csv")
            files = read(path)
        elif what == "loses a listed one":
            (tmp_path / "2026-01-01/part-0.csv").unlink()
        elif what == "gets other columns":
            (tmp_path / "2026-01-01/part-0.csv").write_text("a,b\n1,2\n")
        else:
            name = {"grows": "part-0.csv", "gets a file": "part-2.csv"}[what]
            write_day(tmp_path, "2026-01-01", day_rows("2026-01-01", 30), name)
        return files

    monkeypatch.setattr(stage, "find_files", changed)
    with pytest.raises(DataError, match="the logs of 2026-01-01 changed while they were read") as caught:
        nights.ingest(config)
    assert "data.watermark.success" in caught.value.hint
    assert not list((tmp_path / "store").rglob("*.parquet"))
    monkeypatch.undo()
    if what == "gets other columns":  # now that nothing changes, they are what is wrong
        with pytest.raises(DataError, match="part-0.csv"):
            nights.ingest(config)
        return
    rows = {"grows": 50, "gets a file": 70, "loses one": 20, "loses a listed one": 20}
    assert nights.ingest(config).summary["rows"] == rows[what]


def test_the_fingerprint_sees_a_file_that_came_after_a_listing(tmp_path):
    path = write_rows(tmp_path / "logs.csv")
    before = raw_fingerprint(csv_config(tmp_path).data)
    write_rows(path.with_name("more.csv"))
    assert raw_fingerprint(csv_config(tmp_path).data) != before


def _hold(folder, ready, done):
    with Store(folder).draft("datasets/d/k", kind="dataset", key="k", config={}, inputs={}) as draft:
        draft.write_json("a.json", 1)
        ready.set()
        done.wait(PATIENCE)


def test_two_processes_do_not_write_one_artifact(tmp_path):
    context = multiprocessing.get_context("forkserver")
    ready, done = context.Event(), context.Event()
    other = context.Process(target=_hold, args=(str(tmp_path), ready, done))
    other.start()
    try:
        assert ready.wait(PATIENCE)
        store = Store(str(tmp_path))
        with (
            pytest.raises(LaunchError, match="datasets/d/k is already being written: another process holds"),
            store.draft("datasets/d/k", kind="dataset", key="k", config={}, inputs={}),
        ):
            pass
        assert (tmp_path / "datasets/d/k/a.json").exists()  # the other one's
    finally:
        done.set()
        other.join(PATIENCE)
    assert not (tmp_path / "datasets/d/k").exists()
    with store.draft("datasets/d/k", kind="dataset", key="k", config={}, inputs={}) as draft:
        draft.commit({})
    assert store.find("datasets/d/k") is not None


def test_a_full_disk_names_the_file_that_met_it(tmp_path):
    rows = pl.DataFrame({"label": np.random.default_rng(0).integers(1 << 60, size=1 << 17)})
    with (
        pytest.raises(ArtifactError, match="no space left on the store's disk while writing datasets/d/k/train/part-0"),
        Store(str(tmp_path)).draft("datasets/d/k", kind="ingest", key="k", config={}, inputs={}) as draft,
        draft.open("quarantine.jsonl"),
        PartWriter(draft, "train", IngestConfig(rows_per_group=rows.height)) as parts,
    ):
        folder = tmp_path / "datasets/d/k/train"
        folder.mkdir()
        (folder / "part-00000.parquet").symlink_to("/dev/full")
        parts.add(rows)
    assert not (tmp_path / "datasets/d/k").exists()


def _killed(folder):
    with Store(folder).draft("datasets/d/k", kind="ingest", key="k", config={}, inputs={}) as draft:
        draft.write_json("a.json", [1])
        os._exit(9)


def test_a_dataset_made_again_by_a_process_that_is_killed_is_absent_until_the_next_run(tmp_path):
    """Readers find no dataset then, never half a one; those that had found it see a file that is not as written."""
    store = Store(str(tmp_path))
    names = ("a.json", "b.json")
    with store.draft("datasets/d/k", kind="ingest", key="k", config={}, inputs={}) as draft:
        for name in names:
            draft.write_json(name, [1, 2, 3])
        former = draft.commit({})
    other = multiprocessing.get_context("forkserver").Process(target=_killed, args=(str(tmp_path),))
    other.start()
    other.join(PATIENCE)
    assert store.find("datasets/d/k") is None
    with pytest.raises(ArtifactError, match="no committed artifact"):
        store.get("datasets/d/k", "ingest")
    with pytest.raises(ArtifactError, match="a.json is corrupt"):
        store.verify(former)
    with store.draft("datasets/d/k", kind="ingest", key="k", config={}, inputs={}) as draft:
        assert store.names("datasets/d/k") == []
        draft.write_json("a.json", [1, 2, 3])
        draft.commit({})
    store.verify(store.get("datasets/d/k", "ingest"))


def test_of_two_writers_on_a_store_without_locks_one_that_lost_files_commits_nothing():
    """The second begins by removing what lies there; a manifest of files that are gone would be half a dataset."""
    store, key = Store("memory://two-writers"), {"kind": "ingest", "key": "k", "config": {}, "inputs": {}}
    with ExitStack() as second:
        with pytest.raises(LaunchError, match="a.json was removed or replaced"), store.draft("d/k", **key) as first:
            first.write_json("a.json", [1])
            late = second.enter_context(store.draft("d/k", **key))
            first.write_json("b.json", [2])
            first.commit({})
        assert store.find("d/k") is None
        for name, value in (("a.json", [1]), ("b.json", [2])):
            late.write_json(name, value)
        late.commit({})
    store.verify(store.get("d/k", "ingest"))
    with store.draft("d/k", **key) as first, store.draft("d/k", **key) as again:  # both write all: the same bytes
        for draft in (first, again):
            for name, value in (("a.json", [1]), ("b.json", [2])):
                draft.write_json(name, value)
        first.commit({})
        store.verify(store.get("d/k", "ingest"))
        again.commit({})
    store.verify(store.get("d/k", "ingest"))
