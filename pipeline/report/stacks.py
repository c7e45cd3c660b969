"""Stacked bars, one a rank: rows of HTML for a few ranks, one SVG plot for many. All text is escaped here."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape

from pipeline.report import units
from pipeline.report.svg import LEFT, RIGHT, TOP, WIDTH, Axis, Frame, Line, drawing, reference_lines, ticks

MOST_ROWS = 8
MOST_HOVERS = 256
UNITS = 1000  # width of a row's picture
RANKS = "rank"


@dataclass(frozen=True, kw_only=True)
class Series:
    """One colour of every bar: ``values`` by rank; ``colour`` is the number of a class of the theme."""

    name: str
    values: Sequence[float]
    colour: int


@dataclass(frozen=True, kw_only=True)
class Stacks:
    """Bars to draw: ``series`` from the bottom up, a ``limit`` they are held against (0: none) and its ``limit_name``.

    ``show``: how a value is written; ``unit`` and ``scale``: the axis shows values divided by ``scale``.
    """

    title: str
    unit: str
    series: Sequence[Series]
    show: Callable[[float], str]
    limit: float = 0.0
    limit_name: str = ""
    scale: float = 1.0

    @property
    def ranks(self) -> int:
        """Bars there are."""
        return len(self.series[0].values)

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
        return f"{RANKS} {rank}: {', '.join(parts) or 'nothing'}{limit}"


def stacked(stacks: Stacks) -> str:
    """The figure: up to MOST_ROWS ranks as rows with their figures, more as a plot over ranks."""
    few = stacks.ranks <= MOST_ROWS
    unit = stacks.unit if few else f"{stacks.unit}, {stacks.span}"
    title = f"{escape(stacks.title)} <span>{escape(unit)}</span>"
    return f"<figure><figcaption>{title}</figcaption>{_rows(stacks) if few else _plot(stacks)}</figure>"


def legend(series: Sequence[Series]) -> str:
    """What the colours mean."""
    items = (
        f'<span><svg class="swatch" aria-hidden="true"><rect class="c{one.colour}" width="11" height="11"/></svg>'
        f"{escape(one.name)}</span>"
        for one in series
    )
    return f'<p class="legend muted small">{"".join(items)}</p>'


def _rows(stacks: Stacks) -> str:
    top = max([stacks.limit, *(stacks.total(rank) for rank in range(stacks.ranks))]) or 1.0
    return f'<div class="stacks">{"".join(_row(stacks, rank, top) for rank in range(stacks.ranks))}</div>'


def _row(stacks: Stacks, rank: int, top: float) -> str:
    parts, left = [], 0.0
    for series in stacks.series:
        width = UNITS * series.values[rank] / top
        if width:
            parts.append(f'<rect class="c{series.colour}" x="{left:.2f}" width="{max(width, 2):.2f}" height="16"/>')
        left += width
    if stacks.limit:
        parts.append(
            f'<rect class="limit" x="{min(UNITS * stacks.limit / top, UNITS - 4):.2f}" width="4" height="16"/>'
        )
    words, total = escape(stacks.words(rank)), stacks.show(stacks.total(rank))
    of = f" of {stacks.show(stacks.limit)}" if stacks.limit else ""
    return (
        f'<div class="rank">{RANKS} {rank}</div>'
        f'<svg class="stack" viewBox="0 0 {UNITS} 16" preserveAspectRatio="none" role="img" aria-label="{words}">'
        f"<title>{words}</title>{''.join(parts)}</svg>"
        f'<div class="number">{escape(total + of)}</div>'
    )


def _plot(stacks: Stacks) -> str:
    """Vertical bars side by side, one path a series, so that a thousand ranks stay a small file."""
    ranks = range(stacks.ranks)
    top = max([stacks.limit, *(stacks.total(rank) for rank in ranks)]) / stacks.scale
    x, y = Axis(title=RANKS, whole=True), Axis(title=stacks.unit, from_zero=True)
    x_ticks = [tick for tick in ticks(0, stacks.ranks - 1, about=6, whole=True) if tick < stacks.ranks]
    frame = Frame(x, y, x_ticks, ticks(0.0, top), -0.5, stacks.ranks - 0.5)
    limit = stacks.limit / stacks.scale
    lines = [Line(limit, f"{stacks.limit_name} {stacks.show(stacks.limit)}")] if limit else []
    body = [*frame.grid(), *_paths(stacks, frame), *reference_lines(frame, lines), *_hovers(stacks, frame)]
    return drawing(body, f"{stacks.title} of {stacks.ranks} ranks, {stacks.span}")


def _paths(stacks: Stacks, frame: Frame) -> list[str]:
    width = (WIDTH - LEFT - RIGHT) / stacks.ranks
    bar = width * (0.8 if width > 4 else 1.0)
    base, found = [0.0] * stacks.ranks, []
    for series in stacks.series:
        moves = []
        for rank, value in enumerate(series.values):
            if value:
                low, high = (frame.y(amount / stacks.scale) for amount in (base[rank], base[rank] + value))
                moves.append(f"M{frame.x(rank) - bar / 2:.2f} {low:.1f}h{bar:.2f}V{high:.1f}h{-bar:.2f}z")
                base[rank] += value
        found.append(f'<g class="c{series.colour}"><path class="fill" d="{"".join(moves)}"/></g>' if moves else "")
    return found


def _hovers(stacks: Stacks, frame: Frame) -> list[str]:
    """Invisible columns that say their figures when pointed at."""
    if stacks.ranks > MOST_HOVERS:
        return []
    width = (WIDTH - LEFT - RIGHT) / stacks.ranks
    return [
        f'<rect class="hover" x="{frame.x(rank) - width / 2:.2f}" y="{TOP}" width="{width:.2f}" '
        f'height="{frame.bottom - TOP}"><title>{escape(stacks.words(rank))}</title></rect>'
        for rank in range(stacks.ranks)
    ]


def milliseconds(value: float) -> str:
    """Milliseconds for people."""
    return f"{units.decimal(value, 2 if value >= 1 else 3)} ms"
