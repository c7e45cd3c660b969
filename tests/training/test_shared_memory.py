"""Collectives through shared memory: as gloo's, for any sizes, and an error where a rank has ended."""

import os
from contextlib import nullcontext
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torchrec.distributed.dist_data import PooledEmbeddingsAllToAll

from pipeline.training import shared_memory
from pipeline.training import step as training_step
from pipeline.training.shared_memory import SHARED_SPINS, _bytes, _runs, memory_between, share_memory
from tests.alone import alone
from tests.embeddings.ranks import spawn
from tests.towers.cases import flat
from tests.waits import until

CPU = torch.device("cpu")


def exchange(rank, world, step):
    """An all-to-all of random sizes: the arguments of ``dist.all_to_all_single``."""
    rows = torch.randint(0, 9, (world, world), generator=torch.Generator().manual_seed(step)).tolist()
    kind = (torch.float32, torch.int64, torch.bfloat16)[step % 3]
    values = (100 * rank + torch.arange(sum(rows[rank]) * 3)).reshape(-1, 3).to(kind)
    receives = [rows[source][rank] for source in range(world)]
    return torch.zeros(sum(receives), 3, dtype=kind), values, receives, rows[rank]


def compare(folder):
    rank, world = dist.get_rank(), dist.get_world_size()
    memory = share_memory(CPU, one_machine=True)
    group = dist.new_group(list(range(world)))
    for step in range(20):
        shared_memory.SLOT = 64 if step % 5 == 4 else 256 << 20  # too small for some ranks' messages
        expected, *given = exchange(rank, world, step)
        got = torch.zeros_like(expected)
        dist.all_to_all_single(expected, *given, group=group)
        with memory.exchanging():
            assert dist.all_to_all_single(got, *given, async_op=True).wait()
        assert torch.equal(got, expected), step
        with memory.exchanging():  # a group of its own is none of the memory's
            again = torch.zeros_like(expected)
            dist.all_to_all_single(again, *given, group=group)
        assert torch.equal(again, expected), step
        drawn = torch.Generator().manual_seed(100 * step + rank)
        own, expected = torch.rand(step, generator=drawn), torch.zeros(world * step)  # of no values too
        gathered = torch.zeros_like(expected)
        dist.all_gather_into_tensor(expected, own, group=group)
        with memory.exchanging():
            dist.all_gather_into_tensor(gathered, own)
            in_place = torch.zeros(world, step)
            in_place[rank] = own
            dist.all_gather_into_tensor(in_place.flatten(), in_place[rank])
        assert torch.equal(gathered, expected) and torch.equal(in_place.flatten(), expected), step
        values = [torch.arange(10.0) * (rank + 1), torch.full((3, 2), rank, dtype=torch.int64), torch.zeros(0)]
        fits = memory.post(values)
        assert fits == (shared_memory.SLOT > 88)
        if fits:
            memory.take_sums(values)
            assert torch.equal(values[0], torch.arange(10.0) * sum(range(1, world + 1)))
            assert torch.equal(values[1], torch.full((3, 2), sum(range(world))))
    (folder / f"done-{rank}").touch()


@pytest.mark.parametrize("world", [pytest.param(2, marks=pytest.mark.slow), 3])
def test_exchanges_equal_those_of_gloo(tmp_path, world):
    spawn(compare, world, tmp_path)
    assert len(list(tmp_path.glob("done-*"))) == world


def compare_parts(folder):
    """Two pairs of four ranks: each pair has memory of its own, and the others' ranks none of its messages."""
    rank = dist.get_rank()
    pairs = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    own, place = pairs[rank % 2], rank // 2
    memory = share_memory(CPU, one_machine=True, group=own)
    for step in range(10):
        expected, *given = exchange(place, 2, step + rank % 2)
        got, across = torch.zeros_like(expected), torch.zeros(4)
        dist.all_to_all_single(expected, *given, group=own)
        with memory.exchanging():
            dist.all_to_all_single(got, *given, group=own)
            dist.all_gather_into_tensor(across, torch.tensor([float(rank)]))
        assert torch.equal(got, expected), step
        assert across.tolist() == [0.0, 1.0, 2.0, 3.0]
    (folder / f"done-{rank}").touch()


def test_ranks_of_a_group_exchange_among_themselves(tmp_path):
    spawn(compare_parts, 4, tmp_path)
    assert len(list(tmp_path.glob("done-*"))) == 4


def pool(folder, slot):
    """Pooled embeddings of uneven widths, there and back, by TorchRec's exchange and through the memory."""
    rank, widths = dist.get_rank(), [3, 0, 5]
    memory, counted = share_memory(CPU, one_machine=True), []
    memory.counted = lambda sizes, group: counted.append(sum(sizes) - sizes[rank])
    shared_memory.SLOT = slot
    exchange = PooledEmbeddingsAllToAll(dist.group.WORLD, widths)
    for step in range(4):
        drawn = torch.Generator().manual_seed(10 * step + rank)
        values, weights = torch.randn(12, widths[rank], generator=drawn), torch.randn(4, 8, generator=drawn)
        found = []
        for where in (nullcontext, memory.exchanging):
            given = values.clone().requires_grad_()
            with where():
                result = exchange(given).wait()
                (result * weights).sum().backward()
            found.append((result.detach(), given.grad))
        assert torch.equal(found[0][0], found[1][0]) and torch.equal(found[0][1], found[1][1]), step
    assert counted == ([4 * 8 * widths[rank], 4 * 4 * (8 - widths[rank])] * 4 if slot > 1000 else [])
    (folder / f"done-{rank}").touch()


@pytest.mark.parametrize("slot", [256 << 20, pytest.param(100, marks=pytest.mark.slow)])
def test_pooled_embeddings_and_their_gradients_are_those_of_torchrec(tmp_path, slot):
    spawn(pool, 3, tmp_path, slot)
    assert len(list(tmp_path.glob("done-*"))) == 3


def add_up(memory):
    values = [torch.ones(3)]
    assert memory.post(values)
    memory.take_sums(values)


def sums(folder):
    """Sums of more than a piece, and ranks that post one after the other and go on at once."""
    rank, world = dist.get_rank(), dist.get_world_size()
    memory, turns = share_memory(CPU, one_machine=True), share_memory(CPU, one_machine=True)
    for step in range(4):
        drawn = [
            torch.randn(100_000, generator=torch.Generator().manual_seed(10 * step + each)) for each in range(world)
        ]
        values = [drawn[rank].clone()]
        for turn in range(world):
            if turn == rank:
                memory.post(values)
            add_up(turns)
        memory.take_sums(values)
        assert torch.equal(values[0], sum(drawn[1:], drawn[0]))
    (folder / f"done-{rank}").touch()


def test_a_sum_is_taken_in_the_order_of_ranks_whenever_they_post(tmp_path):
    spawn(sums, 3, tmp_path)
    assert len(list(tmp_path.glob("done-*"))) == 3


def leave(folder):
    memory = share_memory(CPU, one_machine=True)
    if dist.get_rank() == 1:
        os._exit(0)
    with pytest.raises(RuntimeError, match=r"rank 1 \(process \d+\) has ended"):
        add_up(memory)
    (folder / "told").touch()


def test_a_rank_that_ends_does_not_leave_the_others_waiting(tmp_path):
    spawn(leave, 2, tmp_path)
    assert (tmp_path / "told").exists()


def test_bytes_are_those_of_the_values_whatever_their_stride():
    """A tensor of one value may have stride 0, and writing to its bytes writes to it."""
    for values in (torch.tensor([7], dtype=torch.int32).expand(1), torch.zeros(0, dtype=torch.int32), torch.arange(3)):
        odd = values.as_strided(values.shape, (0,)) if len(values) < 2 else values
        assert torch.equal(_bytes(odd).view(values.dtype), values)
        _bytes(odd).fill_(0)
        assert not odd.any()


def test_a_process_runs_until_it_has_ended():
    assert _runs(os.getpid())
    child = os.fork()
    if not child:
        os._exit(0)
    os.waitid(os.P_PID, child, os.WEXITED | os.WNOWAIT)  # now it is a zombie
    assert not _runs(child)
    os.waitpid(child, 0)
    assert not _runs(child)


def cannot(folder, whose):
    if dist.get_rank() == whose:
        shared_memory.mmap.mmap = refuse
    assert share_memory(CPU, one_machine=True) is None
    (folder / f"done-{dist.get_rank()}").touch()


def wait(folder, cpus):
    """Rank 0 waits for the other one, which comes once it pauses; how often it looked goes to a file."""
    shared_memory.available_cpus = lambda: cpus
    memory, looks, paused = share_memory(CPU, one_machine=True), [], folder / "paused"
    if dist.get_rank() == 1:
        until(paused.exists)
    pausing = mock.patch.object(shared_memory.time, "sleep", lambda seconds: paused.touch())
    with mock.patch.object(shared_memory.os, "sched_yield", lambda: looks.append(None)), pausing:
        memory.all_gather(torch.empty(2), torch.ones(1))
    if dist.get_rank() == 0:
        (folder / "looks").write_text(str(len(looks)))


@pytest.mark.parametrize(("cpus", "few"), [(1, True), (2, False)])
def test_ranks_that_share_cpus_look_a_few_times_before_they_pause(tmp_path, cpus, few):
    spawn(wait, 2, tmp_path, cpus)
    assert (int((tmp_path / "looks").read_text()) < SHARED_SPINS) == few


def refuse(*_, **__):
    raise OSError(13, "Permission denied")


@pytest.mark.parametrize("whose", [pytest.param(0, marks=pytest.mark.slow), 1])
def test_where_one_rank_cannot_map_the_memory_no_rank_uses_it(tmp_path, whose):
    spawn(cannot, 2, tmp_path, whose)
    assert len(list(tmp_path.glob("done-*"))) == 2


def without_a_second(folder):
    """A training whose ranks can map memory once, and not again for the gradients of the dense part."""
    made = []

    def once(*arguments, **keywords):
        made.append(None if made else memory_between(*arguments, **keywords))
        return made[-1]

    training_step.memory_between = once
    flat(folder, {"whole": ({}, {})})
    assert len(made) == 2 and made[0] is not None
    (folder / f"done-{dist.get_rank()}").touch()


def test_a_training_goes_on_where_only_part_of_its_memory_can_be_mapped(tmp_path):
    spawn(without_a_second, 2, tmp_path)
    dense = [load_file(tmp_path / f"whole-{rank}.safetensors") for rank in range(2)]
    assert len(list(tmp_path.glob("done-*"))) == 2
    names = [name for name in dense[0] if name.startswith("dense|")]
    assert names and all(torch.equal(dense[0][name], dense[1][name]) for name in names)


@alone
def test_several_machines_and_one_rank_have_none():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    assert share_memory(CPU, one_machine=False) is None
    assert share_memory(CPU, one_machine=True) is None


def stuck(folder):
    memory = share_memory(CPU, one_machine=True)
    shared_memory.LONGEST = 0.0
    if dist.get_rank() == 0:
        with pytest.raises(RuntimeError, match="has not come to a collective in"):
            add_up(memory)
        (folder / "told").touch()
    dist.barrier()


def test_a_rank_that_hangs_is_named(tmp_path):
    spawn(stuck, 2, tmp_path)
    assert (tmp_path / "told").exists()
