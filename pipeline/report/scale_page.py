"""The page of ``nightjar scale --html``: samples/s over ranks, and what a step is spent on."""

from __future__ import annotations

import math
from collections.abc import Iterator

from markupsafe import Markup

from pipeline import units
from pipeline.records.scale import Scale, World
from pipeline.report.page import COLOURS, Figure, PageTable, from_template
from pipeline.report.scale import BOUNDS, figures_of, problems_of, title_of, wall_words, worlds_of
from pipeline.report.stacked_bars import BarSeries as Part
from pipeline.report.stacked_bars import StackedBars, milliseconds
from pipeline.report.svg import Axis, PlotCurve, series_plot

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
