"""What a row takes beside its values: its change mark on the device, its place on tier ssd."""

import dataclasses

import numpy as np
import pytest

from pipeline.embeddings.ssd.log import place_type
from pipeline.planning.candidates import CachedRows, ShardBlock, shard_bytes
from pipeline.planning.choices import PlannedTable
from pipeline.records import HOST_ROW_BYTES, ShardPlan, TablePlan, place_bytes
from pipeline.specs import TABLE_OPTIMIZERS
from tests.planning.plan_cases import cpu

EDGE = int((2**31 - 1) / 2.1)
MILLION = 1_000_000


@pytest.mark.parametrize("rows", [1, MILLION, EDGE - 1, EDGE, EDGE + 2, 2 * EDGE])
def test_places_are_counted_as_wide_as_the_log_makes_them(rows):
    assert place_bytes(rows) == np.dtype(place_type(rows)).itemsize


def counted(device, tier, rows=MILLION, cache_rows=0, host_rows=0):
    """(HBM, DDR) of a whole table."""
    hardware = dataclasses.replace(cpu(1, 1), device=device, hbm_gib=80.0, ssd_gib=900.0)
    table = PlannedTable(
        name="t", rows=rows, dim=16, pooling=1.0, curve=None, optimizer=TABLE_OPTIMIZERS.get("rowwise_adagrad")
    )
    return shard_bytes(hardware, table, tier, CachedRows(cache_rows, host_rows), ShardBlock(0, rows, 0, 16), 0, 0)[:2]


def test_a_gpu_keeps_a_mark_for_every_row_of_every_tier():
    assert counted("cuda", "hbm") == (MILLION * (17 * 4 + 1), 0)
    assert counted("cuda", "hbm_cached", cache_rows=10) == (MILLION * (4 + 1) + 10 * (16 * 4 + 16), MILLION * 17 * 4)
    assert counted("cuda", "ssd", cache_rows=10) == (MILLION + 10 * 17 * 4, MILLION * 4)
    hosted = MILLION * 4 + 30 * (17 * 4 + HOST_ROW_BYTES)
    assert counted("cuda", "ssd", cache_rows=10, host_rows=30) == (MILLION + 10 * 17 * 4, hosted)
    assert counted("cpu", "ddr") == (0, MILLION * 17 * 4)  # ``staging`` counts its marks


def test_a_large_table_on_ssd_has_wide_places():
    assert counted("cpu", "ssd", rows=EDGE - 1)[1] == (EDGE - 1) * 4
    assert counted("cpu", "ssd", rows=EDGE + 2)[1] == (EDGE + 2) * 8


@pytest.mark.parametrize(
    ("device", "tier", "rows", "bytes_a_row"),
    [
        ("cuda", "hbm", MILLION, 69),
        ("cuda", "ddr", MILLION, 1),
        ("cuda", "ssd", MILLION, 1),
        ("cuda", "hbm_cached", MILLION, 5),
        ("cpu", "ddr", MILLION, 68),
        ("cpu", "ssd", MILLION, 4),
        ("cpu", "ssd", EDGE + 2, 8),
    ],
)
def test_what_a_plan_predicts_of_a_shard_holds_marks_and_places(device, tier, rows, bytes_a_row):
    shard = ShardPlan(rank=0, row=0, rows=rows, column=0, columns=16)
    table = TablePlan(
        rows=rows,
        dim=16,
        pooling=1.0,
        tier=tier,
        sharding="table_wise",
        kernel="fused",
        shards=(shard,),
        cost_ms=0.0,
        reason="",
    )
    assert table.resident_bytes(shard, device) == rows * bytes_a_row
