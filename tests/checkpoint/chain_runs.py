"""What the ranks of the checkpointer tests run."""

import threading

import torch
import torch.distributed as dist
from safetensors.torch import save_file

from pipeline.checkpoint.checkpointer import CheckpointedModel, Checkpointer
from pipeline.checkpoint.fault_points import FaultPoint, ignore
from pipeline.checkpoint.train_state import TrainState
from pipeline.config import CheckpointConfig
from pipeline.embeddings.tables import dense_parameters
from pipeline.embeddings.touched import TouchedRows
from pipeline.store import Store
from tests.embeddings.cases import make, shards_to_tensors, train
from tests.embeddings.ranks import plan_for
from tests.logged import listen

LAST = 6


def checkpointer(folder, dmp, access, on_point=ignore, limits=None, **settings):
    dense = dense_parameters(dmp)
    model = CheckpointedModel(access, TouchedRows(dmp), dense, None)
    config = CheckpointConfig(**{"quantise": "fp32", "chunk_mib": 0.001, "keep_last": 50, **settings})
    said = listen()
    store = Store(str(folder / "store"))
    more = {} if limits is None else {"limits": limits}
    saver = Checkpointer(store, "ck", config, model, "key", {"a": 1}, {"data": "d"}, on_point=on_point, **more)
    return saver, said


def write(folder, kinds, name, steps, settings):
    """Train ``LAST`` steps with a checkpoint after each of ``steps``, that after ``LAST`` the final one; leave the
    tables at the end.
    """
    dmp, access = make(plan_for(kinds, dist.get_world_size()))
    saver, _ = checkpointer(folder, dmp, access, **settings)
    for step in range(LAST):
        train(dmp, step, step + 1)
        if step + 1 in steps:
            assert saver.save(TrainState(step=step + 1, rng=torch.get_rng_state()), final=step + 1 == LAST)
            if step + 1 == max(steps):
                saver.close()
                save_file(shards_to_tensors(access), folder / f"{name}-saved-{dist.get_rank()}.safetensors")
    save_file(shards_to_tensors(access), folder / f"{name}-end-{dist.get_rank()}.safetensors")


def resume(folder, kinds, name, settings, expected):
    """Restore into a model drawn from another seed, train to the end, leave the tables and save once more."""
    dmp, access = make(plan_for(kinds, dist.get_world_size()), seed=77)
    saver, said = checkpointer(folder, dmp, access, **settings)
    state = saver.resume()
    assert state.step == expected, said
    save_file(shards_to_tensors(access), folder / f"{name}-restored-{dist.get_rank()}.safetensors")
    train(dmp, state.step, LAST)
    saver.save(TrainState(step=LAST), wait=True)
    save_file(shards_to_tensors(access), folder / f"{name}-again-{dist.get_rank()}.safetensors")
    again, access2 = make(plan_for(kinds, dist.get_world_size()), seed=78)
    saver, _ = checkpointer(folder, again, access2, **settings)
    assert saver.resume().step == LAST
    for one, two in zip(access.local_shards(), access2.local_shards(), strict=True):
        assert torch.equal(one.weight, two.weight), one.table
        assert torch.equal(one.state["adagrad_sum"], two.state["adagrad_sum"]), one.table
    if dist.get_rank() == 0:
        (folder / f"{name}-said.txt").write_text("\n".join(said))


def compact_behind(folder):
    """Chains that are compacted behind training restore bit for bit, and the next deltas hold enough."""
    kinds = ["row_wise", "data_parallel", "table_wise"]
    for policy in ("one_shot", "consecutive"):
        place = folder / policy
        if dist.get_rank() == 0:
            place.mkdir()
        dist.barrier()
        settings = {"policy": policy, "compact_after": 2, "keep_last": 1}
        write(place, kinds, "a", [1, 2, 3, 4, 5], settings)
        dist.barrier()
        resume(place, kinds, "b", settings, 5)
        dist.barrier()


def skip_while_busy(folder):
    """One rank of two writes its first checkpoint until it is told to go on; the next one is skipped on both."""
    dmp, access = make(plan_for(["row_wise", "data_parallel", "table_wise"], dist.get_world_size()))
    go_on = threading.Event()
    if dist.get_rank() == 0:
        go_on.set()  # it has nothing to wait for but the other rank
    hold = lambda phase: go_on.wait() if phase == FaultPoint.WRITTEN else None  # noqa: E731
    saver, said = checkpointer(folder, dmp, access, hold, when_busy="skip", policy="one_shot")
    train(dmp, 0, 1)
    assert saver.save(TrainState(step=1))
    train(dmp, 1, 2)
    assert not saver.save(TrainState(step=2))
    go_on.set()
    train(dmp, 2, 3)
    assert saver.save(TrainState(step=3), wait=True)
    assert (saver.figures.count, saver.figures.skipped, saver.figures.failed) == (2, 1, 0)
    told = ["no checkpoint after step 2: the last one is still being written"]
    assert said == (told if dist.get_rank() == 0 else [])
    save_file(shards_to_tensors(access), folder / f"a-end-{dist.get_rank()}.safetensors")
