"""The answers of ``nightjar scale`` and ``nightjar dry-run`` as text, and the page of ``nightjar scale --html``."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Iterator, Mapping, Sequence

from markupsafe import Markup

from pipeline.core import units
from pipeline.core.units import text_table
from pipeline.plugins.capacity.scale_record import DryRun, Scale, ScaleFigure, World
from pipeline.report.page import COLOURS, Figure, PageTable, from_template
from pipeline.report.stacked_bars import BarSeries as Part
from pipeline.report.stacked_bars import StackedBars, milliseconds
from pipeline.report.svg import Axis, PlotCurve, series_plot

WIDTH = 80
BOUNDS = {
    "compute": "compute",
    "overhead": "overhead and latency",
    "within_hosts": "all-to-all within hosts",
    "between_hosts": "all-to-all between hosts",
    "all_reduce": "all-reduce",
    "reader": "reader",
    "checkpoint": "checkpoint",
    "store": "store",
    "memory": "memory",
}


def scale_text(record: Scale) -> str:
    """A line for each world, the wall, and what was measured and assumed."""
    return "\n".join(_lines(record))


def dry_run_text(record: DryRun) -> str:
    """What a dry run found."""
    first, largest = record.first, record.largest
    rows = [
        [
            f"rank {each.rank}{what}",
            units.size(each.metadata),
            units.size(each.sharding),
            units.size(each.exchanged),
            units.size(each.rows),
            units.count(each.files),
        ]
        for each, what in ((first, ", which commits"), (largest, ", the largest"))
    ]
    head = ["", "metadata*", "sharding*", "heard*", "rows*", "files*"]
    took = ", ".join(f"{name} {units.duration(seconds)}" for name, seconds in record.seconds.items())
    lines = [
        f"{record.ranks:,} ranks on {record.hosts:,} hosts, batch {record.batch:,}: {record.tables} tables in "
        f"{record.shards:,} shards",
        "",
        text_table(head, rows[: 1 if first == largest else 2]),
        "",
        _wrapped(
            f"every rank reads a plan of {units.size(record.plan_bytes)} and decodes "
            f"{units.percent(record.decoded_share)} of the rows; a checkpoint has {record.files:,} files and an index "
            f"of {units.size(record.index_bytes)}"
        ),
        _wrapped(f"{took}; peak {units.size(record.peak)}"),
        *(record.problems or ("every row is planned, sharded, named and dealt exactly once",)),
    ]
    return "\n".join(lines)


def title_of(record: Scale) -> str:
    """The model, the data and the hardware."""
    return f"{record.model} on {record.data}, hosts as hardware={record.hardware}"


def wall_words(record: Scale) -> str:
    """Where more ranks end to pay, and what moves that."""
    wall = record.wall
    if wall is None:
        return f"No wall up to {record.worlds[-1].ranks:,} ranks: samples/s grow with them."
    then = f" Behind it: {BOUNDS[wall.then]}." if wall.then else ""
    return f"The next wall: {BOUNDS[wall.bound]}, at {wall.ranks:,} ranks. What moves it: {wall.setting}.{then}"


def worlds_of(worlds: Sequence[World]) -> tuple[list[str], list[list[str]]]:
    """Heading and rows of the table of worlds."""
    head = ["ranks*", "hosts*", "batch*", "samples/s*", "a rank*", "step ms*", "memory*", "waits for", "then"]
    return head, [_row(world) for world in worlds]


def figures_of(figures: Mapping[str, ScaleFigure]) -> tuple[list[str], list[list[str]]]:
    """Heading and rows of a table of figures."""
    rows = [[units.short(f.value), f.unit, name, f.source] for name, f in figures.items()]
    return ["value*", "unit", "figure", "from"], rows


def problems_of(worlds: Sequence[World]) -> list[str]:
    """Why worlds have no plan."""
    return [f"{w.ranks:,} ranks: {w.problem}. What helps: {w.setting}" for w in worlds if w.problem]


def _row(world: World) -> list[str]:
    hosts = units.count(world.hosts - world.embedding_hosts)
    hosts += f" + {units.count(world.embedding_hosts)}" if world.embedding_hosts else ""
    ranks = [units.count(world.ranks), hosts, units.count(world.batch)]
    if not world.fits:
        return [*ranks, *[units.ABSENT] * 4, f"no plan: {BOUNDS[world.bound]}", units.ABSENT]
    return [
        *ranks,
        units.count(round(world.samples_per_s or 0)),
        units.percent(world.efficiency, 0),
        units.decimal(world.step_ms, 2),
        f"{units.size(world.memory)} ({units.percent(world.filled, 0)})",
        BOUNDS[world.bound],
        BOUNDS[world.then or world.bound],
    ]


def _lines(record: Scale) -> Iterator[str]:
    yield title_of(record)
    yield ""
    yield text_table(*worlds_of(record.worlds))
    yield ""
    yield _wrapped(wall_words(record))
    yield from map(_wrapped, problems_of(record.worlds))
    for title, figures in (("measured on this machine", record.measured), ("assumed", record.assumed)):
        yield from ("", title, text_table(*figures_of(figures))) if figures else ()
    yield from map(_wrapped, record.rules)
    yield _wrapped("a rank: its samples/s over those of the smallest world; memory: of the fullest rank")


def _wrapped(text: str) -> str:
    return textwrap.fill(text, WIDTH, break_on_hyphens=False, break_long_words=False)


PREDICTED, LINEAR = 0, 3  # colours
# The headings of ``worlds_of``, which has shorter ones for a terminal.
HEAD = (
    "Ranks*",
    "Hosts*",
    "Global batch*",
    "Samples/s*",
    "Scaling efficiency*",
    "Step, ms*",
    "Memory*",
    "Bottleneck",
    "Next bottleneck",
)


def scale_page(record: Scale) -> str:
    """The page as HTML."""
    parts = _parts(record)
    return from_template(
        "scale.html",
        title=f"Nightjar: {title_of(record)}",
        files="the output of --json",
        heading=title_of(record),
        about="A training on more ranks than this machine has, predicted.",
        wall=wall_words(record),
        figures=list(_figures(record, parts)),
        legend_of=parts,
        worlds=PageTable(HEAD, worlds_of(record.worlds)[1]),
        problems=problems_of(record.worlds),
        measured=PageTable(*figures_of(record.measured)),
        assumed=PageTable(*figures_of(record.assumed)),
        rules=list(record.rules),
    )


def _figures(record: Scale, parts: list[Part]) -> Iterator[Figure]:
    known = _known(record)
    if not known:
        return
    yield Figure(
        "Samples per second", "blue: predicted; orange: in proportion to the ranks; both axes double", _speeds(known)
    )
    names = [f"{world.ranks:,}" for world in known]
    bars = StackedBars(title="Milliseconds of a step", unit="ms by ranks", series=parts, show=milliseconds, names=names)
    yield bars.figure()


def _known(record: Scale) -> list[World]:
    """The worlds that have a plan."""
    return [world for world in record.worlds if world.fits and world.samples_per_s]


def _speeds(known: list[World]) -> Markup:
    first = known[0]
    points = tuple((math.log2(w.ranks), math.log2(w.samples_per_s or 1.0)) for w in known)
    ideal = tuple((math.log2(w.ranks), math.log2((first.samples_per_s or 1.0) * w.ranks / first.ranks)) for w in known)
    series = [PlotCurve("predicted", PREDICTED, points), PlotCurve("in proportion", LINEAR, ideal)]
    x = Axis(title="ranks", whole=True, show=_doubled)
    return series_plot(series, x=x, y=Axis(title="samples/s", whole=True, show=_doubled), label="Samples/s over ranks")


def _doubled(value: float, spread: float) -> str:
    return units.short(2.0**value)


def _parts(record: Scale) -> list[Part]:
    """What steps are spent on, with what goes on beside them; parts that take no time are left out."""
    known = _known(record)
    names = [name for name in BOUNDS if any((world.parts or {}).get(name, 0.0) for world in known)]
    return [
        Part(name=BOUNDS[name], colour=number % COLOURS, values=[(world.parts or {}).get(name, 0.0) for world in known])
        for number, name in enumerate(names)
    ]
