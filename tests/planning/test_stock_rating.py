"""The benchmark's yardstick: a plan of ours is rated as TorchRec's planner rates the same placement."""

import pytest
from plan_cases import configure, dataset, preset

from benchmarks.stock import Stock, slowest_rank
from pipeline.records import Plan, ShardPlan, TablePlan

ROWS = {"a": 4_000_000, "b": 300_000, "c": 20_000, "d": 900, "e": 40}
POOLING = {"a": 3.0, "b": 12.0, "c": 1.0}


def stock_case():
    hardware = preset("h100x2x8")
    config = configure(hardware, dim=256, batch=16_384)
    return config, Stock(config, *dataset(ROWS, POOLING))


def as_ours(options, config) -> Plan:
    """The stock planner's placement in our form."""
    tables = {
        option.name: TablePlan(
            rows=option.tensor.shape[0],
            dim=option.tensor.shape[1],
            pooling=1.0,
            tier="hbm",
            cost_ms=0.0,
            reason="",
            sharding=option.sharding_type,
            kernel=option.compute_kernel,
            shards=tuple(
                ShardPlan(rank=s.rank, row=s.offset[0], rows=s.size[0], column=s.offset[1], columns=s.size[1])
                for s in option.shards
            ),
        )
        for option in options
    }
    return Plan(
        hardware="h", device="cuda", world_size=config.world_size, ranks_per_host=8, global_batch=16_384, tables=tables
    )


def test_the_stock_planners_own_placement_gets_its_own_rating() -> None:
    config, stock = stock_case()
    options = stock.plan()
    plan = as_ours(options, config)
    assert len({table.sharding for table in plan.tables.values()}) > 1
    assert stock.rate(plan) == pytest.approx(slowest_rank(options, 16), rel=1e-9)


@pytest.mark.parametrize("sharding", ["row_wise", "column_wise", "table_wise"])
def test_moving_a_shard_onto_the_busiest_rank_costs_what_it_costs(sharding: str) -> None:
    config, stock = stock_case()
    whole = {name: [(0, rows, 0, 256)] for name, rows in ROWS.items()}
    cuts = {
        "row_wise": [(rank * 250_000, 250_000, 0, 256) for rank in range(16)],
        "column_wise": [(0, 4_000_000, 0, 128), (0, 4_000_000, 128, 128)],
        "table_wise": whole["a"],
    }[sharding]

    def rated(ranks: list[int]) -> float:
        tables = {
            name: TablePlan(
                rows=rows,
                dim=256,
                pooling=1.0,
                tier="hbm",
                kernel="fused",
                cost_ms=0.0,
                reason="",
                sharding=sharding if name == "a" else "table_wise",
                shards=tuple(
                    ShardPlan(rank=rank, row=row, rows=some, column=column, columns=columns)
                    for rank, (row, some, column, columns) in zip(
                        ranks if name == "a" else [index], cuts if name == "a" else whole[name], strict=True
                    )
                ),
            )
            for index, (name, rows) in enumerate(ROWS.items())
        }
        return stock.rate(
            Plan(hardware="h", device="cuda", world_size=16, ranks_per_host=8, global_batch=16_384, tables=tables)
        )

    spread = rated(list(range(16))[: len(cuts)])
    heaped = rated([1] * len(cuts))
    assert heaped > spread > 0
