"""Faults that pass while a training resumes change nothing; only proven damage does, and sets aside what it met."""

import errno
import shutil
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from pipeline.checkpoint import reader
from pipeline.checkpoint.checkpointer import CheckpointedModel, Checkpointer
from pipeline.checkpoint.ckpt_commands import gc, list_checkpoints
from pipeline.checkpoint.container import require_memory
from pipeline.checkpoint.index import committed
from pipeline.checkpoint.quarantine import listed, set_aside
from pipeline.checkpoint.reader import OTHER_MODEL, RestoreTarget, restore_newest
from pipeline.checkpoint.retention import clear, remove_uncommitted
from pipeline.checkpoint.train_state import TrainState
from pipeline.config import CheckpointConfig
from pipeline.core.errors import ArtifactError, DamagedError, PassingError, UnreachableError
from pipeline.store import Store
from tests.checkpoint.chain_runs import checkpointer, write
from tests.checkpoint.single import Picked, access, shard
from tests.checkpoint.single import write as put
from tests.embeddings.cases import make
from tests.embeddings.ranks import plan_for, spawn
from tests.faults.acts import Marks
from tests.logged import listen

SETTINGS = {"policy": "one_shot"}
CHUNKS = "step-00000003/rows"


def tree(root):
    """Every file below ``root`` with its bytes."""
    return {str(path.relative_to(root)): path.read_bytes() for path in root.rglob("*") if path.is_file()}


def changes(before, after):
    """Names of the files that came, went, or have other bytes: not the bytes, since a manifest has the time."""
    return sorted(name for name in before.keys() | after.keys() if before.get(name) != after.get(name))


def fail(holder, name, error, count):
    """Let function ``name`` of ``holder`` fail with ``error`` on chunks, the first ``count`` times; where it failed.

    Ranks are processes of their own, so nothing is put back.
    """
    real, failed = getattr(holder, name), []

    def failing(*args, **kwargs):
        if any(CHUNKS in str(arg) for arg in args) and len(failed) < count:
            failed.append(args)
            raise error
        return real(*args, **kwargs)

    setattr(holder, name, failing)
    return failed


FAULTS = {
    "memory": MemoryError("cannot allocate 16 MiB"),
    "thread": RuntimeError("can't start new thread"),
    "disk": OSError(errno.EIO, "Input/output error"),
    "files": OSError(errno.EMFILE, "Too many open files"),
}


def resume_through(folder, name, count):
    """Resume on two ranks while reading fails on the second, ``count`` times."""
    dmp, rows = make(plan_for("row_wise", 2), seed=77)
    saver, said = checkpointer(folder, dmp, rows, **SETTINGS)
    holder, function = (saver.store.fs, "open") if isinstance(FAULTS[name], OSError) else (reader, "read_block")
    failed = fail(holder, function, FAULTS[name], count if dist.get_rank() == 1 else 0)
    if count == 1:
        assert saver.resume().step == 3
        assert len(failed) == dist.get_rank()
    else:
        with pytest.raises(PassingError, match="rank 1|cannot be read"):
            saver.resume()
    assert not any("going back" in line for line in said)
    dist.barrier()


@pytest.fixture(scope="module")
def three(tmp_path_factory):
    """A function that copies a folder with checkpoints 1, 2 and 3 to another place; they are written once."""
    folder = tmp_path_factory.mktemp("three")
    spawn(write, 1, folder, "table_wise", "a", [1, 2, 3], SETTINGS)
    return lambda place: shutil.copytree(folder, place, dirs_exist_ok=True)


SOONER = [("disk", 1), ("memory", 100)]  # it passes, and it does not


@pytest.mark.parametrize(
    ("name", "count"),
    [
        pytest.param(name, count, marks=() if (name, count) in SOONER else pytest.mark.slow)
        for count in (1, 100)
        for name in FAULTS
    ],
)
def test_a_fault_while_restoring_goes_on_or_stops_and_changes_no_file(tmp_path, three, name, count):
    three(tmp_path)
    before = tree(tmp_path / "store")
    spawn(resume_through, 2, tmp_path, name, count)
    assert changes(before, tree(tmp_path / "store")) == []


def no_new_threads(folder):
    """Resume while this process cannot start a thread for reading, once and then for good."""
    dmp, rows = make(plan_for("table_wise", 1), seed=77)
    saver, said = checkpointer(folder, dmp, rows, **SETTINGS)
    real, left = threading.Thread.start, [1]

    def start(thread):
        if thread.name.startswith("nightjar-restore") and left[0]:
            left[0] -= 1
            raise RuntimeError("can't start new thread")
        real(thread)

    threading.Thread.start = start
    assert saver.resume().step == 3
    left[0] = 1000
    with pytest.raises(PassingError, match="can't start new thread"):
        saver.resume()


def test_no_thread_to_read_with_is_no_damage(tmp_path, three):
    three(tmp_path)
    before = tree(tmp_path / "store")
    spawn(no_new_threads, 1, tmp_path)
    assert changes(before, tree(tmp_path / "store")) == []


def resume_once(folder, expected):
    dmp, rows = make(plan_for("table_wise", 1), seed=77)
    saver, said = checkpointer(folder, dmp, rows, **SETTINGS)
    assert saver.resume().step == expected
    saver.save(TrainState(step=3), wait=True)
    (folder / "said.txt").write_text("\n".join(said))


def pin(store, path):
    """A version of a model that names checkpoint ``path``."""
    with store.draft("models/m/v1", kind="publish", key="v", config={}, inputs={"checkpoint": path}) as draft:
        draft.commit({})


def damage(root, step):
    file = sorted((root / f"ck/step-{step:08d}/rows/a").iterdir())[0]
    file.write_bytes(file.read_bytes()[:-1])


def test_a_damaged_checkpoint_is_set_aside_with_what_rests_on_it_and_nothing_is_deleted(tmp_path):
    spawn(write, 1, tmp_path, "table_wise", "a", [1, 2, 3], {"policy": "full"})
    spawn(write, 1, tmp_path / "more", "table_wise", "a", [1, 2, 3], {"policy": "consecutive"})
    for root, expected in ((tmp_path / "store", {3}), (tmp_path / "more/store", {2, 3})):
        damage(root, min(expected))
        before = tree(root / "ck")
        spawn(resume_once, 1, root.parent, min(expected) - 1)
        after = tree(root / "ck")
        moved = {}
        for name, data in before.items():
            step, _, rest = name.partition("/")
            aside = int(step.removeprefix("step-")) in expected
            moved[f"aside/{step}.1/{rest}" if aside else name] = data
        assert changes(moved, {name: after[name] for name in moved}) == []
        said = (root.parent / "said.txt").read_text()
        for step in expected:
            assert f"checkpoint ck/step-{step:08d} is set aside as ck/aside/step-{step:08d}.1" in said
        assert committed(Store(str(root)), "ck")[-1].summary["step"] == 3  # taken again in its old place


def test_what_is_set_aside_is_listed_and_goes_by_gc_once_nothing_names_it(tmp_path):
    place = "runs/r/checkpoints/k"
    store = Store(str(tmp_path))
    rows, dense = access(shard()), {"w": torch.ones(2)}
    for step in (1, 2):
        put(store, f"{place}/step-{step:08d}", rows, dense)
    pin(store, f"{place}/step-00000002")
    set_aside(store, place, {"step-00000002": "a file is gone"})
    assert [(each.name, each.type) for each in list_checkpoints(store)] == [
        ("step-00000001", "baseline"),
        ("step-00000002.1", "set aside"),
    ]
    told = gc(store, None, None, None, 0.0, dry_run=False)
    assert told["removed"] == []
    assert "models/m/v1/manifest.json names" in told["kept"][-1]["reason"]
    put(store, f"{place}/step-00000002", rows, dense)
    told = gc(store, None, None, None, 3600.0, dry_run=False)
    assert (told["removed"], told["kept"][-1]["reason"]) == ([], "set aside only now")
    told = gc(store, None, None, None, 0.0, dry_run=False)
    (removed,) = told["removed"]
    assert removed["path"] == f"{place}/aside/step-00000002.1"
    assert removed["bytes"] > 0 and "a file is gone" in removed["reason"]
    assert store.names(place) == ["aside", "step-00000001", "step-00000002"]
    assert store.names(f"{place}/aside") == []


def test_on_an_object_store_files_stay_until_their_place_is_needed():
    store, place = Store("memory://nightjar-aside"), "runs/r/checkpoints/k"
    rows, dense = access(shard()), {"w": torch.ones(2)}
    for step in (1, 2):
        put(store, f"{place}/step-{step:08d}", rows, dense)
    before = set(store.fs.find(store.full(f"{place}/step-00000002")))
    set_aside(store, place, {"step-00000002": "a file is gone"})
    assert [each.summary["step"] for each in committed(store, place)] == [1]
    assert remove_uncommitted(store, place, aside=["step-00000002"]) == []
    there = set(store.fs.find(store.full(f"{place}/step-00000002")))
    assert {name.replace("former-manifest.json", "manifest.json") for name in there} == before
    told = gc(store, None, None, None, 0.0, dry_run=True)
    assert [each["path"] for each in told["removed"]] == [f"{place}/aside/step-00000002.1"]
    put(store, f"{place}/step-00000002", rows, dense)
    moved = {name.rpartition("step-00000002.1/")[2] for name in store.fs.find(store.full(f"{place}/aside"))}
    assert moved == {name.rpartition("step-00000002/")[2] for name in there} | {"set-aside.json"}
    store.verify(store.get(f"{place}/step-00000002", "train"))
    gc(store, None, None, None, 0.0, dry_run=False)
    assert store.names(f"{place}/aside") == []
    store.verify(store.get(f"{place}/step-00000002", "train"))


@pytest.mark.parametrize("kind", ["disk", "objects"])
def test_a_checkpoint_that_lost_its_manifest_stays_when_those_on_it_were_set_aside(tmp_path, kind):
    """Its rows are all there; with the manifest out of a backup all of them can be used again."""
    store = Store(str(tmp_path) if kind == "disk" else "memory://nightjar-lost-manifest")
    put(store, "c/step-00000001", access(shard()))
    put(store, "c/step-00000002", access(shard()))
    put(store, "c/step-00000003", access(shard()), parents=(2,), picked=Picked(1))
    store.fs.rm_file(store.full("c/step-00000002/manifest.json"))
    before = set(store.fs.find(store.full("c/step-00000002")))
    saver = resumable(store)
    assert saver.resume().step == 1
    assert [each.former for each in listed(store, "c")] == ["c/step-00000003"]
    assert resumable(store).resume().step == 1
    assert set(store.fs.find(store.full("c/step-00000002"))) == before


def resumable(store):
    """A checkpointer of the made-up shard, as a training has it when it begins."""
    rows = SimpleNamespace(**vars(access(shard())), scratch=None)
    model = CheckpointedModel(rows, Marks(10), {}, None)
    return Checkpointer(store, "c", CheckpointConfig(), model, "k", {}, {})


def test_a_checkpoint_that_a_killed_process_was_about_to_set_aside_is_one_like_others(monkeypatch):
    """``force=true`` clears it, and a sweep does not take it for one that lies aside."""
    store = Store("memory://nightjar-about-to")
    put(store, "c/step-00000001", access(shard()))
    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(store.fs.inner, "cp_file", killed)
        set_aside(store, "c", {"step-00000001": "a file is gone"})
    assert [each.path for each in committed(store, "c")] == ["c/step-00000001"]
    assert clear(store, "c", {}) == []
    assert committed(store, "c") == []


def killed(*_, **__):
    raise KeyboardInterrupt


def test_a_look_that_fails_is_no_proof_of_absence(tmp_path, monkeypatch):
    """A sweep that takes a failed look for a missing manifest removes a checkpoint that is whole."""
    store = Store(str(tmp_path))
    for step in (1, 2):
        put(store, f"c/step-{step:08d}", access(shard()))
    real = Path.stat

    def look(path, **more):
        if str(path).endswith("step-00000002/manifest.json"):
            raise OSError(errno.EIO, "Input/output error")
        return real(path, **more)

    with monkeypatch.context() as patched, pytest.raises(OSError, match="Input/output"):
        patched.setattr(Path, "stat", look)
        remove_uncommitted(store, "c")
    assert [each.summary["step"] for each in committed(store, "c")] == [1, 2]
    with pytest.raises(OSError, match="too long"):
        store.exists("x" * 5000)


def test_bytes_that_are_right_when_read_again_are_no_damage(tmp_path, monkeypatch):
    store = Store(str(tmp_path))
    put(store, "c/step-00000001", access(shard()))
    store.write_bytes("other", b"{}")
    swapped = []

    def otherwise(real):  # the first read gives another file's bytes
        def read(path, *args, **kwargs):
            if path.endswith(("manifest.json", "index.json")) and path not in swapped:
                swapped.append(path)
                return real(store.full("other"), *args, **kwargs)
            return real(path, *args, **kwargs)

        return read

    for name in ("open", "cat_file"):
        monkeypatch.setattr(store.fs, name, otherwise(getattr(store.fs, name)))
    said = listen()
    assert restore_newest(store, "c", RestoreTarget(access(shard()), {}))[1].step == 1 and said == []
    assert len(swapped) == 2


def test_a_store_that_answers_otherwise_every_time_is_no_proof_either(tmp_path, monkeypatch):
    store = Store(str(tmp_path))
    put(store, "c/step-00000001", access(shard()))
    for number in range(20):
        store.write_bytes(f"other-{number}", b"x" * number)
    real, count = store.fs.open, iter(range(20))

    def opened(path, *args, **kwargs):
        other = path.endswith("index.json")
        return real(store.full(f"other-{next(count)}") if other else path, *args, **kwargs)

    monkeypatch.setattr(store.fs, "open", opened)
    with pytest.raises(UnreachableError, match="gives different bytes at every read"):
        restore_newest(store, "c", RestoreTarget(access(shard()), {}))


def test_a_model_that_does_not_fit_is_said_at_once_and_no_older_checkpoint_is_tried(tmp_path):
    store, said = Store(str(tmp_path)), listen()
    for step in (1, 2):
        put(store, f"c/step-{step:08d}", access(shard()))
    with pytest.raises(ArtifactError, match="does not fit the model") as caught:
        restore_newest(store, "c", RestoreTarget(access(shard(rows=11)), {}))
    assert not isinstance(caught.value, DamagedError | PassingError)
    assert (caught.value.hint, said) == (OTHER_MODEL, [])


def test_no_memory_for_a_chunk_is_told_from_a_chunk_that_makes_no_sense():
    with pytest.raises(RuntimeError) as caught:
        torch.empty(1 << 60)
    with pytest.raises(MemoryError, match="allocate memory"):
        require_memory(caught.value)
    require_memory(RuntimeError("shape '[2, 3]' is invalid for input of size 5"))
