"""Plans of version 2, made up: a laptop's and a cluster's, with caches, phases, reservations and figures."""

from __future__ import annotations

from dataclasses import replace

from pipeline.records import Plan, ShardPlan, TablePlan

GIB = 2**30
FIGURES = {
    "hosts": 16.0,
    "ranks_per_host": 8.0,
    "hbm_gib": 79.0,
    "ddr_gib": 240.0,
    "ssd_gib": 3000.0,
    "hbm_gb_per_s": 3350.0,
    "ddr_gb_per_s": 75.0,
    "intra_host_gb_per_s": 450.0,
    "inter_host_gb_per_s": 50.0,
}
RESERVED = {"dense": 2 * GIB, "activations": 3 * GIB, "inputs": GIB // 2, "communication": 2 * GIB, "staging": GIB}
PHASES = {
    "input_exchange": 0.4,
    "lookup": 1.1,
    "output_exchange": 1.6,
    "dense": 2.0,
    "gradient_exchange": 1.5,
    "update": 0.9,
    "overhead": 0.5,
}


def table(rows: int, ranks: range | list[int], *, dim: int = 128, sharding: str = "row_wise", **changes) -> TablePlan:
    """A table in equal blocks of rows on ``ranks``; with one rank table-wise."""
    ranks = list(ranks)
    sharding = "table_wise" if len(ranks) == 1 else sharding
    block = -(-rows // len(ranks))
    copies = sharding == "data_parallel"
    shards = tuple(
        ShardPlan(
            rank=rank,
            row=0 if copies else i * block,
            rows=rows if copies else min(block, rows - i * block),
            column=0,
            columns=dim,
        )
        for i, rank in enumerate(ranks)
    )
    made = TablePlan(
        rows=rows,
        dim=dim,
        pooling=1.0,
        tier="hbm",
        sharding=sharding,
        kernel="dense" if copies else "fused",
        shards=shards,
        cost_ms=rows / 4e7,
        reason=f"{rows:,} rows are cheapest {sharding}",
    )
    return replace(made, **changes)


def cached(rows: int, ranks: range | list[int], tier: str = "hbm_cached", **changes) -> TablePlan:
    """A table whose hottest tenth lies in a cache that serves 97 % of its lookups."""
    kernel = {"hbm_cached": "fused_uvm_caching", "ssd": "key_value"}[tier]
    return table(rows, ranks, tier=tier, kernel=kernel, cache_rows=rows // 10, hit_rate=0.9712, **changes)


def cluster(tables: int = 26, world: int = 128) -> Plan:
    """A plan for ``world`` GPUs: a few huge tables row-wise and cached, one on SSD, many small ones."""
    made = {}
    for i in range(tables):
        name, rows = f"C{i + 1}", [40_000_000, 3_067_956, 405_282, 39_060, 2_209, 155][i % 6] + i
        made[name] = (cached if i == 6 else table)(rows, range(world) if i % 6 == 0 else [i % world])
    made["C3"] = cached(405_284, [2 % world], tier="ssd", reason="the coldest of all: only SSD has room for it")
    made["C5"] = table(2_213, range(world), sharding="data_parallel")
    memory = [
        {"hbm": int((18 + 11 * (rank * 37 % 101) / 101) * GIB), "ddr": 12 * GIB, "ssd": GIB * (2 + rank % 3)}
        for rank in range(world)
    ]
    phases = [{name: ms * (0.8 + 0.2 * (rank * 53 % 97) / 97) for name, ms in PHASES.items()} for rank in range(world)]
    return Plan(
        hardware="h100x16x8",
        device="cuda",
        world_size=world,
        ranks_per_host=min(world, 8),
        global_batch=65_536,
        tables=made,
        memory=memory,
        predicted_step_ms=6.4,
        phases=phases,
        reserved=[dict(RESERVED)] * world,
        reserved_tier="hbm",
        gap=0.0042,
        figures=dict(FIGURES),
        profile_key="f" * 64,
    )


def laptop(tables: int = 3) -> Plan:
    """A plan for one CPU rank: everything table-wise in DDR, no SSD."""
    made = {f"C{i + 1}": table(1_000_000 // (i + 1), [0], dim=16, tier="ddr") for i in range(tables)}
    return Plan(
        hardware="laptop",
        device="cpu",
        world_size=1,
        ranks_per_host=1,
        global_batch=4096,
        tables=made,
        memory=[{"hbm": 0, "ddr": 130 * 2**20, "ssd": 0}],
        predicted_step_ms=20.5,
        phases=[{**dict.fromkeys(PHASES, 0.0), "lookup": 3.0, "dense": 12.5, "update": 4.0, "overhead": 1.0}],
        reserved=[{"dense": 3 * 2**20, "activations": 20 * 2**20, "inputs": 2**20}],
        reserved_tier="ddr",
        figures={"hosts": 1.0, "ranks_per_host": 1.0, "hbm_gib": 0.0, "ddr_gib": 8.0, "ssd_gib": 0.0},
        profile_key="a" * 64,
    )
