"""Real gloo ranks for tests, forked from a server that has imported TorchRec once: a rank starts in milliseconds."""

import dataclasses
import multiprocessing
import os
import sys
import traceback

import torch
import torch.multiprocessing as mp

from pipeline.records import DatasetSchema, Plan, ShardPlan, SparseColumn, TablePlan
from pipeline.specs import TABLE_OPTIMIZERS
from tests.waits import no_waits, until

# What the fork server imports before it forks: seconds, paid once for all tests of a session. Nothing that imports
# Polars, which has threads. It imports this module as well, so tests/conftest.py starts it: here, each would start one.
multiprocessing.set_forkserver_preload(
    [
        "pipeline.training.trainer",
        "tests.embeddings.cases",
        "pipeline.cli",
        "pipeline.cli.commands.run",
        "pipeline.config.compose",
        "pipeline.report",
        "pipeline.launch.chain",
        "pipeline.stages.release",
        "torch.export._trace",
        "pytest",
        "psutil",
        "tests.shared_cores",
        "tests.composed",
        "tests.frozen",
    ]
)

ROWS = {"b": 23, "a": 10, "long": 41}
DIM = 8


def schema(rows=ROWS, weighted=False):
    columns = tuple(SparseColumn(name=n, rows=r, multi=weighted, weighted=weighted) for n, r in rows.items())
    return DatasetSchema(dense=(), sparse=columns, rows={}, files={}, groups={})


def shards_for(sharding, index, rows, dim, world, local):
    """Shards as a planner would place them; table ``index`` starts on rank ``index`` modulo the world."""
    home = index % world
    host = (index % (world // local)) * local
    if sharding == "table_wise":
        return [ShardPlan(rank=home, row=0, rows=rows, column=0, columns=dim)]
    if sharding in ("column_wise", "table_column_wise"):
        half, base = dim // 2, 0 if sharding == "column_wise" else host
        span = world if sharding == "column_wise" else local
        return [
            ShardPlan(rank=base + (index + i) % span, row=0, rows=rows, column=i * half, columns=half) for i in range(2)
        ]
    if sharding == "row_wise":
        return row_shards(rows, 0, world, 0, dim)
    if sharding == "table_row_wise":
        return row_shards(rows, host, local, 0, dim)
    if sharding == "grid_shard":
        hosts = world // local
        part = dim // hosts
        return [s for h in range(hosts) for s in row_shards(rows, h * local, local, h * part, part)]
    return []


def row_shards(rows, first, count, column, columns):
    block = -(-rows // count)
    cuts = [min(i * block, rows) for i in range(count + 1)]
    return [
        ShardPlan(rank=first + i, row=cuts[i], rows=cuts[i + 1] - cuts[i], column=column, columns=columns)
        for i in range(count)
    ]


def plan_for(shardings, world, local=None, rows=ROWS, dim=DIM):
    """A plan with one sharding for all tables, or one per table."""
    local = local or world
    kinds = [shardings] * len(rows) if isinstance(shardings, str) else shardings
    tables = {}
    for i, ((name, count), kind) in enumerate(zip(rows.items(), kinds, strict=True)):
        shards = tuple(shards_for(kind, i, count, dim, world, local))
        kernel = "dense" if kind == "data_parallel" else "fused"
        tables[name] = TablePlan(
            rows=count,
            dim=dim,
            pooling=1.0,
            tier="ddr",
            sharding=kind,
            kernel=kernel,
            shards=shards,
            cost_ms=0.0,
            reason="",
        )
    return Plan(hardware="test", device="cpu", world_size=world, ranks_per_host=local, global_batch=8, tables=tables)


def on_tier(plan, tier, cache_rows=0, host_rows=0):
    """``plan`` with every table that is not data-parallel on ``tier``."""
    placed = {"tier": tier, "cache_rows": cache_rows, "host_rows": host_rows}
    tables = {
        name: table if table.kernel == "dense" else dataclasses.replace(table, **placed)
        for name, table in plan.tables.items()
    }
    return dataclasses.replace(plan, tables=tables)


def with_state(plan, optimizer):
    """``plan`` for tables that the optimizer called ``optimizer`` trains."""
    spec = TABLE_OPTIMIZERS.get(optimizer)
    state = {"state_bytes": spec.row_bytes, "value_state_bytes": spec.value_bytes}
    return dataclasses.replace(
        plan, tables={name: dataclasses.replace(table, **state) for name, table in plan.tables.items()}
    )


def join_ranks(rank, world, local, folder):
    """Make this process rank ``rank`` of ``world``, meeting in ``folder``, ``local`` ranks on each pretended host."""
    os.environ.update(
        RANK=str(rank),
        WORLD_SIZE=str(world),
        LOCAL_RANK=str(rank % local),
        LOCAL_WORLD_SIZE=str(local),
        GROUP_RANK=str(rank // local),
    )
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=world)


def _rank(rank, world, local, folder, function, args):
    assert "tests.frozen" in sys.modules, "the fork server has not imported what it should: see set_forkserver_preload"
    join_ranks(rank, world, local, folder)
    try:
        with no_waits():
            function(folder, *args)
    except BaseException:
        traceback.print_exc(file=sys.stderr)
        raise
    finally:
        torch.distributed.destroy_process_group()


def spawn(function, world, folder, *args, local=None):
    """Run ``function(folder, *args)`` on ``world`` gloo ranks, ``local`` of them on each pretended host."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "rendezvous").unlink(missing_ok=True)
    ranks = mp.start_processes(
        _rank, args=(world, local or world, folder, function, args), nprocs=world, join=False, start_method="forkserver"
    )
    try:
        until(lambda: ranks.join(timeout=1.0), lambda: f"of {world} ranks that run {function.__name__}")
    finally:
        for process in ranks.processes:
            process.kill()
