"""The page of ``nightjar what-if --nights --html``: how tables grow and how memory fills, as figures."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from pipeline import units
from pipeline.records.outlook import Outlook, TableOutlook
from pipeline.report.outlook import (
    band_words,
    full_tables,
    full_tiers,
    gain,
    growing,
    plans_of,
    read_words,
    tables_of,
    title_of,
)
from pipeline.report.page import Figure, PageTable, from_template
from pipeline.report.svg import Axis, PlotCurve, percent_tick, series_plot

MOST_FIGURES = 6
MEASURED, TREND, BAND = 0, 1, 3  # colours
NIGHT = Axis(title="night", whole=True)


def outlook_page(records: Sequence[Outlook]) -> str:
    """The page as HTML; a part for every combination of settings."""
    first = records[0]
    return from_template(
        "outlook.html",
        title=f"Nightjar: {first.model}, {first.nights} nights",
        files="the output of --json",
        heading=f"{first.model}, the next {first.nights} nights",
        about="Night 0 is the last night in the store.",
        parts=[_part(record) for record in records],
        band=band_words(first),
    )


def _part(record: Outlook) -> dict[str, object]:
    return {
        "title": title_of(record),
        "read": read_words(record),
        "figures": list(_figures(record)),
        "plans": PageTable(*plans_of(record.plans)),
        "tables": PageTable(*tables_of(record)),
        "lines": [*full_tiers(record), *full_tables(record), *record.notes],
    }


def _figures(record: Outlook) -> Iterator[Figure]:
    yield from _filled(record)
    for name, table in growing(record)[:MOST_FIGURES]:
        if gain(table):
            yield _rows(name, table)


def _rows(name: str, table: TableOutlook) -> Figure:
    """Rows of a table: measured up to night 0, then the trend between the ends of its band."""
    before = len(table.history) - 1
    measured = [(float(place - before), float(rows)) for place, rows in enumerate(table.history)]
    low, trend, high = (
        [(float(night), float(path[side])) for night, path in enumerate(table.paths)] for side in range(3)
    )
    series = [
        PlotCurve("measured", MEASURED, tuple(measured)),
        PlotCurve("trend", TREND, tuple(trend)),
        PlotCurve("upper end of the interval", BAND, tuple(high)),
        PlotCurve("lower end of the interval", BAND, tuple(low)),
    ]
    label = f"Rows of {name} over the nights, {units.count(trend[-1][1])} in the end"
    unit = f"rows, measured up to night 0; limit {units.count(table.limit)}"
    return Figure(name, unit, series_plot(series, x=NIGHT, y=Axis(title="rows"), label=label))


def _filled(record: Outlook) -> Iterator[Figure]:
    """How far the fullest rank is filled, by memory, on the nights that have a plan."""
    tiers = list(dict.fromkeys(tier for plan in record.plans for tier in plan.filled or {}))
    series = [
        PlotCurve(
            tier.upper(),
            colour,
            tuple(
                (float(plan.night), plan.filled[tier]) for plan in record.plans if plan.filled and tier in plan.filled
            ),
        )
        for colour, tier in enumerate(tiers)
    ]
    y = Axis(title="filled", from_zero=True, show=percent_tick)
    unit = f"fullest rank, {', '.join(tier.upper() for tier in tiers)}; nights without a plan are left out"
    if drawn := series_plot(series, x=NIGHT, y=y, label="Memory of the fullest rank over the nights"):
        yield Figure("Memory", unit, drawn)
