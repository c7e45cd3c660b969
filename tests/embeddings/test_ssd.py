"""Tables on SSD train bit for bit like tables in memory, leave nothing behind, and fail with one message."""

from collections import deque
from threading import Event

import numpy as np
import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file

from pipeline.core.errors import ConfigError, PlanError
from pipeline.embeddings.initial import initial_rows, rows_at
from pipeline.embeddings.sharding import to_sharding_plan
from pipeline.embeddings.ssd import SsdStore
from pipeline.embeddings.ssd.aio import ENGINES, DiskQueue
from pipeline.embeddings.ssd.fetch import Fetcher
from pipeline.embeddings.ssd.shard import SsdShard
from pipeline.embeddings.tables import TableSpec
from pipeline.embeddings.touched import TouchedRows
from pipeline.records import ShardPlan
from tests.embeddings.cases import SEED, batch, kjt_of, make, shards_to_tensors, train
from tests.embeddings.ranks import DIM, on_tier, plan_for, spawn
from tests.tiers import with_slow

STEPS = 24
KINDS = {
    "sgd": ["row_wise", "table_wise", "data_parallel"],
    "rw": "row_wise",
    "tw": "table_wise",
    "mixed": ["row_wise", "table_wise", "data_parallel"],
    "clipped": ["row_wise", "table_wise", "data_parallel"],
}


def outcome(dmp, access):
    """Train, and everything that came of it."""
    touched = TouchedRows(dmp)
    outputs = train(dmp, 0, STEPS)
    marks = {"|".join(map(str, key)) + "|touched": touched.mask(key).clone() for key in touched.shards()}
    return {**outputs, **marks, **shards_to_tensors(access)}


def compare_tiers(folder):
    rank, world = dist.get_rank(), dist.get_world_size()
    paths = [folder / "disk0", folder / "disk1"]
    for path in paths:
        path.mkdir(exist_ok=True)
    for name, kind in KINDS.items():
        plan = plan_for(kind, world)
        ssd = SsdStore(on_tier(plan, "ssd"), [str(path) for path in paths], rank)
        how = {"optimizer": "sgd" if name == "sgd" else "rowwise_adagrad", "clip": 0.004 if name == "clipped" else None}
        save_file(outcome(*make(plan, **how)), folder / f"{name}-ddr-{rank}.safetensors")
        save_file(outcome(*make(on_tier(plan, "ssd"), ssd=ssd, **how)), folder / f"{name}-ssd-{rank}.safetensors")
        assert [list(path.iterdir()) for path in paths] == [[], []]
        ssd.close()


@pytest.mark.parametrize("world", [1, 2])
def test_tables_on_ssd_end_like_tables_in_memory(tmp_path, world):
    spawn(compare_tiers, world, tmp_path)
    for name in KINDS:
        for rank in range(world):
            ddr, ssd = (load_file(tmp_path / f"{name}-{tier}-{rank}.safetensors") for tier in ("ddr", "ssd"))
            assert sorted(ddr) == sorted(ssd) and any("sum" in key for key in ddr) == (name != "sgd")
            assert [key for key in ddr if not torch.equal(ddr[key], ssd[key])] == []


@pytest.mark.parametrize("dim", [1, 4, 5, 12, 64])
def test_scattered_initial_rows_equal_the_sequential_ones(dim):
    table = TableSpec("t", 20_000, dim)
    rows = np.random.default_rng(dim).integers(0, table.rows, 300)
    rows[:4] = 0, 8191, 8192, 19_999
    assert np.array_equal(rows_at(3, table, rows), initial_rows(3, table, 0, table.rows).numpy()[rows])


def queue_of(engine):
    """A queue that reads by ``engine``, where kernel and container allow it."""
    try:
        return DiskQueue([engine])
    except OSError:
        pytest.skip(f"{engine.name} is refused here")


class Model:
    """A shard, and beside it what its rows should be, in plain memory."""

    def __init__(self, folder, rows, dim, pinned):
        self.table, self.generator = TableSpec("t", rows, dim), np.random.default_rng(rows)
        self.shard = SsdShard(folder, "t", ShardPlan(rank=0, row=0, rows=rows, column=0, columns=dim), pinned, dim + 1)
        self.kernel, self.kernel_state = torch.zeros(rows, dim), torch.zeros(rows)
        self.shard.live_in([self.kernel, self.kernel_state])
        self.shard.begin(self.table, SEED)
        self.weights, self.sums = initial_rows(SEED, self.table, 0, rows).numpy(), np.zeros(rows, np.float32)
        self.fetcher = Fetcher()

    def begin(self, count):
        """Fetch a batch; its rows are right, wherever they were."""
        part = self.shard.part(self.generator.integers(0, self.table.rows, count), Event())
        self.fetcher.fetch([(self.shard, part)])
        assert part.ready.is_set() and (part.rows >= self.shard.pinned).all()
        self.same(part)
        return part

    def same(self, part):
        weights, state = self.kernel.numpy()[part.slots], self.kernel_state.numpy()[part.slots]
        assert np.array_equal(weights, self.weights[part.rows]) and np.array_equal(state, self.sums[part.rows])

    def train(self, part):
        """Change the batch's rows where they lie."""
        change = self.generator.random((len(part.rows), self.table.dim), np.float32)
        self.weights[part.rows] += change
        self.sums[part.rows] += 1
        self.kernel.numpy()[part.slots] += change
        self.kernel_state.numpy()[part.slots] += 1

    def all_same(self):
        records = self.fetcher.read(self.shard, np.arange(self.table.rows))
        assert np.array_equal(records[:, :-2], self.weights) and np.array_equal(records[:, -2], self.sums)


# Of every engine few rows or short ones; of one many.
SMALL, LARGE = [(9_000, 5, 0), (500, 2_000, 7)], (40_000, 62, 3_000)
SOONER = [(*shape, engine) for engine in ENGINES for shape in SMALL] + [(*LARGE, ENGINES[0])]
FURTHER = [(*LARGE, engine) for engine in ENGINES[1:]]


@pytest.mark.parametrize(("rows", "dim", "pinned", "engine"), with_slow([*SOONER, *FURTHER], SOONER))
def test_rows_survive_every_way_through_slots_and_the_log(tmp_path, rows, dim, pinned, engine):
    """Batches overlap, and segments are emptied many times over."""
    model = Model(tmp_path, rows, dim, pinned)
    model.fetcher.queue = queue_of(engine)
    model.all_same()
    flying, emptied = deque(), []
    empty = model.shard.log.empty
    model.shard.log.empty = lambda: emptied.append(empty()) or emptied[-1]
    for step in range(60):
        flying.append(model.begin(rows // 12))
        if len(flying) > 3:
            part = flying.popleft()
            model.same(part)
            model.train(part)
            model.shard.release(part)
        if step % 20 == 10:
            places = model.generator.permutation(rows)[: rows // 7]
            model.weights[places], model.sums[places] = model.generator.random((len(places), dim), np.float32), 7
            model.shard.put(places, np.c_[model.weights[places], model.sums[places]])
            model.all_same()
    for part in flying:
        model.shard.release(part)
    assert len(emptied) > 3 or rows * dim < 50_000
    assert model.shard.log.emptied == sum(len(segments) for segments in emptied)
    written = model.shard.log.written
    assert written.left == 4 * model.shard.log.added * (dim + 1) and written.logged < 4 * written.left
    assert len(model.shard._free) <= 5 * rows // 12
    model.all_same()
    live = int(model.shard.log._live.sum())
    assert live == int((model.shard._where > 0).sum()) <= rows - pinned
    model.shard.begin(model.table, SEED + 1)
    model.weights, model.sums = initial_rows(SEED + 1, model.table, 0, rows).numpy(), np.zeros(rows, np.float32)
    model.all_same()


def test_a_page_is_read_once_and_long_runs_are_few_reads(tmp_path):
    model = Model(tmp_path, 5_000, 62, 0)
    model.shard.put(np.arange(5_000), np.c_[model.weights, model.sums])
    places = np.arange(4_000)
    reads = model.shard.log.reads(model.generator.permutation(places), places)
    assert len(reads.offset) == -(-4_000 * 256 // (16 * 4096)) and reads.length.sum() == 4_000 * 256
    reads = model.shard.log.reads(np.array([999, 5, 500, 7, 5 + 16]), np.arange(5))
    assert reads.count.tolist() == [3, 1, 1] and reads.target.tolist() == [1, 3, 4, 2, 0]
    assert reads.offset.tolist() == [0, 500 * 256 // 4096 * 4096, 999 * 256 // 4096 * 4096]
    assert reads.length.tolist() == [8192, 4096, 4096]


def test_a_batch_left_out_or_not_announced_is_let_go_all_the_same(tmp_path):
    store = SsdStore(on_tier(plan_for("row_wise", 1), "ssd"), [str(tmp_path)], 0)
    shard = store.shard("long")
    shard.live_in([torch.zeros(41, DIM), torch.zeros(41)])
    store.begin(TableSpec("long", 41, DIM), SEED)
    for ids in ([1, 2, 3], [4, 5, 6], [7, 8, 9]):
        store.prefetch({"long": np.array(ids)})
    odd, places = store.hold("long", np.array([40, 2, 40]), 3)
    found, _ = store.hold("long", np.array([5, 6]), 2)
    last, _ = store.hold("long", np.array([9, 9]), 2)
    row_in = dict(zip(odd.slots.tolist(), odd.rows.tolist(), strict=True))
    assert [row_in[slot] for slot in places.tolist()] == [40, 2, 40]
    assert [part.rows.tolist() for part in (odd, found, last)] == [[2, 40], [4, 5, 6], [7, 8, 9]]
    store.let_go([("long", part) for part in (odd, found, last)])
    store.prefetch({"long": np.array([1])})
    store.hold("long", np.array([1]), 1)
    assert store._worker.call(lambda: int((shard._held > 0).sum())) == 1
    store.close()


@pytest.mark.parametrize("cached", [False, True])
def test_pieces_of_a_batch_are_let_go_with_it(tmp_path, cached):
    """A batch over two windows of the reader is announced twice; a cache has room for no more than one batch."""
    store = SsdStore(on_tier(plan_for("row_wise", 1), "ssd", cache_rows=6 if cached else 0), [str(tmp_path)], 0, cached)
    shard = store.shard("long")
    shard.live_in([torch.zeros(6 if cached else 41, DIM)])
    store.begin(TableSpec("long", 41, DIM), SEED)
    for first in range(0, 36, 6):
        store.prefetch({"long": np.arange(first, first + 4)})
        store.prefetch({"long": np.arange(first + 4, first + 6)})
    for first in range(0, 36, 6):
        part, _ = store.hold("long", np.arange(first, first + 6), 6)
        assert len(store._waiting["long"]) == 2 * (30 - first) // 6
        store.let_go([("long", part)])
    store._worker.call(lambda: store._release())
    assert store._worker.call(lambda: int((shard._held > 0).sum())) == 0
    store.close()


def on_one_rank(folder):
    ssd = SsdStore(on_tier(plan_for("row_wise", 1), "ssd"), [str(folder)], 0)
    dmp, access = make(on_tier(plan_for("row_wise", 1), "ssd"), ssd=ssd)
    spec, shard = access.tables["long"], {s.table: s for s in access.local_shards()}["long"]
    initial, weight = initial_rows(SEED, spec, 0, spec.rows), torch.empty(2, DIM)
    shard.copy(torch.tensor([7, 3]), weight, {})
    assert torch.equal(weight, initial[[7, 3]])
    shard.put(torch.tensor([5]), torch.ones(1, DIM), {"adagrad_sum": torch.ones(1)})
    initial[5] = 1
    ids, _ = batch(0)
    pooled = dmp(kjt_of(ids))[0]
    used = {5, *ids[2].flatten().tolist()}
    assert int((ssd.shard("long")._where != 0).sum()) == len(used) < spec.rows
    assert torch.equal(pooled[:, 2], initial[ids[2]].sum(1))
    assert torch.equal({s.table: s for s in access.local_shards()}["long"].weight, initial)
    access.initialise(SEED + 1)
    shard = {s.table: s for s in access.local_shards()}["long"]
    assert torch.equal(shard.weight, initial_rows(SEED + 1, spec, 0, spec.rows))
    assert (shard.state["adagrad_sum"] == 0).all()
    dmp(kjt_of(ids))  # lets go of rows of the former tables
    assert torch.equal(shard.weight, initial_rows(SEED + 1, spec, 0, spec.rows))
    ssd.close()


def test_rows_get_their_values_when_they_are_first_used(tmp_path):
    spawn(on_one_rank, 1, tmp_path)


def test_plans_that_ssd_cannot_hold_and_paths_that_cannot_be_used_are_one_message(tmp_path):
    with pytest.raises(
        PlanError, match="table 'b' on tier ssd is sharded column_wise, expected table_wise or row_wise"
    ):
        to_sharding_plan(on_tier(plan_for("column_wise", 1), "ssd"), "collection")
    plan = on_tier(plan_for("row_wise", 1), "ssd")
    with pytest.raises(ConfigError, match="hardware.ssd_paths names no directory"):
        SsdStore(plan, [], 0)
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="names .*file', which is not a directory"):
        SsdStore(plan, [str(tmp_path), str(tmp_path / "file")], 0)
