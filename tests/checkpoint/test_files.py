"""Checkpoint files in one process: chunks, optimizers, what is wrong and how it is said, which ones there are."""

import json
import os
import subprocess
from types import SimpleNamespace

import pytest
import torch
from pipeline.checkpoint.collect import pack, pieces

from pipeline.artifacts import Store
from pipeline.checkpoint import TrainState, checkpoint_path, latest, prune, restore, save
from pipeline.checkpoint.state import flatten_optimizer, load_optimizer
from pipeline.embeddings import LocalShard, TableSpec
from pipeline.errors import ArtifactError


def shard(table="t", rows=10, columns=4, row=0, column=0, owner=True):
    weight = torch.arange(rows * columns, dtype=torch.float32).view(rows, columns)
    return LocalShard(table, row, rows, column, columns, owner, weight, {"adagrad_sum": torch.ones(rows)})


def access(*shards):
    """What checkpoint code uses of RowAccess, without ranks."""
    tables = {s.table: TableSpec(s.table, s.rows, s.columns) for s in shards}
    return SimpleNamespace(tables=tables, local_shards=lambda: list(shards))


def write(store, path="c/step-00000001", rows=None, dense=None, optimizer=None, state=None, **more):
    state = state or TrainState(step=1)
    return save(
        store, path, state=state, rows=rows or access(shard()), dense=dense or {}, optimizer=optimizer,
        key="k", config={}, **more,
    )  # fmt: skip


@pytest.fixture
def store(tmp_path):
    return Store(str(tmp_path / "store"))


def test_pieces_are_bounded_and_cover_owned_shards_once():
    parts = pieces([shard(), shard("u", owner=False), shard("v", rows=3)], limit=45)  # a row: 20 bytes
    assert [(p.extent.table, p.extent.row, p.extent.rows) for p in parts] == [
        ("t", 0, 2), ("t", 2, 2), ("t", 4, 2), ("t", 6, 2), ("t", 8, 2), ("v", 0, 2), ("v", 2, 1)]  # fmt: skip
    assert all(p.bytes <= 45 for p in parts)
    assert [len(group) for group in pack(parts, 80)] == [2, 2, 2, 1]
    assert [p.extent.rows for p in pieces([shard()], limit=1)] == [1] * 10
    source = shard()
    assert pieces([source], limit=45)[0].tensors["weight"].data_ptr() == source.weight.data_ptr()


@pytest.mark.parametrize("kind", [torch.optim.Adam, torch.optim.Adagrad, torch.optim.SGD])
def test_any_dense_optimizer_comes_back_and_steps_alike(kind):
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
    tensors, record = flatten_optimizer(optimizer, dense)
    tensors = {name: value.clone() for name, value in tensors.items()}
    other, other_dense, again = build()
    other.load_state_dict(model.state_dict())
    load_optimizer(again, other_dense, tensors, json.loads(json.dumps(record)))
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
    with pytest.raises(ArtifactError, match="not in both: b"):
        load_optimizer(torch.optim.Adam([dense["w"]]), dense, tensors, record)


def test_round_trip_without_ranks_and_index_is_plain_json(store):
    rows, dense = access(shard(), shard("u", rows=3)), {"w": torch.nn.Parameter(torch.randn(2))}
    before, kept = dense["w"].detach().clone(), [s.weight.clone() for s in rows.local_shards()]
    state = TrainState(step=1, epoch=2, next_batch=3, samples=4, schedule={"peak": 0.1}, rng=torch.get_rng_state())
    artifact = write(store, rows=rows, dense=dense, state=state, chunk_bytes=64)
    assert set(artifact.files) >= {"index.json", "state.json", "dense.safetensors", "rows/rank-00000-00000.safetensors"}
    assert artifact.summary["step"] == 1 and artifact.summary["tables"] == 2
    assert store.find(artifact.path) == artifact
    store.verify(artifact)
    for s in rows.local_shards():
        s.weight.zero_()
    with torch.no_grad():
        dense["w"].zero_()
    found = restore(store, artifact, rows=rows, dense=dense)
    assert torch.equal(found.rng, state.rng) and found.to_json() == state.to_json()
    assert torch.equal(dense["w"].detach(), before)
    assert all(torch.equal(s.weight, w) for s, w in zip(rows.local_shards(), kept, strict=True))


def test_every_difference_between_checkpoint_and_model_is_named(store):
    artifact = write(store, rows=access(shard("a"), shard("b"), shard("gone")))
    with pytest.raises(ArtifactError) as caught:
        restore(store, artifact, rows=access(shard("a"), shard("b", rows=11), shard("new")), dense={})
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
        restore(store, artifact, rows=access(shard()), dense={"w": torch.ones(3), "y": torch.ones(1)})
    with pytest.raises(ArtifactError, match="holds no dense optimizer"):
        optimizer = torch.optim.SGD([weight := torch.nn.Parameter(torch.ones(2))])
        restore(
            store, write(store, dense={"w": weight}), rows=access(shard()), dense={"w": weight}, optimizer=optimizer
        )


@pytest.mark.parametrize("damage", ["flip", "cut", "remove"])
def test_damaged_rows_are_found_before_they_are_used(store, damage, tmp_path):
    artifact = write(store)
    file = tmp_path / "store" / artifact.path / "rows/rank-00000-00000.safetensors"
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data if damage == "flip" else data[:-1])
    if damage == "remove":
        file.unlink()
    message = (
        "is missing from its artifact" if damage == "remove" else r"rank-00000-00000.safetensors is corrupt: \d+ bytes"
    )
    with pytest.raises(ArtifactError, match=message):
        restore(store, artifact, rows=access(shard()), dense={})


def test_rows_missing_from_the_index_are_an_error(store):
    half = access(shard(rows=5))
    half.tables = access(shard()).tables
    artifact = write(store, rows=half)
    with pytest.raises(ArtifactError, match="holds 20 of the 40 values of rows 0 to 9 of table 't'"):
        restore(store, artifact, rows=access(shard()), dense={})


def test_latest_and_prune_count_only_committed(store, tmp_path):
    assert latest(store, "c") is None
    for step in (2, 10, 100_000_000):
        write(store, checkpoint_path("c", step), state=TrainState(step=step))
    for step in (1, 7, 100_000_001):
        (tmp_path / "store" / checkpoint_path("c", step)).mkdir()
    assert latest(store, "c").summary["step"] == 100_000_000
    assert prune(store, "c", 2) == ["c/step-00000007", "c/step-00000002", "c/step-00000001"]
    assert store.names("c") == ["step-00000010", "step-100000000", "step-100000001"]
    assert prune(store, "c", 2) == []
    write(store, checkpoint_path("c", 100_000_001))
    assert prune(store, "c", 1) == ["c/step-100000000", "c/step-00000010"]


def test_saving_again_replaces_and_memory_stores_work():
    store = Store("memory://nightjar-checkpoints")
    write(store, rows=access(shard(), shard("u")))
    artifact = write(store)
    assert len([name for name in artifact.files if name.startswith("rows/")]) == 1
    restore(store, artifact, rows=access(shard()), dense={})
    assert latest(store, "c") == artifact
    prune(store, "c", 1)
    assert latest(store, "c") == artifact


def test_full_disk_is_one_message_and_leaves_nothing(tmp_path):
    disk = tmp_path / "tiny"
    disk.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(disk)], capture_output=True)
    if mounted.returncode or os.geteuid():
        pytest.skip("this machine lets us mount no tmpfs")
    try:
        store = Store(str(disk))
        with pytest.raises(ArtifactError, match="no space left on the store's disk while writing c/step-00000001/rows"):
            write(store, rows=access(shard(rows=100_000)))
        assert store.names("c") == []
    finally:
        subprocess.run(["umount", str(disk)], check=True)
