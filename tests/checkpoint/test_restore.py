"""Checkpoints taken on real ranks restore bit for bit into other world sizes and shardings."""

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file

from pipeline.checkpoint.checkpointer import CheckpointedModel, Checkpointer, latest
from pipeline.checkpoint.reader import RestoreTarget, restore
from pipeline.checkpoint.train_state import TrainState
from pipeline.config import CheckpointConfig
from pipeline.core.errors import ArtifactError
from pipeline.embeddings.tables import dense_parameters
from pipeline.embeddings.touched import TouchedRows
from pipeline.store import Store
from tests.embeddings.cases import ROWS, assemble, kjt_of, make, shards_to_tensors, train
from tests.embeddings.cases import batch as global_batch
from tests.embeddings.ranks import plan_for, spawn

# Name of a checkpoint: ranks it was taken on, and each table's sharding there.
TAKEN = {
    "two-mixed": (2, ["row_wise", "data_parallel", "table_wise"]),
    "two-columns": (2, "column_wise"),
    "one-tables": (1, "table_wise"),
}
READ = [
    ("two-mixed", 1, "table_wise"),
    ("two-mixed", 1, "data_parallel"),
    ("two-mixed", 2, "table_wise"),
    ("two-mixed", 2, ["data_parallel", "row_wise", "row_wise"]),
    ("two-columns", 1, "column_wise"),
    ("one-tables", 1, "row_wise"),
    ("one-tables", 2, "row_wise"),
    ("one-tables", 2, "data_parallel"),
]
CONFIG = {"seed": 5}


def name_of(taken, world, kinds):
    return f"{taken}-{world}-{kinds if isinstance(kinds, str) else '+'.join(kinds)}"


def optimizer_of(dense):
    return torch.optim.Adam(dense.values(), lr=0.01)


def saver(store, name, dmp, access, dense, optimizer):
    model = CheckpointedModel(access, TouchedRows(dmp), dense, optimizer)
    config = CheckpointConfig(quantise="fp32", chunk_mib=400 / 2**20)
    return Checkpointer(store, name, config, model, "k", CONFIG, {"dataset": "d"})


def take(folder, names):
    """Train, save (small chunks), train on; leave the tables at the save and at the end."""
    store, rank = Store(str(folder.parent / "store")), dist.get_rank()
    for name in names:
        dmp, access = make(plan_for(TAKEN[name][1], dist.get_world_size()))
        dense = dense_parameters(dmp)
        optimizer = optimizer_of(dense)
        train(dmp, 0, 3)
        dmp(kjt_of(global_batch(0)[0]))[1].sum().backward()
        optimizer.step()
        state = TrainState(step=3, epoch=1, next_batch=2, samples=36, windows=[[1.0]], rng=torch.get_rng_state()[None])
        saver(store, name, dmp, access, dense, optimizer).save(state, wait=True)
        artifact = latest(store, name)
        assert max(e.bytes for n, e in artifact.files.items() if n.startswith("rows/")) < 1000
        save_file(shards_to_tensors(access), folder / f"{name}-saved-{rank}.safetensors")
        train(dmp, 3, 5)
        save_file(shards_to_tensors(access), folder / f"{name}-end-{rank}.safetensors")
        save_file({n: p.detach().clone() for n, p in dense.items()}, folder / f"{name}-dense-{rank}.safetensors")


def read(folder, cases):
    """Restore into a model drawn from another seed; leave its tables, then train on and leave them again."""
    store, rank = Store(str(folder.parent / "store")), dist.get_rank()
    for taken, world, kinds in cases:
        name = name_of(taken, world, kinds)
        dmp, access = make(plan_for(kinds, world), seed=99)
        train(dmp, 0, 1)
        dense = dense_parameters(dmp)
        optimizer = optimizer_of(dense)
        artifact = latest(store, taken)
        restore(store, artifact, RestoreTarget(access, dense, states=False))
        assert all((shard.state["adagrad_sum"] == 0).all() for shard in access.local_shards())
        state = restore(store, artifact, RestoreTarget(access, dense, optimizer))
        assert (state.step, state.epoch, state.next_batch, state.samples, state.windows) == (3, 1, 2, 36, [[1.0]])
        torch.set_rng_state(state.rng[0])
        assert all("exp_avg_sq" in optimizer.state[p] for p in dense.values())
        save_file(shards_to_tensors(access), folder / f"{name}-saved-{rank}.safetensors")
        train(dmp, 3, 5)
        save_file(shards_to_tensors(access), folder / f"{name}-end-{rank}.safetensors")
        save_file({n: p.detach().clone() for n, p in dense.items()}, folder / f"{name}-dense-{rank}.safetensors")


def fails_on_rank_one(folder):
    """A rank that cannot write makes all ranks raise the same error, and leaves nothing."""
    store = Store(str(folder / "store"))
    dmp, access = make(plan_for("row_wise", 2))
    checkpointer = saver(store, "c", dmp, access, dense_parameters(dmp), None)
    train(dmp, 0, 2)
    if dist.get_rank() == 1:
        real = store.fs.open

        def full_disk(path, *args, **kwargs):
            if "rows/" in path:
                raise OSError(28, "No space left on device")
            return real(path, *args, **kwargs)

        store.fs.open = full_disk
    with pytest.raises(ArtifactError, match="no space left on the store's disk while writing c/step-00000002/rows/"):
        checkpointer.save(TrainState(step=2), wait=True)
    dist.barrier()
    assert store.names("c") == []
    dist.barrier()
    if dist.get_rank() == 1:
        store.fs.open = lambda *args, **kwargs: 1 / 0
    with pytest.raises(ArtifactError, match="writing c/step-00000002 failed on rank 1: ZeroDivisionError"):
        checkpointer.save(TrainState(step=2), wait=True)
    if dist.get_rank() == 1:
        store.fs.open = real
    checkpointer.save(TrainState(step=2), wait=True)
    assert latest(store, "c").summary["rows"] == sum(ROWS.values())


def two_ranks_first(folder):
    take(folder, ["two-mixed", "two-columns"])
    (folder / "full").mkdir(exist_ok=True)
    dist.barrier()
    fails_on_rank_one(folder / "full")


def one_rank(folder):
    take(folder, ["one-tables"])
    read(folder, [case for case in READ if case[1] == 1])


def two_ranks_second(folder):
    read(folder, [case for case in READ if case[1] == 2])


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    root = tmp_path_factory.mktemp("restores")
    out = root / "out"
    spawn(two_ranks_first, 2, out)
    spawn(one_rank, 1, out)
    spawn(two_ranks_second, 2, out)
    return out


@pytest.mark.parametrize(("taken", "world", "kinds"), READ, ids=[name_of(*case) for case in READ])
def test_restored_tables_are_bit_equal(folder, taken, world, kinds):
    stem = name_of(taken, world, kinds)
    weights, sums, _ = assemble(folder, f"{taken}-saved", TAKEN[taken][0])
    found, found_sums, _ = assemble(folder, f"{stem}-saved", world)
    for table in ROWS:
        assert not found[table].isnan().any()
        assert torch.equal(found[table], weights[table])
        for column, part in found_sums[table].items():
            assert torch.equal(part, sums[table][column])


@pytest.mark.parametrize(("taken", "world", "kinds"), READ, ids=[name_of(*case) for case in READ])
def test_training_goes_on_as_if_uninterrupted(folder, taken, world, kinds):
    stem = name_of(taken, world, kinds)
    weights, _, _ = assemble(folder, f"{taken}-end", TAKEN[taken][0])
    found, _, _ = assemble(folder, f"{stem}-end", world)
    for table in ROWS:
        torch.testing.assert_close(found[table], weights[table], rtol=0, atol=1e-6)
    dense, again = (load_file(folder / f"{name}-dense-0.safetensors") for name in (taken, stem))
    for name in dense:
        torch.testing.assert_close(again[name], dense[name], rtol=0, atol=1e-6)
