"""The answers of ``nightjar scale`` and ``nightjar dry-run`` as text, and the page of ``nightjar scale --html``."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Iterator, Mapping, Sequence

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
    """Return a line for each world, the wall, and what was measured and assumed."""
    lines = [title_of(record), "", text_table(*worlds_of(record.worlds)), "", _wrapped(wall_words(record))]
    lines += map(_wrapped, problems_of(record.worlds))
    for title, figures in (("measured on this machine", record.measured), ("assumed", record.assumed)):
        if figures:
            lines += ["", title, text_table(*figures_of(figures))]
    lines += map(_wrapped, record.rules)
    lines.append(_wrapped("a rank: its samples/s over those of the smallest world; memory: of the fullest rank"))
    return "\n".join(lines)


def dry_run_text(record: DryRun) -> str:
    """Return what a dry run found."""
    # Rank 0 receives the reports of all others, so it may be the largest rank as well.
    shown = [(record.first, ", which commits")]
    if record.largest != record.first:
        shown.append((record.largest, ", the largest"))
    rows = []
    for each, what in shown:
        metadata = [units.size(size) for size in (each.metadata, each.sharding, each.exchanged, each.rows)]
        rows.append([f"rank {each.rank}{what}", *metadata, units.count(each.files)])
    head = ["", "metadata*", "sharding*", "heard*", "rows*", "files*"]
    took = ", ".join(f"{name} {units.duration(seconds)}" for name, seconds in record.seconds.items())
    lines = [
        f"{record.ranks:,} ranks on {record.hosts:,} hosts, batch {record.batch:,}: {record.tables} tables in "
        f"{record.shards:,} shards",
        "",
        text_table(head, rows),
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
    """Return the model, the data and the hardware."""
    return f"{record.model} on {record.data}, hosts as hardware={record.hardware}"


def wall_words(record: Scale) -> str:
    """Return where more ranks stop paying off, and what moves that point."""
    wall = record.wall
    if wall is None:
        return f"No wall up to {record.worlds[-1].ranks:,} ranks: samples/s grow with them."
    text = f"The next wall: {BOUNDS[wall.bound]}, at {wall.ranks:,} ranks. What moves it: {wall.setting}."
    if wall.then:
        text += f" Behind it: {BOUNDS[wall.then]}."
    return text


def worlds_of(worlds: Sequence[World]) -> tuple[list[str], list[list[str]]]:
    """Return heading and rows of the table of worlds."""
    head = ["ranks*", "hosts*", "batch*", "samples/s*", "a rank*", "step ms*", "memory*", "waits for", "then"]
    rows = []
    for world in worlds:
        # Embedding hosts take no samples, so they are shown separately.
        hosts = units.count(world.hosts - world.embedding_hosts)
        if world.embedding_hosts:
            hosts += f" + {units.count(world.embedding_hosts)}"
        cells = [units.count(world.ranks), hosts, units.count(world.batch)]
        if world.fits:
            cells += [units.count(round(world.samples_per_s or 0)), units.percent(world.efficiency, 0)]
            cells += [units.decimal(world.step_ms, 2), f"{units.size(world.memory)} ({units.percent(world.filled, 0)})"]
            cells += [BOUNDS[world.bound], BOUNDS[world.then or world.bound]]
        else:
            cells += [*[units.ABSENT] * 4, f"no plan: {BOUNDS[world.bound]}", units.ABSENT]
        rows.append(cells)
    return head, rows


def figures_of(figures: Mapping[str, ScaleFigure]) -> tuple[list[str], list[list[str]]]:
    """Return heading and rows of a table of figures."""
    rows = [[units.short(f.value), f.unit, name, f.source] for name, f in figures.items()]
    return ["value*", "unit", "figure", "from"], rows


def problems_of(worlds: Sequence[World]) -> list[str]:
    """Return why worlds have no plan."""
    return [f"{w.ranks:,} ranks: {w.problem}. What helps: {w.setting}" for w in worlds if w.problem]


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
    """Return the page as HTML."""
    known = [world for world in record.worlds if world.fits and world.samples_per_s]
    parts = _parts(known)
    return from_template(
        "scale.html",
        title=f"Nightjar: {title_of(record)}",
        files="the output of --json",
        heading=title_of(record),
        about="A training on more ranks than this machine has, predicted.",
        wall=wall_words(record),
        figures=list(_figures(known, parts)),
        legend_of=parts,
        worlds=PageTable(HEAD, worlds_of(record.worlds)[1]),
        problems=problems_of(record.worlds),
        measured=PageTable(*figures_of(record.measured)),
        assumed=PageTable(*figures_of(record.assumed)),
        rules=list(record.rules),
    )


def _figures(known: list[World], parts: list[Part]) -> Iterator[Figure]:
    if not known:
        return
    # Both axes are logarithms to base 2, so that proportional growth is a straight line.
    first = known[0]
    points, ideal = [], []
    for world in known:
        ranks = math.log2(world.ranks)
        points.append((ranks, math.log2(world.samples_per_s or 1.0)))
        ideal.append((ranks, math.log2((first.samples_per_s or 1.0) * world.ranks / first.ranks)))
    series = [PlotCurve("predicted", PREDICTED, tuple(points)), PlotCurve("in proportion", LINEAR, tuple(ideal))]
    x = Axis(title="ranks", whole=True, show=_doubled)
    y = Axis(title="samples/s", whole=True, show=_doubled)
    plot = series_plot(series, x=x, y=y, label="Samples/s over ranks")
    yield Figure("Samples per second", "blue: predicted; orange: in proportion to the ranks; both axes double", plot)
    names = [f"{world.ranks:,}" for world in known]
    bars = StackedBars(title="Milliseconds of a step", unit="ms by ranks", series=parts, show=milliseconds, names=names)
    yield bars.figure()


def _doubled(value: float, spread: float) -> str:
    return units.short(2.0**value)


def _parts(known: list[World]) -> list[Part]:
    """Return what steps are spent on, with what goes on beside them; parts that take no time are left out."""
    parts: list[Part] = []
    for name, title in BOUNDS.items():
        values = [(world.parts or {}).get(name, 0.0) for world in known]
        if any(values):
            parts.append(Part(name=title, colour=len(parts) % COLOURS, values=values))
    return parts
