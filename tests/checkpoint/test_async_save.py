"""A checkpoint behind training: ranks that write for different lengths of time, pruning, what pins cost."""

import os
import sys
import threading
from collections import Counter
from contextlib import suppress
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch.distributed.distributed_c10d import _set_pg_timeout

from pipeline.checkpoint import async_save
from pipeline.checkpoint.async_save import Limits
from pipeline.checkpoint.fault_points import FaultPoint
from pipeline.checkpoint.index import committed
from pipeline.checkpoint.retention import pinned_names
from pipeline.checkpoint.train_state import TrainState
from pipeline.core.errors import DamagedError
from pipeline.store import Store
from tests.checkpoint.chain_runs import checkpointer, resume
from tests.checkpoint.single import access, shard
from tests.checkpoint.single import write as put
from tests.checkpoint.test_checkpointer import same, tables
from tests.embeddings.cases import make, shards_to_tensors, train
from tests.embeddings.ranks import plan_for, spawn
from tests.waits import PATIENCE

KINDS = ["row_wise", "data_parallel", "table_wise"]
SHORT = Limits(write=1.0, slack=1.0)
LONG = 600.0  # seconds that a test waits for what is certain to come
TOO_LONG, LOST, STUCK = "its word that it took too long", "the ranks lost contact", "is not written after 3.0 s"
# What the first rank meets while the second one is slow with its first chunk, and what may be said of it. Two limits
# may end a write that has no end, of which a busy machine may meet the second one first.
SLOW = {
    TOO_LONG: ["was not written within 1 s"],
    "no word in time": [LOST],
    "no end": [LOST, STUCK],
}


class Slow:
    """What slows the second rank's first chunk down: its clock is turned past the limit, or it waits to be told."""

    def __init__(self, name):
        self.waits, self.told = name != TOO_LONG, threading.Event()
        self.seconds, self.chunks = 0.0, 0

    def now(self):
        return self.seconds

    def hook(self, point):
        if point != FaultPoint.CHUNK:
            return
        self.chunks += 1
        if self.chunks == 1 and dist.get_rank() == 1:
            self.seconds += 1.5
            assert not self.waits or self.told.wait(LONG)


def renewing_with_time(flight):
    """Have the ranks make another group with as much time for each other as a busy machine needs."""
    renew = flight._renew_writer

    def renewed():
        flight._limits = Limits()
        renew()

    flight._renew_writer = renewed


def slow_rank(folder, name):
    """Two checkpoints and a final one; the first takes one rank too long."""
    slow = Slow(name)
    dmp, rows = make(plan_for(KINDS, 2))
    limits = Limits(write=1.0, now=slow.now) if not slow.waits else None
    saver, said = checkpointer(folder, dmp, rows, slow.hook, limits=limits, policy="one_shot")
    flight = saver._async_save
    renewing_with_time(flight)
    first = flight._writer
    waits = first.group._get_backend(torch.device("cpu")).options._timeout
    assert waits == timedelta(seconds=flight._limits.write + flight._limits.slack)
    train(dmp, 0, 1)
    if slow.waits:  # only now: to make a group takes as long as it takes
        _set_pg_timeout(timedelta(seconds=SHORT.write + SHORT.slack), first.group)
    assert saver.save(TrainState(step=1, rng=torch.get_rng_state()))
    train(dmp, 1, 2)
    thread = first._thread
    if name == "no end":
        flight._limits = SHORT
        saver._collect(raising=False)
    if slow.waits:
        if dist.get_rank() == 0:
            thread.join(LONG)  # until it has lost the other one
            assert not thread.is_alive()
        dist.barrier()
        slow.told.set()
    saver._collect(raising=False)
    assert saver.save(TrainState(step=2, rng=torch.get_rng_state()))
    train(dmp, 2, 3)
    assert saver.save(TrainState(step=3, rng=torch.get_rng_state()), wait=True)
    assert (saver.figures.count, saver.figures.failed) == (2, 1)
    assert len(said) == (dist.get_rank() == 0)
    assert all(line.startswith("the checkpoint was not written; its rows go into the next one: ") for line in said)
    assert all(any(each in line for each in SLOW[name]) for line in said), said
    save_file(shards_to_tensors(rows), folder / f"a-end-{dist.get_rank()}.safetensors")
    thread.join()  # of the one that had no end
    dist.barrier()


@pytest.mark.parametrize(
    "name", [next(iter(SLOW)), *(pytest.param(name, marks=pytest.mark.slow) for name in [*SLOW][1:])]
)
def test_a_rank_that_writes_too_long_costs_that_checkpoint_only(tmp_path, name):
    spawn(slow_rank, 2, tmp_path, name)
    assert [each.summary["step"] for each in committed(Store(str(tmp_path / "store")), "ck")] == [2, 3]
    spawn(resume, 2, tmp_path, "row_wise", "b", {"policy": "one_shot"}, 3)
    same(tables(tmp_path, "a-end", 2), tables(tmp_path, "b-restored", 2))


def without_threads(folder):
    """A rank that gets no thread for its writer writes all the same, and the other rank's writer meets it."""
    dmp, rows = make(plan_for(KINDS, 2))
    saver, said = checkpointer(folder, dmp, rows, policy="one_shot")
    real = threading.Thread.start

    def start(thread):
        if thread.name == "nightjar-checkpoint" and dist.get_rank() == 1:
            raise RuntimeError("can't start new thread")
        real(thread)

    threading.Thread.start = start
    assert saver.save(TrainState(step=1))
    saver.close()
    assert (saver.figures.count, said) == (1, [])


def test_a_rank_without_a_thread_for_its_writer_writes_at_once(tmp_path):
    spawn(without_threads, 2, tmp_path)


def prune_slowly(folder):
    """Removing waits until training has gone on, which it does while the store removes."""
    went_on, threads = threading.Event(), []

    def hook(point):
        if point == FaultPoint.PRUNE:
            threads.append(threading.current_thread().name)
            assert went_on.wait(PATIENCE)

    dmp, rows = make(plan_for("table_wise", 1))
    saver, said = checkpointer(folder, dmp, rows, hook, keep_last=1, policy="full")
    for step in (1, 2):
        train(dmp, step - 1, step)
        assert saver.save(TrainState(step=step))
    train(dmp, 2, 3)
    went_on.set()
    saver.close()
    assert threads == ["nightjar-checkpoint"]
    assert ([entry.step for entry in saver._entries], said) == ([2], [])


def test_training_goes_on_while_old_checkpoints_are_removed(tmp_path):
    spawn(prune_slowly, 1, tmp_path)
    assert Store(str(tmp_path / "store")).names("ck") == ["step-00000002"]


def waited_for(folder):
    """Behind training the writer takes what others leave; once training waits for it, it no longer does."""
    begun, waited, seen = threading.Event(), threading.Event(), []
    raise_priority = async_save._raise_priority

    def hurried(thread):
        raise_priority(thread)
        waited.set()

    async_save._raise_priority = hurried

    def priority():
        return os.getpriority(os.PRIO_PROCESS, threading.get_native_id())

    def hook(point):
        if point == FaultPoint.CHUNK and not seen:
            seen.append(priority())
            begun.set()
            assert waited.wait(PATIENCE)
            seen.append(priority())

    def lower_and_raise():
        usual = priority()
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 19)
        with suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), usual)
            may_be_raised.append(True)

    may_be_raised = []
    trial = threading.Thread(target=lower_and_raise)
    trial.start()
    trial.join()
    dmp, rows = make(plan_for("table_wise", 1))
    saver, said = checkpointer(folder, dmp, rows, hook)
    train(dmp, 0, 1)
    assert saver.save(TrainState(step=1))
    assert begun.wait(PATIENCE)
    saver.close()
    assert (seen, said) == ([19, priority() if may_be_raised else 19], [])


@pytest.mark.skipif(sys.platform != "linux", reason="threads have no priority of their own there")
def test_a_writer_that_training_waits_for_no_longer_yields_to_other_programs(tmp_path):
    spawn(waited_for, 1, tmp_path)


def refused(folder):
    """A store that refuses to remove: checkpoints are taken all the same, and what is left goes later."""
    dmp, rows = make(plan_for("table_wise", 2))
    saver, said = checkpointer(folder, dmp, rows, keep_last=1, policy="full")
    real = saver.store.fs.rm_file

    def refuse(path):
        raise PermissionError(13, "Permission denied")

    saver.store.fs.rm_file = refuse
    for step in (1, 2):
        assert saver.save(TrainState(step=step), wait=True)
    saver.store.fs.rm_file = real
    assert [entry.step for entry in saver._entries] == [2]
    assert len(said) == (dist.get_rank() == 0)
    assert all("old checkpoints are kept until the next one: the store refuses removing" in line for line in said)
    saver.save(TrainState(step=3), wait=True)
    dist.barrier()
    assert saver.store.names("ck") == ["step-00000003"]


def test_what_the_store_refuses_to_remove_goes_with_the_next_checkpoint(tmp_path):
    spawn(refused, 2, tmp_path)


class Counted:
    """Counts the requests of a file system, by what they are."""

    def __init__(self, store, monkeypatch):
        self.count = Counter()
        for name in ("info", "ls", "cat_file", "find", "open"):
            monkeypatch.setattr(store.fs, name, self._counting(name, getattr(store.fs, name)))

    def _counting(self, name, real):
        def call(*args, **kwargs):
            self.count[name] += 1
            return real(*args, **kwargs)

        return call


def test_pins_take_a_request_for_each_version_however_many_nights_there_are(monkeypatch, tmp_path):
    store, place = Store(f"memory:/{tmp_path}"), "runs/n007/checkpoints/k"
    put(store, f"{place}/step-00000001", access(shard()))
    for night in range(60):
        with store.draft(f"runs/n{night:03d}/train/k", kind="train", key="k", config={}, inputs={}) as draft:
            draft.commit({"final": f"runs/n{night:03d}/checkpoints/k/step-00000001"})
    for version in range(20):
        names = {"checkpoint": f"{place}/step-{version + 1:08d}"}
        with store.draft(f"models/m/v{version:02d}", kind="publish", key="k", config={}, inputs=names) as draft:
            draft.commit({})
    store.write_json("models/m/current.json", {})
    counted = Counted(store, monkeypatch)
    assert pinned_names(store, place) == [f"step-{step:08d}" for step in range(1, 21)]
    assert counted.count["cat_file"] == 20 + 2  # versions, what may be one of the model itself, this run's training
    assert sum(counted.count.values()) <= 30


def test_a_version_whose_manifest_is_damaged_keeps_all_checkpoints(tmp_path):
    store, place = Store(f"memory:/{tmp_path}"), "runs/r/checkpoints/k"
    store.write_bytes("models/m/v1/manifest.json", b'{"inputs": {"a": "' + place.encode() + b'/step-00000001"}}')
    assert pinned_names(store, place) == ["step-00000001"]  # of another writer, without a seal
    store.write_bytes("models/m/v2/manifest.json", b'{"schema_version": 2}')
    with pytest.raises(DamagedError, match=r"models/m/v2/manifest.json is not .* what it refers to is unknown"):
        pinned_names(store, place)
