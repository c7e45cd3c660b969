"""Rows of tables on SSD that a GPU's host keeps: what is offered, what it serves, takes and saves."""

from dataclasses import replace

import pytest

from pipeline.config import TrainConfig
from pipeline.planning.candidates import HOST_SHARES, build_offers, whole_layout
from pipeline.planning.choices import Choice, PlannedTable
from pipeline.planning.hitrate import HitCurve
from pipeline.records import HOST_ROW_BYTES
from pipeline.specs import TABLE_OPTIMIZERS
from tests.planning.plan_cases import cpu

ROWS, BATCH = 10_000_000, 65_536
GPU = replace(
    cpu(1, 1),
    device="cuda",
    hbm_gib=80.0,
    hbm_gb_per_s=2000.0,
    hbm_to_ddr_gb_per_s=25.0,
    ssd_gib=900.0,
    ssd_gb_per_s=2.0,
    ssd_read_iops=400_000.0,
)


def offered(device="cuda", **choice):
    table = PlannedTable(
        name="t",
        rows=ROWS,
        dim=64,
        pooling=1.0,
        curve=HitCurve.zipf(ROWS, 1.05),
        optimizer=TABLE_OPTIMIZERS.get("rowwise_adagrad"),
    )
    wanted = Choice(sharding=("table_wise",), tiers=("ssd",), columns=64, **choice)
    hardware = replace(GPU, device=device)
    return build_offers(hardware, TrainConfig(global_batch=BATCH), table, wanted, [whole_layout(BATCH, table)])


def test_more_rows_in_host_memory_serve_more_take_their_bytes_and_leave_the_disk_less():
    found = offered(cache_rows=500_000)
    assert [offer.host_rows for offer in found] == [round(share * ROWS) for share in HOST_SHARES]
    none, *kept = found
    assert none.host_rate == 0.0
    for offer in kept:
        taken = offer.bytes[0][1] - none.bytes[0][1]
        assert taken == pytest.approx(offer.host_rows * (65 * 4 + HOST_ROW_BYTES), rel=1e-6)
        assert offer.bytes[0][0] == none.bytes[0][0] and offer.hit_rate == none.hit_rate
    for rates in ([o.host_rate for o in found], [-o.phases[0]["input_exchange"] for o in found]):
        assert rates == sorted(set(rates))


def test_both_memories_serve_what_one_of_their_rows_would():
    offer = offered(cache_rows=500_000)[-1]
    curve = HitCurve.zipf(ROWS, 1.05)
    assert offer.hit_rate + offer.host_rate == pytest.approx(curve.lru_share(500_000 + offer.host_rows))


def test_a_row_is_in_one_memory_and_a_cpu_has_no_second_one():
    assert all(offer.cache_rows + offer.host_rows <= ROWS for offer in offered())
    assert offered(cache_rows=ROWS)[-1].host_rows == 0
    assert {offer.host_rows for offer in offered(device="cpu")} == {0}
