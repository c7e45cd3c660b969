"""The plan for people (a text table) and for ``result.json`` (a summary). No torch here."""

from __future__ import annotations

from pipeline.contracts import Plan, TablePlan

GIB = 2**30
SHOWN_TABLES = 40
SHOWN_RANKS = 8
# Heading, and width of the column; the first column takes what is left of the line.
COLUMNS = (("rows", 11), ("dim", 4), ("GiB", 8), ("tier", 9), ("sharding", 14), ("ranks", 5), ("ms", 8))
SHORT = {"hbm_cached": "hbm+cache", "table_column_wise": "table_col_wise"}


def plan_summary(plan: Plan) -> dict:
    """``result.json``'s ``plan`` part: predicted bytes by tier over all ranks, step ms, and each table's place."""
    return {
        "tiers": {f"{tier}_bytes": sum(rank[tier] for rank in plan.memory) for tier in ("hbm", "ddr", "ssd")},
        "predicted_step_ms": plan.predicted_step_ms,
        "tables": {
            name: {"tier": table.tier, "sharding": table.sharding, "ranks": table_ranks(table)}
            for name, table in plan.tables.items()
        },
    }


def table_ranks(table: TablePlan) -> list[int]:
    """The ranks that hold some of the table, ascending."""
    return sorted({shard.rank for shard in table.shards})


def stored_bytes(table: TablePlan) -> int:
    """fp32 weights and row-wise Adagrad state of one copy of the table."""
    return table.rows * (table.dim + 1) * 4


def render_plan(plan: Plan, width: int = 80) -> str:
    """A text table of at most ``width`` columns: the largest tables, memory by rank, the predicted step."""
    largest = sorted(plan.tables.items(), key=lambda item: (-stored_bytes(item[1]), item[0]))
    shown = largest if len(largest) <= SHOWN_TABLES else largest[:SHOWN_TABLES]
    lines = [_title(plan), ""]
    lines.append(_line("table", [heading for heading, _ in COLUMNS], width))
    lines.append("-" * width)
    lines += [_line(name, _cells(table), width) for name, table in shown]
    rest = [table for _, table in largest[len(shown) :]]
    if rest:
        size = sum(stored_bytes(table) for table in rest) / GIB
        lines.append(f"... and {len(rest)} smaller tables, {size:.3f} GiB in all")
    lines += ["-" * width, *_rank_lines(plan), ""]
    size = sum(stored_bytes(table) for table in plan.tables.values()) / GIB
    lines.append(f"{len(plan.tables)} tables, {size:.3f} GiB with optimizer state")
    lines.append(f"predicted embedding step: {plan.predicted_step_ms:.3f} ms on the slowest rank")
    return "\n".join(line[:width].rstrip() for line in lines)


def _title(plan: Plan) -> str:
    hosts = plan.world_size // plan.ranks_per_host
    return f"Plan for {plan.hardware}: {hosts} x {plan.ranks_per_host} {plan.device} ranks, batch {plan.global_batch}"


def _cells(table: TablePlan) -> list[str]:
    return [
        f"{table.rows:,}" if table.rows < 1e9 else f"{table.rows}",
        str(table.dim),
        f"{stored_bytes(table) / GIB:.3f}",
        SHORT.get(table.tier, table.tier),
        SHORT.get(table.sharding, table.sharding),
        _ranks(table_ranks(table)),
        f"{table.cost_ms:.3f}",
    ]


def _ranks(ranks: list[int]) -> str:
    """The one rank by number, several by count, as in ``x16``."""
    return str(ranks[0]) if len(ranks) == 1 else f"x{len(ranks)}"


def _line(name: str, cells: list[str], width: int) -> str:
    left = {"tier", "sharding"}
    rest = " ".join(
        f"{cell:<{size}}" if heading in left else f"{cell:>{size}}"
        for cell, (heading, size) in zip(cells, COLUMNS, strict=True)
    )
    room = width - len(rest) - 1
    short = name if len(name) <= room else name[: max(room - 2, 1)] + ".."
    return f"{short:<{room}} {rest}"


def _rank_lines(plan: Plan) -> list[str]:
    """Predicted GiB by rank and tier; many ranks as their fullest and emptiest."""
    lines = [f"rank {rank:<4}{_tiers(used)}" for rank, used in enumerate(plan.memory)]
    if len(lines) <= SHOWN_RANKS:
        return lines
    order = sorted(range(len(lines)), key=lambda rank: (-sum(plan.memory[rank].values()), rank))
    mean = {tier: sum(used[tier] for used in plan.memory) / len(plan.memory) for tier in plan.memory[0]}
    return [
        f"{len(lines)} ranks, mean  {_tiers(mean)}",
        f"fullest  {lines[order[0]]}",
        f"emptiest {lines[order[-1]]}",
    ]


def _tiers(used: dict[str, int] | dict[str, float]) -> str:
    parts = [f"{tier.upper()} {size / GIB:9.3f} GiB" for tier, size in used.items() if size]
    return "  ".join(parts) or "nothing"
