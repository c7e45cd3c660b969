"""Removing: manifests go first, checkpoints that rest on others before these, and what is gone is no error."""

import os
import time
from collections.abc import Iterator
from dataclasses import replace
from datetime import timedelta
from itertools import product
from pathlib import Path

import pytest

from pipeline.checkpoint import retention
from pipeline.core.errors import ArtifactError
from pipeline.publishing import model_commands
from pipeline.store import Store
from pipeline.store.removal import age, forget, remove, store_time
from tests.checkpoint.s3 import Fault, bucket

RUN = "runs/r"
INNER = [f"{RUN}/train/t", *(f"{RUN}/checkpoints/k/step-{step:08d}" for step in (9, 5))]


@pytest.fixture(params=["disk", "objects"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Store:
    made = Store(str(tmp_path) if request.param == "disk" else f"memory://removal-{os.urandom(4).hex()}")
    for path in INNER:
        with made.draft(path, kind="made", key="k", config={}, inputs={}) as draft:
            draft.write_json("a.json", {})
            draft.commit({})
    return made


def test_a_manifest_goes_before_its_files(store: Store) -> None:
    def look() -> None:
        assert store.find(INNER[0]) is None and store.exists(f"{INNER[0]}/a.json")

    remove(store, INNER[0], look)
    assert not store.exists(INNER[0]) and store.find(INNER[1]) is not None
    remove(store, INNER[0])  # again: nothing to do
    remove(store, f"{INNER[1]}/a.json")
    assert store.names(INNER[1]) == ["manifest.json"]


def test_of_a_run_manifests_go_first_and_those_that_rest_on_others_before_these(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    order: list[str] = []
    real = store.fs.rm_file
    monkeypatch.setattr(store.fs, "rm_file", lambda path: (order.append(str(path)), real(path)))

    def look() -> None:
        assert [store.find(path) for path in INNER] == [None] * 3
        assert all(store.exists(f"{path}/a.json") for path in INNER)

    remove(store, RUN, look, nested=True)
    assert order == [store.full(f"{path}/manifest.json") for path in INNER]
    assert not store.exists(RUN)


@pytest.mark.measures
def test_a_forgotten_artifact_keeps_its_files(store: Store) -> None:
    forget(store, INNER[0])
    assert store.find(INNER[0]) is None and store.exists(f"{INNER[0]}/a.json")
    assert 0 <= age(store, store.full(f"{INNER[0]}/a.json"), store_time(store)) < 60


class Clock:
    """The clock of an object store, ``ahead`` of this machine's: all that it stamps is by it."""

    def __init__(self, store: Store, monkeypatch: pytest.MonkeyPatch, ahead: timedelta) -> None:
        real = store.fs.modified
        monkeypatch.setattr(store.fs, "modified", lambda path: real(path) + ahead)


@pytest.mark.measures
@pytest.mark.parametrize("days", [-40, 0, 40])
def test_ages_count_by_the_clock_of_an_object_store(store: Store, monkeypatch: pytest.MonkeyPatch, days: int) -> None:
    if store.is_local:
        assert abs(store_time(store) - time.time()) < 60
        return
    Clock(store, monkeypatch, timedelta(days=days))
    now = store_time(store)
    assert abs(now - time.time() - 86_400 * days) < 60
    assert 0 <= age(store, store.full(f"{INNER[0]}/a.json"), now) < 60
    assert store.names("datasets") == [], "what it was read off is gone"


@pytest.mark.parametrize("days", [-40, 40])
def test_what_is_written_now_stays_whatever_the_clock_of_the_store_shows(monkeypatch, days: int) -> None:
    """A version and a checkpoint in the making, and a version that another machine published a moment ago."""
    store = Store(f"memory://made-{os.urandom(4).hex()}")
    store.write_bytes("models/m/v00001-00000000/dense.pt2", b"half")
    store.write_bytes(f"{RUN}/checkpoints/k/step-00000009/a.bin", b"half")
    with store.draft("models/m/v00002-00000000", kind="publish", key="k", config={}, inputs={}) as draft:
        draft.commit({})
    artifact = store.find("models/m/v00002-00000000")
    assert artifact is not None
    store.write_manifest(replace(artifact, created=artifact.created + 86_400 * days))
    Clock(store, monkeypatch, timedelta(days=days))
    assert model_commands.collect(store, "m", 0, 3600.0, dry_run=True) == []
    assert retention.collect(store, None, min_age_seconds=3600.0) == ([], [])
    assert {each.version for each in model_commands.collect(store, "m", 0, 0.0, dry_run=True)} == {
        "v00001-00000000",
        "v00002-00000000",
    }
    going, _ = retention.collect(store, None, min_age_seconds=0.0)
    assert [each.path for each in going] == [f"{RUN}/checkpoints/k/step-00000009"]


@pytest.mark.parametrize("days", [-40, 40])
def test_nothing_of_a_folder_looks_old_too_soon_by_the_clock_of_its_file_server(tmp_path, monkeypatch, days) -> None:
    """Its manifests are compared by their writers' clocks, which the server's may be far from."""
    store = Store(str(tmp_path))
    store.write_bytes("datasets/d/README", b"there is a place for the probe")
    for version in ("v00001-00000000", "v00002-00000000"):
        with store.draft(f"models/m/{version}", kind="publish", key="k", config={}, inputs={}) as draft:
            draft.commit({})
    Clock(store, monkeypatch, timedelta(days=days))
    assert store_time(store) <= time.time()
    assert model_commands.collect(store, "m", 0, 3600.0, dry_run=True) == []


@pytest.mark.measures
def test_where_the_store_takes_no_object_this_machines_clock_has_to_do(store: Store, monkeypatch) -> None:
    def refused(*args: object, **more: object) -> None:
        raise PermissionError("Access Denied")

    monkeypatch.setattr(store.fs, "pipe_file", refused)
    assert abs(store_time(store) - time.time()) < 60


def test_a_store_that_does_not_say_when_has_files_of_no_age(store: Store, monkeypatch) -> None:
    def silent(path: str) -> None:
        raise NotImplementedError

    monkeypatch.setattr(store.fs, "modified", silent)
    assert age(store, store.full(f"{INNER[0]}/a.json"), 1e12) == 0.0


def test_what_the_store_refuses_to_remove_is_a_message(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*args: object, **more: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(store.fs, "rm_file", refused)
    with pytest.raises(ArtifactError, match=f"the store refuses removing {INNER[0]}: Permission denied"):
        remove(store, INNER[0])
    assert store.find(INNER[0]) is not None


PATTERNS = "a[bc]*?"


@pytest.fixture(params=["disk", "memory", "s3"])
def above(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The URL of a folder for stores."""
    if request.param == "disk":
        yield str(tmp_path)
    elif request.param == "memory":
        yield f"memory://removal-{os.urandom(4).hex()}"
    else:
        with bucket(request.getfixturevalue("endpoint"), monkeypatch) as url:
            yield url


def test_a_url_with_the_characters_of_a_pattern_is_a_name(above: str) -> None:
    store, matched = (Store(f"{above}/{name}") for name in (PATTERNS, "abxy"))
    paths = [*INNER, f"models/{PATTERNS}/v1"]
    for each, path in product((store, matched), paths):
        with each.draft(path, kind="made", key="k", config={}, inputs={}) as draft:
            draft.write_json("a/b.json", {})
            draft.commit({})
    remove(store, paths[-1])
    assert store.names(f"models/{PATTERNS}") == []
    remove(store, RUN, nested=True)
    assert not store.exists(RUN)
    with pytest.raises(FileNotFoundError):
        store.fs.rm(store.full(RUN), recursive=True)
    store.write_json("a.json", {})
    store.fs.mv(store.full("a.json"), store.full("b.json"))
    assert not store.exists("a.json") and store.exists("b.json")
    store.fs.rm(store.full("b.json"))
    assert not store.exists("b.json")
    assert all(matched.find(path) is not None for path in paths)


@pytest.fixture
def written(endpoint, monkeypatch: pytest.MonkeyPatch) -> Iterator[Store]:
    """A store on S3 with one artifact."""
    with bucket(endpoint, monkeypatch) as url:
        store = Store(url)
        with store.draft(RUN, kind="made", key="k", config={}, inputs={}) as draft:
            draft.write_json("a/b.json", {})
            draft.write_json("c.json", {})
            draft.commit({})
        yield store


def test_objects_that_a_bulk_request_leaves_are_removed_one_by_one(written: Store, endpoint) -> None:
    endpoint.fault = Fault("errors", "POST", "delete")
    remove(written, RUN)
    assert endpoint.fault.seen and not written.exists(RUN)


def test_objects_that_cannot_be_removed_are_an_error(written: Store, endpoint) -> None:
    forget(written, RUN)
    endpoint.fault = Every(Fault("errors", "POST", "delete"), Fault(403, "DELETE"))
    with pytest.raises(ArtifactError, match=f"the store refuses removing {RUN}: "):
        remove(written, RUN)
    endpoint.fault = None
    assert written.names(RUN) == ["a", "c.json"]
    remove(written, RUN)
    assert not written.exists(RUN)


class Every:
    """Several faults at once; ``kind`` is that of the one that hit last."""

    def __init__(self, *faults: Fault) -> None:
        self.faults, self.kind = faults, ""

    def hits(self, method: str, path: str) -> bool:
        """Whether one of them hits."""
        for fault in self.faults:
            if fault.hits(method, path):
                self.kind = fault.kind
                return True
        return False
