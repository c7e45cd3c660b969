"""``nightjar what-if --nights`` as text, and as a page: how tables grow and how memory fills."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from pipeline.core import units
from pipeline.core.units import text_table
from pipeline.plugins.capacity.outlook_record import NightPlan, Outlook, Reached, TableOutlook
from pipeline.report.page import Figure, PageTable, from_template
from pipeline.report.summary import first_names, paragraph
from pipeline.report.svg import Axis, PlotCurve, percent_tick, series_plot

MOST_TABLES = 20
MOST_MOVED = 5
MOST_DAYS = 7
TREND_WORDS = {
    "steady": "steady",
    "rising": "rising steps",
    "slowing": "slowing",
    "saturating": "coming to an end",
    "stopped": "no new rows",
    "full": "at its limit",
    "fixed": "fixed rows",
    "short": "too few nights",
}
WHEN_FULL = {"replace": "new ids then take rows of ids that are looked up less", "keep": "new ids then get no row"}


def outlooks_text(records: Sequence[Outlook]) -> str:
    parts = []
    for record in records:
        lines = [title_of(record), paragraph(read_words(record)), "", text_table(*tables_of(record))]
        left_out = len(record.tables) - MOST_TABLES
        if left_out > 0:
            lines.append(f"and {units.plural(left_out, 'table')} that grow less (--json)")
        lines += ["", text_table(*plans_of(record.plans))]
        notes = [f"note: {note}" for note in record.notes]
        for sentences in (list(full_tables(record)), list(full_tiers(record)), notes):
            if sentences:
                lines += ["", *map(paragraph, sentences)]
        lines += ["", paragraph(band_words(record))]
        parts.append("\n".join(lines))
    return "\n\n".join(parts)


def title_of(record: Outlook) -> str:
    ranks = units.plural(record.world_size, "rank")
    title = f"{record.model}, the next {record.nights} nights on {record.hardware}, {ranks}"
    # Show the settings that distinguish this combination from the others; a single combination has none.
    if record.settings:
        title += ": " + " ".join(map("=".join, record.settings.items()))
    return title


def band_words(record: Outlook) -> str:
    return (
        f"[ ]: the {record.band:.0%} prediction interval if nights scatter about the trend as they did; a trend "
        "that changes, a new feature or another market is not in it. Lookups are those of the last night."
    )


def read_words(record: Outlook) -> str:
    text = f"trends of {units.plural(len(record.read), 'night')}, {record.read[0]} to {record.read[-1]}"
    if record.missing:
        text += f"; no night of {first_names(record.missing, MOST_DAYS)}"
    return text


def growing(record: Outlook) -> list[tuple[str, TableOutlook]]:
    """Return the tables, those that gain the most rows first, at most MOST_TABLES."""
    return sorted(record.tables.items(), key=lambda item: -gain(item[1]))[:MOST_TABLES]


def tables_of(record: Outlook) -> tuple[list[str], list[list[str]]]:
    # The record has string keys, as in JSON.
    nights = [str(plan.night) for plan in record.plans]
    rows = []
    for name, table in growing(record):
        low, _, high = table.rows[nights[-1]]
        interval = f"[{units.count(low)}, {units.count(high)}]" if low != high else units.ABSENT
        trend = [units.count(table.rows[night][1]) for night in nights]
        rows.append([name, TREND_WORDS[table.trend], *trend, interval, units.count(table.limit)])
    columns = [f"night {night}*" for night in nights]
    return ["table", "growth", *columns, f"interval, night {nights[-1]}*", "limit*"], rows


def gain(table: TableOutlook) -> int:
    """Return the rows that it gains until the last shown night, by its trend."""
    bands = list(table.rows.values())
    return bands[-1][1] - bands[0][1]


def _tiers_of(plans: Sequence[NightPlan]) -> list[str]:
    # A slower memory may come into use on a later night. A night that does not fit lists no memory.
    tiers: dict[str, None] = {}
    for plan in plans:
        tiers.update(dict.fromkeys(plan.filled or {}))
    return list(tiers)


def plans_of(plans: Sequence[NightPlan]) -> tuple[list[str], list[list[str]]]:
    tiers = _tiers_of(plans)
    rows = []
    for plan in plans:
        cells = [str(plan.night), plan.day or units.ABSENT, units.count(plan.rows), "yes" if plan.fits else "no"]
        cells.append(units.decimal(plan.step_ms, 3))
        for tier in tiers:
            # Show the bytes of all ranks, and how full the fullest rank is.
            text = units.ABSENT
            if plan.tiers and plan.filled:
                text = units.size(plan.tiers[f"{tier}_bytes"])
                if tier in plan.filled:
                    text += f" {units.percent(plan.filled[tier], 0)}"
            cells.append(text)
        moves = []
        for name, (old, new) in (plan.moved or {}).items():
            moves.append(f"{name}: {old} -> {new}".replace("_", " "))
        rows.append([*cells, first_names(moves, MOST_MOVED) or units.ABSENT])
    columns = [f"{tier.upper()}*" for tier in tiers]
    return ["night*", "day", "rows*", "fits", "step ms*", *columns, "moves"], rows


def full_tables(record: Outlook) -> Iterator[str]:
    """Yield what each table that reaches its limit does then, and the override that makes room."""
    due = {}
    for name, table in record.tables.items():
        if table.trend == "full" or table.full.earliest is not None:
            due[name] = table

    # Sort by the night on which tables are full; tables that only the upper end of the band fills come last.
    order = sorted(due, key=lambda name: (due[name].full.night is None, due[name].full.night, due[name].full.earliest))
    for name in order[:MOST_TABLES]:
        table = due[name]
        when = "at its limit already"
        if table.trend != "full":
            when = f"reaches its limit {_when_text(table.full, record)}"
        what = WHEN_FULL.get(table.when_full, table.when_full)
        yield f"{name} {when}: {what}; {table.setting} above {table.limit} makes room"


def _when_text(full: Reached, record: Outlook) -> str:
    # Examples: "on night 12 [9, 17]"; after the last night "later than night 30 [24, later]".
    ends = ["later" if night is None else units.count(night) for night in (full.earliest, full.latest)]
    night = f"later than night {record.nights}"
    if full.night is not None:
        night = f"on night {full.night}"
    return f"{night} [{', '.join(ends)}]"


def full_tiers(record: Outlook) -> Iterator[str]:
    if not record.tiers:
        yield f"no tier is full by night {record.nights}"
    for name, tier in record.tiers.items():
        what = "nothing fits any more" if tier.last else "tables go to slower memory"
        when = "tonight already" if tier.full.night == 0 else _when_text(tier.full, record)
        yield f"{name.upper()} is full {when}: {what}"
        for remedy in tier.remedies:
            yield f"   remedy: {remedy}"


MOST_FIGURES = 6
# Colours of the curves.
MEASURED, TREND, BAND = 0, 1, 3
NIGHT = Axis(title="night", whole=True)


def outlook_page(records: Sequence[Outlook]) -> str:
    """Return the page as HTML; a part for every combination of settings."""
    first, parts = records[0], []
    for record in records:
        figures = [*_memory_figure(record)]
        for name, table in growing(record)[:MOST_FIGURES]:
            if gain(table):
                figures.append(_rows_figure(name, table))
        part = {
            "title": title_of(record),
            "read": read_words(record),
            "figures": figures,
            "plans": PageTable(*plans_of(record.plans)),
            "tables": PageTable(*tables_of(record)),
            "lines": [*full_tiers(record), *full_tables(record), *record.notes],
        }
        parts.append(part)
    return from_template(
        "outlook.html",
        title=f"Nightjar: {first.model}, {first.nights} nights",
        files="the output of --json",
        heading=f"{first.model}, the next {first.nights} nights",
        about="Night 0 is the last night in the store.",
        parts=parts,
        band=band_words(first),
    )


def _rows_figure(name: str, table: TableOutlook) -> Figure:
    # Plot the rows of a table: measured up to night 0, then the trend between the ends of its band.
    first = 1 - len(table.history)
    measured = tuple((float(night), float(rows)) for night, rows in enumerate(table.history, first))
    series = [PlotCurve("measured", MEASURED, measured)]
    ends = ("upper end of the interval", "lower end of the interval")
    for title, colour, side in (("trend", TREND, 1), (ends[0], BAND, 2), (ends[1], BAND, 0)):
        points = tuple((float(night), float(path[side])) for night, path in enumerate(table.paths))
        series.append(PlotCurve(title, colour, points))
    label = f"Rows of {name} over the nights, {units.count(table.paths[-1][1])} in the end"
    unit = f"rows, measured up to night 0; limit {units.count(table.limit)}"
    return Figure(name, unit, series_plot(series, x=NIGHT, y=Axis(title="rows"), label=label))


def _memory_figure(record: Outlook) -> Iterator[Figure]:
    # Plot how full the fullest rank is, by memory, on the nights that have a plan.
    tiers = _tiers_of(record.plans)
    series = []
    for colour, tier in enumerate(tiers):
        points = []
        for plan in record.plans:
            if plan.filled and tier in plan.filled:
                points.append((float(plan.night), plan.filled[tier]))
        series.append(PlotCurve(tier.upper(), colour, tuple(points)))
    y = Axis(title="filled", from_zero=True, show=percent_tick)
    unit = f"fullest rank, {', '.join(tiers).upper()}; nights without a plan are left out"
    plot = series_plot(series, x=NIGHT, y=y, label="Memory of the fullest rank over the nights")
    if plot:
        yield Figure("Memory", unit, plot)
