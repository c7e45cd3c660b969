"""The plan for people (80 columns of text) and for ``result.json`` (a summary). No torch here."""

from __future__ import annotations

import textwrap
from collections import Counter
from collections.abc import Iterable, Sequence

from pipeline.config import TIERS
from pipeline.planning.hardware import MEMORIES, size_text
from pipeline.planning.text_bars import memory_lines, phase_lines
from pipeline.records import Plan, TablePlan
from pipeline.units import GIB

SHOWN_TABLES = 40
SHOWN_CACHES = 12
SHOWN_REASONS = 8
# Heading and width of each column; the first column, the name, takes the rest of the line.
COLUMNS = (("rows", 11), ("dim", 4), ("GiB", 8), ("tier", 9), ("sharding", 14), ("ranks", 5), ("ms", 8))
CACHE_COLUMNS = (("cached rows", 14), ("of the table", 12), ("hits", 7))
TIER_COLUMNS = (("tables", 6), ("GiB", 10), ("kernel", 17), ("sharding", 33))
LEFT = ("tier", "sharding", "kernel")
SHORT = {"hbm_cached": "hbm+cache", "table_column_wise": "table_col_wise"}


def plan_summary(plan: Plan) -> dict:
    """``result.json``'s ``plan`` part: predicted bytes by tier over all ranks, step ms, and each table's place."""
    return {
        "tiers": {f"{tier}_bytes": sum(rank[tier] for rank in plan.memory) for tier in MEMORIES},
        "predicted_step_ms": plan.predicted_step_ms,
        "tables": {
            name: {"tier": table.tier, "sharding": table.sharding, "ranks": table_ranks(table)}
            for name, table in plan.tables.items()
        },
    }


def table_ranks(table: TablePlan) -> list[int]:
    """The ranks that hold some of the table, ascending."""
    return sorted({shard.rank for shard in table.shards})


def by_size(plan: Plan) -> list[tuple[str, TablePlan]]:
    """The tables, largest first."""
    return sorted(plan.tables.items(), key=lambda item: (-item[1].bytes, item[0]))


def render_plan(plan: Plan, width: int = 80) -> str:
    """A page of at most ``width`` columns: tables, tiers, caches, memory by rank, the predicted step, and why."""
    ordered = by_size(plan)
    parts = [
        [_title(plan)],
        _table_lines(ordered, width),
        _tier_lines(plan, width),
        _cache_lines(ordered, width),
        _reason_lines(ordered, width),
        memory_lines(plan, width),
        phase_lines(plan, width),
        _closing(plan),
    ]
    return "\n\n".join("\n".join(line[:width].rstrip() for line in part) for part in parts if part)


def _title(plan: Plan) -> str:
    hosts = plan.world_size // plan.ranks_per_host
    return f"Plan for {plan.hardware}: {hosts} x {plan.ranks_per_host} {plan.device} ranks, batch {plan.global_batch}"


def _table_lines(ordered: Sequence[tuple[str, TablePlan]], width: int) -> list[str]:
    lines = [_line("table", [heading for heading, _ in COLUMNS], width), "-" * width]
    shown = ordered[:SHOWN_TABLES]
    lines += [_line(name, _cells(table), width) for name, table in shown]
    rest = [table for _, table in ordered[len(shown) :]]
    if rest:
        lines.append(f"... and {len(rest)} smaller tables, {_gib(rest)} GiB in all")
    return lines


def _cells(table: TablePlan) -> list[str]:
    return [
        f"{table.rows:,}" if table.rows < 1e9 else f"{table.rows}",
        str(table.dim),
        f"{table.bytes / GIB:.3f}",
        SHORT.get(table.tier, table.tier),
        SHORT.get(table.sharding, table.sharding),
        _ranks(table_ranks(table)),
        f"{table.cost_ms:.3f}",
    ]


def _ranks(ranks: list[int]) -> str:
    """The one rank by number, several by count, as in ``x16``."""
    return str(ranks[0]) if len(ranks) == 1 else f"x{len(ranks)}"


def _tier_lines(plan: Plan, width: int) -> list[str]:
    """Tables, bytes, kernels and sharding types by tier, which sum up a plan of 1,000 tables."""
    if len(plan.tables) < 2:
        return []
    lines = [_line("tier", [heading for heading, _ in TIER_COLUMNS], width, TIER_COLUMNS), "-" * width]
    known = [*TIERS, *sorted({table.tier for table in plan.tables.values()} - set(TIERS))]
    for tier in known:
        tables = [table for table in plan.tables.values() if table.tier == tier]
        for index, kernel in enumerate(_frequent(table.kernel for table in tables)):
            of_kernel = [table for table in tables if table.kernel == kernel]
            shardings = _frequent(SHORT.get(table.sharding, table.sharding) for table in of_kernel)
            counts = ", ".join(f"{number} {sharding}" for sharding, number in shardings.items())
            cells = [str(len(of_kernel)), _gib(of_kernel), kernel, counts]
            lines.append(_line("" if index else SHORT.get(tier, tier), cells, width, TIER_COLUMNS))
    return lines


def _frequent(values: Iterable[str]) -> dict[str, int]:
    """How often each value occurs, the most frequent first."""
    return dict(sorted(Counter(values).items(), key=lambda item: (-item[1], item[0])))


def _cache_lines(ordered: Sequence[tuple[str, TablePlan]], width: int) -> list[str]:
    """The tables with a cache in a faster memory, and the share of lookups that it should serve."""
    cached = [(name, table) for name, table in ordered if table.cache_rows]
    if not cached:
        return []
    lines = [_line("cache", [heading for heading, _ in CACHE_COLUMNS], width, CACHE_COLUMNS), "-" * width]
    for name, table in cached[:SHOWN_CACHES]:
        share = table.cache_rows / max(table.rows, 1)
        cells = [f"{table.cache_rows:,}", f"{share:.2%}", f"{table.hit_rate:.2%}"]
        lines.append(_line(name, cells, width, CACHE_COLUMNS))
    rest = [table for _, table in cached[SHOWN_CACHES:]]
    if rest:
        lines.append(f"... and {len(rest)} more, {min(t.hit_rate for t in rest):.2%} of lookups or more served")
    return lines


def _reason_lines(ordered: Sequence[tuple[str, TablePlan]], width: int) -> list[str]:
    """Why the largest tables are where they are; equal reasons are written once."""
    names: dict[str, list[str]] = {}
    for name, table in ordered[:SHOWN_REASONS]:
        if table.reason:
            names.setdefault(table.reason, []).append(name)
    lines = [
        line
        for reason, of in names.items()
        for line in textwrap.wrap(f"{', '.join(of)}: {reason}", width - 2, subsequent_indent="  ")
    ]
    return ["why", "-" * width, *lines] if lines else []


def _closing(plan: Plan) -> list[str]:
    tables = f"{len(plan.tables)} table" + "s" * (len(plan.tables) != 1)
    size = size_text(sum(table.bytes for table in plan.tables.values()))
    lines = [f"{tables}, {size} with optimizer state"]
    on_ssd = sum(table.bytes for table in plan.tables.values() if table.tier == "ssd")
    if on_ssd:
        lines.append(f"SSD: {size_text(on_ssd)} for a checkpoint's copy of the rows there, beside the rows")
    if plan.phases:  # a plan of version 1 has neither phases nor gap
        gap = f"at most {plan.gap:.2%} above the best possible" if plan.gap > 5e-5 else "proven to be the best"
        lines.append(f"tiers: {gap}, by the cost model")
    part = "step" if plan.phases else "embedding step"
    lines.append(f"predicted {part}: {plan.predicted_step_ms:.3f} ms on the slowest rank")
    return lines


def _gib(tables: Iterable[TablePlan]) -> str:
    return f"{sum(table.bytes for table in tables) / GIB:.3f}"


def _line(name: str, cells: Sequence[str], width: int, columns: Sequence[tuple[str, int]] = COLUMNS) -> str:
    rest = " ".join(
        f"{cell:<{size}}" if heading in LEFT else f"{cell:>{size}}"
        for cell, (heading, size) in zip(cells, columns, strict=True)
    )
    room = width - len(rest) - 1
    short = name if len(name) <= room else name[: max(room - 2, 1)] + ".."
    return f"{short:<{room}} {rest}"
