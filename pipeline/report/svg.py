"""Small line and scatter plots as inline SVG.

Colours and fonts come from CSS classes (``templates/style.css``), so that a plot suits light and dark pages.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import chain

from markupsafe import Markup, escape

from pipeline.core import units

WIDTH, HEIGHT = 380, 236
LEFT, RIGHT, TOP = 50, 14, 14
# Pixel row of the lower edge of a frame; below it are the ticks' labels and the axis's title.
BOTTOM = HEIGHT - 36
MOST_POINTS = 480
MOST_HOVERS = 120
NOTE_HEIGHT = 12

Point = tuple[float, float]


def tag(name: str, *inside: object, **attributes: object) -> Markup:
    """Make an element. Text ``inside`` is escaped unless it is Markup. ``class_`` is class, ``x_y`` x-y."""
    written = Markup("")
    for key, value in attributes.items():
        written += Markup(' {}="{}"').format(key.rstrip("_").replace("_", "-"), value)
    if not inside:
        return Markup("<{}{}/>").format(name, written)
    return Markup("<{0}{1}>{2}</{0}>").format(name, written, Markup("").join(map(escape, inside)))


@dataclass(frozen=True)
class ReferenceLine:
    """A horizontal reference line at ``y`` with its ``label``."""

    y: float
    label: str


@dataclass(frozen=True)
class PlotCurve:
    """A curve of a plot with several. ``colour``: a class of the style sheet, c0 to c6."""

    name: str
    colour: int
    points: tuple[Point, ...]


@dataclass(frozen=True, kw_only=True)
class Axis:
    """One axis. ``title`` contains the unit. ``show`` formats a tick from its value and the distance between ticks."""

    title: str
    from_zero: bool = False
    whole: bool = False
    show: Callable[[float, float], str] = field(default=units.short)


def line_plot(
    points: Sequence[Point],
    *,
    x: Axis,
    y: Axis,
    references: Sequence[ReferenceLine] = (),
    label: str,
    dashed: Sequence[Point] = (),
    marked: tuple[Point, str] | None = None,
) -> Markup:
    """Plot a curve through ``points`` (finite, rising x); "" without points. ``label``: for screen readers.

    ``dashed``: points of a second curve. ``marked``: a point with a dot, and its tooltip.
    """
    if not points:
        return Markup("")
    shown, second = thin(points), thin(dashed)
    frame = Frame.around([*shown, *second, *((shown[0][0], line.y) for line in references)], x, y)
    path = frame.path(shown)
    area = f"{path} L{frame.x(shown[-1][0]):.1f} {BOTTOM:.1f} L{frame.x(shown[0][0]):.1f} {BOTTOM:.1f} Z"
    body = frame.grid()
    if y.from_zero:
        body.append(tag("path", class_="area", d=area))
    body += reference_lines(frame, references)
    if len(second) > 1:
        body.append(tag("path", class_="reference", d=frame.path(second)))
    body.append(tag("path", class_="curve", d=path) if len(shown) > 1 else frame.dot(shown[0]))
    if marked is not None:
        body.append(frame.dot(*marked))
    return drawing([*body, *_hovers(frame, shown)], label)


def series_plot(series: Sequence[PlotCurve], *, x: Axis, y: Axis, label: str) -> Markup:
    """Plot several curves in one frame, each in its colour; those without points are left out."""
    curves = [(curve, thin(curve.points)) for curve in series if curve.points]
    if not curves:
        return Markup("")
    frame = Frame.around(list(chain.from_iterable(points for _, points in curves)), x, y)
    body = frame.grid()
    for curve, points in curves:
        # A single point makes no line, only a hover.
        path = frame.path(points) if len(points) > 1 else ""
        body.append(tag("path", tag("title", curve.name), class_=f"series c{curve.colour}", d=path))
        body += _hovers(frame, points, f"{curve.name}, ")
    return drawing(body, label)


def scatter_plot(
    points: Sequence[tuple[Point, str]], *, joined: Sequence[Point] = (), x: Axis, y: Axis, label: str
) -> Markup:
    """Plot dots with their tooltips, and a line through the ``joined`` points; "" without points."""
    if not points:
        return Markup("")
    frame = Frame.around([*(point for point, _ in points), *joined], x, y)
    body = frame.grid()
    if len(joined) > 1:
        body.append(tag("path", class_="reference", d=frame.path(joined)))
    for point, text in points:
        body.append(frame.dot(point, text))
    return drawing(body, label)


def reliability_plot(
    predicted: Sequence[float], observed: Sequence[float], rows: Sequence[int], *, x: Axis, y: Axis, label: str
) -> Markup:
    """Plot observed against predicted rates by bin, with 95 % intervals and the diagonal of a calibrated model."""
    if not predicted:
        return Markup("")
    spans = list(map(wilson, observed, rows))
    top = max([*predicted, *(min(high, 1.0) for _, high in spans)])
    frame = Frame.around([(0.0, 0.0), (top, top)], x, y)
    end = min(frame.x_high, frame.y_ticks[-1])
    whiskers, dots = [], []
    for p, rate, number, (low, high) in zip(predicted, observed, rows, spans, strict=True):
        whiskers.append(frame.whisker(p, low, high))
        text = f"predicted {units.decimal(p)}, observed {units.decimal(rate)}, {units.count(number)} rows"
        dots.append(frame.dot((p, rate), text))
    # Dots are drawn after all whiskers, which would cover their tooltips.
    diagonal = tag("path", class_="reference", d=frame.path([(0, 0), (end, end)]))
    return drawing([*frame.grid(), diagonal, *whiskers, *dots], label)


def wilson(rate: float, rows: int, z: float = 1.96) -> tuple[float, float]:
    """Compute Wilson's score interval (1927) of a share.

    Args:
        rate: The share, of ``rows`` rows.
        z: A quantile of the normal distribution; 1.96 covers 95 %.
    """
    if rows <= 0:
        return 0.0, 1.0
    scale = 1 + z * z / rows
    middle = (rate + z * z / (2 * rows)) / scale
    half = z * math.sqrt(rate * (1 - rate) / rows + z * z / (4 * rows * rows)) / scale
    return max(0.0, middle - half), min(1.0, middle + half)


def thin(points: Sequence[Point], most: int = MOST_POINTS) -> list[Point]:
    """Keep at most ``most`` of ``points``: the lowest and the highest of each stretch, so that no spike is lost."""
    if len(points) <= most:
        return list(points)
    stretches = most // 2
    thinned: list[Point] = []
    for index in range(stretches):
        part = points[index * len(points) // stretches : (index + 1) * len(points) // stretches]
        # Use a set, since both ends are the same point if the stretch is level.
        ends = {min(part, key=lambda point: point[1]), max(part, key=lambda point: point[1])}
        thinned += sorted(ends)
    return thinned


def ticks(low: float, high: float, about: int = 5, whole: bool = False) -> list[float]:
    """Return round values (steps of 1, 2 or 5 times a power of ten) that cover [``low``, ``high``]."""
    if not high > low:
        pad = max(abs(low) * 0.05, 0.5 if whole else 1e-3)
        low, high = low - pad, high + pad
    raw = (high - low) / about
    power = 10.0 ** math.floor(math.log10(raw))
    # Allow a tolerance of 0.1 %, since rounding may put ``raw`` just above a round step.
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= raw * 0.999)
    if whole:
        step = max(1.0, step)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    # Use multiples instead of a running sum, whose rounding errors would show in the labels.
    return [index * step for index in range(first, last + 1)]


@dataclass(frozen=True)
class Frame:
    """The box of a plot: ticks on both axes, the mapping from values to pixels, and marks at values."""

    x_axis: Axis
    y_axis: Axis
    x_ticks: list[float]
    y_ticks: list[float]
    x_low: float
    x_high: float

    @staticmethod
    def around(points: Sequence[Point], x: Axis, y: Axis) -> Frame:
        """Return the frame around all ``points``. y ends on ticks; x on the data, or on ticks if it starts at zero."""
        xs, ys = zip(*points, strict=True)
        x_begin, y_begin = min(xs), min(ys)
        if x.from_zero:
            x_begin = 0.0
        if y.from_zero:
            y_begin = 0.0
        x_ticks = ticks(x_begin, max(xs), about=6, whole=x.whole)
        y_ticks = ticks(y_begin, max(ys), whole=y.whole)
        low, high = x_ticks[0], x_ticks[-1]
        # Whole numbers, such as steps, fill the width exactly, unless there is only one of them.
        if x.whole and max(xs) > min(xs):
            low, high = x_begin, max(xs)
        return Frame(x, y, [tick for tick in x_ticks if low <= tick <= high], y_ticks, low, high)

    def x(self, value: float) -> float:
        return LEFT + (value - self.x_low) / (self.x_high - self.x_low) * (WIDTH - LEFT - RIGHT)

    def y(self, value: float) -> float:
        low, high = self.y_ticks[0], self.y_ticks[-1]
        return BOTTOM - (value - low) / (high - low) * (BOTTOM - TOP)

    def place(self, point: Point) -> str:
        return f"{self.x(point[0]):.1f} {self.y(point[1]):.1f}"

    def path(self, points: Sequence[Point]) -> str:
        """Return the line through ``points`` as the ``d`` of an SVG path."""
        if not points:
            return ""
        return "M" + " L".join(map(self.place, points))

    def dot(self, point: Point, text: str = "") -> Markup:
        x, y = self.place(point).split()
        tooltip = [tag("title", text)] if text else []
        return tag("circle", *tooltip, class_="dot", cx=x, cy=y, r=3.5)

    def whisker(self, x: float, low: float, high: float) -> Markup:
        return tag("path", class_="whisker", d=self.path([(x, low), (x, high)]))

    def grid(self) -> list[Markup]:
        out: list[Markup] = []
        for tick in self.y_ticks:
            row = self.y(tick)
            out.append(tag("path", class_="grid", d=f"M{LEFT} {row:.1f} H{WIDTH - RIGHT}"))
            out.append(text_at(LEFT - 7, row + 3.5, self._label(self.y_axis, tick, self.y_ticks), "end"))
        for tick in self.x_ticks:
            column = self.x(tick)
            out.append(tag("path", class_="tick", d=f"M{column:.1f} {BOTTOM} v4"))
            out.append(text_at(column, BOTTOM + 15, self._label(self.x_axis, tick, self.x_ticks), "middle"))
        out.append(tag("path", class_="axis", d=f"M{LEFT} {BOTTOM} H{WIDTH - RIGHT}"))
        out.append(text_at((LEFT + WIDTH - RIGHT) / 2, HEIGHT - 4, self.x_axis.title, "middle", "title"))
        return out

    def _label(self, axis: Axis, tick: float, all_ticks: list[float]) -> str:
        # A single tick has no distance to the next, so its own size decides the number of decimals.
        distance = all_ticks[1] - all_ticks[0] if len(all_ticks) > 1 else abs(tick)
        return axis.show(tick, distance)


def percent_tick(value: float, spread: float) -> str:
    return f"{value:.{_percent_digits(spread)}%}"


def signed_tick(value: float, spread: float) -> str:
    sign = "+" if value else ""
    return f"{value:{sign}.{_percent_digits(spread)}%}"


def _percent_digits(spread: float) -> int:
    if spread >= 0.01:
        return 0
    if spread >= 0.001:
        return 1
    return 2


def reference_lines(frame: Frame, lines: Sequence[ReferenceLine]) -> list[Markup]:
    """Draw dashed lines, labelled at the left, where a falling curve leaves room; close labels avoid each other."""
    out: list[Markup] = []
    last = -math.inf
    for line in sorted(lines, key=lambda line: -line.y):
        row = frame.y(line.y)
        above = row - 4
        fits = above - last >= NOTE_HEIGHT and above >= TOP + NOTE_HEIGHT
        # Otherwise put the label below its line, clear of the previous label.
        last = above if fits else max(row + 11, last + NOTE_HEIGHT)
        out.append(tag("path", class_="reference", d=f"M{LEFT} {row:.1f} H{WIDTH - RIGHT}"))
        out.append(text_at(LEFT + 4, last, line.label, "start", "note"))
    return out


def _hovers(frame: Frame, points: Sequence[Point], whose: str = "") -> list[Markup]:
    # Draw invisible spots whose tooltips show their values.
    every = max(1, math.ceil(len(points) / MOST_HOVERS))
    out = []
    for x, y in points[::every]:
        text = f"{whose}{frame.x_axis.title} {units.count(x)}: {frame.y_axis.show(y, abs(y) / 1000 or 1.0)}"
        place = {"cx": f"{frame.x(x):.1f}", "cy": f"{frame.y(y):.1f}"}
        out.append(tag("circle", tag("title", text), class_="hover", **place, r=6))
    return out


def text_at(x: float, y: float, content: str, anchor: str, kind: str = "label") -> Markup:
    """Draw ``content`` with its baseline at ``y``. ``anchor``: which end of it is at ``x``. ``kind``: its CSS class."""
    return tag("text", content, class_=kind, x=f"{x:.1f}", y=f"{y:.1f}", text_anchor=anchor)


def drawing(body: Sequence[Markup], label: str, box: tuple[float, ...] = (0, 0, WIDTH, HEIGHT)) -> Markup:
    """Return the picture around ``body``. ``label``: for screen readers. ``box``: left, top, width and height."""
    attributes = {"viewBox": " ".join(map("{:g}".format, box)), "role": "img", "aria-label": label}
    return tag("svg", *body, class_="plot", **attributes)
