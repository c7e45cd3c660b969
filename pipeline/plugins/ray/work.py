"""What Ray runs on its workers: functions of parts of a log, and the workers that merge counts by ranges of hashes.

Everything that grows with the rows passes between workers. The driver receives only sums, sketches and figures.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import polars as pl
import pyarrow as pa

from pipeline.ingest.blocks import Counted, CountJob, TransformJob, count, train_codes, transformed
from pipeline.ingest.counts import VocabCounts
from pipeline.ingest.output import Encoded, RowsFile, encoded, plain, write_frame
from pipeline.ingest.quality import BINS, TOP, LabelLeakCounts
from pipeline.ingest.schema import SparseSpec
from pipeline.ingest.sources import Block, Source
from pipeline.ingest.statistics_pass import SplitCounts
from pipeline.ingest.transform_pass import FittedState
from pipeline.specs.id_mapping import Counts, FittedMapping, FittingDay
from pipeline.store.artifacts import Draft
from pipeline.store.manifest import FileEntry


@dataclass(frozen=True)
class Answers:
    """What the checks and the profile ask of a feature's counts; ``then`` is for the day that is compared with."""

    kind: str
    distinct: int
    distribution: dict[str, Any]
    curve: tuple[list[int], list[float]]
    shares: np.ndarray | None


def count_part(part: Source, job: CountJob, ranges: int) -> tuple[Any, ...]:
    """Run pass 1 of a part; return figures for the driver, the typed rows of its blocks, and the counts by range."""
    split_counts, blocks, typed = job.empty_counts(), list[Counted](), list[np.ndarray]()
    for block in part.blocks():
        counted, partial, rows = count(block, job)
        split_counts.merge(partial)
        blocks.append(counted)
        if rows:
            typed.append(np.frombuffer(rows, np.uint8))
    return (blocks, typed, *split_counts.shares(ranges))


def look_at(part: Source, work: Callable[[Block], pl.DataFrame]) -> list[bytes]:
    """Return what ``work`` makes of every block, as Arrow IPC."""
    return [work(block).write_ipc(None).getvalue() for block in part.blocks()]


class Merger:
    """Merges counts of ids whose hashes are in one range; the first merger also merges everything else."""

    def __init__(self) -> None:
        self.day: SplitCounts | None = None
        self.total: SplitCounts | None = None

    def begin(self, job: CountJob) -> None:
        self.day = job.empty_counts()

    def merge(self, share: SplitCounts) -> None:
        assert self.day is not None
        self.day.merge(share)

    def figures(self) -> SplitCounts:
        """Return the day without counts of ids, which is what the driver receives."""
        assert self.day is not None
        return self.day.without_counts()

    def close(self) -> None:
        """Add the day to the days before it."""
        assert self.day is not None
        # Do this only after the tables are fitted: a mapping continues the previous one with the counts of this day
        # alone.
        if self.total is None:
            self.total = self.day
        else:
            self.total.merge(self.day)

    def counts(
        self, features: Sequence[SparseSpec], known: pl.Series, then: Mapping[str, Any] | None = None, *, all_days: bool
    ) -> Counts:
        """Return sums, the most frequent ids and the wanted ids of ``features``, which share a table, in this range."""
        split_counts = self.total if all_days else self.day
        assert split_counts is not None
        counts = [split_counts.train.counts[feature.name] for feature in features]
        total = counts[0]
        # Merge into new counts, since those of the single features are needed again.
        if len(counts) > 1:
            total = features[0].mapping.counts(features[0], len(split_counts.spec.sparse))
            for share in counts:
                total.merge(share)
        if not isinstance(total, VocabCounts):
            return total
        return total.condensed(wanted_of(known, then))


def whole(wanted: pl.Series, pieces: Sequence[Counts]) -> Counts:
    """Return the counts of a feature, from those of every range."""
    # Counts that are not a table of ids, such as a sketch, are not divided by hashes: the first piece holds all of
    # them.
    by_id = [piece for piece in pieces if isinstance(piece, VocabCounts)]
    if not by_id:
        return pieces[0]
    return VocabCounts.joined(by_id, wanted)


def fit_mapping(
    feature: SparseSpec, before: FittedMapping | None, day: FittingDay, known: pl.Series, *pieces: Counts
) -> tuple[FittedMapping, FittedMapping, FittedMapping, pl.Series]:
    """Return the mapping of ``feature``: all of it, what pass 2 needs, what the driver needs, and its hashes.

    ``known``: the hashes of the mapping ``before``.
    """
    # Return four results from one task, so that each goes only where it is needed: the driver takes only the third.
    fitted = feature.mapping.fit(feature, whole(known, pieces), before, day)
    return fitted, fitted.applied(), fitted.told(), hashes_of(fitted)


def hashes_of(fitted: FittedMapping) -> pl.Series:
    """Return the hashes of the ids of a mapping; none if it has no ids."""
    if fitted.ids is None:
        return pl.Series([], dtype=pl.UInt64)
    return fitted.ids["hash"]


def wanted_of(known: pl.Series, then: Mapping[str, Any] | None) -> pl.Series:
    """Return the hashes to report whatever their counts: ``known`` ones, and those of the day compared with."""
    named: Sequence[int] = []
    # The feature may have had another mapping on that day, whose keys are not hashes of ids.
    if then is not None and then.get("mapping") == VocabCounts.IDS:
        named = then.get("keys", [])
    return pl.concat([known, pl.Series(named, dtype=pl.UInt64)])


def answers(
    then: Mapping[str, Any] | None, fitted: FittedMapping, missing: int, known: pl.Series, *pieces: Counts
) -> Answers:
    counts = whole(wanted_of(known, then), pieces)
    shares = None
    if then is not None and then.get("mapping") == counts.kind:
        shares = counts.shares_of(then)
    return Answers(
        kind=counts.kind,
        distinct=counts.distinct,
        distribution=counts.distribution(TOP, BINS),
        curve=counts.curve(fitted, missing),
        shares=shares,
    )


def look_alone(
    alone: LabelLeakCounts, first_test_day: int, parts: Sequence[Any]
) -> tuple[LabelLeakCounts, tuple[int, int]]:
    """Return ``alone`` after as many ``parts`` (references to typed rows) as it takes, and its rows and positives."""
    import ray

    # Fetch parts one by one inside the task: as arguments, the typed rows of the whole log would be fetched first.
    for part in parts:
        if alone.enough:
            break
        for typed in ray.get(part):
            alone.add(*train_codes(typed, first_test_day))
    return alone, (alone.rows, alone.positives)


def areas(alone: LabelLeakCounts) -> dict[str, float]:
    """Return the AUC of every sparse feature alone."""
    if not alone.rows:
        return {}
    return {feature.name: alone.auc(feature.name) for feature in alone.spec.sparse}


def transform_part(
    typed: Sequence[np.ndarray], job: TransformJob, folders: Sequence[str], *tables: FittedMapping
) -> tuple[Any, ...]:
    """Run pass 2 of a part; return row counts by folder and rows as Arrow IPC. ``tables``: by ``job.spec.owners``."""
    by_owner = {}
    for column, table in zip(job.spec.owners, tables, strict=True):
        by_owner[column.name] = table
    sparse = {column.name: by_owner[column.owner] for column in job.spec.sparse}
    job = replace(job, state=FittedState(dense=job.state.dense, sparse=sparse))
    blocks = [transformed(block, job) for block in typed]
    heights, parts = list[int](), list[np.ndarray | None]()
    for folder in folders:
        if folder not in blocks[0]:
            heights.append(0)
            parts.append(None)
            continue
        frame = pl.concat([rows[folder] for rows in blocks])
        heights.append(frame.height)
        # The task returns a result for every folder, so an empty one is None.
        parts.append(bytes_of(frame) if frame.height else None)
    return heights, *parts


def bytes_of(frame: pl.DataFrame) -> np.ndarray:
    """Return Arrow IPC in a type that Ray's object store keeps as it is, so that readers on a node share its memory."""
    return np.frombuffer(frame.write_ipc(None, compression="uncompressed").getbuffer(), np.uint8)


def frame_of(data: np.ndarray) -> pl.DataFrame:
    """Read a frame without a copy: the columns stay where ``data`` is."""
    frame = pl.from_arrow(pa.ipc.open_file(pa.py_buffer(data)).read_all())
    assert isinstance(frame, pl.DataFrame)
    return frame


def encode_group(spans: Sequence[tuple[int, int]], compression: str, *parts: np.ndarray) -> Encoded:
    """Encode a row group of the rows (from, to) of each of ``parts``."""
    frames = []
    for part, (start, stop) in zip(parts, spans, strict=True):
        frames.append(frame_of(part)[start:stop])
    return encoded(plain(pl.concat(frames)), compression)


def write_file(
    draft: Draft, name: str, compression: str, sizes: Sequence[int], *groups: Encoded
) -> dict[str, FileEntry]:
    """Write a file of row groups that other tasks have encoded; returns the files of ``draft``, with this one."""
    with draft.open(name) as sink:
        file = RowsFile(sink, groups[0].schema, compression)
        for rows, group in zip(sizes, groups, strict=True):
            file.add([group], rows)
        file.close()
    return draft.files


def write_mapping(
    draft: Draft, feature: SparseSpec, fitted: FittedMapping, compression: str, continued: bool
) -> dict[str, FileEntry]:
    for name, frame in feature.mapping.files(feature.name, fitted, continued=continued).items():
        write_frame(draft, name, frame, compression)
    return draft.files
