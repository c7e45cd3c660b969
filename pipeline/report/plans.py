"""``plan.html``: memory and cost of every rank as stacked bars, and why each table is where it is."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import chain
from typing import Any

from pipeline.core import units
from pipeline.records.plan import PHASES, Plan, TablePlan
from pipeline.report.page import COLOURS, PageTable, from_template, two_lines, with_meter, words
from pipeline.report.run_tables import rank_words
from pipeline.report.stacked_bars import BarSeries, StackedBars, milliseconds
from pipeline.report.svg import tag

PLAN_PAGE = "plan.html"
TIERS = ("hbm", "ddr", "ssd")
SHOWN_TIER = {"hbm_cached": "hbm cached ddr"}
MOST_TABLES = 2_000
MOST_WORDS = 24
TABLE_COLOUR = 0
# Colours by phase, in the order of ``PHASES``. The last one, the overhead, is grey (5 in the style sheet).
PHASE_COLOURS = (0, 1, 2, 3, 4, 6, 5)
# Faint, because this memory is only kept free.
COLOUR_OF = {"margin": COLOURS}


def plan_page(plan: Plan) -> str:
    cut, batch, hardware = "", units.count(plan.global_batch), []
    for name, value in plan.figures.items():
        # Do not round these, since they are the exact figures that the plan was made with.
        hardware.append((name, f"{value:,.10g}"))
    if len(plan.tables) > MOST_TABLES:
        cut = f" The {units.count(MOST_TABLES)} largest are shown."
    return from_template(
        "plan.html",
        title=f"Nightjar plan for {plan.hardware}",
        files="plan.json",
        heading=f"Plan for {plan.hardware}",
        about=f"Nightjar plan · {plan.hosts_text} × {plan.ranks_per_host} {plan.device} ranks · global batch {batch}",
        summary=_figures(plan),
        memory=_memory(plan),
        cost=_cost(plan),
        by_tier=_by_tier(plan),
        tables=_tables(plan),
        cut=cut,
        hardware=hardware,
    )


def _figures(plan: Plan) -> list[tuple[str, str, str]]:
    stored = sum(table.bytes for table in plan.tables.values())
    cards = []
    if plan.phases:
        slowest = plan.slowest_rank
        spent = plan.phases[slowest]
        phase = max(spent, key=lambda name: spent[name])
        share = spent[phase] / max(sum(spent.values()), 1e-12)
        under = f"of the slowest, rank {slowest}"
        if plan.embedding_hosts:
            under = "worker and embedding rank"
        cards.append(("Predicted step", milliseconds(plan.predicted_step_ms), under))
        under = f"{milliseconds(spent[phase])}, {units.percent(share, 0)} of its work"
        cards.append(("Bottleneck", words(phase), under))
    else:
        cards.append(("Predicted step", milliseconds(plan.predicted_step_ms), "the embedding part, slowest rank"))
    # Show the rank and tier nearest to its capacity, the first of equally full ranks.
    shares = []
    for tier in TIERS:
        capacity = plan.capacity_bytes(tier)
        if capacity:
            by_rank = zip(*(series.values for series in _series(plan, tier)), strict=True)
            for rank, used in enumerate(by_rank):
                shares.append((sum(used) / capacity, tier, rank))
    if shares:
        share, tier, rank = max(shares, key=lambda entry: (entry[0], -entry[2]))
        under = f"{tier.upper()} of rank {rank}, reservations included"
        cards.append(("Fullest memory", units.percent(share, 0), under))
    cards.append(("Tables", units.count(len(plan.tables)), f"{units.size(stored)} with optimizer state"))
    if plan.phases and plan.gap <= 5e-5:
        cards.append(("Tier assignment", "optimal", "no better tiers in the cost model"))
    elif plan.phases:
        cards.append(("Tier assignment", f"≤ {units.percent(plan.gap, 2)}", "above the best possible tiers"))
    return cards


def _series(plan: Plan, tier: str) -> list[BarSeries]:
    # Collect the bytes of ``tier`` by rank: its tables, then the reservations by purpose. All ranks reserve in one
    # tier.
    series = [BarSeries(name="tables", values=[rank.get(tier, 0) for rank in plan.memory], colour=TABLE_COLOUR)]
    if tier == plan.reserved_tier:
        purposes = dict.fromkeys(chain.from_iterable(plan.reserved))
        for index, name in enumerate(purposes):
            colour = COLOUR_OF.get(name, 1 + index % (COLOURS - 1))
            values = [rank.get(name, 0) for rank in plan.reserved]
            series.append(BarSeries(name=words(name), values=values, colour=colour))
    return series


def _memory(plan: Plan) -> dict[str, Any] | None:
    if not plan.memory:
        return None
    drawn, unused = [], []
    for tier in TIERS:
        series, capacity = _series(plan, tier), plan.capacity_bytes(tier)
        if any(any(purpose.values) for purpose in series):
            limit: dict[str, Any] = {"limit": capacity, "limit_name": "capacity", "scale": units.GIB}
            drawn.append(StackedBars(title=tier.upper(), unit="GiB per rank", series=series, show=units.size, **limit))
        elif capacity and (tier != "hbm" or plan.device == "cuda"):
            unused.append(f"{tier.upper()} ({units.size(capacity)})")
    legend = max((bars.series for bars in drawn), key=len, default=[])
    text, reserved = "", []
    if unused:
        text = f"Unused on every rank: {', '.join(unused)}. "
    for purpose in legend:
        if purpose.colour != TABLE_COLOUR:
            # Ranks may reserve different amounts; the text gives the largest.
            reserved.append(f"{purpose.name} {units.size(max(purpose.values))}")
    if reserved:
        text += f"Reserved per rank: {', '.join(reserved)}."
    return {"legend": legend, "figures": list(map(StackedBars.figure, drawn)), "text": text}


def _cost(plan: Plan) -> dict[str, Any] | None:
    if not plan.phases:
        return None
    # A plan of a later release may have further phases, which follow the known ones.
    names = [*PHASES, *sorted(set(chain.from_iterable(plan.phases)) - set(PHASES))]
    series = []
    for name, colour in zip(names, [*PHASE_COLOURS, *range(len(names))], strict=False):
        values = [rank.get(name, 0.0) for rank in plan.phases]
        series.append(BarSeries(name=words(name), values=values, colour=colour))

    # Milliseconds by phase of the slowest rank and, with several ranks, also the mean.
    slowest, mean = plan.phases[plan.slowest_rank], plan.mean_phases
    total = sum(slowest.values())
    rows: list[Sequence[str]] = []
    for name in names:
        spent = slowest.get(name, 0.0)
        share = units.percent(spent / max(total, 1e-12), 0)
        rows.append((words(name), units.decimal(spent, 3), share, units.decimal(mean.get(name, 0.0), 3)))
    head = ["Phase", "Slowest, ms*", "Share*", "Mean, ms*"]
    rows.append(("sum", units.decimal(total, 3), "", units.decimal(sum(mean.values()), 3)))
    if len(plan.phases) == 1:
        # With one rank, the mean is that rank again.
        head = ["Phase", "ms*", "Share*"]
        rows = [row[:3] for row in rows]

    text = f"The phases of the slowest rank add up to {milliseconds(total)}"
    overlap = total - plan.predicted_step_ms
    if overlap > 5e-4:
        text += f", of which {milliseconds(overlap)} overlap"
    figure = StackedBars(title="Step", unit="ms per rank", series=series, show=milliseconds).figure()
    legend = [phase for phase in series if any(phase.values)]
    return {"legend": legend, "figure": figure, "table": PageTable(head, rows), "text": f"{text}."}


def _by_tier(plan: Plan) -> PageTable:
    groups: dict[tuple[str, str, str], list[TablePlan]] = {}
    sizes = Counter[tuple[str, str, str]]()
    for table in plan.tables.values():
        group = (table.tier, table.kernel, table.sharding)
        groups.setdefault(group, []).append(table)
        sizes[group] += table.bytes
    # Use 1 if no table has lookups, to avoid dividing by zero.
    lookups = sum(table.pooling for table in plan.tables.values()) or 1.0
    rows = []
    for group, size in sizes.most_common():
        tier, kernel, sharding = group
        share = units.percent(sum(table.pooling for table in groups[group]) / lookups)
        kind = (SHOWN_TIER.get(tier, tier), tag("code", kernel), words(sharding))
        rows.append((*kind, units.count(len(groups[group])), units.size(size), share))
    return PageTable(("Tier", "Kernel", "Sharding", "Tables*", "Size*", "Share of lookups*"), rows)


def _tables(plan: Plan) -> PageTable:
    order = sorted(plan.tables, key=lambda name: (-plan.tables[name].bytes, name))[:MOST_TABLES]
    largest = (plan.tables[order[0]].bytes if order else 1) or 1
    cached = any(table.cache_rows for table in plan.tables.values())
    rows = []
    for name in order:
        table = plan.tables[name]
        cells = [name, f"{units.count(table.rows)} × {table.dim}"]
        cells.append(with_meter(units.size(table.bytes), table.bytes / largest))
        cells.append(two_lines(SHOWN_TIER.get(table.tier, table.tier), tag("code", table.kernel)))
        cells.append(two_lines(words(table.sharding), tag("span", _shards(plan, table), class_="muted small")))
        if table.cache_rows:
            served = f"{units.percent(table.hit_rate)} hits"
            if table.host_rows:
                served += f"; {units.count(table.host_rows)} more in DDR: {units.percent(table.host_rate)}"
            cells.append(two_lines(units.count(table.cache_rows), tag("span", served, class_="muted small")))
        elif cached:
            cells.append(units.ABSENT)
        rows.append([*cells, units.decimal(table.cost_ms, 3), table.reason])
    head = ["Table", "Rows × dim*", "Size*", "Tier, kernel", "Sharding, shards"]
    if cached:
        head.append("Cached rows, hits*")
    return PageTable([*head, "Time, ms*", "Reason~"], rows)


def _shards(plan: Plan, table: TablePlan) -> str:
    ranks = {shard.rank for shard in table.shards}
    shown = rank_words(ranks, plan.world_size)
    count = len(table.shards)
    if count == 1:
        return f"rank {shown}"
    if shown == f"all {len(ranks)}":
        return f"{count} shards, {shown} ranks"
    if len(shown) <= MOST_WORDS:
        return f"{count} shards, ranks {shown}"
    # There are too many ranks to list.
    return f"{count} shards, {len(ranks)} ranks"
