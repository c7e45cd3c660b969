"""Pictures of an assignment to towers as inline SVG: the similarity heat map and the tower map. All text is escaped."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from pipeline.report import units

SIDE, MARGIN, PAD = 440, 74, 14
MOST_CELLS = 96  # on a side; more features are averaged into as many
MOST_LABELS = 64
LONGEST = 11
COLOURS = 7
DOT, SMALL_DOT, LETTER = 8.0, 5.0, 6.2  # pixels: radius of a point with and without a label, width of a letter

Matrix = Sequence[Sequence[float]]
Box = tuple[float, float, float, float]


def heat_map(names: Sequence[str], towers: Sequence[int], similarity: Matrix) -> str:
    """``similarity`` [F][F] as cells from faint (least alike) to strong; rows tower after tower, lines between them."""
    order = sorted(range(len(names)), key=lambda index: (towers[index], index))
    bins = _bins(order)
    low, high = _range(similarity)
    size, labelled = SIDE / len(bins), len(bins) == len(order) <= MOST_LABELS
    body = []
    for row, left in enumerate(bins):
        for column, right in enumerate(bins):
            value = _mean(similarity, left, right)
            if value is not None:
                words = f"{_words(names, left)} and {_words(names, right)}: {units.decimal(value, 2)}"
                body.append(_cell(MARGIN + column * size, MARGIN + row * size, size, value, low, high, words))
    body += _cuts(bins, towers, size)
    if labelled:
        body += _edge_labels([names[index] for index in order], size)
    body.append(_scale(low, high))
    free = 0 if labelled else MARGIN - PAD  # the room of labels
    width, height = MARGIN + SIDE + PAD - free, MARGIN + SIDE + 46 - free
    return _drawing(body, width, height, "Similarity of every pair of features", free)


def tower_map(names: Sequence[str], towers: Sequence[int], placement: Matrix) -> str:
    """Every feature where the placement has it, in the colour and with the number of its tower."""
    width = MARGIN + SIDE + PAD
    low = [min(point[axis] for point in placement) for axis in (0, 1)]
    span = max(*(max(point[axis] for point in placement) - low[axis] for axis in (0, 1)), 1e-9)
    room = width - 2 * (DOT + PAD + 20)
    spots = []
    for point in placement:
        x, y = (width / 2 + (point[a] - low[a] - _extent(placement, a) / 2) * room / span for a in (0, 1))
        spots.append((x, y))
    taken: list[Box] = [(x - DOT, y - DOT, x + DOT, y + DOT) for x, y in spots]
    body, labelled = [], len(names) <= MOST_LABELS
    radius, letters = (DOT, 10) if labelled else (SMALL_DOT, 7)
    for name, tower, (x, y) in zip(names, towers, spots, strict=True):
        body.append(
            f'<g><circle class="c{tower % COLOURS}" cx="{x:.1f}" cy="{y:.1f}" r="{radius}"/>'
            f'<text class="inside" style="font-size:{letters}px" x="{x:.1f}" y="{y + letters / 3:.1f}" '
            f'text-anchor="middle">{tower}</text><title>{escape(f"{name}, tower {tower}")}</title></g>'
        )
        if labelled:
            body.append(_spot_label(_short(name), x, y, width, taken))
    return _drawing(body, width, width, "Features in the plane by tower")


def _extent(placement: Matrix, axis: int) -> float:
    values = [point[axis] for point in placement]
    return max(values) - min(values)


def _bins(order: Sequence[int]) -> list[list[int]]:
    """``order`` cut into at most MOST_CELLS pieces."""
    count = min(len(order), MOST_CELLS)
    return [list(order[i * len(order) // count : (i + 1) * len(order) // count]) for i in range(count)]


def _range(similarity: Matrix) -> tuple[float, float]:
    off = [value for i, row in enumerate(similarity) for j, value in enumerate(row) if i != j]
    return min(off, default=0.0), max(off, default=1.0)


def _mean(similarity: Matrix, left: Sequence[int], right: Sequence[int]) -> float | None:
    """Mean over pairs of two bins, a feature with itself left out; None where there is no pair."""
    values = [similarity[i][j] for i in left for j in right if i != j]
    return sum(values) / len(values) if values else None


def _cell(x: float, y: float, size: float, value: float, low: float, high: float, words: str) -> str:
    share = (value - low) / (high - low) if high > low else 0.5
    return (
        f'<rect class="cell" x="{x:.2f}" y="{y:.2f}" width="{size:.2f}" height="{size:.2f}" '
        f'fill-opacity="{0.04 + 0.96 * min(max(share, 0.0), 1.0):.2f}"><title>{escape(words)}</title></rect>'
    )


def _words(names: Sequence[str], members: Sequence[int]) -> str:
    return names[members[0]] if len(members) == 1 else f"{names[members[0]]} to {names[members[-1]]}"


def _cuts(bins: Sequence[Sequence[int]], towers: Sequence[int], size: float) -> list[str]:
    """Lines where one tower ends and the next begins."""
    first = [towers[members[0]] for members in bins]
    out = []
    for index in range(1, len(first)):
        if first[index] != first[index - 1]:
            at = MARGIN + index * size
            out.append(
                f'<path class="cut" d="M{MARGIN} {at:.1f} H{MARGIN + SIDE} M{at:.1f} {MARGIN} V{MARGIN + SIDE}"/>'
            )
    return out


def _edge_labels(names: Sequence[str], size: float) -> list[str]:
    out, letters = [], f"font-size:{min(11.0, size * 0.82):.1f}px"
    for index, name in enumerate(names):
        at = MARGIN + (index + 0.5) * size
        shown = f"{escape(_short(name))}<title>{escape(name)}</title>"
        out.append(f'<text x="{MARGIN - 5}" y="{at + 3.2:.1f}" text-anchor="end" style="{letters}">{shown}</text>')
        turn = f'transform="translate({at + 3.2:.1f} {MARGIN - 5}) rotate(-90)"'
        out.append(f'<text {turn} style="{letters}">{shown}</text>')
    return out


def _scale(low: float, high: float) -> str:
    """What the strengths mean: ten steps from the lowest to the highest value."""
    y, step = MARGIN + SIDE + 14, 16
    x = MARGIN + 40
    cells = "".join(_cell(x + i * step, y, step, i / 9, 0.0, 1.0, "") for i in range(10))
    return (
        f'<text x="{x - 6}" y="{y + 12}" text-anchor="end">{units.decimal(low, 2)}</text>{cells}'
        f'<text x="{x + 10 * step + 6}" y="{y + 12}">{units.decimal(high, 2)}</text>'
    )


def _spot_label(text: str, x: float, y: float, width: float, taken: list[Box]) -> str:
    """``text`` beside a point where nothing else is; left out where there is no such place."""
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
            return f'<text x="{place:.1f}" y="{base:.1f}" text-anchor="{anchor}">{escape(text)}</text>'
    return ""


def _overlap(one: Box, other: Box) -> bool:
    return one[0] < other[2] and other[0] < one[2] and one[1] < other[3] and other[1] < one[3]


def _short(name: str) -> str:
    return name if len(name) <= LONGEST else f"{name[: LONGEST - 1]}…"


def _drawing(body: Sequence[str], width: float, height: float, label: str, start: float = 0) -> str:
    box = f"{start} {start} {width} {height}"
    head = f'<svg class="plot" viewBox="{box}" role="img" aria-label="{escape(label)}">'
    return f"{head}{''.join(body)}</svg>"
