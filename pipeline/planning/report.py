"""The plan for people (80 columns of text) and for ``result.json`` (a summary). No torch here."""

from __future__ import annotations

import textwrap
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from pipeline.config.hardware import HardwareConfig
from pipeline.config.plan import TIERS
from pipeline.planning.candidates import Offer
from pipeline.planning.choices import DATA_PARALLEL, TABLE_WISE, Choice, PlannedTable
from pipeline.planning.hardware import MEMORIES, fast_memory, size_text
from pipeline.planning.search import PlacementSpace
from pipeline.records.plan import PHASES, Plan, TablePlan
from pipeline.units import GIB

SHOWN_TABLES = 40
SHOWN_CACHES = 12
SHOWN_REASONS = 8
SHOWN_RANKS = 8
LABEL, BAR = 16, 24  # columns
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
            name: {"tier": table.tier, "sharding": table.sharding, "ranks": table.ranks}
            for name, table in plan.tables.items()
        },
    }


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
    ranks = f"{plan.hosts_text} x {plan.ranks_per_host} {plan.device} ranks"
    return f"Plan for {plan.hardware}: {ranks}, batch {plan.global_batch}"


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
        _ranks(table.ranks),
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
        if table.host_rows:
            share = table.host_rows / max(table.rows, 1)
            cells = [f"{table.host_rows:,}", f"{share:.2%}", f"{table.host_rate:.2%}"]
            lines.append(_line("  in DDR behind", cells, width, CACHE_COLUMNS))
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
    where = "a worker's dense part and the slowest embedding rank" if plan.embedding_hosts else "on the slowest rank"
    lines.append(f"predicted {part}: {plan.predicted_step_ms:.3f} ms {where}")
    return lines


def _gib(tables: Iterable[TablePlan]) -> str:
    return f"{sum(table.bytes for table in tables) / GIB:.3f}"


def _line(name: str, cells: Sequence[str], width: int, columns: Sequence[tuple[str, int]] = COLUMNS) -> str:
    rest = " ".join(
        f"{cell:<{size}}" if heading in LEFT else f"{cell:>{size}}"
        for cell, (heading, size) in zip(cells, columns, strict=True)
    )
    room = max(width - len(rest) - 1, len("hbm+cache"))  # a long last cell is cut, not the name
    short = name if len(name) <= room else name[: max(room - 2, 1)] + ".."
    return f"{short:<{room}} {rest}"


def memory_lines(plan: Plan, width: int) -> list[str]:
    """Predicted GiB by rank and tier against the capacity; above 8 ranks only the mean, fullest and emptiest."""
    if not plan.memory:
        return []
    lines = [f"{'memory':<{LABEL}}     [# tables, = reserved, . free]", "-" * width]
    ranks = range(len(plan.memory))
    if len(plan.memory) <= SHOWN_RANKS:
        return lines + [line for rank in ranks for line in _rank_lines(plan, f"rank {rank}", rank)]
    order = sorted(ranks, key=lambda rank: (-fullness(plan, rank), rank))
    lines += _tier_bars(plan, f"{len(plan.memory)} ranks, mean", _mean(plan.memory), _mean_reserved(plan))
    lines += _rank_lines(plan, f"fullest {order[0]}", order[0])
    lines += _rank_lines(plan, f"emptiest {order[-1]}", order[-1])
    return lines


def fullness(plan: Plan, rank: int) -> float:
    """The used share of the rank's fullest tier; bytes where no capacity is known."""
    used = {tier: plan.memory[rank].get(tier, 0) for tier in MEMORIES}
    used[plan.reserved_tier] += plan.reserved_bytes(rank)
    shares = [size / room for tier, size in used.items() if (room := plan.capacity_bytes(tier))]
    return max(shares) if shares else float(sum(used.values()))


def phase_lines(plan: Plan, width: int) -> list[str]:
    """Predicted ms of each phase on the slowest rank and in the mean, with a bar of the slowest rank's share."""
    if not plan.phases:
        return []
    slowest, mean = plan.slowest_rank, plan.mean_phases
    many = len(plan.phases) > 1
    heads = [f"rank {slowest}, ms", f"mean of {len(plan.phases)}, ms"] if many else ["ms"]
    total = sum(plan.phases[slowest].values())
    lines = [f"{'phase':<20}" + "".join(f"{head:>16}" for head in heads), "-" * width]
    room = width - 20 - 16 * len(heads) - 9
    for phase in [*PHASES, *sorted(set(plan.phases[slowest]) - set(PHASES))]:
        spent = plan.phases[slowest].get(phase, 0.0)
        cells = [spent, mean.get(phase, 0.0)] if many else [spent]
        share = spent / total if total else 0.0
        text = "".join(f"{cell:>16.3f}" for cell in cells)
        lines.append(f"{phase.replace('_', ' '):<20}{text}  {share:>4.0%}  {'#' * round(share * room)}")
    overlap = total - plan.predicted_step_ms
    lines.append("-" * width)
    sums = [total, sum(mean.values())] if many else [total]
    hidden = f"  {overlap:.3f} ms of it overlap" if overlap > 5e-4 else ""
    lines.append(f"{'sum':<20}" + "".join(f"{value:>16.3f}" for value in sums) + hidden)
    return lines


def _rank_lines(plan: Plan, label: str, rank: int) -> list[str]:
    return _tier_bars(plan, label, plan.memory[rank], plan.reserved_bytes(rank))


def _tier_bars(plan: Plan, label: str, used: Mapping[str, float], reserved: float) -> list[str]:
    """One line for every tier that exists or is used."""
    lines: list[str] = []
    for tier in MEMORIES:
        tables, kept = used.get(tier, 0), reserved if tier == plan.reserved_tier else 0
        room = plan.capacity_bytes(tier)
        if tables or kept or (room and (tier != "hbm" or plan.device == "cuda")):
            lines.append(f"{'' if lines else label:<{LABEL}} {tier.upper()} {_bar(tables, kept, room)}")
    return lines or [f"{label:<{LABEL}} nothing"]


def _bar(tables: float, kept: float, room: float) -> str:
    text = f"{tables / GIB:.3f}" + (f" + {kept / GIB:.3f}" if kept else "")
    if not room:
        return f"{text} GiB"
    cells = max(round(BAR * tables / room), int(tables > 0))
    more = max(round(BAR * (tables + kept) / room) - cells, int(kept > 0))
    bar = f"{'#' * cells}{'=' * more}"[:BAR]
    return f"[{bar:.<{BAR}}] {text} of {room / GIB:,.4g} GiB, {(tables + kept) / room:.0%}"


def _mean(ranks: list[dict[str, int]]) -> dict[str, float]:
    names = dict.fromkeys(name for rank in ranks for name in rank)
    return {name: sum(rank.get(name, 0) for rank in ranks) / len(ranks) for name in names}


def _mean_reserved(plan: Plan) -> float:
    return sum(plan.reserved_bytes(rank) for rank in range(len(plan.memory))) / len(plan.memory)


def reason(table: PlannedTable, choice: Choice, offer: Offer, space: PlacementSpace) -> str:
    """One sentence: why ``table`` gets ``offer`` of all its offers in ``space``, and its tier if not the fastest."""
    return _sharding_reason(table, choice, offer, space) + _tier_reason(space.hardware, table, offer)


def _sharding_reason(table: PlannedTable, choice: Choice, offer: Offer, space: PlacementSpace) -> str:
    if choice.pinned:
        return f"pinned by plan.tables.{table.name}"
    if space.hardware.world_size == 1:
        return "one rank holds every table whole"
    if offer.sharding == DATA_PARALLEL:
        return "so small that reducing the whole table is cheaper than exchanging its lookups"
    if offer.sharding == TABLE_WISE:
        return "fits one rank whole, and whole tables balance the ranks"
    count = len(offer.layout.shards)
    home = {"hbm": "hbm", "ssd": "ssd"}.get(offer.tier, "ddr")
    if table.bytes > space.room.of(home):
        return f"{size_text(table.bytes)} do not fit one rank: split over {count} shards"
    whole = [o for o in space.offers[table.name] if o.sharding == TABLE_WISE and o.tier == offer.tier]
    saved = max(whole[0].ms) / max(*offer.ms, 1e-9) if whole else 0.0
    if saved >= 1.05:
        return f"split over {count} shards: the busiest rank spends {saved:.1f}x less on it than whole"
    return f"split over {count} shards, which evens out memory or work between the ranks"


def _tier_reason(hardware: HardwareConfig, table: PlannedTable, offer: Offer) -> str:
    if offer.tier == ("hbm" if hardware.device == "cuda" else "ddr"):
        return ""
    density = f"{table.pooling / (table.bytes / GIB):.3g} lookups a sample and GiB"
    if offer.tier == "ddr":
        return f"; HBM has no room for every table, so this one, with {density}, stays in DDR"
    memory = fast_memory(hardware).upper()
    kept = f"{offer.cache_rows:,} rows in {memory} serve {offer.hit_rate:.1%} of its lookups"
    if offer.tier == "hbm_cached":
        return f"; HBM has no room for every table, so this one stays in DDR behind a cache: {kept}"
    if offer.host_rows:
        kept += f", {offer.host_rows:,} more in DDR another {offer.host_rate:.1%}"
    return f"; memory has no room for every table, so this one, with {density}, is on SSD: {kept}"
