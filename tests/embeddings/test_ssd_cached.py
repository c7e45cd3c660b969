"""Tier ssd with a cache of rows in device memory: the same bytes as in memory, from kernels with the cache's rows."""

import dataclasses
from collections import deque
from threading import Event

import numpy as np
import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file

from pipeline.core.errors import GuardError, PlanError
from pipeline.embeddings.initial import initial_rows
from pipeline.embeddings.sharding import to_sharding_plan
from pipeline.embeddings.ssd import SsdStore
from pipeline.embeddings.ssd.cached import CachedShard
from pipeline.embeddings.ssd.fetch import Fetcher, WaitingParts, check_room
from pipeline.embeddings.ssd.kernel import SlotKernel
from pipeline.embeddings.ssd.slots import DeviceSlots, HostSlots
from pipeline.embeddings.tables import TableSpec, kernels
from pipeline.embeddings.touched import TouchedRows
from pipeline.records import ShardPlan
from tests.embeddings.cases import SEED, batch, make, shards_to_tensors, train
from tests.embeddings.ranks import DIM, ROWS, on_tier, plan_for, spawn

STEPS = 24
CACHE = 30  # of 41 rows of table "long"; a batch has up to 24
HOSTED = 5  # rows of a table in host memory, so that most that leave the device go on to the log
KINDS = {
    "rw": ("row_wise", "rowwise_adagrad"),
    "tw": ("table_wise", "rowwise_adagrad"),
    "sgd": (["row_wise", "table_wise", "data_parallel"], "sgd"),
}


def outcome(plan, ssd, device="cpu", **how):
    dmp, access = make(plan, ssd=ssd, device=device, **how)
    touched = TouchedRows(dmp)
    if ssd is not None:  # all at once: most wait in line for slots
        for step in range(STEPS):
            ssd.prefetch(dict(zip(ROWS, (ids.flatten().numpy() for ids in batch(step)[0]), strict=True)))
    outputs = train(dmp, 0, STEPS, device)
    marks = {"|".join(map(str, key)) + "|touched": touched.mask(key) for key in touched.shards()}
    found = {**outputs, **marks, **shards_to_tensors(access)}
    return {key: value.cpu().clone() for key, value in found.items()}, dmp


def compare(folder):
    rank, world = dist.get_rank(), dist.get_world_size()
    for name, (kind, optimizer) in KINDS.items():
        plan = plan_for(kind, world)
        cached = on_tier(plan, "ssd", CACHE, HOSTED)
        ssd = SsdStore(cached, [str(folder)], rank, cached=True)
        save_file(outcome(plan, None, optimizer=optimizer)[0], folder / f"{name}-ddr-{rank}.safetensors")
        found, dmp = outcome(cached, ssd, optimizer=optimizer)
        save_file(found, folder / f"{name}-ssd-{rank}.safetensors")
        for kernel in kernels(dmp):
            if isinstance(kernel.module, SlotKernel):
                held = [ssd.shard(table.name).count if table.name in ssd.tables else 0 for table in kernel.tables]
                assert kernel.module.weights_host.numel() == DIM * sum(held)
                assert [len(w) for w in kernel.module.split_embedding_weights()] == [
                    t.local_rows for t in kernel.tables
                ]
        ssd.close()


@pytest.mark.parametrize("world", [1, 2])
def test_training_from_a_cache_ends_like_in_memory(tmp_path, world):
    spawn(compare, world, tmp_path)
    for name in KINDS:
        for rank in range(world):
            ddr, ssd = (load_file(tmp_path / f"{name}-{tier}-{rank}.safetensors") for tier in ("ddr", "ssd"))
            assert sorted(ddr) == sorted(ssd) and any("sum" in key for key in ddr) == (name != "sgd")
            assert [key for key in ddr if not torch.equal(ddr[key], ssd[key])] == []


@pytest.mark.parametrize("states", [[], [(90,)], [(90, 12), (90,)]])
def test_slots_of_a_device_keep_the_bits_that_slots_of_the_host_keep(states):
    generator = np.random.default_rng(3)
    places = [torch.zeros(90, 12), torch.zeros(90, 12)]
    host, device = (
        kind([weights, *(torch.zeros(shape) for shape in states)], 25)
        for kind, weights in zip((HostSlots, DeviceSlots), places, strict=True)
    )
    for _ in range(20):
        slots = generator.permutation(90)[:33]
        values = generator.integers(0, 2**32, (33, 25), np.uint32).view(np.float32)  # any bits, NaN too
        for each in (host, device):
            each.write(slots, values)
            each.write(slice(5, 9), values[:4])
        wanted = generator.integers(0, 90, 50)
        ours, theirs = device.read(wanted).view(np.uint32), host.read(wanted).view(np.uint32)
        assert np.array_equal(ours, theirs) and ours[:, 12:].any() == bool(states)
    assert torch.equal(places[0].view(torch.int32), places[1].view(torch.int32)) and places[1].any()


class Cached:
    """A shard of 3000 rows with 700 slots, and beside it what its rows should be; ``hosted``: rows in host memory."""

    def __init__(self, folder, rows=3_000, slots=700, dim=12, hosted=0):
        self.table, self.generator = TableSpec("t", rows, dim), np.random.default_rng(rows)
        plan = ShardPlan(rank=0, row=0, rows=rows, column=0, columns=dim)
        self.shard = CachedShard(folder, "t", plan, slots, rows, dim + 1, hosted)
        self.kernel, self.state = torch.zeros(slots, dim), torch.zeros(slots)
        self.shard.live_in([self.kernel, self.state])
        self.shard.begin(self.table, SEED)
        self.weights, self.sums = initial_rows(SEED, self.table, 0, rows).numpy(), np.zeros(rows, np.float32)
        self.fetcher = Fetcher()
        self.missing = self.hosted = 0
        self.line = WaitingParts(self.bring)

    def bring(self, parts):
        self.fetcher.fetch(parts)
        self.missing += sum(part.missing for _, part in parts)
        self.hosted += sum(part.hosted for _, part in parts)

    def announce(self, ids):
        part = self.shard.part(ids, Event())
        self.line.join([(self.shard, part)])
        return part

    def train(self, part):
        change = self.generator.random((len(part.rows), self.table.dim), np.float32)
        assert np.array_equal(self.kernel.numpy()[part.slots], self.weights[part.rows])
        assert np.array_equal(self.state.numpy()[part.slots], self.sums[part.rows])
        self.weights[part.rows] += change
        self.sums[part.rows] += 1
        self.kernel.numpy()[part.slots] += change
        self.state.numpy()[part.slots] += 1
        self.line.release([(self.shard, part)])

    def all_same(self):
        records = self.fetcher.read(self.shard, np.arange(self.table.rows))
        assert np.array_equal(records[:, :-2], self.weights) and np.array_equal(records[:, -2], self.sums)


@pytest.mark.parametrize("hosted", [0, 1, 90, 1_000])
def test_rows_come_wait_stay_and_leave(tmp_path, hosted):
    """Skewed ids, more announced than there are slots for; the batches left out hold nothing."""
    model, flying = Cached(tmp_path, hosted=hosted), deque()
    for step in range(150):
        ids = (3_000 * model.generator.random(400) ** 4).astype(np.int64)
        flying.append(model.announce(ids))
        if step % 11 == 3:
            model.line.release([(model.shard, flying.pop())])
        while len(flying) > 6:
            assert flying[0].ready.is_set() and not flying[-1].ready.is_set()
            model.train(flying.popleft())
        if step % 50 == 20:
            places = model.generator.permutation(3_000)[:500]
            model.weights[places], model.sums[places] = model.generator.random((500, 12), np.float32), 7
            model.shard.put(places, np.c_[model.weights[places], model.sums[places]])
            model.all_same()
    while flying:
        model.train(flying.popleft())
    model.all_same()
    shard = model.shard
    assert (shard._held == 0).all() and shard._unheld == 700 and shard._recency._queued <= 4 * 700
    resident = np.flatnonzero(shard._where < 0)
    assert len(resident) == 700 and np.array_equal(np.sort(shard._row[-shard._where[resident] - 1]), resident)
    places = shard._top - shard._where[shard._where > shard._top - hosted].astype(int)
    assert len(np.unique(places)) == len(places) == hosted - shard.host._unused  # each in one place
    assert bool(model.hosted) == (hosted > 0) and in_log(shard).any()
    shard.begin(model.table, SEED + 1)
    model.weights, model.sums = initial_rows(SEED + 1, model.table, 0, 3_000).numpy(), np.zeros(3_000, np.float32)
    model.all_same()


def in_log(shard):
    return (shard._where > 0) & (shard._where <= shard._top - shard.host.count)


def test_a_cache_filled_by_a_restore_alone_serves_its_rows(tmp_path):
    """As evaluation does: every row is written, none is initialised, and lookups come in any number."""
    weights = np.random.default_rng(1).random((300, 12), np.float32)
    plan = ShardPlan(rank=0, row=0, rows=300, column=0, columns=12)
    shard, fetcher = CachedShard(tmp_path, "t", plan, 100, 300, 13, 50), Fetcher()
    shard.live_in([kernel := torch.zeros(100, 12)])
    shard.put(np.arange(300), np.c_[weights, np.zeros(300, np.float32)])
    for first in (0, 60, 200, 60):
        part = shard.part(np.arange(first, first + 80), Event())
        assert shard.room(part)
        fetcher.fetch([(shard, part)])
        assert np.array_equal(kernel.numpy()[part.slots], weights[part.rows])
        shard.release(part)
    assert len(np.flatnonzero(shard._where < 0)) == 100


def test_the_least_recently_used_rows_leave(tmp_path):
    model = Cached(tmp_path, rows=1_000, slots=100)
    for first in (0, 40, 0, 80):  # the 20 slots that are short come from 40 to 79, which were used before 0 to 39
        model.train(model.announce(np.arange(first, first + 40)))
    resident = np.flatnonzero(model.shard._where < 0)
    assert np.array_equal(resident, np.r_[0:40, 60:120]) and model.missing == 120
    for _ in range(300):  # what is used again and again does not pile up in line
        model.train(model.announce(np.arange(40)))
    assert model.shard._recency._queued <= 400 and model.missing == 120


def test_device_and_host_memory_have_the_most_recently_used_rows(tmp_path):
    """A row comes from the nearest of the three levels, and the longest unused one leaves each."""
    model = Cached(tmp_path, rows=1_000, slots=100, hosted=60)
    for first in (0, 50, 100, 150):
        model.train(model.announce(np.arange(first, first + 50)))
    shard = model.shard
    assert np.array_equal(np.flatnonzero(shard._where < 0), np.arange(100, 200))
    assert np.array_equal(np.flatnonzero(in_log(shard)), np.arange(40))  # 40 to 99 are in host memory
    assert model.missing == 200 and model.hosted == 0
    model.train(model.announce(np.r_[30:70]))  # 10 of them from the log
    assert model.missing == 240 and model.hosted == 30
    assert np.array_equal(np.flatnonzero(shard._where < 0), np.r_[30:70, 140:200])
    # 70 to 79 left for the log: those that were to come back made way only once they were there.
    assert np.array_equal(np.flatnonzero(in_log(shard)), np.r_[:30, 70:100])
    assert shard.host._unused == 20
    model.all_same()


def test_slots_of_lookups_are_ready_in_the_order_of_the_announcement(tmp_path):
    model = Cached(tmp_path)
    ids = model.generator.integers(0, 3_000, 500)
    part = model.announce(ids)
    assert np.array_equal(model.shard._row[part.each], ids) and np.array_equal(part.each, part.slots[part.find(ids)])


def test_a_batch_that_the_cache_is_too_small_for_is_one_message(tmp_path):
    model = Cached(tmp_path, rows=1_000, slots=100)
    with pytest.raises(
        GuardError, match="a batch needs 101 rows of table 't' on this rank, .* memory for 100"
    ) as caught:
        model.announce(np.arange(101))
    assert caught.value.exit_code == 5 and "+plan.tables.t.cache_rows=202" in str(caught.value)
    model = Cached(tmp_path, rows=1_000, slots=100)
    model.announce(np.arange(60))
    other = model.shard.part(np.arange(500, 560), Event())
    with pytest.raises(
        GuardError, match="cache_rows of table 't' is too small: 60 rows are needed beside .* read ahead"
    ):
        check_room(model.shard, other)


def too_small(folder):
    plan = on_tier(plan_for("row_wise", 1), "ssd", 5)
    ssd = SsdStore(plan, [str(folder)], 0, cached=True)
    dmp, _ = make(plan, ssd=ssd)
    with pytest.raises(GuardError, match="a batch needs .* rows of table 'b' on this rank"):
        train(dmp)
    ssd.close()


def test_training_stops_with_that_message(tmp_path):
    spawn(too_small, 1, tmp_path)


def on_cuda(plan, tier):
    kernel = {"hbm_cached": "fused_uvm_caching", "ddr": "fused_uvm"}.get(tier, "fused")
    plan = dataclasses.replace(on_tier(plan, tier, CACHE if tier in ("ssd", "hbm_cached") else 0), device="cuda")
    tables = {name: dataclasses.replace(table, kernel=kernel) for name, table in plan.tables.items()}
    return dataclasses.replace(plan, tables=tables)


def test_a_plan_for_cuda_says_how_large_caches_are():
    tables = to_sharding_plan(on_cuda(plan_for("row_wise", 2), "hbm_cached"), "collection").plan["collection"]
    assert tables["long"].compute_kernel == "fused_uvm_caching"
    assert {name: table.cache_params.load_factor for name, table in tables.items()} == {
        name: CACHE / rows for name, rows in ROWS.items()
    }
    tables = to_sharding_plan(on_cuda(plan_for("row_wise", 2), "ssd"), "collection").plan["collection"]
    assert tables["long"].compute_kernel == "fused" and tables["long"].cache_params is None
    plan = dataclasses.replace(on_tier(plan_for("row_wise", 1), "ssd"), device="cuda")
    with pytest.raises(PlanError, match="table 'b' on tier ssd has cache_rows 0 on cuda"):
        to_sharding_plan(plan, "collection")


def compare_on_cuda(folder):
    dist.destroy_process_group()
    dist.init_process_group("nccl", init_method=f"file://{folder}/nccl", rank=0, world_size=1)
    found = {}
    for tier in ("hbm", "hbm_cached", "ssd"):
        plan = on_cuda(plan_for("row_wise", 1), tier)
        ssd = SsdStore(plan, [str(folder)], 0) if tier == "ssd" else None
        found[tier], dmp = outcome(plan, ssd, device="cuda:0")
        if ssd is not None:
            module = next(kernels(dmp)).module
            assert module.weights_dev.is_cuda
            assert module.weights_dev.numel() == DIM * sum(min(CACHE, rows) for rows in ROWS.values())
            ssd.close()
    for tier in ("hbm_cached", "ssd"):
        for key, value in found["hbm"].items():
            torch.testing.assert_close(found[tier][key], value, rtol=1e-6, atol=1e-7, msg=f"{tier} {key}")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_on_cuda_cached_tables_end_like_tables_in_its_memory(tmp_path):
    spawn(compare_on_cuda, 1, tmp_path)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_on_cuda_slots_are_read_after_training_and_written_before_it():
    weights, state = torch.zeros(64, 8, device="cuda"), torch.zeros(64, device="cuda")
    slots, matrix = DeviceSlots([weights, state], 9), torch.rand(4096, 4096, device="cuda")
    all_slots = np.arange(64)
    for turn in range(1, 6):
        for _ in range(20):  # keeps the stream busy while the host runs ahead
            matrix = matrix @ matrix / 4096
        weights.add_(1)
        slots.trained()
        rows = slots.read(all_slots)
        assert (rows[:, :8] == 2 * turn - 1).all() and not rows[:, 8].any()
        slots.write(all_slots, np.concatenate([rows[:, :8] + 1, rows[:, 8:]], axis=1))
        slots.arrived()
        assert (weights == 2 * turn).all()
