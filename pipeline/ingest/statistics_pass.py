"""Pass 1: measures every feature over the train rows, in partial results that merge in any order.

``Partial`` counts one set of typed rows; ``SplitCounts`` sends every block's rows to train, validation, test, or (split
by day) to the days that may yet turn out to be the last ones.
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
from pipeline.ingest.duplicate_rate import Contents, row_hashes
from pipeline.ingest.event_columns import Lengths, left_out_column
from pipeline.ingest.ids import Coded, coded_ids, of_bits, without_hashes
from pipeline.ingest.labels import kept, sums, typed
from pipeline.ingest.moments import Moments, lengths_of, measure, moments_of, quantised_moments
from pipeline.ingest.schema import CONTENT, DAY, DataSpec, DenseSpec
from pipeline.ingest.sketch import Sketch
from pipeline.ingest.times import HOUR, HOURS_PER_DAY, TimeSplit
from pipeline.records.dataset import LABEL, ROW_WEIGHT, VALIDATION
from pipeline.specs.id_mapping import Counts, IdCounts


class Partial:
    """Counts and moments of one set of typed rows. ``labels``: those of further tasks, of weights and of ``sums``."""

    def __init__(self, spec: DataSpec) -> None:
        self.spec = spec
        self.rows = 0
        self.positives = 0
        self.raw, self.prepared, self.sketches = dict[str, Moments](), dict[str, Moments](), dict[str, Sketch]()
        for dense in spec.dense:
            self.raw[dense.name] = Moments()
            self.sketches[dense.name] = Sketch()
            if dense.logarithmic or dense.clip:
                self.prepared[dense.name] = Moments()
        self.labels = {typed(task.name): Moments() for task in spec.tasks}
        if spec.row_weight:
            self.labels[ROW_WEIGHT] = Moments()
        self.sums = sums(spec)
        for name in self.sums:
            self.labels[name] = Moments()
        self.lengths = {sequence.name: Lengths() for sequence in spec.sequences}
        self.missing, self.lookups, self.counts = dict[str, int](), dict[str, int](), dict[str, Counts]()
        vocabularies = sum(sparse.mapping.vocabulary for sparse in spec.sparse)
        for sparse in spec.sparse:
            self.missing[sparse.name] = self.lookups[sparse.name] = 0
            self.counts[sparse.name] = sparse.mapping.counts(sparse, vocabularies)

    def add(self, frame: pl.DataFrame, coded: dict[str, Coded], keep: np.ndarray | None = None) -> None:
        """Count typed rows.

        Args:
            frame: typed rows of a block.
            coded: ids of ``frame`` by feature, except for features that are numbers.
            keep: bool [rows], which of them to count; None counts all.
        """
        rows = None if keep is None else pl.Series(keep)
        # Numbers are filtered some columns at a time, because in a wide log all at once would be a copy of the block.
        others = without_hashes(frame, coded).select(~cs.starts_with("dense:"))
        if rows is not None:
            others = others.filter(rows)
        self.rows += others.height
        self.positives += int(others[LABEL].sum())
        self._add_moments(frame, rows)
        if self.labels:
            expressions = [self.sums.get(name, pl.col(name).cast(pl.Float64)) for name in self.labels]
            for target, moments in zip(self.labels.values(), measure(others, expressions), strict=True):
                target.merge(moments)

        labels = others[LABEL].to_numpy()
        for dense in self.spec.dense:
            column = _filtered(frame, dense, rows)[f"dense:{dense.name}"]
            # A sketch counts numbers, so a vector is represented by its length.
            values = lengths_of(column) if dense.vector else column.to_numpy()
            self.sketches[dense.name].add(values, labels)
        for sparse in self.spec.sparse:
            counts = self.counts[sparse.name]
            if isinstance(counts, BinCounts):
                hashes = others[f"hash:{sparse.name}"]
                self.lookups[sparse.name] += others.height
                self.missing[sparse.name] += hashes.null_count()
                counts.sketch.add(of_bits(hashes), labels)
            else:
                assert isinstance(counts, IdCounts)
                ids = coded[sparse.name]
                lookups, first, missing = ids.counts(keep)
                self.missing[sparse.name] += missing
                self.lookups[sparse.name] += int(lookups.sum()) + missing
                seen = lookups > 0
                texts = frame[f"id:{sparse.name}"]
                if sparse.multi:
                    texts = texts.explode(empty_as_null=True)
                counts.add(ids.hashes[seen], texts[first[seen]], lookups[seen])
        for sequence in self.spec.sequences:
            lists = frame[f"id:{sequence.features[0]}"]
            if rows is not None:
                lists = lists.filter(rows)
            left_out, column_name = 0, left_out_column(sequence.name)
            if column_name in others.columns:
                left_out = int(others[column_name].sum())
            self.lengths[sequence.name].add(lists, left_out)

    def _add_moments(self, frame: pl.DataFrame, rows: pl.Series | None) -> None:
        numbers = []
        for dense in self.spec.dense:
            if not dense.vector:
                numbers.append(dense)
                continue
            moments, prepared = moments_of(_filtered(frame, dense, rows)[f"dense:{dense.name}"], dense)
            self.raw[dense.name].merge(moments)
            if dense.name in self.prepared:
                self.prepared[dense.name].merge(prepared)
        raw = measure(frame, [pl.col(f"dense:{dense.name}") for dense in numbers], rows)
        for dense, moments in zip(numbers, raw, strict=True):
            self.raw[dense.name].merge(moments)
            if dense.name in self.prepared:
                self.prepared[dense.name].merge(quantised_moments(_filtered(frame, dense, rows), dense))

    def merge(self, other: Partial) -> None:
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
        """Return ``count`` partials that add up to this one: ids by ranges of their hashes, all else in the first."""
        parts = [self.without_counts()]
        for _ in range(count - 1):
            parts.append(Partial(self.spec))
        for name, counts in self.counts.items():
            # Only counts of single ids are divided. Others return one share, which goes to the first part.
            for part, share in zip(parts, counts.shares(count), strict=False):
                part.counts[name] = share
        return parts

    def without_counts(self) -> Partial:
        """Return everything except the counts of ids."""
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
        self.rows += len(labels)
        self.positives += int(labels.sum())

    def merge(self, other: Tally) -> None:
        self.rows += other.rows
        self.positives += other.positives


@dataclass
class _Day:
    """A day that may become a test day, with the counts of its rows if it does not."""

    train: Partial
    validation: Tally


class SplitCounts:
    """The split and what was counted of its train rows.

    ``test``: whether all rows are test rows, or none, if whole days are ingested one after the other; None if that
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
        """Split and count a block of typed rows.

        Args:
            frame: typed rows.
            coded: their ids by feature, except for features that are numbers.
            places: hashes (uint64 [rows]) of the rows' files and numbers, if the split goes by them.

        Returns:
            Which rows are in which split.
        """
        hashes = self._split_hashes(frame, places)
        validation = self._validation_rows(frame, hashes)
        share = self.spec.sampling.negatives
        stay = None
        if share is not None and hashes is not None:
            stay = kept(hashes, frame[LABEL], share)
        if self.split.by == "day" and self.test is None:
            self._add_days(frame, coded, validation)
            return RowSplits(None, validation, stay)

        if self.test is not None:
            test = pl.Series([self.test]).new_from_index(0, frame.height)
        elif self.cut is not None:
            test = self.cut.is_test(frame)
        elif self.split.by == "hours":
            test = frame[HOUR] >= HOURS_PER_DAY - self.split.test_hours
        else:
            assert hashes is not None
            test = hash_split(hashes, self.split.test_share)
        labels = frame[LABEL]
        self.tested.add(labels.filter(test))
        train = ~test
        in_gap = None
        if self.cut is not None:
            in_gap = self.cut.is_left_out(frame)
        if in_gap is not None:
            self.gap.add(labels.filter(in_gap))
            train = train & ~in_gap
        if validation is not None:
            validation = validation & train
            self.validation.add(labels.filter(validation))
            train = train & ~validation
        if not self.test:
            self.train.add(frame, coded, train.to_numpy())
        return RowSplits(test, validation, stay, in_gap)

    def _split_hashes(self, frame: pl.DataFrame, places: np.ndarray | None) -> np.ndarray | None:
        # Returns the hashes for the hash split, validation shares and sampling; None if nothing needs them.
        by_hash = self.split.by == "hash" and self.test is None
        samples = self.spec.sampling.negatives is not None
        if self.test or not (by_hash or self.split.validation_share or samples):
            return None
        if places is not None:
            return places
        # CONTENT is the hash of the row as delivered, so leaving out features moves no row to another split.
        hashes = frame[CONTENT].to_numpy() if CONTENT in frame.columns else row_hashes(frame, self.spec)
        self.contents.add(hashes)
        return hashes

    def _validation_rows(self, frame: pl.DataFrame, hashes: np.ndarray | None) -> pl.Series | None:
        # Returns the rows that are validation rows unless they turn out to be test rows.
        split = self.split
        if self.test or not split.validates:
            return None
        if split.validation_hours:
            # Only the last day of a range is split by its hours. The others are train days.
            if self.test is not None:
                return None
            return frame[HOUR] >= HOURS_PER_DAY - split.test_hours - split.validation_hours
        assert hashes is not None
        below = split.validation_share
        if split.by == "hash" and self.test is None:
            # The share is one of the rows that are not test rows; their hashes lie above those of test rows.
            below = split.test_share + split.validation_share * (1.0 - split.test_share)
        return hash_split(hashes, below)

    @property
    def needs_places(self) -> bool:
        """Whether the hash split should go by place: most rows repeat, so it would hold out contents, not rows."""
        splits_by_hash = self.split.by == "hash" and self.split.test_share > 0
        samples = self.spec.sampling.negatives is not None
        uses_hashes = splits_by_hash or self.split.validation_share > 0 or samples
        return not self.by_place and uses_hashes and self.contents.repeats

    def _add_days(self, frame: pl.DataFrame, coded: dict[str, Coded], validation: pl.Series | None) -> None:
        # Only the last `test_days` days seen so far can be test days: all before them are train, and added at once.
        # A log may have thousands of days, and each addition looks at the whole block.
        days = frame[DAY].to_numpy()
        held_out = np.zeros(frame.height, bool)
        if validation is not None:
            held_out = validation.to_numpy()
        present = np.unique(days).tolist()
        last = sorted({*self.days, *present})[-self.split.test_days :]
        older = days < last[0]
        if older.any():
            self.train.add(frame, coded, older & ~held_out)
            self.validation.add(frame[LABEL].filter(pl.Series(older & held_out)))
        # Sort rows by day, and number their ids anew, so that a day costs its own rows and not those of the block.
        order = np.argsort(days, kind="stable")
        ordered = days[order]
        starts, ends = np.searchsorted(ordered, last), np.searchsorted(ordered, last, side="right")
        for day, start, end in zip(last, starts, ends, strict=True):
            if start == end:
                continue
            rows, counted = order[start:end], self._counts_of_day(day)
            train = frame[rows[~held_out[rows]]]
            if train.height:
                counted.train.add(train, coded_ids(train, self.spec))
            counted.validation.add(frame[LABEL].gather(rows[held_out[rows]]))
        self._finalize_days()

    def _counts_of_day(self, day: int) -> _Day:
        return self.days.setdefault(day, _Day(Partial(self.spec), Tally()))

    def _finalize_days(self) -> None:
        while len(self.days) > self.split.test_days:
            oldest = self.days.pop(min(self.days))
            self.train.merge(oldest.train)
            self.validation.merge(oldest.validation)

    def merge(self, other: SplitCounts) -> None:
        """Add the counts of ``other``, of other blocks or of the next day."""
        self.train.merge(other.train)
        for day, part in other.days.items():
            counted = self._counts_of_day(day)
            counted.train.merge(part.train)
            counted.validation.merge(part.validation)
        self._finalize_days()
        self.validation.merge(other.validation)
        self.tested.merge(other.tested)
        self.gap.merge(other.gap)
        self.contents.merge(other.contents)

    def shares(self, count: int) -> list[SplitCounts]:
        """Return ``count`` counts that merge to this one: ids by ranges of their hashes, all else in the first."""
        parts = list[SplitCounts]()
        for share in self.train.shares(count):
            part = copy.copy(self)
            part.train, part.days = share, {}
            if parts:
                part.validation, part.tested, part.gap, part.contents = Tally(), Tally(), Tally(), Contents()
            parts.append(part)
        for day, counted in self.days.items():
            validation = counted.validation
            for part, share in zip(parts, counted.train.shares(count), strict=True):
                part.days[day] = _Day(share, validation)
                # Everything but counts of ids stays with the first part.
                validation = Tally()
        return parts

    def without_counts(self) -> SplitCounts:
        part = copy.copy(self)
        part.train, part.days = self.train.without_counts(), {}
        for day, counted in self.days.items():
            part.days[day] = _Day(counted.train.without_counts(), counted.validation)
        return part

    @property
    def first_test_day(self) -> int:
        """The first test day of a split by the rows' day, once all blocks were added; later days are test days, too."""
        return min(self.days, default=0)

    @property
    def has_train_rows(self) -> bool:
        """Whether there are rows to fit on: the last days of a range that is split by time may have none."""
        return not self.test and (self.cut is None or self.train.rows > 0)

    @property
    def rows(self) -> dict[str, int]:
        held = sum(day.train.rows + day.validation.rows for day in self.days.values())
        return self._by_split(self.train.rows, self.validation.rows, self.tested.rows + held)

    @property
    def positives(self) -> dict[str, int]:
        held = sum(day.train.positives + day.validation.positives for day in self.days.values())
        return self._by_split(self.train.positives, self.validation.positives, self.tested.positives + held)

    def _by_split(self, train: int, validation: int, test: int) -> dict[str, int]:
        splits = {"train": train}
        if self.split.validates:
            splits[VALIDATION] = validation
        splits["test"] = test
        return splits


def hash_split(hashes: np.ndarray, test_share: float) -> pl.Series:
    """Return a mask: True for the share of rows whose hash falls below ``test_share`` of its range."""
    return pl.Series((hashes >> np.uint64(32)) < np.uint64(round(test_share * 2.0**32)))


def _filtered(frame: pl.DataFrame, dense: DenseSpec, rows: pl.Series | None) -> pl.DataFrame:
    column = frame.select(f"dense:{dense.name}")
    if rows is None:
        return column
    return column.filter(rows)
