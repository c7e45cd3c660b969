"""What making room in the log of a table on SSD costs: bounded, counted, and less for rows of unlike frequency."""

from collections import deque
from threading import Event

import numpy as np
import pytest
import torch

from benchmarks.ssd_log import written_a_byte
from pipeline.config import HardwareConfig
from pipeline.core.errors import GuardError
from pipeline.embeddings.ssd import SsdStore, named
from pipeline.embeddings.ssd.fetch import Fetcher
from pipeline.embeddings.ssd.shard import SsdShard
from pipeline.embeddings.tables import TableSpec
from pipeline.records import ShardPlan
from pipeline.records.scratch import KINDS, LOG_SPARE, log_shape, write_amplification
from tests.embeddings.cases import SEED
from tests.embeddings.ranks import DIM, on_tier, plan_for
from tests.embeddings.test_ssd_faults import stand_in

ROWS, WIDTH = 30_000, 62


@pytest.mark.slow
def test_rows_of_unlike_frequency_cost_less_than_the_model_of_even_ones_and_more_room_costs_less(tmp_path):
    skewed, even, roomy = (
        written_a_byte(tmp_path, ROWS, WIDTH, exponent, spare)
        for exponent, spare in ((1.2, 0.2), (0.0, 0.2), (1.2, 0.35))
    )
    assert 1.3 < skewed < 0.95 * even and roomy < 0.8 * skewed
    # The log has room for the pinned rows too, and ten segments more.
    assert even == pytest.approx(write_amplification(0.26), rel=0.12)


def test_the_model_falls_with_the_room_to_spare():
    assert [round(write_amplification(spare), 2) for spare in (0.1, 0.2, 0.3, 0.5)] == [5.18, 2.69, 1.88, 1.26]


def test_a_log_almost_without_room_to_spare_still_takes_every_row(tmp_path):
    plan = ShardPlan(rank=0, row=0, rows=3_000, column=0, columns=WIDTH)
    shard = SsdShard(tmp_path, "t", plan, 0, WIDTH + 1, 0.02)
    shard.live_in([torch.zeros(3_000, WIDTH), torch.zeros(3_000)])
    shard.begin(TableSpec("t", 3_000, WIDTH), SEED)
    generator = np.random.default_rng(1)
    values = np.zeros((3_000, WIDTH + 1), np.float32)
    for turn in range(40):
        places = generator.permutation(3_000)[: 1 + 70 * turn]
        values[places] = generator.random((len(places), WIDTH + 1), np.float32)
        shard.put(places, values[places])
    fetcher = Fetcher()
    used = shard.used(np.arange(3_000))
    assert shard.log.emptied > 40 and len(used) == 3_000
    assert np.array_equal(fetcher.read(shard, np.arange(3_000))[:, :-1], values)


def test_idle_time_makes_room_before_rows_need_it(tmp_path):
    rows = {"long": 12_000}
    store = SsdStore(on_tier(plan_for("row_wise", 1, rows=rows, dim=WIDTH), "ssd"), [str(tmp_path)], 0)
    shard = store.shard("long")
    shard.live_in([torch.zeros(12_000, WIDTH), torch.zeros(12_000)])
    store.begin(TableSpec("long", 12_000, WIDTH), SEED)
    store._worker._idle = None
    generator, numbers = np.random.default_rng(2), np.arange(12_000)
    store.write("long", numbers, np.zeros((12_000, shard.values), np.float32))
    log, free = shard.log, KINDS + 99
    while free > KINDS + 1:
        some = generator.permutation(numbers)[:500]
        store.write("long", some, np.ones((500, shard.values), np.float32))
        free = store._worker.call(lambda: len(log._free))
    assert store._worker.call(log.worth_emptying)
    before, emptied = len(log._free), log.emptied
    while store._worker.call(store._tidy):
        pass
    assert len(log._free) > before and log.emptied > emptied and not store._worker.call(log.worth_emptying)
    assert sorted(np.unique(store.read("long", numbers)[:, :-1]).tolist()) == [0, 1]
    store.close()


def test_rows_that_stay_in_slots_for_a_while_are_right_and_no_more_than_asked_for(tmp_path):
    plan = ShardPlan(rank=0, row=0, rows=6_000, column=0, columns=WIDTH)
    shard, fetcher = SsdShard(tmp_path, "t", plan, 500, WIDTH + 1, 0.1, None, 300), Fetcher()
    kernel = torch.zeros(6_000, WIDTH)
    shard.live_in([kernel, torch.zeros(6_000)])
    shard.begin(TableSpec("t", 6_000, WIDTH), SEED)
    generator, flying = np.random.default_rng(5), deque()
    expected = fetcher.read(shard, np.arange(6_000))[:, :WIDTH].copy()
    for _ in range(400):
        part = shard.part((6_000 * generator.random(300) ** 2).astype(np.int64), Event())
        fetcher.fetch([(shard, part)])
        flying.append(part)
        if shard.log.worth_emptying():
            shard.tidy()
        if len(flying) > 3:
            done = flying.popleft()
            assert np.array_equal(kernel.numpy()[done.slots], expected[done.rows])
            kernel.numpy()[done.slots] += 1
            expected[done.rows] += 1
            shard.release(done)
    assert np.array_equal(fetcher.read(shard, np.arange(500, 6_000))[:, :WIDTH], expected[500:])
    assert shard.log.emptied > 50 and shard._idle == 300
    shard.begin(TableSpec("t", 6_000, WIDTH), SEED)


def test_an_error_of_the_log_reaches_who_waits(tmp_path):
    store = SsdStore(on_tier(plan_for("row_wise", 1, rows={"long": 9_000}), "ssd"), [str(tmp_path)], 0)
    shard = store.shard("long")
    shard.live_in([torch.zeros(9_000, DIM), torch.zeros(9_000)])
    store.begin(TableSpec("long", 9_000, DIM), SEED)
    stand_in(shard.log, "/dev/full")
    values = np.zeros((9_000, shard.values), np.float32)
    with pytest.raises(GuardError, match="cannot be written.*No space left on device"):
        for _ in range(9):
            store.write("long", np.arange(9_000), values)
    store.close()


def test_the_store_counts_what_leaves_memory_and_what_is_written(tmp_path):
    store = SsdStore(on_tier(plan_for("row_wise", 1, rows={"long": 5_000}), "ssd"), [str(tmp_path)], 0)
    shard = store.shard("long")
    shard.live_in([torch.zeros(5_000, DIM), torch.zeros(5_000)])
    store.begin(TableSpec("long", 5_000, DIM), SEED)
    store.write("long", np.arange(5_000), np.zeros((5_000, shard.values), np.float32))
    sums = store.figures.take()
    shape = log_shape(5_000, 4 * shard.values)
    assert sums[-2:] == [5_000 * 4 * shard.values, 5_000 // shape.per_segment * shape.segment]
    assert named(sums, 1)["ssd_write_amplification"] == sums[-1] / sums[-2]
    assert named([0.0] * len(sums), 1)["ssd_write_amplification"] is None
    store.close()


def test_the_setting_has_the_default_of_the_log_and_reaches_its_size(tmp_path):
    assert HardwareConfig(name="x").ssd_spare == LOG_SPARE
    plan = on_tier(plan_for("row_wise", 1, rows={"long": 50_000}), "ssd")
    sizes = []
    for spare in (0.1, 0.5):
        store = SsdStore(plan, [str(tmp_path)], 0, spare=spare)
        sizes.append(store.shard("long").log.file.size)
        assert sizes[-1] == log_shape(50_000, 4 * store.shard("long").values, spare).bytes
        store.close()
    assert sizes[1] > 1.5 * sizes[0]
