"""``schema.json`` and ``profile.json``: what ingestion promises of a dataset to planning, training and evaluation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

from pipeline.records.record import Record, absent

MISSING_ROW = 0
UNSEEN_ROW = 1
RESERVED_ROWS = 2

LABEL = "label"
# The split of the rows that training validates on; a dataset may lack it.
VALIDATION = "validation"
TRUE_PROBABILITY = "true_probability"
# The hour of a row, 0 to 23, in datasets that divide train rows from test rows by the hour.
SPLIT_HOUR = "split_hour"
ROW_WEIGHT = "row_weight"
# For each row, the share of similar rows without a click that was kept.
NEGATIVE_RATE = "negative_rate"
# How the loss makes up for rows that were left out.
BY_LOGIT, BY_WEIGHTS = "logit", "weights"
# Folder beside split ``test``: raw/part-*.parquet has the same rows in the same row groups, with numbers before their
# transform. It is written for features whose transform keeps less than their numbers (percentile, bins).
RAW = "raw"
# Folder like RAW: unseen/part-*.parquet has the hashes of held-out ids that have no row of their own in this dataset. A
# model of another dataset may have a row for them.
UNSEEN = "unseen"
# The events of a dataset's rows by ``data.dedupe.key``: events/part-*.parquet, by which rows of later days are told
# apart. They have nothing to do with the events of sequences.
EVENTS = "events"
# The events of a dataset's days for the sequences that later days build: histories/<sequence>/part-*.parquet.
HISTORIES = "histories"
# What was fitted, for a dataset and for the versions that are trained on it.
TRANSFORMS = "transforms.json"


def dataset_path(name: str, key: str, day: str | None = None) -> str:
    """Return where a dataset lies in the store: ``datasets/<name>[/<day>]/<key>``; "" leaves a part out."""
    return "/".join(part for part in ("datasets", name, day or "", key) if part)


def weight_column(feature: str) -> str:
    """Name of the Parquet column that holds the weights of a weighted multi-valued ``feature``."""
    return f"{feature}__weight"


def vector_columns(feature: str, width: int) -> list[str]:
    """Return the names of the Parquet columns (float32) that hold the ``width`` numbers of a vector."""
    return [f"{feature}_{number}" for number in range(width)]


def task_column(task: str) -> str:
    """Name of the Parquet column (float32, NaN where missing) that holds the labels of a further ``task``."""
    return f"{task}__label"


def raw_column(feature: str) -> str:
    """Name of the Parquet column that holds the raw numbers of a held-out ``feature``; ``RAW`` says where."""
    return f"{feature}__raw"


def unseen_column(feature: str) -> str:
    """Name of the Parquet column with the hashes of a held-out ``feature``'s unseen ids; ``UNSEEN`` says where."""
    return f"{feature}__unseen"


@dataclass(frozen=True, kw_only=True)
class SparseColumn(Record):
    """A categorical feature as it lies in Parquet and the table of ``rows`` rows that embeds it.

    ``table``: the feature whose table this one shares; "" where it has its own, which has its name.
    Single-valued: one int32 column. Multi-valued: list<int32>; ``weighted`` adds list<float32> in ``weight_column``.
    Values are row numbers in [0, rows).
    """

    name: str
    rows: int
    multi: bool = False
    weighted: bool = False
    table: str = absent("")

    @property
    def owner(self) -> str:
        """The name of its table."""
        return self.table or self.name


@dataclass(frozen=True, kw_only=True)
class SequenceColumn(Record):
    """A column of a sequence: list<int32> of row numbers in [0, rows), one an event; a row without events has one, 0.

    ``table``: the feature whose table it shares; "" where it has its own, which has its name.
    """

    name: str
    rows: int
    table: str = absent("")

    @property
    def owner(self) -> str:
        """The name of its table."""
        return self.table or self.name


@dataclass(frozen=True, kw_only=True)
class SequenceGroup(Record):
    """A sequence: its ``columns`` are lists of one length in every row, 1 to ``max_length``, the oldest event first."""

    name: str
    columns: tuple[SequenceColumn, ...]
    max_length: int


@dataclass(frozen=True, kw_only=True)
class TableSchema:
    """A table of ``rows`` rows and the ``features`` that it embeds, in the order of the schema.

    ``weighted``: whether ids of any of them have weights. ``events``: columns of sequences whose rows it has.
    """

    name: str
    rows: int
    features: tuple[str, ...]
    weighted: bool = False
    events: tuple[str, ...] = ()

    @property
    def columns(self) -> tuple[str, ...]:
        """All columns that look up rows in the table."""
        return (*self.features, *self.events)


@dataclass(frozen=True, kw_only=True)
class TaskColumn(Record):
    """A task besides the main one: ``kind`` of its label, and the task ``given`` without which it cannot happen."""

    name: str
    kind: str
    given: str | None = absent()


@dataclass(frozen=True, kw_only=True)
class DatasetSchema(Record):
    """``schema.json``: columns of a dataset's Parquet files, in order: label, dense, sparse.

    ``rows`` counts rows of split ``train``, ``test`` and, where there is one, ``validation``; files of a split are
    ``<split>/part-*.parquet``, their names in order in ``files``, the rows of each file's row groups in ``groups``.
    ``true_probability``: a float32 column of that name holds the probability the label was drawn from. ``tasks``:
    those besides the main one, whose labels are in ``task_column``; ``row_weights``: column ``ROW_WEIGHT`` has weights.
    ``sampled``: rows without a click were left out, ``NEGATIVE_RATE`` has the share that was kept, and the loss makes
    up for them by the logit or by weights ("": all rows are there). ``sequences``: of events.
    """

    FILE: ClassVar[str] = "schema.json"
    KIND: ClassVar[str] = "dataset's schema"
    REMEDY: ClassVar[str] = "stages=[ingest] force=true rebuilds the dataset"

    dense: tuple[str, ...]
    sparse: tuple[SparseColumn, ...]
    rows: dict[str, int]
    files: dict[str, list[str]]
    groups: dict[str, list[list[int]]]
    true_probability: bool = False
    tasks: tuple[TaskColumn, ...] = absent(())
    row_weights: bool = absent(False)
    sampled: str = absent("")
    sequences: tuple[SequenceGroup, ...] = absent(())

    @property
    def counted(self) -> bool:
        """Whether some rows count for more or less than one row."""
        return self.row_weights or bool(self.sampled)

    @property
    def tables(self) -> tuple[TableSchema, ...]:
        """The tables, in the order of the features that they are named after."""
        # Make entries for all tables first: a feature may come before the one whose table it shares.
        sharing: dict[str, list[SparseColumn]] = {c.name: [] for c in self.sparse if not c.table}
        for column in self.sparse:
            sharing[column.owner].append(column)
        events: dict[str, list[SequenceColumn]] = {}
        for event in self.event_columns:
            sharing.setdefault(event.owner, [])
            events.setdefault(event.owner, []).append(event)
        tables = []
        for name, columns in sharing.items():
            of_events = events.get(name, [])
            # All columns of a table have the same number of rows. A table that only sequences use has no feature.
            shared: list[SparseColumn | SequenceColumn] = [*columns, *of_events]
            table = TableSchema(
                name=name,
                rows=shared[0].rows,
                features=tuple(column.name for column in columns),
                weighted=any(column.weighted for column in columns),
                events=tuple(event.name for event in of_events),
            )
            tables.append(table)
        return tuple(tables)

    @property
    def vectors(self) -> tuple[str, ...]:
        """The names of the model's embedding vectors: the sparse features, followed by the sequences."""
        return (*(column.name for column in self.sparse), *(each.name for each in self.sequences))

    def with_vectors(self, names: Sequence[str]) -> DatasetSchema:
        """Return the schema with the features and sequences of these ``names`` alone, in their order."""
        # Configurations are checked so that no feature and sequence have the same name.
        sparse = {column.name: column for column in self.sparse}
        sequences = {each.name: each for each in self.sequences}
        return replace(
            self,
            sparse=tuple(sparse[name] for name in names if name in sparse),
            sequences=tuple(sequences[name] for name in names if name in sequences),
        )

    @property
    def tables_of_sequences(self) -> dict[str, list[str]]:
        """The features whose tables the events have, by sequence; each once."""
        tables = {}
        for each in self.sequences:
            tables[each.name] = list(dict.fromkeys(column.table for column in each.columns if column.table))
        return tables

    @property
    def sharing(self) -> dict[str, list[str]]:
        """The features and the sequences of every table, by its name, in the order of ``tables``."""
        sequence_of: dict[str, str] = {}
        for sequence in self.sequences:
            sequence_of |= dict.fromkeys((column.name for column in sequence.columns), sequence.name)
        sharing = {}
        for table in self.tables:
            # Several columns of a sequence may share a table, but the sequence is listed once.
            names = [*table.features, *(sequence_of[column] for column in table.events)]
            sharing[table.name] = list(dict.fromkeys(names))
        return sharing

    @property
    def id_columns(self) -> tuple[SparseColumn | SequenceColumn, ...]:
        """The sparse features, and the columns of all sequences."""
        return (*self.sparse, *self.event_columns)

    @property
    def event_columns(self) -> tuple[SequenceColumn, ...]:
        """The columns of all sequences."""
        return tuple(column for sequence in self.sequences for column in sequence.columns)


@dataclass(frozen=True, kw_only=True)
class FeatureProfile(Record):
    """What ingestion measured of one sparse feature over the train rows.

    ``distinct``: raw ids seen; ``missing_share``: share of rows without a value; ``pooling``: mean ids per row;
    ``hot_rows``/``hot_share``: access histogram, the share of lookups served by the hottest k rows of the table.
    """

    rows: int
    distinct: int
    missing_share: float
    pooling: float
    hot_rows: list[int]
    hot_share: list[float]


@dataclass(frozen=True, kw_only=True)
class DenseProfile(Record):
    """What ingestion measured of one dense feature over the train rows, before its transform."""

    missing_share: float
    minimum: float
    maximum: float
    mean: float
    std: float


@dataclass(frozen=True, kw_only=True)
class SequenceProfile(Record):
    """What ingestion measured of a sequence over the train rows: events a row, and how many were left out as leaks.

    ``rows_by_length``: rows without events, then those with 1 to ``events_per_bin``, with as many more, and so on.
    """

    mean: float
    p99: int
    longest: int
    empty_share: float
    left_out: int = absent(0)
    rows_by_length: tuple[int, ...] = absent(())
    events_per_bin: int = absent(1)

    @property
    def looked_up(self) -> float:
        """Mean events per row that a model works on; an empty history has the event of missing values."""
        return self.mean + self.empty_share


@dataclass(frozen=True, kw_only=True)
class Profile(Record):
    """``profile.json``: rows and label rate per split, and every feature's figures.

    All of them are of the rows that were counted, those included that ``data.sampling`` leaves out of the dataset.
    ``tasks``: figures of the train rows' labels, by further task; ``row_weight``: of their weights. ``base_rate``: the
    click rate of the rows that the train rows stand for, where these have weights or were sampled before.
    ``sparse`` has the columns of ``sequences``, too.
    """

    FILE: ClassVar[str] = "profile.json"
    KIND: ClassVar[str] = "dataset's profile"
    REMEDY: ClassVar[str] = "stages=[ingest] force=true rebuilds the dataset"

    rows: dict[str, int]
    label_rate: dict[str, float]
    dense: dict[str, DenseProfile]
    sparse: dict[str, FeatureProfile]
    tasks: dict[str, DenseProfile] | None = absent()
    row_weight: DenseProfile | None = absent()
    base_rate: float | None = absent()
    sequences: dict[str, SequenceProfile] | None = absent()

    def table(self, features: tuple[str, ...]) -> FeatureProfile:
        """Return the figures of a table that the sparse ``features`` share; a single feature has its own.

        With several, their hottest rows are assumed to be the same ones; a share is that of all their lookups.
        """
        parts = [self.sparse[name] for name in features]
        pooling = sum(part.pooling for part in parts)
        # Weight shares by their features' lookups; without lookups there is nothing to weight by.
        if len(parts) == 1 or not pooling:
            return parts[0]
        hot_share = []
        for shares in zip(*(part.hot_share for part in parts), strict=True):
            served = sum(share * part.pooling for share, part in zip(shares, parts, strict=True))
            hot_share.append(served / pooling)
        return FeatureProfile(
            rows=parts[0].rows,
            distinct=max(part.distinct for part in parts),
            missing_share=sum(part.missing_share * part.pooling for part in parts) / pooling,
            pooling=pooling,
            hot_rows=parts[0].hot_rows,
            hot_share=hot_share,
        )
