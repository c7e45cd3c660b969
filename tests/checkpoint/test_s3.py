"""Checkpoints on an object store that answers 500, 503 or not at all: tried again, or named and refused; no loss."""

import uuid

import fsspec
import pytest
import torch

from pipeline.checkpoint import collectives
from pipeline.checkpoint.collectives import retry_on_all_ranks
from pipeline.checkpoint.index import committed
from pipeline.checkpoint.quarantine import in_place, listed, remove, set_aside
from pipeline.checkpoint.reader import RestoreTarget, restore_newest
from pipeline.checkpoint.retention import remove_uncommitted
from pipeline.core.errors import ArtifactError
from pipeline.store import Store
from tests.checkpoint.s3 import Fault
from tests.checkpoint.single import access, shard, write
from tests.logged import listen

SLOW = pytest.param("timeout", marks=pytest.mark.slow)  # waits for an answer that does not come
FURTHER = pytest.param(500, marks=pytest.mark.slow)
# What a write does, in its order, and how its requests look.
WRITES = {"rows": "/rows/", "dense": "dense.safetensors", "index": "index.json", "manifest": "manifest.json"}


@pytest.fixture
def store(endpoint, monkeypatch, request):
    """A store in a bucket of its own, over a client that gives up soon."""
    patience = 5 if "timeout" in request.node.name else 60  # seconds; a busy machine takes its time for other answers
    quick = {"read_timeout": patience, "connect_timeout": 60, "retries": {"max_attempts": 0}}
    settings = {"key": "k", "secret": "s", "endpoint_url": endpoint.url, "config_kwargs": quick}
    monkeypatch.setitem(fsspec.config.conf, "s3", settings)
    monkeypatch.setattr("s3fs.S3FileSystem.retries", 1)
    endpoint.fault = None
    bucket = f"b{uuid.uuid4().hex}"
    fsspec.filesystem("s3").mkdir(bucket)
    yield Store(f"s3://{bucket}/store")
    endpoint.fault = None
    fsspec.filesystem("s3").invalidate_cache()


def put(store, step, **more):
    """A checkpoint whose rows and dense part tell its step."""
    table = shard()
    table.weight.add_(100 * step)
    return write(store, f"c/step-{step:08d}", access(table), {"w": torch.full((2,), float(step))}, **more)


def newest(store):
    """Step of what restoring gives, after checking that rows and dense part are of one checkpoint."""
    table, dense, said = shard(), {"w": torch.zeros(2)}, listen()
    table.weight.zero_()
    found = restore_newest(store, "c", RestoreTarget(access(table), dense))
    step = found[1].step
    assert torch.equal(table.weight, shard().weight + 100 * step)
    assert dense["w"].tolist() == [step, step]
    return step, said


@pytest.mark.parametrize("kind", [503, FURTHER, SLOW])
def test_a_fault_that_passes_is_tried_again(store, endpoint, kind):
    put(store, 1)
    endpoint.fault = Fault(kind, "PUT", "/step-00000002/rows/t/00000-000000", count=1)
    written = put(store, 2)
    assert endpoint.fault.seen, "the fault was never met"
    endpoint.fault = None
    store.verify(written)
    assert newest(store) == (2, [])


LATER = [pytest.param(*each, marks=pytest.mark.slow) for each in ((500, "dense"), ("timeout", "index"))]


@pytest.mark.parametrize(("kind", "what"), [(503, "rows"), (500, "manifest"), *LATER])
def test_a_write_that_keeps_failing_is_named_and_loses_nothing(store, endpoint, kind, what):
    before = put(store, 1)
    endpoint.fault = Fault(kind, "PUT", WRITES[what])
    with pytest.raises(ArtifactError, match=r"cannot write s3://.*step-00000002/.* after 3 tries") as caught:
        put(store, 2)
    assert WRITES[what].strip("/") in caught.value.message
    assert "the checkpoint before it is untouched" in caught.value.hint
    assert endpoint.fault.seen
    endpoint.fault = None
    store.fs.invalidate_cache()
    assert [a.path for a in committed(store, "c")] == [before.path]
    store.verify(before)
    assert newest(store) == (1, [])
    put(store, 2)  # the store has recovered: the same checkpoint can be written in the same place
    assert newest(store) == (2, [])


@pytest.mark.parametrize(
    ("part", "kind"),
    [
        ("/rows/", 503),
        ("manifest.json", 500),
        pytest.param("/rows/", 500, marks=pytest.mark.slow),
        pytest.param("manifest.json", 503, marks=pytest.mark.slow),
        pytest.param("/rows/", "timeout", marks=pytest.mark.slow),
        pytest.param("manifest.json", "timeout", marks=pytest.mark.slow),
    ],
)
def test_a_store_that_cannot_be_read_is_no_damaged_checkpoint(store, endpoint, monkeypatch, kind, part):
    """Falling back to older rows would throw away training that is safe: it stops and says where."""
    monkeypatch.setattr(collectives, "PAUSES", (0.0,))
    put(store, 1)
    put(store, 2)
    store.fs.invalidate_cache()
    endpoint.fault = Fault(kind, "GET", part)
    said = listen()
    with pytest.raises(ArtifactError, match=r"s3://.*cannot be read") as caught:
        restore_newest(store, "c", RestoreTarget(access(shard()), {"w": torch.zeros(2)}))
    assert caught.value.hint == "run the same command again once the store answers; nothing was changed"
    assert endpoint.fault.seen
    assert said and all("again in 0 s, because s3://" in line for line in said)  # never "going back"
    endpoint.fault = None
    assert newest(store) == (2, [])


def test_an_artifact_whose_commit_is_never_answered_stays_whole(store, endpoint):
    """Every answer to the last write is lost, though it was done: what it committed is not cleared up after it."""
    about = {"kind": "k", "key": "k", "config": {}, "inputs": {}}
    with pytest.raises(Exception, match="endpoint|onnection"), store.draft("a", **about) as draft:
        draft.write_json("x.json", [1])
        endpoint.fault = Fault("lost", "PUT", "a/manifest.json")
        draft.commit({})
    endpoint.fault = None
    store.fs.invalidate_cache()
    store.verify(store.find("a"))


def test_what_another_process_wrote_since_a_folder_was_listed_is_there(store):
    """An answer of "not there" out of a cache would let it be written over or removed."""
    other = Store(store.url)
    store.write_bytes("a/1", b"1")
    assert len(store.fs.find(store.full("a"))) == 1
    fsspec.filesystem("s3", skip_instance_cache=True).pipe_file(other.full("a/2"), b"2")
    assert store.exists("a/2")
    assert store.fs.isfile(store.full("a/2"))


def test_a_committed_checkpoint_survives_a_dying_store(store, endpoint):
    """Every request fails once the manifest is there: the checkpoint is whole all the same."""

    def fail(point):
        if point == "after commit":
            endpoint.fault = Fault(500, "DELETE")

    put(store, 1)
    put(store, 2, on_point=fail)
    endpoint.fault = None
    assert newest(store) == (2, [])


@pytest.mark.parametrize("kind", [503, FURTHER])
def test_a_damaged_checkpoint_is_set_aside_without_a_rename_and_makes_room_later(store, endpoint, kind):
    """Its manifest goes, its files stay until a checkpoint of the same step comes; a fault on the way loses nothing."""
    put(store, 1)
    written = put(store, 2)
    lost = next(name for name in written.files if name.startswith("rows/"))
    store.fs.rm_file(store.full(f"{written.path}/{lost}"))
    endpoint.fault = Fault(kind, "DELETE", count=1)
    damaged, table = {}, shard()
    found = restore_newest(store, "c", RestoreTarget(access(table), {"w": torch.zeros(2)}), damaged)
    assert (found[1].step, list(damaged)) == (1, ["step-00000002"])
    retry_on_all_ranks("setting aside", lambda: set_aside(store, "c", damaged))
    assert [each.path for each in committed(store, "c")] == [found[0].path]
    assert remove_uncommitted(store, "c", aside=in_place(store, "c")) == []
    files = set(written.files) - {lost} | {"former-manifest.json"}
    assert {name.rpartition("step-00000002/")[2] for name in store.fs.find(store.full("c/step-00000002"))} == files
    store.verify(put(store, 2))
    (one,) = listed(store, "c")
    assert one.files == one.path == "c/aside/step-00000002.1"
    there = {name.rpartition("step-00000002.1/")[2] for name in store.fs.find(store.full(one.path))}
    assert there == files | {"set-aside.json"}
    remove(store, one)
    assert (listed(store, "c"), newest(store)) == ([], (2, []))
