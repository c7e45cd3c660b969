"""How mapping ``learned`` decides which ids share a row (Learning to Collide, arXiv 2203.15837).

Frequent ids have rows of their own. A factorisation machine (Rendle 2010) with a few dimensions, trained for a moment
on some of the train rows, tells what the others are like: a k-d tree over its weights cuts them into as many cells of
equal lookups as there are rows for them. What it says of an id that was seen a few times is the luck of its labels:
ids put together by that would fit the train rows and nothing else. So an id counts only where more than half of what
is seen of it is its own (empirical Bayes, Efron and Morris 1975); the others, and those never seen, hash into the rest
of the rows. The clustering is our own design; the paper gives none.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import polars as pl

from pipeline.ingest.ids import flat_hashes, ids_per_row
from pipeline.records.dataset import LABEL, RESERVED_ROWS
from pipeline.specs.id_mapping import FittedMapping, FittingDay, MappedFeature, id_table, no_rows_freed

# Share of a table's rows that belong to one id each.
PRIVATE_SHARE = 0.8
# Share of its rows, at least, for ids that were never seen or too seldom.
UNSEEN_SHARE = 0.05
# Train rows that the probe sees.
SAMPLE_ROWS = 1 << 18
DIMENSIONS = 4
EPOCHS = 2
BATCH_ROWS = 2048
RATE = 0.1
LEAST_TRUST = 0.5


def trust_in(counts: np.ndarray, positives: np.ndarray) -> np.ndarray:
    """Share of each id's observed effect on the label that is its own and not the luck of ``counts`` rows: [n].

    An effect seen n times has variance 1 / (n v) by luck alone, v the label's; what the effects of all ids vary more
    than that is theirs.
    """
    rate = positives.sum() / max(counts.sum(), 1)
    variance = max(rate * (1 - rate), 1e-6)
    effects = (positives - counts * rate) / (np.maximum(counts, 1) * variance)
    own = float((counts * effects**2 - 1 / variance).sum() / max(counts.sum(), 1))
    return counts / (counts + 1 / max(own * variance, 1e-12))


def shared_rows(feature: MappedFeature, counts: pl.DataFrame, probed: pl.DataFrame) -> FittedMapping:
    """Who shares which row of ``feature``'s table; ``counts``: hash, id and count of its ids; ``probed``: of ``probe``.

    An id that the probe has not seen has no weight and no trust.
    """
    table = counts.sort(["count", "hash"], descending=[True, False])
    usable = feature.rows - RESERVED_ROWS
    spread = max(1, round(usable * UNSEEN_SHARE))
    if table.height <= usable - spread:
        rows = np.arange(RESERVED_ROWS, RESERVED_ROWS + table.height)
        first = RESERVED_ROWS + table.height
        return _shared(first + spread, table, rows, first)
    private = max(min(round(usable * PRIVATE_SHARE), usable - 2), 0)
    learned = table.select("hash").join(probed, on="hash", how="left", maintain_order="left").fill_null(0.0)
    trust, seen = learned["trust"].to_numpy(), table["count"].to_numpy().astype(np.float64)
    alike = np.arange(private, table.height)[trust[private:] > LEAST_TRUST]
    free = usable - private - spread
    share = seen[alike].sum() / seen[private:].sum()
    clusters = min(round(free * share), len(alike)) if len(alike) else 0
    rows = np.full(table.height, -1, np.int64)
    rows[:private] = np.arange(private)
    if clusters:
        weights = learned.drop("hash", "trust").to_numpy()[alike] * trust[alike, None]
        rows[alike] = private + cells(weights, seen[alike], clusters)
    first = private + (int(rows.max()) + 1 - private if clusters else 0)
    known = rows >= 0
    return _shared(feature.rows, table.filter(pl.Series(known)), rows[known] + RESERVED_ROWS, RESERVED_ROWS + first)


def _shared(rows: int, table: pl.DataFrame, row: np.ndarray, first: int) -> FittedMapping:
    return FittedMapping(rows=rows, ids=id_table(table, row), freed=no_rows_freed(), spread=(first, rows - first))


def cells(points: np.ndarray, weights: np.ndarray, count: int) -> np.ndarray:
    """Cell, 0 to at most ``count`` - 1, of each of ``points`` [n, d]: a k-d tree, cut at weighted medians."""
    cell = np.zeros(len(points), np.int64)
    open_cells = [(np.arange(len(points)), count)]
    number = 0
    while open_cells:
        inside, budget = open_cells.pop()
        if budget == 1 or len(inside) < 2:
            cell[inside] = number
            number += 1
            continue
        part, weight = points[inside], weights[inside]
        spread = np.average((part - np.average(part, axis=0, weights=weight)) ** 2, axis=0, weights=weight)
        order = inside[np.argsort(part[:, int(spread.argmax())], kind="stable")]
        left = budget // 2
        below = np.cumsum(weights[order])
        cut = int(np.searchsorted(below, below[-1] * left / budget))
        cut = min(max(cut, 1), len(order) - 1)
        open_cells += [(order[cut:], budget - left), (order[:cut], left)]
    return cell


def probe(day: FittingDay) -> dict[str, pl.DataFrame]:
    """What a short training on the first SAMPLE_ROWS train rows of ``day`` says of ids, by feature.

    Columns ``hash``, ``trust`` (how much of what is seen of an id is its own, 0 to 1) and the id's 1 + DIMENSIONS
    weights.
    """
    sample = _IdRows(day.features, day.sample())
    model = _Machine(sample, day.seed)
    for _ in range(EPOCHS):
        for start in range(0, sample.rows, BATCH_ROWS):
            model.step(start, min(start + BATCH_ROWS, sample.rows))
    return model.probed()


class _IdRows:
    """Rows as numbers of ids: row i looks up ids[starts[i]:starts[i + 1]], over all features."""

    def __init__(self, features: Sequence[MappedFeature], frames: Iterable[pl.DataFrame]) -> None:
        parts, self.rows = list[pl.DataFrame](), 0
        for part in frames:
            parts.append(part.select(LABEL, *(f"hash:{feature.name}" for feature in features)))
            self.rows += part.height
            if self.rows >= SAMPLE_ROWS:
                break
        frame = pl.concat(parts).head(SAMPLE_ROWS)
        self.rows, self.size = frame.height, 0
        self.labels = frame[LABEL].to_numpy().astype(np.float64)
        self.hashes: dict[str, np.ndarray] = {}
        ids, rows = [], []
        for feature in features:
            hashes, numbers = np.unique(flat_hashes(frame, feature).fill_null(0).to_numpy(), return_inverse=True)
            ids.append(numbers + self.size)
            rows.append(np.repeat(np.arange(self.rows), ids_per_row(frame, feature)))
            self.hashes[feature.name], self.size = hashes, self.size + len(hashes)
        row = np.concatenate(rows)
        self.ids = np.concatenate(ids)[np.argsort(row, kind="stable")]
        self.starts = np.concatenate([[0], np.cumsum(np.bincount(row, minlength=self.rows))])


class _Machine:
    """Logit = bias + sum of w + half of (square of the sum of v - sum of the squares of v); Adagrad per id."""

    def __init__(self, sample: _IdRows, seed: int) -> None:
        self.sample = sample
        rng = np.random.default_rng([seed, 11])
        self.table = np.zeros((sample.size, 1 + DIMENSIONS))
        self.table[:, 1:] = 0.05 * rng.standard_normal((sample.size, DIMENSIONS))
        self.sums = np.full((sample.size, 2), 1e-2)
        rate = sample.labels.mean().clip(1e-3, 1 - 1e-3)
        self.bias = float(np.log(rate / (1 - rate)))

    def step(self, start: int, stop: int) -> None:
        sample = self.sample
        ends = sample.starts[start : stop + 1]
        ids, offsets = sample.ids[ends[0] : ends[-1]], ends[:-1] - ends[0]
        lengths = np.diff(ends)
        picked = self.table[ids]
        sums = np.add.reduceat(picked, offsets)
        squares = np.add.reduceat(picked[:, 1:] ** 2, offsets).sum(axis=1)
        logits = self.bias + sums[:, 0] + 0.5 * ((sums[:, 1:] ** 2).sum(axis=1) - squares)
        error = 1 / (1 + np.exp(-logits)) - sample.labels[start:stop]
        each = np.repeat(error, lengths)[:, None]
        gradient = each * np.concatenate(
            [np.ones((len(ids), 1)), np.repeat(sums[:, 1:], lengths, axis=0) - picked[:, 1:]], axis=1
        )
        self._apply(ids, gradient)

    def _apply(self, ids: np.ndarray, gradient: np.ndarray) -> None:
        order = np.argsort(ids, kind="stable")
        unique, first = np.unique(ids[order], return_index=True)
        total = np.add.reduceat(gradient[order], first)
        self.sums[unique, 0] += total[:, 0] ** 2
        self.sums[unique, 1] += (total[:, 1:] ** 2).mean(axis=1)
        self.table[unique, :1] -= RATE * total[:, :1] / np.sqrt(self.sums[unique, :1])
        self.table[unique, 1:] -= RATE * total[:, 1:] / np.sqrt(self.sums[unique, 1:])

    def probed(self) -> dict[str, pl.DataFrame]:
        # See `probe`; weights of dimensions are scaled to what they add to a logit.
        sample, scaled = self.sample, self.table.copy()
        sums = np.add.reduceat(self.table[sample.ids][:, 1:], sample.starts[:-1])
        scaled[:, 1:] *= np.sqrt((sums**2).mean(axis=0))
        counts = np.bincount(sample.ids, minlength=sample.size)
        positives = np.bincount(sample.ids, np.repeat(sample.labels, np.diff(sample.starts)), minlength=sample.size)
        frames, first = {}, 0
        for name, hashes in sample.hashes.items():
            own = slice(first, first + len(hashes))
            trust = pl.DataFrame({"hash": hashes, "trust": trust_in(counts[own], positives[own])})
            frames[name] = trust.hstack(pl.DataFrame(scaled[own]))
            first = own.stop
        return frames
