"""Row groups of a dataset's Parquet files as feature-major NumPy columns.

This module knows the dataset's layout (``records.DatasetSchema``), but nothing of batches, ranks or torch. From here
on, ids are row numbers of tables: ingestion has mapped the ids of the log to them.
"""

from __future__ import annotations

import threading
from contextlib import AbstractContextManager, closing, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from pipeline.core.errors import ArtifactError, GuardError
from pipeline.core.retrying import explained, retried
from pipeline.evaluation.metrics import counted_for
from pipeline.records.dataset import (
    LABEL,
    NEGATIVE_RATE,
    RAW,
    ROW_WEIGHT,
    TRANSFORMS,
    TRUE_PROBABILITY,
    UNSEEN,
    UNSEEN_ROW,
    DatasetSchema,
    raw_column,
    task_column,
    unseen_column,
    weight_column,
)
from pipeline.records.record import read
from pipeline.specs.label_kind import LABEL_KINDS
from pipeline.store.artifacts import Store
from pipeline.store.manifest import Artifact

SCHEMA_FILE, PROFILE_FILE = "schema.json", "profile.json"
# The file with a teacher's logits for the rows of a split, and the name of the column that they are read as.
SCORES, TEACHER_LOGIT = "scores.npy", "teacher_logit"


@dataclass(frozen=True)
class RowGroup:
    """One row group: ``index`` within ``file``; its ``rows`` start at row ``first`` of the split."""

    file: str
    index: int
    rows: int
    first: int


@dataclass(frozen=True)
class Ragged:
    """A multi-valued column: row i holds values[offsets[i]:offsets[i + 1]]; ``weights`` go with the values."""

    offsets: np.ndarray
    values: np.ndarray
    weights: np.ndarray | None

    def take(self, rows: np.ndarray) -> Ragged:
        """Return copies of the given ``rows``, in that order."""
        starts = self.offsets[rows]
        lengths = self.offsets[rows + 1] - starts
        offsets = np.concatenate([[0], np.cumsum(lengths)])
        picks = np.arange(offsets[-1]) + np.repeat(starts - offsets[:-1], lengths)
        return Ragged(offsets, self.values[picks], None if self.weights is None else self.weights[picks])

    def cut(self, start: int, stop: int) -> Ragged:
        """Return rows [start, stop) as views of the same memory."""
        first, end = self.offsets[start], self.offsets[stop]
        weights = None if self.weights is None else self.weights[first:end]
        return Ragged(self.offsets[start : stop + 1] - first, self.values[first:end], weights)

    def first(self, most: int) -> Ragged:
        """Return all rows, each with at most its first ``most`` values."""
        lengths = np.diff(self.offsets)
        place = np.arange(self.offsets[-1] - self.offsets[0]) - np.repeat(self.offsets[:-1] - self.offsets[0], lengths)
        offsets = np.concatenate([[0], np.cumsum(np.minimum(lengths, most))])
        kept = place < most
        return Ragged(offsets, self.values[kept], None if self.weights is None else self.weights[kept])


@dataclass
class DecodedColumns:
    """Decoded rows, feature-major: labels [N], dense [n, N], single-valued ids [s, N] int32, ragged by feature name.

    The columns of a sequence are ragged, too.

    ``extra`` [k, N] float32: labels of further tasks, NaN where missing; the teacher's logits, if there is one; then
    row weights and the shares of kept rows without a click, if the dataset has them.
    """

    labels: np.ndarray
    dense: np.ndarray
    single: np.ndarray
    ragged: dict[str, Ragged]
    extra: np.ndarray


def take_each(columns: DecodedColumns, picks: list[np.ndarray]) -> list[DecodedColumns]:
    """Return, for each of ``picks``, copies of those rows in that order; all of them share one allocation.

    Copies one column after the other, so that each stays in the cache while it is read at random.
    """
    more = 1 + len(columns.extra)
    floats = _blocks(np.float32, more + len(columns.dense), picks)
    ids = _blocks(np.int32, len(columns.single), picks)
    for source, targets in (([columns.labels, *columns.extra, *columns.dense], floats), (columns.single, ids)):
        for number, column in enumerate(source):
            for rows, target in zip(picks, targets, strict=True):
                # mode="clip" spares NumPy a buffered copy; the indices are always in range.
                np.take(column, rows, out=target[number], mode="clip")
    taken = []
    for rows, values, numbers in zip(picks, floats, ids, strict=True):
        ragged = {name: column.take(rows) for name, column in columns.ragged.items()}
        taken.append(DecodedColumns(values[0], values[more:], numbers, ragged, values[1:more]))
    return taken


def _blocks(kind: type, columns: int, picks: list[np.ndarray]) -> list[np.ndarray]:
    whole: np.ndarray = np.empty(columns * sum(map(len, picks)), kind)
    blocks, at = [], 0
    for picked in picks:
        end = at + columns * len(picked)
        blocks.append(whole[at:end].reshape(columns, len(picked)))
        at = end
    return blocks


def join(parts: list[DecodedColumns]) -> DecodedColumns:
    """Concatenate the rows of all ``parts``."""
    joined, ragged = dict[str, np.ndarray](), dict[str, Ragged]()
    for kind in ("labels", "dense", "single", "extra"):
        joined[kind] = np.concatenate([getattr(part, kind) for part in parts], axis=-1)
    for name in parts[0].ragged:
        ragged[name] = join_ragged([part.ragged[name] for part in parts])
    return DecodedColumns(ragged=ragged, **joined)


def join_ragged(parts: list[Ragged]) -> Ragged:
    """Concatenate the rows of all ``parts``."""
    lengths, values, weights = list[np.ndarray](), list[np.ndarray](), list[np.ndarray]()
    for part in parts:
        lengths.append(np.diff(part.offsets))
        values.append(part.values)
        if part.weights is not None:
            weights.append(part.weights)
    offsets = np.concatenate([[0], np.cumsum(np.concatenate(lengths))])
    # All parts belong to one column, so either all of them have weights or none.
    return Ragged(offsets, np.concatenate(values), np.concatenate(weights) if weights else None)


class SplitReader:
    """Reads row groups of one split of a committed dataset; safe to use from several threads.

    ``groups_read`` counts decoded groups. Raises ArtifactError for a file that cannot be read, PassingError where the
    store does not answer after several tries, and GuardError for a row number outside its table.

    ``teacher`` is an artifact whose ``scores.npy`` has a teacher's logit for each row of the split, in order.
    """

    def __init__(self, store: Store, dataset: Artifact, split: str, teacher: Artifact | None = None) -> None:
        self.store, self.dataset, self.split = store, dataset, split
        self.schema = schema = read(DatasetSchema, store, f"{dataset.path}/{SCHEMA_FILE}")
        self.groups: list[RowGroup] = []
        self.rows = 0
        for file, sizes in zip(schema.files.get(split, []), schema.groups.get(split, []), strict=True):
            path = file if "/" in file else f"{split}/{file}"
            for index, rows in enumerate(sizes):
                if rows:
                    self.groups.append(RowGroup(path, index, rows, self.rows))
                self.rows += rows
        self.groups_read = 0
        # A file is opened anew for each of its row groups, but its footer is parsed only once.
        self._footers: dict[str, Any] = {}
        self._lock = threading.Lock()
        self._teacher: Any = None if teacher is None else self._read_scores(teacher)

        self.single = [column.name for column in schema.sparse if not column.multi]
        self.multi = [column for column in schema.sparse if column.multi]
        # The order matters: ``DensePart``, ``RowCounts`` and ``counted_for`` count from the front or from the end.
        self.extra = [task_column(task.name) for task in schema.tasks]
        if teacher is not None:
            self.extra.append(TEACHER_LOGIT)
        if schema.row_weights:
            self.extra.append(ROW_WEIGHT)
        if schema.sampled:
            self.extra.append(NEGATIVE_RATE)
        self._table_rows = {column.name: column.rows for column in schema.id_columns}

    def _read_scores(self, teacher: Artifact) -> Any:
        # A local file is mapped, so its pages are read only when they are needed.
        self.store.verify(teacher, SCORES)
        path = f"{teacher.path}/{SCORES}"
        if self.store.is_local:
            scores = np.load(self.store.full(path), mmap_mode="r", allow_pickle=False)
        else:
            with self.store.open(path) as source:
                scores = np.lib.format.read_array(source, allow_pickle=False)
        if scores.shape != (self.rows,):
            raise ArtifactError(
                f"{self.store.url_of(path)} has scores of shape {scores.shape}, expected {self.rows} rows",
                hint=f"remove {self.store.url_of(teacher.path)} and run the same command again",
            )
        return scores

    def allocate(self, rows: int) -> DecodedColumns:
        """Allocate columns for ``rows`` rows; ragged columns are added with the rows that are read."""
        # The memory is not cleared, since ``read`` writes every value.
        return DecodedColumns(
            labels=np.empty(rows, np.float32),
            dense=np.empty((len(self.schema.dense), rows), np.float32),
            single=np.empty((len(self.single), rows), np.int32),
            ragged={},
            extra=np.empty((len(self.extra), rows), np.float32),
        )

    def read(self, group: RowGroup, into: DecodedColumns, at: int) -> dict[str, Ragged]:
        """Decode ``group`` into rows [at, at + group.rows) of ``into`` and return its multi-valued columns."""
        schema = self.schema
        # The teacher's logits are stored outside the Parquet files, by row of the split.
        stored = [name for name in self.extra if name != TEACHER_LOGIT]
        names = [LABEL, *schema.dense, *(column.name for column in schema.sparse)]
        names += [weight_column(column.name) for column in self.multi if column.weighted]
        names += stored + [column.name for column in schema.event_columns]
        table = self._table(group, names)
        end = at + group.rows
        into.labels[at:end] = _flat(table, LABEL)
        for row, name in enumerate(self.extra):
            if name == TEACHER_LOGIT:
                into.extra[row, at:end] = self._teacher[group.first : group.first + group.rows]
            else:
                into.extra[row, at:end] = _flat(table, name)
        for row, name in enumerate(schema.dense):
            into.dense[row, at:end] = _flat(table, name)
        for row, name in enumerate(self.single):
            ids = _flat(table, name)
            self._check(name, ids, group, None)
            into.single[row, at:end] = ids

        ragged: dict[str, Ragged] = {}
        for column in self.multi:
            ragged[column.name] = self._ragged(table, column.name, column.weighted, group)
        for sequence in schema.sequences:
            own = {column.name: self._ragged(table, column.name, False, group) for column in sequence.columns}
            offsets = own[sequence.columns[0].name].offsets
            for name, events in own.items():
                if not np.array_equal(events.offsets, offsets):
                    raise ArtifactError(
                        f"the columns of sequence {sequence.name!r} differ in length in {group.file} row group "
                        f"{group.index}",
                        hint="nightjar ingest with force=true writes the dataset again",
                    )
                # The columns of a sequence share one array of offsets, which saves memory: windows are kept for many
                # batches.
                ragged[name] = replace(events, offsets=offsets)
        return ragged

    def column(self, name: str) -> np.ndarray:
        """Return a whole float column of the split in row order, such as its labels; float32 [rows]."""
        parts = [_flat(self._table(group, [name]), name) for group in self.groups]
        return np.concatenate(parts).astype(np.float32) if parts else np.empty(0, np.float32)

    def number_ids(self, feature: str) -> np.ndarray:
        """Number the ids of a single-valued ``feature`` of held-out rows.

        Ids without a table row are told apart by the hashes that the dataset keeps of them, so the numbers follow from
        the ids of the log. Ids that a mapping without a vocabulary maps to the same row have the same number.

        Returns:
            int64 [rows], from 0 on; -1 where a row has no id.
        """
        parts = [_flat(self._table(group, [feature]), feature) for group in self.groups]
        ids = np.concatenate(parts).astype(np.uint64)
        fitted: dict[str, Any] = {}
        if TRANSFORMS in self.dataset.files:
            fitted = self.store.read_json(f"{self.dataset.path}/{TRANSFORMS}")
        if feature in fitted.get("unseen", ()):
            hashes = np.concatenate([self.unseen(group, [feature])[feature] for group in self.groups])
            ids = np.where(hashes > 0, hashes, ids)
        known = ids > UNSEEN_ROW
        numbers = np.full(len(ids), -1, np.int64)
        numbers[known] = np.unique(ids[known], return_inverse=True)[1]
        return numbers

    def labels(self) -> dict[str, np.ndarray]:
        """Return the labels of all rows by further task, float32 [rows], NaN where missing."""
        return {task.name: self.column(task_column(task.name)) for task in self.schema.tasks}

    def spread(self, most_rows: int) -> None:
        """Keep only some row groups, evenly spread, with about ``most_rows`` rows in all."""
        if self.rows <= most_rows:
            return
        count = max(1, len(self.groups) * most_rows // self.rows)
        self.groups = [self.groups[i * len(self.groups) // count] for i in range(count)]
        self.rows = sum(group.rows for group in self.groups)

    def row_weights(self) -> np.ndarray | None:
        """Return how many rows each row counts for in figures, float32 [rows]; None where each counts as one."""
        own = self.column(ROW_WEIGHT) if self.schema.row_weights else None
        if not self.schema.sampled:
            return own
        rates = self.column(NEGATIVE_RATE)
        # No row was left out of this split, so its labels need not be read.
        if (rates == 1).all():
            return own
        if own is None:
            own = np.ones(self.rows, np.float32)
        return counted_for(own, self.column(LABEL), rates)

    def counted_for(self, columns: DecodedColumns) -> np.ndarray | None:
        """Return ``row_weights`` for the decoded rows ``columns``."""
        if not self.schema.counted:
            return None
        own = np.ones(len(columns.labels), np.float32)
        if not self.schema.sampled:
            return columns.extra[-1] if self.schema.row_weights else own
        # The shares of kept rows are the last column, preceded by the row weights.
        if self.schema.row_weights:
            own = columns.extra[-2]
        return counted_for(own, columns.labels, columns.extra[-1])

    def task_starts(self) -> list[float]:
        """Return the logit of each further task's mean label in the dataset's profile."""
        if PROFILE_FILE not in self.dataset.files:
            return [0.0] * len(self.schema.tasks)
        known = self.store.read_json(f"{self.dataset.path}/{PROFILE_FILE}").get("tasks") or {}
        starts = []
        for task in self.schema.tasks:
            profile, start = known.get(task.name), 0.0
            if profile:
                # The profile's mean is over the rows with a label for this task.
                rows = round(self.rows * (1 - profile["missing_share"]))
                start = LABEL_KINDS.get(task.kind).start(profile["mean"], rows)
            starts.append(start)
        return starts

    def base_rate(self) -> float | None:
        """Return the split's click rate in the dataset's profile, before rows were left out; None if it has none."""
        if PROFILE_FILE not in self.dataset.files:
            return None
        profile = self.store.read_json(f"{self.dataset.path}/{PROFILE_FILE}")
        rate = profile.get("label_rate", {}).get(self.split)
        # ``base_rate`` is over all rows of the log, while ``label_rate`` of the train rows only counts the kept ones.
        if self.split == "train":
            rate = profile.get("base_rate", rate)
        return None if rate is None else float(rate)

    def true_probability(self) -> np.ndarray | None:
        """Return the probability that each label was drawn from, float32 [rows]; None if the dataset lacks it."""
        return self.column(TRUE_PROBABILITY) if self.schema.true_probability else None

    def raw(self, group: RowGroup, features: list[str]) -> dict[str, np.ndarray]:
        """Read numbers as they were before their transform, for the rows of a held-out ``group``.

        Args:
            features: The features whose raw numbers the dataset keeps (``raw`` in its transforms.json).

        Returns:
            Arrays by feature, float64 [rows], NaN where missing.
        """
        columns = list(map(raw_column, features))
        table = self._table(_beside(RAW, group), columns)
        return {name: _flat(table, column) for name, column in zip(features, columns, strict=True)}

    def unseen(self, group: RowGroup, features: list[str]) -> dict[str, np.ndarray]:
        """Read the hashes (uint64) of ids without a table row, for the rows of a held-out ``group``; 0 for other ids.

        There is one hash per lookup: [rows], or for a multi-valued feature as many as its ``values``. ``features`` are
        those whose hashes the dataset keeps (``unseen`` in its transforms.json).
        """
        table = self._table(_beside(UNSEEN, group), list(map(unseen_column, features)))
        hashes = {}
        for name in features:
            column = _array(table.column(unseen_column(name)))
            if pa.types.is_list(column.type):
                column = column.flatten()
            hashes[name] = column.to_numpy()
        return hashes

    def _table(self, group: RowGroup, names: list[str]) -> pa.Table:
        where = self.store.url_of(f"{self.dataset.path}/{group.file}")
        try:
            table = retried(lambda: self._decoded(group, names), f"reading {where}")
        except Exception as error:
            # If the store did not answer, the dataset may be intact, and ingesting it again would not help.
            passing = explained(error)
            if passing is not None:
                raise passing from error
            if not isinstance(error, pa.ArrowInvalid | OSError):
                raise
            raise ArtifactError(
                f"{where} cannot be read: {error}", hint="nightjar ingest with force=true writes the dataset again"
            ) from error
        # pyarrow silently skips requested columns that a file lacks.
        missing = [name for name in names if name not in table.column_names]
        if missing or table.num_rows != group.rows:
            raise ArtifactError(
                f"{where} row group {group.index} has {table.num_rows} rows and lacks columns "
                f"{missing}, expected {group.rows} rows and all columns of {SCHEMA_FILE}",
                hint="nightjar ingest with force=true writes the dataset again",
            )
        return table

    def _decoded(self, group: RowGroup, names: list[str]) -> pa.Table:
        local = self.store.is_local
        opened: AbstractContextManager[Any]
        if local:
            opened = nullcontext(self.store.full(f"{self.dataset.path}/{group.file}"))
        else:
            opened = closing(self.store.open_parts(self.dataset, group.file))
        with self._lock:
            footer = self._footers.get(group.file)
        with (
            opened as source,
            pq.ParquetFile(source, metadata=footer, memory_map=local, pre_buffer=not local) as file,
        ):
            # Decode with one thread: several row groups are decoded at once already, and the step needs the other CPUs.
            table = file.read_row_group(group.index, columns=names, use_threads=False)
            with self._lock:
                self._footers.setdefault(group.file, file.metadata)
                self.groups_read += 1
        return table

    def _ragged(self, table: pa.Table, name: str, weighted: bool, group: RowGroup) -> Ragged:
        lists = _array(table.column(name))
        # The offsets of a slice do not begin at 0.
        offsets = lists.offsets.to_numpy().astype(np.int64)
        values = lists.values.to_numpy()[offsets[0] : offsets[-1]].astype(np.int32, copy=False)
        self._check(name, values, group, offsets - offsets[0])
        weights = None
        if weighted:
            weight_lists = _array(table.column(weight_column(name)))
            ends = weight_lists.offsets.to_numpy()
            weights = weight_lists.values.to_numpy()[ends[0] : ends[-1]].astype(np.float32, copy=False)
            if len(weights) != len(values):
                raise ArtifactError(
                    f"feature {name!r} has {len(values)} ids but {len(weights)} weights in {group.file} "
                    f"row group {group.index}",
                    hint="nightjar ingest with force=true writes the dataset again",
                )
        return Ragged(offsets - offsets[0], values, weights)

    def _check(self, name: str, ids: np.ndarray, group: RowGroup, offsets: np.ndarray | None) -> None:
        rows = self._table_rows[name]
        if not len(ids) or (ids.min() >= 0 and ids.max() < rows):
            return
        row = at = int(np.argmax((ids < 0) | (ids >= rows)))
        if offsets is not None:
            # Search from the right, because rows without a value have the same offset as the row after them.
            row = int(np.searchsorted(offsets, at, side="right")) - 1
        raise GuardError(
            f"table {name!r} has rows 0 to {rows - 1}, but {self.split} row {group.first + row} ({group.file}) "
            f"asks for row {ids[at]}",
            hint=f"data.sparse.{name}.rows={int(ids.max()) + 1} and force=true write the dataset again",
        )


def _beside(folder: str, group: RowGroup) -> RowGroup:
    # Returns the row group with the same rows in the files of ``folder``, which have the same names as the split's.
    return replace(group, file=f"{folder}/{group.file.rpartition('/')[2]}")


def _array(column: pa.ChunkedArray) -> Any:
    return column.chunk(0) if column.num_chunks == 1 else pa.concat_arrays(column.chunks)


def _flat(table: pa.Table, name: str) -> np.ndarray:
    return _array(table.column(name)).to_numpy(zero_copy_only=False)
