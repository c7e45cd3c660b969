"""All tables on every rank, for models that are not trained: then ranks need nothing of each other.

A row that a rank restores costs about what an embedding costs that it exchanges, and no batch waits for other ranks.
"""

from __future__ import annotations

from dataclasses import replace

import torch.distributed as dist

from pipeline.config import HardwareConfig
from pipeline.embeddings.sharding import TableRanks
from pipeline.records import Plan, ShardPlan
from pipeline.units import GIB

_own: tuple[object, dist.ProcessGroup] | None = None  # the group of all ranks, and that of this one alone


def whole_tables_pay(plan: Plan, hardware: HardwareConfig, rows: int) -> bool:
    """Whether each rank should have all tables to score ``rows`` rows of its own.

    They must fit into the host memory of a rank beside what the plan reserves, and have fewer values than are looked
    up. CPUs alone: tables on SSD, GPUs and embedding hosts stay as they are planned.
    """
    tables = plan.tables.values()
    if plan.device != "cpu" or hardware.embedding_hosts or any(table.tier != "ddr" for table in tables):
        return False
    reserved = max((sum(each.values()) for each in plan.reserved), default=0)
    fit = reserved + sum(table.bytes for table in tables) <= hardware.ddr_gib * GIB
    return fit and sum(table.rows * table.dim for table in tables) <= rows * sum(table.dim for table in tables)


def whole_tables(plan: Plan) -> tuple[Plan, TableRanks]:
    """``plan`` with all tables on this rank, and the group of this rank alone, of which a process makes one."""
    global _own
    rank, world = dist.get_rank(), dist.group.WORLD
    if _own is None or _own[0] is not world:
        _own = world, dist.new_group([rank], use_local_synchronization=True)
    tables = {
        name: replace(
            table,
            sharding="table_wise",
            kernel="fused",
            shards=(ShardPlan(rank=rank, row=0, rows=table.rows, column=0, columns=table.dim),),
        )
        for name, table in plan.tables.items()
    }
    return replace(plan, tables=tables), TableRanks((rank,), _own[1])
