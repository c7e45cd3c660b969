"""``nightjar what-if --nights`` as text, and as a page: how tables grow and how memory fills."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Sequence

from pipeline import units
from pipeline.records.outlook import Band, NightPlan, Outlook, Reached, TableOutlook
from pipeline.report.page import Figure, PageTable, from_template
from pipeline.report.svg import Axis, PlotCurve, percent_tick, series_plot
from pipeline.units import text_table

WIDTH = 80
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
WHEN_FULL = {
    "replace": "new ids then take rows of ids that are looked up less",
    "keep": "new ids then get no row",
}


def outlooks_text(records: Sequence[Outlook]) -> str:
    """One part for every combination of settings."""
    return "\n\n".join("\n".join(_lines(record)) for record in records)


def _lines(record: Outlook) -> Iterator[str]:
    yield title_of(record)
    yield _wrapped(read_words(record))
    yield ""
    yield text_table(*tables_of(record))
    more = len(record.tables) - MOST_TABLES
    yield from [f"and {units.plural(more, 'table')} that grow less (--json)"] if more > 0 else []
    yield ""
    yield text_table(*plans_of(record.plans))
    for lines in (list(full_tables(record)), list(full_tiers(record))):
        yield from ("", *map(_wrapped, lines)) if lines else ()
    yield from ("", *(_wrapped(f"note: {note}") for note in record.notes)) if record.notes else ()
    yield ""
    yield _wrapped(band_words(record))


def title_of(record: Outlook) -> str:
    """The model, the hardware and the settings that vary."""
    varied = " ".join(f"{key}={value}" for key, value in record.settings.items())
    ranks = units.plural(record.world_size, "rank")
    title = f"{record.model}, the next {record.nights} nights on {record.hardware}, {ranks}"
    return f"{title}: {varied}" if varied else title


def band_words(record: Outlook) -> str:
    """What an interval is."""
    return (
        f"[ ]: the {record.band:.0%} prediction interval if nights scatter about the trend as they did; a trend "
        "that changes, a new feature or another market is not in it. Lookups are those of the last night."
    )


def read_words(record: Outlook) -> str:
    """The nights that the trends come from, and the days between them without one."""
    text = f"trends of {units.plural(len(record.read), 'night')}, {record.read[0]} to {record.read[-1]}"
    if not record.missing:
        return text
    more = f" and {len(record.missing) - MOST_DAYS} more" if len(record.missing) > MOST_DAYS else ""
    return f"{text}; no night of {', '.join(record.missing[:MOST_DAYS])}{more}"


def growing(record: Outlook) -> list[tuple[str, TableOutlook]]:
    """The tables, those that gain the most rows first, at most MOST_TABLES."""
    return sorted(record.tables.items(), key=lambda item: -gain(item[1]))[:MOST_TABLES]


def tables_of(record: Outlook) -> tuple[list[str], list[list[str]]]:
    """Head and rows of the table of tables."""
    shown = [str(plan.night) for plan in record.plans]
    last = shown[-1]
    rows = [
        [
            name,
            TREND_WORDS[table.trend],
            *(units.count(table.rows[night][1]) for night in shown),
            _band(table.rows[last]),
            units.count(table.limit),
        ]
        for name, table in growing(record)
    ]
    return ["table", "growth", *(f"night {night}*" for night in shown), f"interval, night {last}*", "limit*"], rows


def gain(table: TableOutlook) -> int:
    """The rows that it gains until the last shown night, by its trend."""
    bands = list(table.rows.values())
    return bands[-1][1] - bands[0][1]


def _band(band: Band) -> str:
    low, _, high = band
    return units.ABSENT if low == high else f"[{units.count(low)}, {units.count(high)}]"


def plans_of(plans: Sequence[NightPlan]) -> tuple[list[str], list[list[str]]]:
    """Head and rows of the table of plans."""
    tiers = list(dict.fromkeys(tier for plan in plans for tier in plan.filled or {}))
    rows = [
        [
            str(plan.night),
            plan.day or units.ABSENT,
            units.count(plan.rows),
            "yes" if plan.fits else "no",
            units.decimal(plan.step_ms, 3),
            *(_tier(plan, tier) for tier in tiers),
            _moved(plan),
        ]
        for plan in plans
    ]
    return ["night*", "day", "rows*", "fits", "step ms*", *(f"{t.upper()}*" for t in tiers), "moves"], rows


def _tier(plan: NightPlan, tier: str) -> str:
    """Bytes of all ranks, and how far the fullest one is filled."""
    if not plan.tiers or not plan.filled:
        return units.ABSENT
    size = units.size(plan.tiers[f"{tier}_bytes"])
    return f"{size} {units.percent(plan.filled[tier], 0)}" if tier in plan.filled else size


def _moved(plan: NightPlan) -> str:
    if not plan.moved:
        return units.ABSENT
    parts = [f"{name}: {old} -> {new}".replace("_", " ") for name, (old, new) in plan.moved.items()]
    more = f" and {len(parts) - MOST_MOVED} more" if len(parts) > MOST_MOVED else ""
    return ", ".join(parts[:MOST_MOVED]) + more


def full_tables(record: Outlook) -> Iterator[str]:
    """What each table that reaches its limit does then, and the override that makes room."""
    due = {name: t for name, t in record.tables.items() if t.trend == "full" or t.full.earliest is not None}
    order = sorted(due, key=lambda name: (due[name].full.night is None, due[name].full.night, due[name].full.earliest))
    for name in order[:MOST_TABLES]:
        table = due[name]
        when = (
            "at its limit already" if table.trend == "full" else f"reaches its limit {_when_text(table.full, record)}"
        )
        yield f"{name} {when}: {WHEN_FULL.get(table.when_full, table.when_full)}{_limit_hint(table)}"


def _limit_hint(table: TableOutlook) -> str:
    """The override that leaves the table room for the trend, if it would grow on."""
    return f"; {table.setting} above {table.limit} makes room"


def _when_text(full: Reached, record: Outlook) -> str:
    """``on night 12 [9, 17]``; after the last night: ``later than night 30 [24, later]``."""
    ends = [units.count(each) if each is not None else "later" for each in (full.earliest, full.latest)]
    night = f"on night {full.night}" if full.night is not None else f"later than night {record.nights}"
    return f"{night} [{', '.join(ends)}]"


def full_tiers(record: Outlook) -> Iterator[str]:
    """When each memory is full, and what helps."""
    if not record.tiers:
        yield f"no tier is full by night {record.nights}"
    for tier, one in record.tiers.items():
        what = "nothing fits any more" if one.last else "tables go to slower memory"
        already = one.full.night == 0
        when = "tonight already" if already else _when_text(one.full, record)
        yield f"{tier.upper()} is full {when}: {what}"
        yield from (f"   remedy: {remedy}" for remedy in one.remedies)


def _wrapped(text: str) -> str:
    return textwrap.fill(text, WIDTH, subsequent_indent="   ", break_long_words=False, break_on_hyphens=False)


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
