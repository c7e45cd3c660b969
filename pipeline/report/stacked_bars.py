"""Stacked bars, one per rank: rows of HTML for a few ranks, one SVG plot for many."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from markupsafe import Markup

from pipeline.core import units
from pipeline.report import svg
from pipeline.report.page import Figure

MOST_ROWS = 8
MOST_HOVERS = 256
# Width of a row's drawing, in the units of its viewBox.
UNITS = 1000
RANKS = "rank"


@dataclass(frozen=True, kw_only=True)
class BarSeries:
    """One colour of every bar. ``values``: one per rank. ``colour``: the number of a class in the style sheet."""

    name: str
    values: Sequence[float]
    colour: int


@dataclass(frozen=True, kw_only=True)
class StackedBars:
    """Bars: ``series`` from the bottom up, with a ``limit`` (0: none) called ``limit_name``.

    ``show`` formats a value. The axis shows values divided by ``scale``, in ``unit``. ``names``: names of the bars if
    they are not ranks; each bar then has its own row.
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
        return self.names[rank] if self.names else f"{RANKS} {rank}"

    @property
    def ranks(self) -> int:
        return len(self.series[0].values)

    @property
    def totals(self) -> list[float]:
        return list(map(sum, zip(*(series.values for series in self.series), strict=True)))

    @property
    def top(self) -> float:
        """The highest bar, or the limit if that is higher."""
        return max([self.limit, *self.totals])

    @property
    def span(self) -> str:
        totals = self.totals
        low, high = self.show(min(totals)), self.show(max(totals))
        # Compare as text, since values may differ only in digits that are not shown.
        return low if low == high else f"{low} to {high}"

    def words(self, rank: int) -> str:
        parts = []
        for series in self.series:
            if series.values[rank]:
                parts.append(f"{series.name} {self.show(series.values[rank])}")
        text = f"{self.name(rank)}: {', '.join(parts) or 'nothing'}"
        if self.limit:
            text += f", {self.limit_name} {self.show(self.limit)}"
        return text

    def figure(self) -> Figure:
        """Draw rows with figures for up to MOST_ROWS ranks, else a plot over ranks."""
        if not self.names and self.ranks > MOST_ROWS:
            return Figure(self.title, f"{self.unit}, {self.span}", _plot(self))
        # All rows share one scale, so that the lengths of bars can be compared.
        top = self.top or 1.0
        rows = []
        for rank, total in enumerate(self.totals):
            rows.append(_row(self, rank, total, top))
        return Figure(self.title, self.unit, svg.tag("div", *rows, class_="stacked-bars"))


def _row(bars: StackedBars, rank: int, total: float, top: float) -> Markup:
    parts, left = [], 0.0
    for series in bars.series:
        width = UNITS * series.values[rank] / top
        if width:
            size = {"x": f"{left:.2f}", "width": f"{max(width, 2):.2f}", "height": 16}
            parts.append(svg.tag("rect", class_=f"c{series.colour}", **size))
        left += width
    if bars.limit:
        edge = min(UNITS * bars.limit / top, UNITS - 4)
        parts.append(svg.tag("rect", class_="limit", x=f"{edge:.2f}", width=4, height=16))
    words, number = bars.words(rank), bars.show(total)
    if bars.limit:
        number += f" of {bars.show(bars.limit)}"
    attributes = {"viewBox": f"0 0 {UNITS} 16", "preserveAspectRatio": "none", "role": "img", "aria-label": words}
    picture = svg.tag("svg", svg.tag("title", words), *parts, class_="stacked-bar", **attributes)
    return svg.tag("div", bars.name(rank), class_="rank") + picture + svg.tag("div", number, class_="number")


def _plot(bars: StackedBars) -> Markup:
    # Draw vertical bars side by side, with one path per series, so that a thousand ranks fit into a small file.
    x, y = svg.Axis(title=RANKS, whole=True), svg.Axis(title=bars.unit, from_zero=True)
    x_ticks = [tick for tick in svg.ticks(0, bars.ranks - 1, about=6, whole=True) if tick < bars.ranks]
    frame = svg.Frame(x, y, x_ticks, svg.ticks(0.0, bars.top / bars.scale), -0.5, bars.ranks - 0.5)
    body = frame.grid()
    width = (svg.WIDTH - svg.LEFT - svg.RIGHT) / bars.ranks
    bar = width * (0.8 if width > 4 else 1.0)
    base = [0.0] * bars.ranks
    for series in bars.series:
        moves = []
        for rank, value in enumerate(series.values):
            if value:
                low, high = frame.y(base[rank] / bars.scale), frame.y((base[rank] + value) / bars.scale)
                moves.append(f"M{frame.x(rank) - bar / 2:.2f} {low:.1f}h{bar:.2f}V{high:.1f}h{-bar:.2f}z")
                base[rank] += value
        if moves:
            body.append(svg.tag("g", svg.tag("path", class_="fill", d="".join(moves)), class_=f"c{series.colour}"))
    if bars.limit:
        limit = svg.ReferenceLine(bars.limit / bars.scale, f"{bars.limit_name} {bars.show(bars.limit)}")
        body += svg.reference_lines(frame, [limit])
    if bars.ranks <= MOST_HOVERS:
        # Draw invisible columns whose tooltips show their figures.
        size = {"y": svg.TOP, "width": f"{width:.2f}", "height": svg.BOTTOM - svg.TOP}
        for rank in range(bars.ranks):
            left = f"{frame.x(rank) - width / 2:.2f}"
            body.append(svg.tag("rect", svg.tag("title", bars.words(rank)), class_="hover", x=left, **size))
    return svg.drawing(body, f"{bars.title} of {bars.ranks} ranks, {bars.span}")


def milliseconds(value: float) -> str:
    return f"{units.decimal(value, 2 if value >= 1 else 3)} ms"
