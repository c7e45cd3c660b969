"""All tables on every rank, for scoring: only where they fit and cost less than to exchange embeddings."""

from dataclasses import replace

import pytest

from pipeline.config import HardwareConfig
from pipeline.core.units import GIB
from pipeline.embeddings.sharding import whole_tables_pay
from tests.embeddings.ranks import DIM, ROWS, on_tier, plan_for

# Each table has DIM values a row and 4 bytes of state, and a scored row looks up one row of each.
LOOKED_UP = -(-sum(ROWS.values()) // len(ROWS))
BYTES = sum(ROWS.values()) * (4 * DIM + 4)


def hardware(free=BYTES):
    return HardwareConfig(name="h", ddr_gib=free / GIB)


@pytest.mark.parametrize("kind", ["table_wise", "row_wise", "data_parallel"])
def test_tables_that_fit_and_are_looked_up_more_than_once_are_on_every_rank(kind):
    plan = plan_for(kind, 2)
    assert whole_tables_pay(plan, hardware(), LOOKED_UP)
    assert not whole_tables_pay(plan, hardware(BYTES - 1), LOOKED_UP)
    assert not whole_tables_pay(plan, hardware(), LOOKED_UP - 1)


def test_memory_that_the_plan_reserves_is_not_taken():
    plan = replace(plan_for("table_wise", 2), reserved=[{"process": 10}, {"process": 10, "margin": 5}])
    assert whole_tables_pay(plan, hardware(BYTES + 15), LOOKED_UP)
    assert not whole_tables_pay(plan, hardware(BYTES + 14), LOOKED_UP)


def test_tables_on_ssd_on_gpus_and_on_embedding_hosts_stay_where_they_are():
    plan = plan_for("table_wise", 2)
    for other in (on_tier(plan, "ssd"), replace(plan, device="cuda")):
        assert not whole_tables_pay(other, hardware(100 * BYTES), 100 * LOOKED_UP)
    apart = replace(hardware(100 * BYTES), hosts=2, embedding_hosts=1)
    assert not whole_tables_pay(plan, apart, 100 * LOOKED_UP)
