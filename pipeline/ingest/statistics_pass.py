"""Pass 1: what the train rows say about every feature, in partial results that merge in any order.

``Partial`` counts one set of typed rows; ``Fit`` sends every block's rows to train, validation, test, or (split by
day) to the days that may yet turn out to be the last ones.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import polars as pl
import polars.selectors as cs

from pipeline.config.ingest import SplitConfig
from pipeline.ingest.counts import BinCounts
from pipeline.ingest.dictionary_encoding import Coded, coded_ids, without_hashes
from pipeline.ingest.duplicate_rate import Contents, row_hashes
from pipeline.ingest.event_columns import Lengths, left_out_column
from pipeline.ingest.ids import of_bits
from pipeline.ingest.moments import Moments, measure, quantised_moments
from pipeline.ingest.sampling import kept, sums
from pipeline.ingest.schema import DAY, DataSpec, DenseSpec, SparseSpec
from pipeline.ingest.sketch import Sketch
from pipeline.ingest.tasks import typed
from pipeline.ingest.times import HOUR, TimeSplit, test_hours_from
from pipeline.ingest.vectors import lengths_of, moments_of
from pipeline.records.dataset import LABEL, ROW_WEIGHT, VALIDATION
from pipeline.specs.id_mapping import Counts, IdCounts


class Partial:
    """Counts and moments of one set of typed rows. ``labels``: of further tasks' labels and weights, by name."""

    def __init__(self, spec: DataSpec) -> None:
        self.spec = spec
        self.rows = 0
        self.positives = 0
        self.raw = {feature.name: Moments() for feature in spec.dense}
        self.prepared = {feature.name: Moments() for feature in spec.dense if feature.logarithmic or feature.clip}
        self.sketches = {feature.name: Sketch() for feature in spec.dense}
        self.labels = {typed(task.name): Moments() for task in spec.tasks}
        if spec.row_weight:
            self.labels[ROW_WEIGHT] = Moments()
        self.sums = sums(spec)
        self.labels |= {name: Moments() for name in self.sums}
        self.missing = {feature.name: 0 for feature in spec.sparse}
        self.lookups = {feature.name: 0 for feature in spec.sparse}
        self.lengths = {each.name: Lengths() for each in spec.sequences}
        vocabularies = sum(feature.mapping.vocabulary for feature in spec.sparse)
        self.counts: dict[str, Counts] = {
            feature.name: feature.mapping.counts(feature, vocabularies) for feature in spec.sparse
        }

    def add(self, frame: pl.DataFrame, coded: dict[str, Coded], keep: np.ndarray | None = None) -> None:
        """Count the typed rows of ``frame``, or those of ``keep`` (bool [rows]); ``coded``: ids that are no numbers."""
        rows = None if keep is None else pl.Series(keep)
        # Numbers are chosen some columns at a time: of a wide log, all at once would be a copy of the block.
        chosen = without_hashes(frame, coded).select(~cs.starts_with("dense:"))
        chosen = chosen if rows is None else chosen.filter(rows)
        self.rows += chosen.height
        self.positives += int(chosen[LABEL].sum())
        self._add_dense(frame, rows)
        self._add_labels(chosen)
        labels = chosen[LABEL].to_numpy()
        for dense in self.spec.dense:
            column = _of(frame, dense, rows)[f"dense:{dense.name}"]
            self.sketches[dense.name].add(lengths_of(column) if dense.vector else column.to_numpy(), labels)
        for feature in self.spec.sparse:
            counts = self.counts[feature.name]
            if isinstance(counts, BinCounts):
                self.lookups[feature.name] += chosen.height
                self.missing[feature.name] += chosen[f"hash:{feature.name}"].null_count()
                counts.sketch.add(of_bits(chosen[f"hash:{feature.name}"]), labels)
            else:
                self._add_ids(feature, coded[feature.name], frame[f"id:{feature.name}"], keep)

        for sequence in self.spec.sequences:
            ids = frame[f"id:{sequence.features[0]}"]
            left = left_out_column(sequence.name)
            self.lengths[sequence.name].add(
                ids if keep is None else ids.filter(pl.Series(keep)),
                int(chosen[left].sum()) if left in chosen.columns else 0,
            )

    def _add_ids(self, feature: SparseSpec, coded: Coded, ids: pl.Series, keep: np.ndarray | None) -> None:
        counts, first, missing = coded.counts(keep)
        self.missing[feature.name] += missing
        self.lookups[feature.name] += int(counts.sum()) + missing
        seen, target = counts > 0, self.counts[feature.name]
        assert isinstance(target, IdCounts)
        ids = ids.explode(empty_as_null=True) if feature.multi else ids
        target.add(coded.hashes[seen], ids[first[seen]], counts[seen])

    def _add_dense(self, frame: pl.DataFrame, rows: pl.Series | None) -> None:
        for vector in (each for each in self.spec.dense if each.vector):
            moments, prepared = moments_of(_of(frame, vector, rows)[f"dense:{vector.name}"], vector)
            self.raw[vector.name].merge(moments)
            if vector.name in self.prepared:
                self.prepared[vector.name].merge(prepared)
        numbers = [each for each in self.spec.dense if not each.vector]
        raw = measure(frame, [pl.col(f"dense:{each.name}") for each in numbers], rows)
        for each, moments in zip(numbers, raw, strict=True):
            self.raw[each.name].merge(moments)
            if each.name in self.prepared:
                self.prepared[each.name].merge(quantised_moments(_of(frame, each, rows), each))

    def _add_labels(self, frame: pl.DataFrame) -> None:
        moments = (
            measure(frame, [self.sums.get(name, pl.col(name).cast(pl.Float64)) for name in self.labels])
            if self.labels
            else []
        )
        for target, measured in zip(self.labels.values(), moments, strict=True):
            target.merge(measured)

    def merge(self, other: Partial) -> None:
        """Take in what ``other`` counted."""
        self.rows += other.rows
        self.positives += other.positives
        for name, moments in self.raw.items():
            moments.merge(other.raw[name])
        for name, moments in self.prepared.items():
            moments.merge(other.prepared[name])
        for name, moments in self.labels.items():
            moments.merge(other.labels[name])
        for name, sketch in self.sketches.items():
            sketch.merge(other.sketches[name])
        for name, lengths in self.lengths.items():
            lengths.merge(other.lengths[name])
        for name, counts in self.counts.items():
            self.missing[name] += other.missing[name]
            self.lookups[name] += other.lookups[name]
            counts.merge(other.counts[name])

    def shares(self, count: int) -> list[Partial]:
        """``count`` partials that add up to this one: ids by ranges of their hashes, all else in the first."""
        parts = [self.without_counts(), *(Partial(self.spec) for _ in range(count - 1))]
        for name, counts in self.counts.items():
            for part, share in zip(parts, counts.shares(count), strict=False):
                part.counts[name] = share
        return parts

    def without_counts(self) -> Partial:
        """All but the counts of ids."""
        other = copy.copy(self)
        other.counts = {}
        return other

    def finalize(self, wanted: Mapping[str, pl.Series]) -> None:
        """Add up counts that are on disk, so that ids with the hashes ``wanted`` of a feature are told apart."""
        for name, hashes in wanted.items():
            self.counts[name].settle(hashes)


@dataclass(frozen=True)
class RowSplits:
    """Which rows of a block are test rows (None: not known yet), and which of the others are validation rows.

    ``kept``: the rows that stay if they are train rows; None: all. ``left_out``: rows of the gap before the test rows;
    None: none are.
    """

    test: pl.Series | None
    validation: pl.Series | None = None
    kept: pl.Series | None = None
    left_out: pl.Series | None = None


@dataclass
class Tally:
    """Rows, and the clicks among them."""

    rows: int = 0
    positives: int = 0

    def add(self, labels: pl.Series) -> None:
        """Count rows with these ``labels``."""
        self.rows += len(labels)
        self.positives += int(labels.sum())

    def merge(self, other: Tally) -> None:
        """Take in what ``other`` counted."""
        self.rows += other.rows
        self.positives += other.positives


@dataclass
class _Day:
    """A day that may become a test day: what its rows are counted as if it does not."""

    train: Partial
    validation: Tally


class Fit:
    """The split and what was counted of its train rows.

    ``test``: that all rows are test rows, or none, where whole days are ingested one after the other; None where that
    depends on the row. ``by_place``: the hash split goes by a row's file and number, not by its content. ``cut``: of a
    split by time; ``gap``: rows that it leaves out.
    """

    def __init__(
        self, spec: DataSpec, test: bool | None = None, *, by_place: bool = False, cut: TimeSplit | None = None
    ) -> None:
        self.spec = spec
        self.by_place = by_place
        self.cut = cut
        self.contents = Contents()
        self.split: SplitConfig = spec.split
        self.test = test
        self.train = Partial(spec)
        self.days: dict[int, _Day] = {}
        self.validation, self.tested, self.gap = Tally(), Tally(), Tally()

    def add(self, frame: pl.DataFrame, coded: dict[str, Coded], places: np.ndarray | None = None) -> RowSplits:
        """Count a block of typed rows; returns which of them are train rows.

        ``places``: hashes of the rows' files and numbers, where the split goes by them.
        """
        hashes = self._hashes(frame, places)
        looked_at = self._validation_rows(frame, hashes)
        share = self.spec.sampling.negatives
        stay = kept(hashes, frame[LABEL], share) if share is not None and hashes is not None else None
        if self.split.by == "day" and self.test is None:
            self._add_days(frame, coded, looked_at)
            return RowSplits(None, looked_at, stay)
        test = (
            self._test_rows(frame, hashes)
            if self.test is None
            else pl.Series([self.test]).new_from_index(0, frame.height)
        )
        labels = frame[LABEL]
        left_out = None if self.cut is None else self.cut.is_left_out(frame)
        self.tested.add(labels.filter(test))
        rest = ~test
        if left_out is not None:
            self.gap.add(labels.filter(left_out))
            rest = rest & ~left_out
        if looked_at is not None:
            looked_at = looked_at & rest
            self.validation.add(labels.filter(looked_at))
            rest = rest & ~looked_at
        if not self.test:
            self.train.add(frame, coded, rest.to_numpy())
        return RowSplits(test, looked_at, stay, left_out)

    def _hashes(self, frame: pl.DataFrame, places: np.ndarray | None) -> np.ndarray | None:
        by_hash = self.split.by == "hash" and self.test is None
        if self.test or not (by_hash or self.split.validation_share or self._thins):
            return None
        if places is not None:
            return places
        hashes = row_hashes(frame, self.spec)
        self.contents.add(hashes)
        return hashes

    @property
    def _thins(self) -> bool:
        return self.spec.sampling.negatives is not None

    def _test_rows(self, frame: pl.DataFrame, hashes: np.ndarray | None) -> pl.Series:
        if self.cut is not None:
            return self.cut.is_test(frame)
        if self.split.by == "hours":
            return frame[HOUR] >= test_hours_from(self.split.test_hours)
        assert hashes is not None
        return hash_split(hashes, self.split.test_share)

    def _validation_rows(self, frame: pl.DataFrame, hashes: np.ndarray | None) -> pl.Series | None:
        split = self.split
        if self.test or not split.validates:
            return None
        if split.validation_hours:
            first = test_hours_from(split.test_hours + split.validation_hours)
            return frame[HOUR] >= first if self.test is None else None
        assert hashes is not None
        by_hash = split.by == "hash" and self.test is None
        return hash_split(hashes, validation_below(split.validation_share, split.test_share if by_hash else 0.0))

    @property
    def needs_places(self) -> bool:
        """Whether the hash split should go by place: most rows repeat, so it would hold out contents, not rows."""
        splits = (self.split.by == "hash" and self.split.test_share > 0) or self.split.validation_share > 0
        splits = splits or self._thins
        return not self.by_place and splits and self.contents.repeats

    def _add_days(self, frame: pl.DataFrame, coded: dict[str, Coded], looked_at: pl.Series | None) -> None:
        # Only the last `test_days` days seen so far can be test days: all before them are train, and added at once.
        # A log may have thousands of days, and each addition looks at the whole block.
        days = frame[DAY].to_numpy()
        none = np.zeros(frame.height, bool) if looked_at is None else looked_at.to_numpy()
        present = np.unique(days).tolist()
        last = sorted({*self.days, *present})[-self.split.test_days :]
        if (older := days < last[0]).any():
            self.train.add(frame, coded, older & ~none)
            self.validation.add(frame[LABEL].filter(pl.Series(older & none)))
        # Rows in the order of their days, and their ids numbered anew: a day costs its rows, not those of the block.
        order = np.argsort(days, kind="stable")
        ends = np.searchsorted(days[order], [last, [day + 1 for day in last]])
        for day, first, end in zip(last, *ends.tolist(), strict=True):
            if first == end:
                continue
            rows, part = order[first:end], self._of_day(day)
            if (train := frame[rows[~none[rows]]]).height:
                part.train.add(train, coded_ids(train, self.spec))
            part.validation.add(frame[LABEL].gather(rows[none[rows]]))
        self._finalize()

    def _of_day(self, day: int) -> _Day:
        return self.days.setdefault(day, _Day(Partial(self.spec), Tally()))

    def _finalize(self) -> None:
        while len(self.days) > self.split.test_days:
            settled = self.days.pop(min(self.days))
            self.train.merge(settled.train)
            self.validation.merge(settled.validation)

    def merge(self, other: Fit) -> None:
        """Take in what ``other``, of other blocks or of the next day, counted."""
        self.train.merge(other.train)
        for day, part in other.days.items():
            own = self._of_day(day)
            own.train.merge(part.train)
            own.validation.merge(part.validation)
        self._finalize()
        self.validation.merge(other.validation)
        self.tested.merge(other.tested)
        self.gap.merge(other.gap)
        self.contents.merge(other.contents)

    def shares(self, count: int) -> list[Fit]:
        """``count`` fits that merge to this one: ids by ranges of their hashes, all else in the first."""
        fits = [self._with(part) for part in self.train.shares(count)]
        for day, held in self.days.items():
            for fit, part in zip(fits, held.train.shares(count), strict=True):
                fit.days[day] = _Day(part, held.validation if fit is fits[0] else Tally())
        for fit in fits[1:]:
            fit.validation, fit.tested, fit.gap, fit.contents = Tally(), Tally(), Tally(), Contents()
        return fits

    def without_counts(self) -> Fit:
        """All but the counts of ids."""
        fit = self._with(self.train.without_counts())
        fit.days = {day: _Day(held.train.without_counts(), held.validation) for day, held in self.days.items()}
        return fit

    def _with(self, train: Partial) -> Fit:
        other = copy.copy(self)
        other.train, other.days = train, {}
        return other

    @property
    def first_test_day(self) -> int:
        """Where the split is by row's day: rows of it and later ones are test rows, once all blocks were added."""
        return min(self.days, default=0)

    @property
    def fits(self) -> bool:
        """Whether there is anything to fit: the last days of a range that is split by time may have no train rows."""
        return not self.test and (self.cut is None or self.train.rows > 0)

    @property
    def rows(self) -> dict[str, int]:
        """Rows per split."""
        held = sum(part.train.rows + part.validation.rows for part in self.days.values())
        return self._by_split(self.train.rows, self.validation.rows, self.tested.rows + held)

    @property
    def positives(self) -> dict[str, int]:
        """Clicks per split."""
        held = sum(part.train.positives + part.validation.positives for part in self.days.values())
        return self._by_split(self.train.positives, self.validation.positives, self.tested.positives + held)

    def _by_split(self, train: int, validation: int, test: int) -> dict[str, int]:
        return {"train": train, **({VALIDATION: validation} if self.split.validates else {}), "test": test}


def hash_split(hashes: np.ndarray, test_share: float) -> pl.Series:
    """True for the share of rows whose hash falls below ``test_share`` of its range."""
    return pl.Series((hashes >> np.uint64(32)) < np.uint64(round(test_share * 2.0**32)))


def validation_below(share: float, test_share: float) -> float:
    """The share of hashes up to which rows are test or validation rows: ``share`` of those that are not test rows."""
    return test_share + share * (1.0 - test_share)


def _of(frame: pl.DataFrame, dense: DenseSpec, rows: pl.Series | None) -> pl.DataFrame:
    column = frame.select(f"dense:{dense.name}")
    return column if rows is None else column.filter(rows)
