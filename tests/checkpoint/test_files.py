"""Checkpoint files in one process: chunks, optimizers, what does not fit and how it is said, where a write fails."""

import json
import os
import subprocess
from dataclasses import replace

import pytest
import torch

from pipeline.checkpoint.checkpointer import latest
from pipeline.checkpoint.chunks import RowBlock, TableCoding
from pipeline.checkpoint.fault_points import FaultPoint
from pipeline.checkpoint.index import committed, name_of
from pipeline.checkpoint.quantise import Coding
from pipeline.checkpoint.reader import apply_block
from pipeline.checkpoint.save import write_checkpoint
from pipeline.checkpoint.train_state import TrainState, flatten_optimizer, load_optimizer
from pipeline.core.errors import ArtifactError
from pipeline.store import Store
from tests.checkpoint.built import CODINGS
from tests.checkpoint.single import Picked, access, job, read, shard, write


@pytest.fixture
def store(tmp_path):
    return Store(str(tmp_path / "store"))


def test_chunks_are_bounded_and_cover_owned_shards_once(store):
    rows = access(shard(), shard("u", owner=False), shard("v", rows=3))
    artifact = write(store, rows=rows, chunk=45)  # a row: 20 bytes
    extents = store.read_json(f"{artifact.path}/index.json")["files"]
    assert [(e["table"], e["first"], e["rows"]) for e in extents] == [
        ("t", 0, 2),
        ("t", 2, 2),
        ("t", 4, 2),
        ("t", 6, 2),
        ("t", 8, 2),
        ("v", 0, 2),
        ("v", 2, 1),
    ]
    assert {e["file"] for e in extents} | {"index.json", "state.json", "dense.safetensors"} == set(artifact.files)
    tiny = write(store, chunk=1)
    assert [e["rows"] for e in store.read_json(f"{tiny.path}/index.json")["files"]] == [1] * 10


def test_a_delta_without_rows_is_committed_in_every_coding(store):
    base = write(store)
    for number, (name, coding) in enumerate(CODINGS.items(), start=2):
        made = job(f"c/{name_of(number)}", parents=[1], picked=Picked())
        delta = write_checkpoint(store, replace(made, coding=lambda block, coding=coding: coding), None)
        assert delta.summary["rows"] == 0, name
        rows = access(shard())
        rows.local_shards()[0].weight.zero_()
        read(store, delta, rows)
        assert torch.equal(rows.local_shards()[0].weight, shard().weight)
    store.verify(base)


def test_huge_rows_spoil_no_others_of_a_checkpoint(store):
    large = shard(rows=40)
    large.weight.uniform_(-1e-3, 1e-3, generator=torch.Generator().manual_seed(3))
    large.weight[7], large.weight[20, 1] = 1e4, 3e38
    made = replace(job(rows=access(large), chunk=1 << 20), coding=lambda block: TableCoding(Coding(8)))
    done = write_checkpoint(store, made, None)
    assert done.summary["rows"] == 40 and set(done.summary["codings"]) == {"fp32", "q8"}
    store.verify(done)
    back = shard(rows=40)
    read(store, done, access(back))
    assert back.weight[20, 1] == large.weight[20, 1] and torch.allclose(back.weight[7], large.weight[7], rtol=1e-3)
    others = [row for row in range(40) if row not in (7, 20)]
    assert (back.weight - large.weight)[others].abs().max() < 1e-5


@pytest.mark.parametrize("kind", [torch.optim.Adam, torch.optim.Adagrad, torch.optim.SGD])
def test_any_dense_optimizer_comes_back_and_steps_alike(store, kind):
    def build():
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Linear(4, 1))
        first, second = ([*layer.parameters()] for layer in model)
        groups = [{"params": first, "weight_decay": 0.1}, {"params": second}]
        extra = {"momentum": 0.9} if kind is torch.optim.SGD else {}
        return model, dict(model.named_parameters()), kind(groups, lr=0.1, **extra)

    def step(model, optimizer):
        optimizer.zero_grad()
        model(torch.ones(2, 3)).square().sum().backward()
        optimizer.step()

    model, dense, optimizer = build()
    step(model, optimizer)
    optimizer.param_groups[1]["lr"] = 0.03
    artifact = write(store, dense=dense, optimizer=optimizer)
    other, other_dense, again = build()
    read(store, artifact, access(shard()), other_dense, again)
    for _ in range(2):
        step(model, optimizer)
        step(other, again)
    assert all(torch.equal(dense[name], other_dense[name]) for name in dense)


def test_other_optimizer_or_parameters_are_named():
    dense = {"w": torch.nn.Parameter(torch.ones(2)), "b": torch.nn.Parameter(torch.ones(1))}
    tensors, record = flatten_optimizer(torch.optim.Adam(dense.values()), dense)
    with pytest.raises(
        ArtifactError, match=r"dense optimizer is Adam, but the run's is Adagrad\n.*dense_optimizer=adam"
    ):
        load_optimizer(torch.optim.Adagrad(dense.values()), dense, tensors, record)
    _, decayed = flatten_optimizer(torch.optim.AdamW(dense.values(), weight_decay=0.25), dense)
    with pytest.raises(ArtifactError, match=r"train.dense_optimizer=adam train.weight_decay=0.25"):
        load_optimizer(torch.optim.Adam(dense.values()), dense, tensors, decayed)
    with pytest.raises(ArtifactError, match="not in both: b"):
        load_optimizer(torch.optim.Adam([dense["w"]]), dense, tensors, record)


def test_round_trip_of_all_parts_and_json_is_plain(store):
    rows, dense = access(shard(), shard("u", rows=3)), {"w": torch.nn.Parameter(torch.randn(2))}
    before, kept = dense["w"].detach().clone(), [s.weight.clone() for s in rows.local_shards()]
    state = TrainState(step=1, epoch=2, next_batch=3, samples=4, schedule={"peak": 0.1}, rng=torch.get_rng_state())
    artifact = write(store, rows=rows, dense=dense, state=state)
    assert store.find(artifact.path) == artifact
    store.verify(artifact)
    for s in rows.local_shards():
        s.weight.zero_()
    with torch.no_grad():
        dense["w"].zero_()
    found = read(store, artifact, rows, dense)
    assert torch.equal(found.rng, state.rng) and found.to_json() == state.to_json()
    assert torch.equal(dense["w"].detach(), before)
    assert all(torch.equal(s.weight, w) for s, w in zip(rows.local_shards(), kept, strict=True))
    record = json.loads(store.fs.cat_file(store.full(f"{artifact.path}/state.json")))
    assert record["train"]["next_batch"] == 3


def test_states_are_zeroed_where_only_weights_are_wanted(store):
    artifact = write(store)
    rows = access(shard())
    read(store, artifact, rows, states=False)
    assert not rows.local_shards()[0].state["adagrad_sum"].any()


def test_every_difference_between_checkpoint_and_model_is_named(store):
    artifact = write(store, rows=access(shard("a"), shard("b"), shard("gone")))
    with pytest.raises(ArtifactError) as caught:
        read(store, artifact, access(shard("a"), shard("b", rows=11), shard("new")))
    for part in (
        "'b' is 10 rows x 4 in it, 11 x 4 in the model",
        "'new' of the model is not in it",
        "its table 'gone'",
    ):
        assert part in caught.value.message
    artifact = write(store, dense={"w": torch.ones(2), "x": torch.ones(1)})
    with pytest.raises(
        ArtifactError, match=r"'w' is \(2,\) in it, \(3,\) in the model; .*'y' is not there in it, \(1,\)"
    ):
        read(store, artifact, access(shard()), {"w": torch.ones(3), "y": torch.ones(1)})
    weight = torch.nn.Parameter(torch.ones(2))
    artifact = write(store, dense={"w": weight})
    with pytest.raises(ArtifactError, match="holds no dense optimizer"):
        read(store, artifact, access(shard()), {"w": weight}, torch.optim.SGD([weight]))


def test_rows_missing_from_the_index_are_an_error(store):
    half = access(shard(rows=5))
    half.tables = access(shard()).tables
    artifact = write(store, rows=half)
    with pytest.raises(ArtifactError, match="holds 20 of the 40 values of rows 0 to 9 of table 't'"):
        read(store, artifact, access(shard()))


def test_column_ranges_join_into_the_sum_of_the_whole_row(store):
    target = shard(rows=2, columns=8)
    target.weight.zero_()
    grads = torch.randn(2, 8)
    for column, columns in ((0, 2), (2, 6)):
        cut = grads[:, column : column + columns].contiguous()
        block = RowBlock("t", torch.arange(2).numpy(), column, cut, {"adagrad_sum": cut.square().mean(1)})
        assert apply_block(block, target) == 2
    assert torch.equal(target.weight, grads)
    torch.testing.assert_close(target.state["adagrad_sum"], grads.square().mean(1))


@pytest.mark.parametrize("ids", [[2, 3, 4, 5, 6, 7], [2, 4, 6, 9]])
def test_a_shard_takes_the_rows_of_a_block_that_are_its_own(ids):
    target = shard(row=4, rows=3)
    target.weight.zero_()
    values = torch.tensor(ids, dtype=torch.float32)
    block = RowBlock("t", torch.tensor(ids).numpy(), 0, values[:, None].expand(-1, 4), {"adagrad_sum": values})
    own = [row for row in ids if 4 <= row < 7]
    assert apply_block(block, target) == len(own)
    expected = torch.tensor([float(row) if row in own else 0.0 for row in (4, 5, 6)])
    assert torch.equal(target.weight, expected[:, None].expand(-1, 4))
    assert torch.equal(target.state["adagrad_sum"], torch.where(expected > 0, expected, 1.0))
    assert apply_block(block, shard(row=10, rows=3)) == 0


def test_only_committed_ones_count_on_stores_without_rename_too():
    store = Store("memory://nightjar-checkpoints")
    assert latest(store, "c") is None
    write(store, rows=access(shard(), shard("u")))
    artifact = write(store)
    assert len([name for name in artifact.files if "/u/" in name]) == 0
    read(store, artifact, access(shard()))
    assert latest(store, "c") == artifact
    with store.open("c/step-00000009/rows", "wb") as sink:
        sink.write(b"x")
    assert latest(store, "c") == artifact


@pytest.mark.parametrize(
    "point", [FaultPoint.ENCODE, FaultPoint.CHUNK, FaultPoint.DENSE, FaultPoint.WRITTEN, FaultPoint.BEFORE_COMMIT]
)
def test_a_write_that_fails_before_the_commit_leaves_nothing(store, point):
    before = write(store)

    def fail(now):
        if now == point:
            raise OSError(28, "No space left on device")

    with pytest.raises(ArtifactError, match="No space left|no space left"):
        write(store, "c/step-00000002", on_point=fail)
    assert [a.path for a in committed(store, "c")] == [before.path]
    assert store.names("c") == ["step-00000001"]
    store.verify(before)


def test_a_failure_after_the_commit_does_not_undo_it(store):
    """As when another rank dies after the manifest was written and before it could be told."""

    def fail(now):
        if now == FaultPoint.AFTER_COMMIT:
            raise RuntimeError("connection closed by peer")

    with pytest.raises(ArtifactError, match="connection closed"):
        write(store, on_point=fail)
    store.verify(latest(store, "c"))


@pytest.fixture
def tiny_disk(tmp_path):
    """A function that mounts a disk of so many KiB; skips where this machine does not allow it."""
    mounted = []

    def mount(kib):
        disk = tmp_path / f"disk{len(mounted)}"
        disk.mkdir()
        command = ["mount", "-t", "tmpfs", "-o", f"size={kib}k", "tmpfs", str(disk)]
        if os.geteuid() or subprocess.run(command, capture_output=True).returncode:
            pytest.skip("this machine lets us mount no tmpfs")
        mounted.append(disk)
        return disk

    yield mount
    for disk in mounted:
        subprocess.run(["umount", str(disk)], check=True)


def test_a_full_disk_at_any_moment_keeps_what_was_committed(tiny_disk):
    """A disk with room for one checkpoint and a part of the next, the part growing until it fits: no size harms."""
    failed = set()
    for kib in range(60, 200, 4):
        store = Store(str(tiny_disk(kib)))
        try:
            before = write(store, rows=access(shard(rows=2000)), dense={"w": torch.ones(3000)}, chunk=8000)
        except ArtifactError as error:
            assert "no space left on the store's disk while writing c/step-00000001" in error.message
            assert store.names("c") == []
            continue
        try:
            write(store, "c/step-00000002", access(shard(rows=2000)), {"w": torch.ones(3000)}, chunk=8000)
        except ArtifactError as error:
            assert "no space left on the store's disk while writing c/step-00000002/" in error.message
            failed.add(error.message.split("step-00000002/")[1].split("/")[0])
            assert store.names("c") == ["step-00000001"]
        store.verify(before)
    assert {"rows", "dense.safetensors"} <= failed
