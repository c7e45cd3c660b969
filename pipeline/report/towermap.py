"""An assignment to towers as inline SVG: the similarity heat map and the tower map."""

from __future__ import annotations

from collections.abc import Sequence

from markupsafe import Markup

from pipeline import units
from pipeline.report.page import COLOURS
from pipeline.report.svg import drawing, tag

SIDE, MARGIN, PAD = 440, 74, 14
# Per side; more features are averaged into as many cells.
MOST_CELLS = 96
MOST_LABELS = 64
LONGEST = 11
# Pixels: radius of a point with and without a label, width of a letter.
DOT, SMALL_DOT, LETTER = 8.0, 5.0, 6.2

Matrix = Sequence[Sequence[float]]
Box = tuple[float, float, float, float]


def heat_map(names: Sequence[str], towers: Sequence[int], similarity: Matrix) -> Markup:
    """Draw ``similarity`` [F][F] as cells from faint to strong, ordered by tower, with lines between towers."""
    order = sorted(range(len(names)), key=lambda index: (towers[index], index))
    count = min(len(order), MOST_CELLS)
    bins = [order[i * len(order) // count : (i + 1) * len(order) // count] for i in range(count)]
    labels = [names[b[0]] if len(b) == 1 else f"{names[b[0]]} to {names[b[-1]]}" for b in bins]
    off_diagonal = [value for i, row in enumerate(similarity) for j, value in enumerate(row) if i != j]
    low, high = min(off_diagonal, default=0.0), max(off_diagonal, default=1.0)
    size, labelled = SIDE / len(bins), len(bins) == len(order) <= MOST_LABELS
    body = []
    for row, left in enumerate(bins):
        for column, right in enumerate(bins):
            # Without pairs of a feature with itself.
            values = [similarity[i][j] for i in left for j in right if i != j]
            if values:
                value = sum(values) / len(values)
                words = f"{labels[row]} and {labels[column]}: {units.decimal(value, 2)}"
                share = (value - low) / (high - low) if high > low else 0.5
                body.append(_cell(MARGIN + column * size, MARGIN + row * size, size, share, words))
    # Lines where one tower ends and the next begins.
    far = MARGIN + SIDE
    for index in range(1, len(bins)):
        if towers[bins[index][0]] != towers[bins[index - 1][0]]:
            at = MARGIN + index * size
            body.append(tag("path", class_="cut", d=f"M{MARGIN} {at:.1f} H{far} M{at:.1f} {MARGIN} V{far}"))
    if labelled:
        body += _edge_labels([names[index] for index in order], size)
    body += _scale(low, high)
    # Without labels their room is cut off.
    free = 0 if labelled else MARGIN - PAD
    width, height = MARGIN + SIDE + PAD - free, MARGIN + SIDE + 46 - free
    return drawing(body, "Similarity of every pair of features", (free, free, width, height))


def tower_map(names: Sequence[str], towers: Sequence[int], placement: Matrix) -> Markup:
    """Draw every feature at its place, in the colour and with the number of its tower."""
    width = MARGIN + SIDE + PAD
    low = [min(point[axis] for point in placement) for axis in (0, 1)]
    extent = [max(point[axis] for point in placement) - low[axis] for axis in (0, 1)]
    room = (width - 2 * (DOT + PAD + 20)) / max(*extent, 1e-9)
    spots = []
    for point in placement:
        x, y = (width / 2 + (point[a] - low[a] - extent[a] / 2) * room for a in (0, 1))
        spots.append((x, y))
    taken: list[Box] = [(x - DOT, y - DOT, x + DOT, y + DOT) for x, y in spots]
    body, labelled = [], len(names) <= MOST_LABELS
    for name, tower, (x, y) in zip(names, towers, spots, strict=True):
        body.append(_spot(name, tower, x, y, labelled))
        if labelled:
            body += _spot_label(_short(name), x, y, width, taken)
    return drawing(body, "Features in the plane by tower", (0, 0, width, width))


def _spot(name: str, tower: int, x: float, y: float, labelled: bool) -> Markup:
    radius, letters = (DOT, 10) if labelled else (SMALL_DOT, 7)
    place = {"x": f"{x:.1f}", "y": f"{y + letters / 3:.1f}"}
    return tag(
        "g",
        tag("circle", class_=f"c{tower % COLOURS}", cx=f"{x:.1f}", cy=f"{y:.1f}", r=radius),
        tag("text", tower, class_="inside", style=f"font-size:{letters}px", **place, text_anchor="middle"),
        tag("title", f"{name}, tower {tower}"),
    )


def _cell(x: float, y: float, size: float, share: float, words: str) -> Markup:
    # A square, from faint (``share`` 0) to strong (1).
    box = {"x": f"{x:.2f}", "y": f"{y:.2f}", "width": f"{size:.2f}", "height": f"{size:.2f}"}
    opacity = f"{0.04 + 0.96 * min(max(share, 0.0), 1.0):.2f}"
    return tag("rect", tag("title", words), class_="cell", **box, fill_opacity=opacity)


def _edge_labels(names: Sequence[str], size: float) -> list[Markup]:
    out, letters = [], f"font-size:{min(11.0, size * 0.82):.1f}px"
    for index, name in enumerate(names):
        at = f"{MARGIN + (index + 0.5) * size + 3.2:.1f}"
        shown = (_short(name), tag("title", name))
        out.append(tag("text", *shown, x=MARGIN - 5, y=at, text_anchor="end", style=letters))
        out.append(tag("text", *shown, transform=f"translate({at} {MARGIN - 5}) rotate(-90)", style=letters))
    return out


def _scale(low: float, high: float) -> list[Markup]:
    # The legend: ten steps from the lowest to the highest value.
    x, y, step = MARGIN + 40, MARGIN + SIDE + 14, 16
    return [
        tag("text", units.decimal(low, 2), x=x - 6, y=y + 12, text_anchor="end"),
        *(_cell(x + i * step, y, step, i / 9, "") for i in range(10)),
        tag("text", units.decimal(high, 2), x=x + 10 * step + 6, y=y + 12),
    ]


def _spot_label(text: str, x: float, y: float, width: float, taken: list[Box]) -> list[Markup]:
    # ``text`` beside a point, where nothing else is; nothing if there is no room.
    long = LETTER * len(text)
    gap = DOT + 3
    for left, base, anchor in (
        (x + gap, y + 4, "start"),
        (x - gap - long, y + 4, "end"),
        (x - long / 2, y - gap, "middle"),
        (x - long / 2, y + gap + 8, "middle"),
    ):
        box = (left, base - 9, left + long, base + 2)
        inside = box[0] >= 0 and box[2] <= width and box[1] >= 0 and box[3] <= width
        if inside and not any(_overlap(box, other) for other in taken):
            taken.append(box)
            place = {"start": left, "end": left + long, "middle": x}[anchor]
            return [tag("text", text, x=f"{place:.1f}", y=f"{base:.1f}", text_anchor=anchor)]
    return []


def _overlap(one: Box, other: Box) -> bool:
    return one[0] < other[2] and other[0] < one[2] and one[1] < other[3] and other[1] < one[3]


def _short(name: str) -> str:
    return name if len(name) <= LONGEST else f"{name[: LONGEST - 1]}…"
