"""Where a number's values are cut into bins: by their counts alone, or by what the label says of them."""

from __future__ import annotations

import heapq
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from pipeline.config.features import MDL
from pipeline.ingest.sketch import Sketch, lower_edges

Counts = NDArray[np.int64]


def bin_bounds(sketch: Sketch, by: str, bins: int) -> NDArray[np.float64]:
    """Bounds of at most ``bins`` bins of the values that ``sketch`` counted: float64, rising, none twice.

    ``by``: ``mdl`` or ``percentile``. A value's bin is the number of bounds that are not above it.
    """
    return mdl_bounds(sketch, bins) if by == MDL else sketch.bounds(bins)


@dataclass(frozen=True)
class _BucketSplit:
    """Buckets [start, end) cut before ``at``; ``saved``: bits that the cut saves in the description of the labels."""

    start: int
    end: int
    at: int
    saved: float


def mdl_bounds(sketch: Sketch, bins: int) -> NDArray[np.float64]:
    """Bounds between which the click rate differs by more than chance (Fayyad and Irani 1993, "Multi-Interval
    Discretization of Continuous-Valued Attributes for Classification Learning", sections 3 and 5).

    Values are cut in two where the entropy of the labels falls most, and the parts again, as long as a cut shortens the
    description of the labels (the minimum description length principle). The cut that saves most comes first, so
    ``bins`` keeps the best ones. Cuts lie between buckets of the sketch: exact where values differ by more than 0.8 %,
    as whole numbers up to 256 do. No bounds: the values alone tell nothing of the label.
    """
    rows, clicks = (np.concatenate([[0], np.cumsum(each)]) for each in (sketch.rows, sketch.clicks))
    waiting = [*_ranked(rows, clicks, 0, len(sketch.used))]
    cuts = list[int]()
    while waiting and len(cuts) < bins - 1:
        _, _, cut = heapq.heappop(waiting)
        cuts.append(cut.at)
        for part in ((cut.start, cut.at), (cut.at, cut.end)):
            for ranked in _ranked(rows, clicks, *part):
                heapq.heappush(waiting, ranked)
    return lower_edges()[sketch.used[np.sort(np.array(cuts, np.int64))]]


def _ranked(rows: Counts, clicks: Counts, start: int, end: int) -> list[tuple[float, int, _BucketSplit]]:
    # The best cut of buckets [start, end), to be sorted by falling savings; nothing where none is worth its bits.
    if end - start < 2:
        return []
    places = np.arange(start + 1, end)
    low = _bits(rows[places] - rows[start], clicks[places] - clicks[start])
    high = _bits(rows[end] - rows[places], clicks[end] - clicks[places])
    best = int(np.argmin(low + high))
    at, count, clicked = int(places[best]), int(rows[end] - rows[start]), int(clicks[end] - clicks[start])
    whole = float(_bits(np.array([count]), np.array([clicked]))[0])
    classes = [_classes(count, clicked)]
    entropies = [whole / count]
    for first, last, bits in ((start, at, low[best]), (at, end, high[best])):
        size = int(rows[last] - rows[first])
        classes.append(_classes(size, int(clicks[last] - clicks[first])))
        entropies.append(float(bits) / size)
    delta = np.log2(3.0 ** classes[0] - 2) - (
        classes[0] * entropies[0] - classes[1] * entropies[1] - classes[2] * entropies[2]
    )
    saved = whole - float(low[best] + high[best]) - float(np.log2(count - 1) + delta)
    return [(-saved, at, _BucketSplit(start, end, at, saved))] if saved > 0 else []


def _classes(rows: int, clicks: int) -> int:
    return (clicks > 0) + (clicks < rows)


def _bits(rows: Counts, clicks: Counts) -> NDArray[np.float64]:
    # Bits of the labels of parts [n] with so many `rows` and `clicks`: rows times the entropy of their labels.
    total = np.zeros(len(rows))
    for part in (clicks, rows - clicks):
        share = part / rows
        total -= part * np.log2(share, out=np.zeros(len(rows)), where=part > 0)
    return total
