"""The memory that a super-net takes: every table at its full width, before any is made."""

from __future__ import annotations

from pipeline import units
from pipeline.embeddings.rules import table_rules
from pipeline.errors import PlanError
from pipeline.machine import usable_memory
from pipeline.search.space import Space
from pipeline.training.memory import status_bytes

VALUE = 4  # bytes of a float32
COPIES = 2  # of rows and their optimizers' state: a second one while the search's state is written or read


def table_bytes(space: Space, dim: int) -> int:
    """Bytes that the tables take at width ``dim``: rows, their optimizers' state, and the copy that is kept."""
    rules = table_rules(space.config.model, space.config.train)
    columns = {column.name: column for table in space.schema.tables for column in rules.of(table.name).columns}
    values = dim + sum(dim if column.per_value else 1 for column in columns.values())
    return COPIES * VALUE * values * sum(table.rows for table in space.schema.tables)


def require_memory(space: Space, room: int | None = None) -> None:
    """Raise PlanError where the tables of the super-net do not fit into ``room`` bytes of memory.

    By default that is what this process may still use on this machine. The dense part and a batch are small beside
    tables that come near it, and are not counted.
    """
    dim, rows = space.config.model.embedding_dim, sum(table.rows for table in space.schema.tables)
    if room is None:
        room = usable_memory() - status_bytes("VmRSS")
    if (needed := table_bytes(space, dim)) <= room:
        return
    fitting = next((width for width in range(dim - dim % 4, 3, -4) if table_bytes(space, width) <= room), None)
    narrower = f"model.embedding_dim={fitting}, or " if fitting else ""
    raise PlanError(
        f"the search needs {units.size(needed)} for {units.count(rows)} rows at their full width of {dim}, with the "
        f"optimizer's state and a copy of both to go on from, but this machine has {units.size(max(room, 0))} left",
        hint=f"{narrower}data.sparse_defaults.min_count=<higher>, which makes fewer rows",
    )
