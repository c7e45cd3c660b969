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
from dataclasses import dataclass

import numpy as np
import polars as pl

from pipeline.ingest.ids import flat_hashes, ids_per_row
from pipeline.records import LABEL, RESERVED_ROWS
from pipeline.specs.id_mapping import FittedMapping, FittingDay, MappedFeature, id_table, no_rows_freed

PRIVATE_SHARE = 0.8  # of a table's rows that belong to one id each
UNSEEN_SHARE = 0.05  # of its rows, at least, for ids that were never seen or too seldom
SAMPLE_ROWS = 1 << 18  # train rows that the probe sees
DIMENSIONS = 4
EPOCHS = 2
BATCH_ROWS = 2048
RATE = 0.1
LEAST_TRUST = 0.5


@dataclass(frozen=True)
class Probe:
    """What a short training says of ids: by feature, hash (sorted), weights [n, 1 + DIMENSIONS] and trust [n].

    ``trust``: how much of what is seen of an id is its own, 0 to 1.
    """

    hashes: dict[str, np.ndarray]
    weights: dict[str, np.ndarray]
    trust: dict[str, np.ndarray]

    def of(self, feature: str, hashes: np.ndarray) -> np.ndarray:
        """Weights of the ids with these hashes: [n, 1 + DIMENSIONS]; zeros of those the probe has not seen."""
        return self._values(self.weights[feature], feature, hashes)

    def trust_of(self, feature: str, hashes: np.ndarray) -> np.ndarray:
        """Trust of the ids with these hashes: [n]; 0 of those the probe has not seen."""
        return self._values(self.trust[feature][:, None], feature, hashes)[:, 0]

    def _values(self, values: np.ndarray, feature: str, hashes: np.ndarray) -> np.ndarray:
        known = self.hashes[feature]
        if not len(known):
            return np.zeros((len(hashes), values.shape[1]))
        at = np.searchsorted(known, hashes).clip(0, len(known) - 1)
        return np.where((known[at] == hashes)[:, None], values[at], 0.0)


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


def shared_rows(feature: MappedFeature, counts: pl.DataFrame, probe: Probe) -> FittedMapping:
    """Who shares which row of ``feature``'s table; ``counts``: hash, id and count of its ids."""
    table = counts.sort(["count", "hash"], descending=[True, False])
    usable = feature.rows - RESERVED_ROWS
    spread = max(1, round(usable * UNSEEN_SHARE))
    if table.height <= usable - spread:
        rows = np.arange(RESERVED_ROWS, RESERVED_ROWS + table.height)
        first = RESERVED_ROWS + table.height
        return _shared(first + spread, table, rows, first)
    private = max(min(round(usable * PRIVATE_SHARE), usable - 2), 0)
    hashes, seen = table["hash"].to_numpy(), table["count"].to_numpy().astype(np.float64)
    trust = probe.trust_of(feature.name, hashes)
    alike = np.arange(private, table.height)[trust[private:] > LEAST_TRUST]
    free = usable - private - spread
    share = seen[alike].sum() / seen[private:].sum()
    clusters = min(round(free * share), len(alike)) if len(alike) else 0
    rows = np.full(table.height, -1, np.int64)
    rows[:private] = np.arange(private)
    if clusters:
        weights = probe.of(feature.name, hashes[alike]) * trust[alike, None]
        rows[alike] = private + cells(weights, seen[alike], clusters)
    first = private + (int(rows.max()) + 1 - private if clusters else 0)
    known = rows >= 0
    return _shared(feature.rows, table.filter(pl.Series(known)), rows[known] + RESERVED_ROWS, RESERVED_ROWS + first)


def _shared(rows: int, table: pl.DataFrame, row: np.ndarray, first: int) -> FittedMapping:
    """The fit in which the ids of ``table`` have the rows ``row``, and others hash into those from ``first``."""
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


def probe(day: FittingDay) -> Probe:
    """Train the probe on the first SAMPLE_ROWS of the typed train rows of ``day``."""
    sample = _Sample(day.features, day.sample())
    model = _Machine(sample, day.seed)
    for _ in range(EPOCHS):
        for start in range(0, sample.rows, BATCH_ROWS):
            model.step(start, min(start + BATCH_ROWS, sample.rows))
    return model.weights_of(day.features)


class _Sample:
    """Rows as numbers of ids: row i looks up ids[starts[i]:starts[i + 1]], over all features."""

    def __init__(self, features: Sequence[MappedFeature], frames: Iterable[pl.DataFrame]) -> None:
        labels: list[np.ndarray] = []
        self.hashes: dict[str, np.ndarray] = {}
        hashes: dict[str, list[np.ndarray]] = {feature.name: [] for feature in features}
        lengths: dict[str, list[np.ndarray]] = {feature.name: [] for feature in features}
        self.rows = 0
        for frame in frames:
            frame = frame.head(SAMPLE_ROWS - self.rows)
            self.rows += frame.height
            labels.append(frame[LABEL].to_numpy())
            for feature in features:
                hashes[feature.name].append(flat_hashes(frame, feature).fill_null(0).to_numpy())
                lengths[feature.name].append(ids_per_row(frame, feature))
            if self.rows >= SAMPLE_ROWS:
                break
        self.labels = np.concatenate(labels).astype(np.float64) if labels else np.zeros(0)
        self._join(features, hashes, lengths)

    def _join(
        self,
        features: Sequence[MappedFeature],
        hashes: dict[str, list[np.ndarray]],
        lengths: dict[str, list[np.ndarray]],
    ) -> None:
        self.first: dict[str, int] = {}
        ids, rows, total = [], [], 0
        for feature in features:
            self.hashes[feature.name], numbers = np.unique(np.concatenate(hashes[feature.name]), return_inverse=True)
            self.first[feature.name] = total
            ids.append(numbers + total)
            rows.append(np.repeat(np.arange(self.rows), np.concatenate(lengths[feature.name])))
            total += len(self.hashes[feature.name])
        row = np.concatenate(rows)
        self.ids = np.concatenate(ids)[np.argsort(row, kind="stable")]
        self.starts = np.concatenate([[0], np.cumsum(np.bincount(row, minlength=self.rows))])
        self.size = total


class _Machine:
    """Logit = bias + sum of w + half of (square of the sum of v - sum of the squares of v); Adagrad per id."""

    def __init__(self, sample: _Sample, seed: int) -> None:
        self.sample = sample
        rng = np.random.default_rng([seed, 11])
        self.table = np.zeros((sample.size, 1 + DIMENSIONS))
        self.table[:, 1:] = 0.05 * rng.standard_normal((sample.size, DIMENSIONS))
        self.sums = np.full((sample.size, 2), 1e-2)
        rate = sample.labels.mean().clip(1e-3, 1 - 1e-3)
        self.bias = float(np.log(rate / (1 - rate)))

    def step(self, start: int, stop: int) -> None:
        """Train on the rows [start, stop)."""
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

    def weights_of(self, features: Sequence[MappedFeature]) -> Probe:
        """The ids' weights by feature; those of dimensions scaled to what they add to a logit."""
        sample, scaled = self.sample, self.table.copy()
        if sample.rows:
            sums = np.add.reduceat(self.table[sample.ids][:, 1:], sample.starts[:-1])
            scaled[:, 1:] *= np.sqrt((sums**2).mean(axis=0))
        counts = np.bincount(sample.ids, minlength=sample.size)
        labels = np.repeat(sample.labels, np.diff(sample.starts))
        positives = np.bincount(sample.ids, labels, minlength=sample.size)
        weights, trust = {}, {}
        for feature in features:
            first = sample.first[feature.name]
            own = slice(first, first + len(sample.hashes[feature.name]))
            weights[feature.name], trust[feature.name] = scaled[own], trust_in(counts[own], positives[own])
        return Probe(sample.hashes, weights, trust)
