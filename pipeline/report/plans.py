"""``plan.html`` in a plan's artifact: memory and cost of every rank as stacked bars, and why each table is where it is.

One self-contained page from a Plan alone: inline CSS and SVG, no script, nothing fetched, light and dark.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape

from pipeline.records import PHASES, Plan, TablePlan
from pipeline.report import units
from pipeline.report.page import cards, document
from pipeline.report.stacks import Series, Stacks, legend, milliseconds, stacked
from pipeline.report.tables import facts, head_cells, number, rank_words, scroll_table, section, table_bytes

PLAN_PAGE = "plan.html"
GIB = 2**30
TIERS = ("hbm", "ddr", "ssd")
SHOWN_TIER = {"hbm_cached": "hbm cached ddr"}
MOST_TABLES = 2_000
MOST_WORDS = 24
TABLE_COLOUR = 0
PHASE_COLOURS = (0, 1, 2, 3, 4, 6, 5)  # grey for the overhead
COLOURS = 7
COLOUR_OF = {"margin": COLOURS}  # no use of the memory, only kept free: faint


def plan_page(plan: Plan) -> str:
    """The page as text; everything that comes from the plan is escaped."""
    parts = [_header(plan), cards(_figures(plan)), _memory(plan), _cost(plan), _by_tier(plan), _tables(plan)]
    figures = [(name, f"{value:,.10g}") for name, value in plan.figures.items()]
    return document(f"Nightjar plan for {plan.hardware}", [*parts, facts("Hardware, a rank", figures)], "plan.json")


def slowest_rank(plan: Plan) -> int:
    """The rank whose phases add up to the most ms, the first of equals."""
    return max(range(len(plan.phases)), key=lambda rank: (sum(plan.phases[rank].values()), -rank))


def _header(plan: Plan) -> str:
    hosts = plan.world_size // plan.ranks_per_host
    said = f"Nightjar plan · {hosts} × {plan.ranks_per_host} {plan.device} ranks · global batch "
    return (
        f"<header><h1>Plan for {escape(plan.hardware)}</h1>"
        f"<p>{escape(said + units.count(plan.global_batch))}</p></header>"
    )


def _figures(plan: Plan) -> list[tuple[str, str, str]]:
    """The cards: step, bottleneck, fullest memory, tables, quality of the tier assignment."""
    stored = sum(table_bytes(table) for table in plan.tables.values())
    found = []
    if plan.phases:
        slowest = slowest_rank(plan)
        spent = plan.phases[slowest]
        phase = max(spent, key=lambda name: spent[name])
        share = spent[phase] / max(sum(spent.values()), 1e-12)
        found.append(("Predicted step", milliseconds(plan.predicted_step_ms), f"of the slowest, rank {slowest}"))
        found.append(
            ("Bottleneck", _words(phase), f"{milliseconds(spent[phase])}, {units.percent(share, 0)} of its work")
        )
    else:
        found.append(("Predicted step", milliseconds(plan.predicted_step_ms), "the embedding part, slowest rank"))
    found += _fullest(plan)
    found.append(("Tables", units.count(len(plan.tables)), f"{units.size(stored)} with optimizer state"))
    if plan.phases:
        best = plan.gap <= 5e-5
        under = "no better tiers, by the cost model" if best else "above the best tiers there are"
        found.append(("Tier assignment", "optimal" if best else f"≤ {units.percent(plan.gap, 2)}", under))
    return found


def _fullest(plan: Plan) -> list[tuple[str, str, str]]:
    """The card of the rank and tier that is nearest to its capacity."""
    shares = [
        (sum(part) / room, tier, rank)
        for tier in TIERS
        if (room := _capacity(plan, tier))
        for rank, part in enumerate(zip(*(series.values for series in _series(plan, tier)), strict=True))
    ]
    if not shares:
        return []
    share, tier, rank = max(shares, key=lambda found: (found[0], -found[2]))
    return [("Fullest memory", units.percent(share, 0), f"{tier.upper()} of rank {rank}, reservations included")]


def _capacity(plan: Plan, tier: str) -> float:
    """Bytes of ``tier`` that one rank has; 0 where the plan does not say."""
    return plan.figures.get(f"{tier}_gib", 0.0) * GIB


def _series(plan: Plan, tier: str) -> list[Series]:
    """Bytes of ``tier`` by rank: its tables, then what is reserved by purpose."""
    found = [Series(name="tables", values=[rank.get(tier, 0) for rank in plan.memory], colour=TABLE_COLOUR)]
    if tier == plan.reserved_tier:
        purposes = dict.fromkeys(name for rank in plan.reserved for name in rank)
        for index, name in enumerate(purposes):
            values = [rank.get(name, 0) for rank in plan.reserved]
            found.append(
                Series(name=_words(name), values=values, colour=COLOUR_OF.get(name, 1 + index % (COLOURS - 1)))
            )
    return found


def _memory(plan: Plan) -> str:
    if not plan.memory:
        return ""
    drawn, unused = [], []
    for tier in TIERS:
        series, room = _series(plan, tier), _capacity(plan, tier)
        if any(any(one.values) for one in series):
            drawn.append(
                Stacks(
                    title=tier.upper(),
                    unit="GiB a rank",
                    series=series,
                    show=units.size,
                    limit=room,
                    limit_name="capacity",
                    scale=GIB,
                )  # fmt: skip
            )
        elif room and (tier != "hbm" or plan.device == "cuda"):
            unused.append(f"{tier.upper()} ({units.size(room)})")
    kept = max((stacks.series for stacks in drawn), key=len, default=[])
    said = f"Nothing lies in {', '.join(unused)} of a rank. " if unused else ""
    note = f'<p class="muted small">{escape(said + _reserved_words(kept))}</p>'
    plots = f'<div class="plots">{"".join(stacked(stacks) for stacks in drawn)}</div>'
    return section("Memory of each rank", legend(kept) + plots + note)


def _reserved_words(series: Sequence[Series]) -> str:
    """What is kept free of tables, by purpose; the most of any rank."""
    kept = [f"{one.name} {units.size(max(one.values))}" for one in series if one.colour != TABLE_COLOUR]
    return f"Kept free of tables a rank: {', '.join(kept)}." if kept else ""


def _cost(plan: Plan) -> str:
    if not plan.phases:
        return ""
    names = [*PHASES, *sorted({name for rank in plan.phases for name in rank} - set(PHASES))]
    series = [
        Series(name=_words(name), values=[rank.get(name, 0.0) for rank in plan.phases], colour=colour)
        for name, colour in zip(names, [*PHASE_COLOURS, *range(len(names))], strict=False)
    ]
    stacks = Stacks(title="Step", unit="ms a rank", series=series, show=milliseconds)
    total, figure = sum(plan.phases[slowest_rank(plan)].values()), stacked(stacks)
    overlap = total - plan.predicted_step_ms
    said = f"The phases of the slowest rank add up to {milliseconds(total)}"
    said += f", {milliseconds(overlap)} of which overlap." if overlap > 5e-4 else "."
    note = f'<p class="muted small">{escape(said)}</p>'
    body = f'<div class="plots">{figure}<div>{_phase_table(plan, names)}{note}</div></div>'
    return section("Predicted cost of each rank", legend([one for one in series if any(one.values)]) + body)


def _phase_table(plan: Plan, names: Sequence[str]) -> str:
    """Milliseconds by phase: of the slowest rank, and where there are several of the mean one."""
    slowest, mean, many = plan.phases[slowest_rank(plan)], _mean(plan.phases), len(plan.phases) > 1
    total = sum(slowest.values())

    def row(name: str, spent: float, share: str, of_all: float) -> str:
        last = number(units.decimal(of_all, 3)) if many else ""
        return f"<tr><td>{escape(name)}</td>{number(units.decimal(spent, 3))}{number(share)}{last}</tr>"

    rows = []
    for name in names:
        spent = slowest.get(name, 0.0)
        rows.append(row(_words(name), spent, units.percent(spent / max(total, 1e-12), 0), mean.get(name, 0.0)))
    rows.append(row("sum", total, "", sum(mean.values())))
    head = ("Phase", "Slowest, ms*", "Share*", "Mean, ms*") if many else ("Phase", "ms*", "Share*")
    return scroll_table(head_cells(head), rows)


def _mean(ranks: list[dict[str, float]]) -> Mapping[str, float]:
    names = dict.fromkeys(name for rank in ranks for name in rank)
    return {name: sum(rank.get(name, 0.0) for rank in ranks) / len(ranks) for name in names}


def _by_tier(plan: Plan) -> str:
    """Tables, bytes and lookups by tier, kernel and sharding type: what many tables come to."""
    groups: dict[tuple[str, str, str], list[TablePlan]] = {}
    for table in plan.tables.values():
        groups.setdefault((table.tier, table.kernel, table.sharding), []).append(table)
    lookups = sum(table.pooling for table in plan.tables.values()) or 1.0
    rows = []
    for (tier, kernel, sharding), tables in sorted(groups.items(), key=lambda item: -sum(map(table_bytes, item[1]))):
        rows.append(
            f"<tr><td>{escape(SHOWN_TIER.get(tier, tier))}</td><td><code>{escape(kernel)}</code></td>"
            f"<td>{escape(_words(sharding))}</td>"
            + number(units.count(len(tables)))
            + number(units.size(sum(map(table_bytes, tables))))
            + number(units.percent(sum(table.pooling for table in tables) / lookups))
            + "</tr>"
        )
    head = head_cells(("Tier", "Kernel", "Sharding", "Tables*", "Size*", "Of the lookups*"))
    return section("Where the tables are", scroll_table(head, rows))


def _tables(plan: Plan) -> str:
    order = sorted(plan.tables, key=lambda name: (-table_bytes(plan.tables[name]), name))
    largest = max((table_bytes(table) for table in plan.tables.values()), default=1) or 1
    cached = any(table.cache_rows for table in plan.tables.values())
    rows = [_table_row(plan, name, largest, cached) for name in order[:MOST_TABLES]]
    names = ["Table", "Rows × dim*", "Size*", "Tier, kernel", "Sharding, shards"]
    head = head_cells([*names, *(["Cached rows, hits*"] if cached else []), "ms*", "Why"])
    cut = f" The {units.count(MOST_TABLES)} largest are shown." if len(order) > MOST_TABLES else ""
    note = (
        f'<p class="muted small">Largest first; a size counts the optimizer state, ms is the busiest rank\'s.{cut}</p>'
    )
    return section("Tables", note + scroll_table(head, rows))


def _table_row(plan: Plan, name: str, largest: int, cached: bool) -> str:
    table = plan.tables[name]
    share = 100 * table_bytes(table) / largest
    meter = (
        '<svg class="meter" viewBox="0 0 100 8" preserveAspectRatio="none" aria-hidden="true">'
        f'<rect width="{max(share, 1):.1f}" height="8"/></svg>'
    )
    tier = escape(SHOWN_TIER.get(table.tier, table.tier))
    return (
        f"<tr><td>{escape(name)}</td>{number(f'{units.count(table.rows)} × {table.dim}')}"
        f'<td class="number">{units.size(table_bytes(table))}{meter}</td>'
        f'<td class="word">{tier}<br><code>{escape(table.kernel)}</code></td>'
        f'<td class="word">{escape(_words(table.sharding))}<br><span class="muted small">'
        f"{escape(_shards(plan, table))}</span></td>"
        + (_cache_cell(table) if cached else "")
        + number(units.decimal(table.cost_ms, 3))
        + f'<td class="why">{escape(table.reason)}</td></tr>'
    )


def _shards(plan: Plan, table: TablePlan) -> str:
    """``rank 3``, or ``16 shards, ranks 0-7``; a long list of single ranks by its number."""
    ranks = {shard.rank for shard in table.shards}
    words = rank_words(ranks, plan.world_size)
    if len(table.shards) == 1:
        return f"rank {words}"
    if words == f"all {len(ranks)}":
        return f"{len(table.shards)} shards, {words} ranks"
    return f"{len(table.shards)} shards, " + (f"ranks {words}" if len(words) <= MOST_WORDS else f"{len(ranks)} ranks")


def _cache_cell(table: TablePlan) -> str:
    if not table.cache_rows:
        return number(units.ABSENT)
    hits = f'<span class="muted small">{units.percent(table.hit_rate)} hits</span>'
    return f'<td class="number">{units.count(table.cache_rows)}<br>{hits}</td>'


def _words(name: str) -> str:
    return name.replace("_", " ")
