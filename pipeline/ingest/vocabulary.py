"""Ids that stay: the vocabulary of a feature, continued from day to day.

On the first build ids are ranked by falling count, later ones are appended in the same order. An id keeps its row until
it was not seen for ``evict_after_days``, or until the table is full and an id without a row is looked up more: the row
then becomes that id's. Ids that are too rare, or for which there is no row, wait as candidates with their counts, the
most frequent ``kept_ids`` of them.

An id's heat is how much it is looked up now: its lookups, each of which counts for a tenth less with every day.

Mapping ``learned`` decides which ids share a row (Learning to Collide, arXiv 2203.15837). Frequent ids have rows of
their own. A factorisation machine (Rendle 2010) with a few dimensions, trained briefly on some of the train rows, tells
which of the other ids are alike: a k-d tree over its weights cuts them into as many cells of equal lookups as there are
rows for them. What it learns about an id that was seen a few times is mostly chance, and grouping by that would fit
the train rows and nothing else. So an id counts only if more than half of its observed effect is its own
(empirical Bayes, Efron and Morris 1975); the others, and those never seen, hash into the rest of the rows. The
clustering is our own design; the paper gives none.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

import numpy as np
import polars as pl

from pipeline.core.errors import ConfigError
from pipeline.ingest.counts import kept_ids
from pipeline.ingest.ids import flat_hashes, ids_per_row
from pipeline.records.dataset import LABEL, RESERVED_ROWS
from pipeline.specs.id_mapping import FittedMapping, FittingDay, MappedFeature, id_columns, id_table, no_rows_freed

# Days after which candidates are forgotten if nothing is evicted.
FORGET_AFTER_DAYS = 30
# Share of its heat that an id has left after a day: half after a week. A smaller share follows new ids sooner and
# resets more rows: with 2 % new ids a day, 0.5 replaced 28 % of a full table every night, 0.9 replaces 7 % and serves
# as many lookups.
COOLING = 0.9
# Heat that is left, by days of age. Computed by products and not powers, because every machine rounds them alike.
_LEFT = np.multiply.accumulate(np.concatenate([[1.0], np.full(400, COOLING)]))


def empty() -> FittedMapping:
    """Return a vocabulary without ids."""
    return FittedMapping(ids=pl.DataFrame(schema=id_columns()), rows=RESERVED_ROWS, freed=no_rows_freed())


def _ranked(ids: pl.DataFrame) -> pl.DataFrame:
    # Ties go by hash: any order will do, as long as it is always the same.
    return ids.sort(["count", "hash"], descending=[True, False])


def updated(
    mapping: FittedMapping, counts: pl.DataFrame, feature: MappedFeature, day: int | None, first_day: int
) -> FittedMapping:
    """Update ``mapping`` by the train lookups ``counts`` (hash, id, count) of one day.

    ``first_day``: that of the dataset that is being made. A row whose id was seen on an earlier day of the dataset gets
    no other id, because one training must not see two ids in a row. ConfigError if the table has more rows than
    ``feature`` allows.
    """
    if mapping.rows > feature.rows:
        raise ConfigError(
            f"data.sparse.{feature.name}.rows is {feature.rows:,}, but its mapping has {mapping.rows:,} rows already",
            hint=f"data.sparse.{feature.name}.rows={mapping.rows}, or data.mapping_from=null for a new mapping",
        )
    assert mapping.ids is not None and mapping.freed is not None
    ids = mapping.ids
    if day is not None:
        # Ids of a log without days were last seen the day before: they age from then on.
        ids = ids.with_columns(pl.col("last_day").fill_null(day - 1))
    ids, freed = _evicted(_counted(ids, counts, day), feature, day)
    freed = pl.concat([mapping.freed, freed])
    # Without days, a dataset is fitted only once.
    in_use = pl.lit(day is not None) & (pl.col("last_day") >= first_day)
    held = freed.filter(in_use)["row"]
    used = mapping.ids.filter(in_use)["row"].drop_nulls()
    now = _admitted(replace(mapping, ids=ids, freed=freed), feature, held)
    if feature.when_full == "replace":
        now = _replaced(now, feature, day, used)
    return now


def _counted(ids: pl.DataFrame, counts: pl.DataFrame, day: int | None) -> pl.DataFrame:
    seen = counts.select(
        "id",
        "hash",
        pl.lit(None, pl.Int32).alias("row"),
        "count",
        pl.lit(day, pl.Int32).alias("last_day"),
        pl.col("count").cast(pl.Float64).alias("heat"),
    )
    if ids.is_empty():
        return seen
    # Use min and not first: should two ids share a hash, the result does not depend on the order of blocks.
    ids = ids.with_columns(pl.col("heat").fill_null(pl.col("count").cast(pl.Float64)))
    both = pl.concat([ids.with_columns(_heat(ids, day)), seen.with_columns(now=pl.col("heat"), heat=None)])
    merged = both.group_by("hash").agg(
        pl.min("id"),
        pl.max("row"),
        pl.sum("count"),
        pl.max("last_day"),
        pl.max("heat"),
        pl.sum("now"),
        again=pl.len() > 1,
    )
    # An id that was not seen keeps the heat of its last day, so that it cools only by the days in between.
    heat = pl.when(pl.col("again") | pl.col("heat").is_null()).then(pl.col("now")).otherwise(pl.col("heat"))
    return merged.with_columns(heat.alias("heat")).select(list(id_columns()))


def _heat(ids: pl.DataFrame, day: int | None) -> pl.Series:
    known = ids["heat"].fill_null(ids["count"].cast(pl.Float64)).to_numpy()
    if day is None:
        return pl.Series("now", known)
    age = (day - ids["last_day"].fill_null(day)).clip(0, len(_LEFT) - 1).to_numpy()
    return pl.Series("now", known * _LEFT[age])


def _evicted(ids: pl.DataFrame, feature: MappedFeature, day: int | None) -> tuple[pl.DataFrame, pl.DataFrame]:
    if day is None:
        return ids, no_rows_freed()
    limit = feature.evict_after_days
    # Candidates are forgotten even if nothing is evicted. Otherwise ids that are seen once would pile up day after day.
    waiting, age = pl.col("row").is_null(), day - pl.col("last_day")
    old = waiting & (age > (limit or FORGET_AFTER_DAYS))
    if limit is not None:
        old = old | (age > limit)
    gone = ids.filter(old.fill_null(False))
    if gone.is_empty():
        return ids, no_rows_freed()
    return ids.filter(~old.fill_null(False)), gone.filter(~waiting).sort("row").select(no_rows_freed().columns)


def _admitted(mapping: FittedMapping, feature: MappedFeature, held: pl.Series) -> FittedMapping:
    # Gives rows to the candidates that are frequent enough: free ones, lowest first, then new ones up to the cap.
    ids = mapping.ids
    assert ids is not None
    wanting = _ranked(ids.filter(pl.col("row").is_null() & (pl.col("count") >= feature.min_count)))
    taken = np.zeros(mapping.rows, bool)
    taken[:RESERVED_ROWS] = True
    taken[ids["row"].drop_nulls().to_numpy()] = True
    taken[held.to_numpy()] = True
    free = np.flatnonzero(~taken)
    count = min(wanting.height, len(free) + feature.rows - mapping.rows)
    added = max(count - len(free), 0)
    rows = np.concatenate([free[: count - added], np.arange(mapping.rows, mapping.rows + added)]).astype(np.int32)
    admitted = wanting.head(count).with_columns(pl.Series("row", rows))
    rest = ids.join(admitted.select("hash"), on="hash", how="anti") if count else ids
    waiting = rest.filter(pl.col("row").is_null())
    if waiting.height > (most := kept_ids(feature.rows)):
        rest = pl.concat([rest.filter(pl.col("row").is_not_null()), _ranked(waiting).head(most)])
    return replace(mapping, ids=pl.concat([rest, admitted]).rechunk(), rows=mapping.rows + added)


def _replaced(mapping: FittedMapping, feature: MappedFeature, day: int | None, used: pl.Series) -> FittedMapping:
    # Gives the rows of the coldest ids to the hottest ids that still want one, as long as their owners are colder. Rows
    # in `used` stay. An id that loses its row waits as a candidate.
    assert mapping.ids is not None and mapping.freed is not None
    ids = mapping.ids.with_columns(_heat(mapping.ids, day))
    wanting = ids.filter(pl.col("row").is_null() & (pl.col("count") >= feature.min_count))
    wanting = wanting.sort(["now", "hash"], descending=[True, False])
    if wanting.is_empty():
        return mapping
    cold = ids.filter(pl.col("row").is_not_null() & ~pl.col("row").is_in(used.implode())).sort(["now", "hash"])
    most = min(wanting.height, cold.height)
    # One column falls and the other rises, so the pairs that change places come first.
    count = int((wanting["now"].head(most) > cold["now"].head(most)).sum())
    if not count:
        return mapping
    came, gone = wanting.head(count), cold.head(count)
    rest = mapping.ids.join(pl.concat([came, gone]).select("hash"), on="hash", how="anti")
    parts = [rest, came.with_columns(gone["row"]), gone.with_columns(pl.lit(None, pl.Int32).alias("row"))]
    freed = pl.concat([mapping.freed, gone.sort("row").select(no_rows_freed().columns)])
    changed = pl.concat([part.select(list(id_columns())) for part in parts]).rechunk()
    return replace(mapping, ids=changed, freed=freed, replaced=mapping.replaced + count)


# Share of a table's rows that belong to one id each.
PRIVATE_SHARE = 0.8
# Least share of its rows for ids that were never seen or too seldom.
UNSEEN_SHARE = 0.05
# Train rows that the probe sees.
SAMPLE_ROWS = 1 << 18
DIMENSIONS = 4
EPOCHS = 2
BATCH_ROWS = 2048
RATE = 0.1
LEAST_TRUST = 0.5


def trust_in(counts: np.ndarray, positives: np.ndarray) -> np.ndarray:
    """Return the share of each id's observed effect on the label that is its own and not chance: [n].

    By chance alone, an effect that was seen n times has variance 1 / (n v), where v is the label's variance. The
    variance of all ids' effects beyond that is their own.
    """
    rate = positives.sum() / max(counts.sum(), 1)
    variance = max(rate * (1 - rate), 1e-6)
    effects = (positives - counts * rate) / (np.maximum(counts, 1) * variance)
    own = float((counts * effects**2 - 1 / variance).sum() / max(counts.sum(), 1))
    return counts / (counts + 1 / max(own * variance, 1e-12))


def shared_rows(feature: MappedFeature, counts: pl.DataFrame, probed: pl.DataFrame) -> FittedMapping:
    """Choose which ids share a row of a table; ``counts``: hash, id and count of its ids; ``probed``: from ``probe``.

    An id that the probe has not seen has no weights and no trust.
    """
    table = _ranked(counts)
    usable = feature.rows - RESERVED_ROWS
    spread = max(1, round(usable * UNSEEN_SHARE))
    if table.height <= usable - spread:
        # Every id has a row of its own, and the rows for unseen ids come last.
        first = RESERVED_ROWS + table.height
        ids = id_table(table, np.arange(RESERVED_ROWS, first))
        return FittedMapping(rows=first + spread, ids=ids, freed=no_rows_freed(), spread=(first, spread))
    private = max(min(round(usable * PRIVATE_SHARE), usable - 2), 0)
    learned = table.select("hash").join(probed, on="hash", how="left", maintain_order="left").fill_null(0.0)
    trust, seen = learned["trust"].to_numpy(), table["count"].to_numpy().astype(np.float64)
    alike = np.arange(private, table.height)[trust[private:] > LEAST_TRUST]
    # Ids that are clustered and ids that hash into the rest share the free rows in proportion to their lookups.
    free = usable - private - spread
    share = seen[alike].sum() / seen[private:].sum()
    clusters = min(round(free * share), len(alike)) if len(alike) else 0
    rows = np.full(table.height, -1, np.int64)
    rows[:private] = np.arange(private)
    first = private
    if clusters:
        weights = learned.drop("hash", "trust").to_numpy()[alike] * trust[alike, None]
        rows[alike] = private + cells(weights, seen[alike], clusters)
        first = int(rows.max()) + 1
    # Ids without a row are not stored: like unseen ids, they are spread by their hashes.
    known, first = rows >= 0, RESERVED_ROWS + first
    ids = id_table(table.filter(pl.Series(known)), rows[known] + RESERVED_ROWS)
    return FittedMapping(rows=feature.rows, ids=ids, freed=no_rows_freed(), spread=(first, feature.rows - first))


def cells(points: np.ndarray, weights: np.ndarray, count: int) -> np.ndarray:
    """Return the cell, 0 to at most ``count`` - 1, of each of ``points`` [n, d]: a k-d tree cut at weighted medians."""
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
    """Train briefly on the first SAMPLE_ROWS train rows of ``day``, and return what that says about ids, by feature.

    Columns ``hash``, ``trust`` (share of an id's observed effect that is its own, 0 to 1) and the id's 1 + DIMENSIONS
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
        # The derivative with respect to w is 1, that with respect to v the sum of the other ids' v.
        others = np.repeat(sums[:, 1:], lengths, axis=0) - picked[:, 1:]
        gradient = np.repeat(error, lengths)[:, None] * np.concatenate([np.ones((len(ids), 1)), others], axis=1)

        # An id in several rows of the batch takes one step along the sum of its gradients. Adagrad has two sums an id,
        # one for w and one for all of v.
        order = np.argsort(ids, kind="stable")
        unique, first = np.unique(ids[order], return_index=True)
        total = np.add.reduceat(gradient[order], first)
        self.sums[unique, 0] += total[:, 0] ** 2
        self.sums[unique, 1] += (total[:, 1:] ** 2).mean(axis=1)
        self.table[unique, :1] -= RATE * total[:, :1] / np.sqrt(self.sums[unique, :1])
        self.table[unique, 1:] -= RATE * total[:, 1:] / np.sqrt(self.sums[unique, 1:])

    def probed(self) -> dict[str, pl.DataFrame]:
        # Returns the result of `probe`; weights of dimensions are scaled to what they add to a logit.
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
