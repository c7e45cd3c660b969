"""Stacked bars, one per rank: rows of HTML for a few ranks, one SVG plot for many."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from markupsafe import Markup

from pipeline import units
from pipeline.report.page import Figure
from pipeline.report.svg import (
    LEFT,
    RIGHT,
    TOP,
    WIDTH,
    Axis,
    Frame,
    ReferenceLine,
    drawing,
    reference_lines,
    tag,
    ticks,
)

MOST_ROWS = 8
MOST_HOVERS = 256
UNITS = 1000  # width of a row's picture
RANKS = "rank"


@dataclass(frozen=True, kw_only=True)
class BarSeries:
    """One colour of every bar. ``values``: by rank. ``colour``: the number of a class in the style sheet."""

    name: str
    values: Sequence[float]
    colour: int


@dataclass(frozen=True, kw_only=True)
class StackedBars:
    """Bars: ``series`` from the bottom up, with a ``limit`` (0: none) called ``limit_name``.

    ``show`` formats a value. The axis shows values divided by ``scale``, in ``unit``. ``names``: of the bars, where
    they are no ranks; as many rows as there are bars then.
    """

    title: str
    unit: str
    series: Sequence[BarSeries]
    show: Callable[[float], str]
    limit: float = 0.0
    limit_name: str = ""
    scale: float = 1.0
    names: Sequence[str] = ()

    def name(self, rank: int) -> str:
        """The name of the bar of ``rank``."""
        return self.names[rank] if self.names else f"{RANKS} {rank}"

    @property
    def ranks(self) -> int:
        """The number of bars."""
        return len(self.series[0].values)

    @property
    def top(self) -> float:
        """The highest bar, or the limit if that is higher."""
        return max([self.limit, *map(self.total, range(self.ranks))])

    def total(self, rank: int) -> float:
        """Height of the bar of ``rank``."""
        return sum(series.values[rank] for series in self.series)

    @property
    def span(self) -> str:
        """Lowest and highest bar in words."""
        low, high = (self.show(value(map(self.total, range(self.ranks)))) for value in (min, max))
        return low if low == high else f"{low} to {high}"

    def words(self, rank: int) -> str:
        """The bar of ``rank`` in words."""
        parts = [f"{series.name} {self.show(series.values[rank])}" for series in self.series if series.values[rank]]
        limit = f", {self.limit_name} {self.show(self.limit)}" if self.limit else ""
        return f"{self.name(rank)}: {', '.join(parts) or 'nothing'}{limit}"

    def figure(self) -> Figure:
        """Rows with figures for up to MOST_ROWS ranks, else a plot over ranks."""
        if self.names or self.ranks <= MOST_ROWS:
            rows = [_row(self, rank, self.top or 1.0) for rank in range(self.ranks)]
            return Figure(self.title, self.unit, tag("div", *rows, class_="stacked-bars"))
        return Figure(self.title, f"{self.unit}, {self.span}", _plot(self))


def _row(bars: StackedBars, rank: int, top: float) -> Markup:
    parts, left = [], 0.0
    for series in bars.series:
        width = UNITS * series.values[rank] / top
        if width:
            size = {"x": f"{left:.2f}", "width": f"{max(width, 2):.2f}", "height": 16}
            parts.append(tag("rect", class_=f"c{series.colour}", **size))
        left += width
    if bars.limit:
        edge = min(UNITS * bars.limit / top, UNITS - 4)
        parts.append(tag("rect", class_="limit", x=f"{edge:.2f}", width=4, height=16))
    words, total = bars.words(rank), bars.show(bars.total(rank))
    of = f" of {bars.show(bars.limit)}" if bars.limit else ""
    attributes = {"viewBox": f"0 0 {UNITS} 16", "preserveAspectRatio": "none", "role": "img", "aria-label": words}
    picture = tag("svg", tag("title", words), *parts, class_="stacked-bar", **attributes)
    return tag("div", bars.name(rank), class_="rank") + picture + tag("div", total + of, class_="number")


def _plot(bars: StackedBars) -> Markup:
    """Vertical bars side by side, one path per series, so that a thousand ranks are a small file."""
    x, y = Axis(title=RANKS, whole=True), Axis(title=bars.unit, from_zero=True)
    x_ticks = [tick for tick in ticks(0, bars.ranks - 1, about=6, whole=True) if tick < bars.ranks]
    frame = Frame(x, y, x_ticks, ticks(0.0, bars.top / bars.scale), -0.5, bars.ranks - 0.5)
    lines = [ReferenceLine(bars.limit / bars.scale, f"{bars.limit_name} {bars.show(bars.limit)}")] if bars.limit else []
    body = [*frame.grid(), *_paths(bars, frame), *reference_lines(frame, lines), *_hovers(bars, frame)]
    return drawing(body, f"{bars.title} of {bars.ranks} ranks, {bars.span}")


def _paths(bars: StackedBars, frame: Frame) -> list[Markup]:
    width = (WIDTH - LEFT - RIGHT) / bars.ranks
    bar = width * (0.8 if width > 4 else 1.0)
    base, paths = [0.0] * bars.ranks, []
    for series in bars.series:
        moves = []
        for rank, value in enumerate(series.values):
            if value:
                low, high = (frame.y(amount / bars.scale) for amount in (base[rank], base[rank] + value))
                moves.append(f"M{frame.x(rank) - bar / 2:.2f} {low:.1f}h{bar:.2f}V{high:.1f}h{-bar:.2f}z")
                base[rank] += value
        if moves:
            paths.append(tag("g", tag("path", class_="fill", d="".join(moves)), class_=f"c{series.colour}"))
    return paths


def _hovers(bars: StackedBars, frame: Frame) -> list[Markup]:
    """Invisible columns whose tooltips show their figures."""
    if bars.ranks > MOST_HOVERS:
        return []
    width = (WIDTH - LEFT - RIGHT) / bars.ranks
    size = {"y": TOP, "width": f"{width:.2f}", "height": frame.bottom - TOP}
    return [
        tag("rect", tag("title", bars.words(rank)), class_="hover", x=f"{frame.x(rank) - width / 2:.2f}", **size)
        for rank in range(bars.ranks)
    ]


def milliseconds(value: float) -> str:
    """``value`` in milliseconds, as text."""
    return f"{units.decimal(value, 2 if value >= 1 else 3)} ms"
