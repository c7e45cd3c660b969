"""The plan for people (80 columns of text) and for ``result.json`` (a summary). This module imports no torch."""

from __future__ import annotations

import textwrap
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from pipeline.config.plan import TIERS
from pipeline.core.units import GIB
from pipeline.planning.candidate_search import PlacementSpace
from pipeline.planning.candidates import Offer
from pipeline.planning.choices import DATA_PARALLEL, TABLE_WISE, Choice, PlannedTable
from pipeline.planning.hardware import MEMORIES, fast_memory, size_text
from pipeline.records.plan import PHASES, Plan, TablePlan

SHOWN_TABLES = 40
SHOWN_CACHES = 12
SHOWN_REASONS = 8
SHOWN_RANKS = 8
# Widths in characters.
LABEL, BAR = 16, 24
# The heading and width of each column; the first column, the name, takes the rest of the line.
COLUMNS = (("rows", 11), ("dim", 4), ("GiB", 8), ("tier", 9), ("sharding", 14), ("ranks", 5), ("ms", 8))
CACHE_COLUMNS = (("cached rows", 14), ("of the table", 12), ("hits", 7))
TIER_COLUMNS = (("tables", 6), ("GiB", 10), ("kernel", 17), ("sharding", 33))
LEFT = ("tier", "sharding", "kernel")
SHORT = {"hbm_cached": "hbm+cache", "table_column_wise": "table_col_wise"}


def plan_summary(plan: Plan) -> dict:
    """Return the ``plan`` part of ``result.json``: predicted bytes by tier, step ms, and each table's place."""
    tiers, tables = {}, {}
    for tier in MEMORIES:
        tiers[f"{tier}_bytes"] = sum(rank[tier] for rank in plan.memory)
    for name, table in plan.tables.items():
        tables[name] = {"tier": table.tier, "sharding": table.sharding, "ranks": table.ranks}
    return {"tiers": tiers, "predicted_step_ms": plan.predicted_step_ms, "tables": tables}


def render_plan(plan: Plan, width: int = 80) -> str:
    """Render a page of at most ``width`` columns.

    It shows tables, tiers, caches, memory by rank, the predicted step, and why.
    """
    ranks = f"{plan.hosts_text} x {plan.ranks_per_host} {plan.device} ranks"
    largest_first = sorted(plan.tables.items(), key=lambda item: (-item[1].bytes, item[0]))
    parts = [
        [f"Plan for {plan.hardware}: {ranks}, batch {plan.global_batch}"],
        _table_lines(largest_first, width),
        _tier_lines(plan, width),
        _cache_lines(largest_first, width),
        _reason_lines(largest_first, width),
        _memory_lines(plan, width),
        _phase_lines(plan, width),
        _closing_lines(plan),
    ]
    pages = []
    for lines in parts:
        if lines:
            pages.append("\n".join(line[:width].rstrip() for line in lines))
    return "\n\n".join(pages)


def _table_lines(tables: Sequence[tuple[str, TablePlan]], width: int) -> list[str]:
    lines = _heading("table", COLUMNS, width)
    for name, table in tables[:SHOWN_TABLES]:
        rows = f"{table.rows:,}"
        if table.rows >= 1e9:
            # The number would not fit the column with commas.
            rows = str(table.rows)
        # A single rank is shown by number, several by count, as in x16.
        ranks = f"x{len(table.ranks)}"
        if len(table.ranks) == 1:
            ranks = str(table.ranks[0])
        size, tier = f"{table.bytes / GIB:.3f}", SHORT.get(table.tier, table.tier)
        sharding = SHORT.get(table.sharding, table.sharding)
        cells = [rows, str(table.dim), size, tier, sharding, ranks, f"{table.cost_ms:.3f}"]
        lines.append(_line(name, cells, width))
    rest = dict(tables[SHOWN_TABLES:]).values()
    if rest:
        lines.append(f"... and {len(rest)} smaller tables, {_gib(rest)} GiB in all")
    return lines


def _tier_lines(plan: Plan, width: int) -> list[str]:
    # Sums up tables, bytes, kernels and sharding types by tier, which shows a plan even of 1,000 tables at a glance.
    if len(plan.tables) < 2:
        return []
    by_tier: dict[str, dict[str, list[TablePlan]]] = {}
    for table in plan.tables.values():
        by_tier.setdefault(table.tier, {}).setdefault(table.kernel, []).append(table)
    lines = _heading("tier", TIER_COLUMNS, width)
    unknown = by_tier.keys() - set(TIERS)
    for tier in [*TIERS, *sorted(unknown)]:
        label = SHORT.get(tier, tier)
        # Sort kernels and sharding types by the number of their tables, then by name.
        kernels = by_tier.get(tier, {})
        for kernel, tables in sorted(kernels.items(), key=lambda item: (-len(item[1]), item[0])):
            shardings = Counter(SHORT.get(table.sharding, table.sharding) for table in tables)
            counts = []
            for sharding, number in sorted(shardings.items(), key=lambda item: (-item[1], item[0])):
                counts.append(f"{number} {sharding}")
            cells = [str(len(tables)), _gib(tables), kernel, ", ".join(counts)]
            lines.append(_line(label, cells, width, TIER_COLUMNS))
            label = ""
    return lines


def _cache_lines(tables: Sequence[tuple[str, TablePlan]], width: int) -> list[str]:
    # Lists the tables with a cache in a faster memory, and the share of lookups that it should serve.
    cached = [(name, table) for name, table in tables if table.cache_rows]
    if not cached:
        return []
    lines = _heading("cache", CACHE_COLUMNS, width)
    for name, table in cached[:SHOWN_CACHES]:
        caches = [(name, table.cache_rows, table.hit_rate)]
        if table.host_rows:
            caches.append(("  in DDR behind", table.host_rows, table.host_rate))
        for label, rows, hits in caches:
            cells = [f"{rows:,}", f"{rows / max(table.rows, 1):.2%}", f"{hits:.2%}"]
            lines.append(_line(label, cells, width, CACHE_COLUMNS))
    rest = [table.hit_rate for _, table in cached[SHOWN_CACHES:]]
    if rest:
        lines.append(f"... and {len(rest)} more, {min(rest):.2%} of lookups or more served")
    return lines


def _reason_lines(tables: Sequence[tuple[str, TablePlan]], width: int) -> list[str]:
    # Explains why the largest tables are where they are. Similar tables share a reason, which is written once.
    names: dict[str, list[str]] = {}
    for name, table in tables[:SHOWN_REASONS]:
        if table.reason:
            names.setdefault(table.reason, []).append(name)
    if not names:
        return []
    lines = ["why", "-" * width]
    for reason, group in names.items():
        lines += textwrap.wrap(f"{', '.join(group)}: {reason}", width - 2, subsequent_indent="  ")
    return lines


def _memory_lines(plan: Plan, width: int) -> list[str]:
    # Compares predicted GiB by rank and tier with the capacity; of many ranks only the mean, fullest and emptiest.
    if not plan.memory:
        return []
    lines = [f"{'memory':<{LABEL}}     [# tables, = reserved, . free]", "-" * width]
    count = len(plan.memory)
    if count <= SHOWN_RANKS:
        shown = [(f"rank {rank}", rank) for rank in range(count)]
    else:
        mean: dict[str, float] = {}
        for used in plan.memory:
            for tier, size in used.items():
                mean[tier] = mean.get(tier, 0) + size
        for tier in mean:
            mean[tier] /= count
        reserved = sum(map(plan.reserved_bytes, range(count))) / count
        lines += _tier_bars(plan, f"{count} ranks, mean", mean, reserved)
        order = sorted(range(count), key=lambda rank: (-_fullness(plan, rank), rank))
        shown = [(f"fullest {order[0]}", order[0]), (f"emptiest {order[-1]}", order[-1])]
    for label, rank in shown:
        lines += _tier_bars(plan, label, plan.memory[rank], plan.reserved_bytes(rank))
    return lines


def _fullness(plan: Plan, rank: int) -> float:
    # Returns the used share of the rank's fullest tier; bytes where no capacity is known.
    used = {tier: plan.memory[rank].get(tier, 0) for tier in MEMORIES}
    used[plan.reserved_tier] += plan.reserved_bytes(rank)
    shares = []
    for tier, size in used.items():
        capacity = plan.capacity_bytes(tier)
        if capacity:
            shares.append(size / capacity)
    return max(shares) if shares else float(sum(used.values()))


def _tier_bars(plan: Plan, label: str, used: Mapping[str, float], reserved: float) -> list[str]:
    # Returns one line for every tier that exists or is used.
    lines: list[str] = []
    for tier in MEMORIES:
        tables = used.get(tier, 0)
        rest = reserved if tier == plan.reserved_tier else 0
        capacity = plan.capacity_bytes(tier)
        exists = capacity and (tier != "hbm" or plan.device == "cuda")
        if not (tables or rest or exists):
            continue
        text = f"{tables / GIB:.3f}"
        if rest:
            text += f" + {rest / GIB:.3f}"
        if capacity:
            cells = max(round(BAR * tables / capacity), int(tables > 0))
            rest_cells = max(round(BAR * (tables + rest) / capacity) - cells, int(rest > 0))
            bar = f"{'#' * cells}{'=' * rest_cells}"[:BAR]
            text = f"[{bar:.<{BAR}}] {text} of {capacity / GIB:,.4g} GiB, {(tables + rest) / capacity:.0%}"
        else:
            text += " GiB"
        lines.append(f"{'' if lines else label:<{LABEL}} {tier.upper()} {text}")
    return lines or [f"{label:<{LABEL}} nothing"]


def _phase_lines(plan: Plan, width: int) -> list[str]:
    # Shows each phase's predicted ms on the slowest rank and on average, with a bar of the slowest rank's share.
    if not plan.phases:
        return []
    slowest = plan.slowest_rank
    heads, columns = ["ms"], [plan.phases[slowest]]
    if len(plan.phases) > 1:
        heads = [f"rank {slowest}, ms", f"mean of {len(plan.phases)}, ms"]
        columns.append(plan.mean_phases)
    total = sum(columns[0].values())
    lines = [f"{'phase':<20}" + "".join(f"{head:>16}" for head in heads), "-" * width]
    room = width - 20 - 16 * len(heads) - 9
    for phase in [*PHASES, *sorted(set(columns[0]) - set(PHASES))]:
        cells = "".join(f"{phases.get(phase, 0.0):>16.3f}" for phases in columns)
        share = columns[0].get(phase, 0.0) / total if total else 0.0
        lines.append(f"{phase.replace('_', ' '):<20}{cells}  {share:>4.0%}  {'#' * round(share * room)}")
    lines.append("-" * width)
    sums = "".join(f"{sum(phases.values()):>16.3f}" for phases in columns)
    overlap = total - plan.predicted_step_ms
    if overlap > 5e-4:
        sums += f"  {overlap:.3f} ms of it overlap"
    lines.append(f"{'sum':<20}{sums}")
    return lines


def _closing_lines(plan: Plan) -> list[str]:
    size = on_ssd = 0
    for table in plan.tables.values():
        size += table.bytes
        if table.tier == "ssd":
            on_ssd += table.bytes
    plural = "" if len(plan.tables) == 1 else "s"
    lines = [f"{len(plan.tables)} table{plural}, {size_text(size)} with optimizer state"]
    if on_ssd:
        lines.append(f"SSD: {size_text(on_ssd)} for a checkpoint's copy of the rows there, beside the rows")
    part = "embedding step"
    # A plan of version 1 has neither phases nor gap.
    if plan.phases:
        part, gap = "step", "proven to be the best"
        if plan.gap > 5e-5:
            # A smaller gap would round to 0.00 %.
            gap = f"at most {plan.gap:.2%} above the best possible"
        lines.append(f"tiers: {gap}, by the cost model")
    where = "on the slowest rank"
    if plan.embedding_hosts:
        where = "a worker's dense part and the slowest embedding rank"
    lines.append(f"predicted {part}: {plan.predicted_step_ms:.3f} ms {where}")
    return lines


def _heading(name: str, columns: Sequence[tuple[str, int]], width: int) -> list[str]:
    headings, _ = zip(*columns, strict=True)
    return [_line(name, headings, width, columns), "-" * width]


def _line(name: str, cells: Sequence[str], width: int, columns: Sequence[tuple[str, int]] = COLUMNS) -> str:
    aligned = []
    for cell, (heading, size) in zip(cells, columns, strict=True):
        side = "<" if heading in LEFT else ">"
        aligned.append(f"{cell:{side}{size}}")
    rest = " ".join(aligned)
    # A long last cell is cut, but not the name.
    room = max(width - len(rest) - 1, len("hbm+cache"))
    if len(name) > room:
        name = name[: max(room - 2, 1)] + ".."
    return f"{name:<{room}} {rest}"


def _gib(tables: Iterable[TablePlan]) -> str:
    return f"{sum(table.bytes for table in tables) / GIB:.3f}"


def explain(table: PlannedTable, choice: Choice, offer: Offer, space: PlacementSpace) -> str:
    """Say in one sentence why ``table`` gets ``offer`` of all its offers in ``space``; its tier if not the fastest."""
    reason, hardware = _explain_sharding(table, choice, offer, space), space.hardware
    if offer.tier == fast_memory(hardware):
        return reason
    density = f"{table.pooling / (table.bytes / GIB):.3g} lookups a sample and GiB"
    if offer.tier == "ddr":
        return f"{reason}; HBM has no room for every table, so this one, with {density}, stays in DDR"
    memory = fast_memory(hardware).upper()
    cached = f"{offer.cache_rows:,} rows in {memory} serve {offer.hit_rate:.1%} of its lookups"
    if offer.tier == "hbm_cached":
        return f"{reason}; HBM has no room for every table, so this one stays in DDR behind a cache: {cached}"
    if offer.host_rows:
        cached += f", {offer.host_rows:,} more in DDR another {offer.host_rate:.1%}"
    return f"{reason}; memory has no room for every table, so this one, with {density}, is on SSD: {cached}"


def _explain_sharding(table: PlannedTable, choice: Choice, offer: Offer, space: PlacementSpace) -> str:
    if choice.pinned:
        return f"pinned by plan.tables.{table.name}"
    if space.hardware.world_size == 1:
        return "one rank holds every table whole"
    if offer.sharding == DATA_PARALLEL:
        return "so small that reducing the whole table is cheaper than exchanging its lookups"
    if offer.sharding == TABLE_WISE:
        return "fits one rank whole, and whole tables balance the ranks"
    count = len(offer.layout.shards)
    memory = offer.tier if offer.tier in ("hbm", "ssd") else "ddr"
    if table.bytes > space.room.of(memory):
        return f"{size_text(table.bytes)} do not fit one rank: split over {count} shards"
    for other in space.offers[table.name]:
        if other.sharding == TABLE_WISE and other.tier == offer.tier:
            saved = max(other.ms) / max(*offer.ms, 1e-9)
            if saved >= 1.05:
                return f"split over {count} shards: the busiest rank spends {saved:.1f}x less on it than whole"
            break
    return f"split over {count} shards, which evens out memory or work between the ranks"
