"""What the columns of a log mean: the data configuration with every default filled in.

``DataSpec`` is what ingestion calls the schema. ``schema.json``, the schema of the dataset that ingestion writes, is
``records.dataset.DatasetSchema``.

*Event* has two meanings in this room. With ``data.dedupe.key`` it is what a row of the log is about, such as an
impression, which later rows may name again (``events``, ``repeats``). In a sequence or a history it is an item of what
a user did before (``event_columns``, ``histories``); training knows only these.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import xxhash

from pipeline.config.features import BINNINGS, LIST, MAP, PERCENTILE
from pipeline.config.ingest import SamplingConfig, SplitConfig
from pipeline.config.sequences import AGE, event_feature
from pipeline.core.errors import DataError
from pipeline.records.dataset import vector_columns
from pipeline.specs.id_mapping import IdMapping
from pipeline.specs.label_kind import TaskSpec

DAY = "day"
# Columns of typed rows: two hashes of the ``data.dedupe.key`` of the row's event, and the label by the dataset's own
# logs, whatever came later.
EVENT, EVENT_CHECK, CAME_CLICKED = "event:key", "event:check", "event:clicked"
# Column of raw rows: the click is in other rows of these logs (1), in later ones (2).
CLICKED_LATER = "clicked later"
# Column of typed rows: the time by which they are split, in seconds since 1970.
SPLIT_TIME = "split_time"
# Column of typed rows: the hash of their content as it was delivered, where features are left out.
CONTENT = "content"
# Column of synthetic logs: seconds since the day from which they count days.
TIME = "time"
CRITEO_COLUMNS = ["label", *(f"I{i}" for i in range(1, 14)), *(f"C{i}" for i in range(1, 27))]
# The default of `data.quote`, for formats without quotes, too.
QUOTE = '"'
# Microseconds, in which times are counted.
DAY_US = 86_400_000_000
MINUTE_US = 60_000_000


@dataclass(frozen=True, kw_only=True)
class DenseSpec:
    """One numeric feature: the raw ``column`` it comes from, its ``transform``, and what its values may be.

    ``width``: how many numbers a value has. Above 1 it is a vector, with ``separator`` between its numbers in text.
    """

    name: str
    column: str
    transform: str
    clip: tuple[float, ...] = ()
    bins: int = 100
    low: float | None = None
    high: float | None = None
    required: bool = False
    width: int = 1
    separator: str = ","

    @property
    def bounds(self) -> tuple[float, float] | None:
        """The lowest and the highest allowed number; None where any number is allowed."""
        if self.low is None and self.high is None:
            return None
        low = -math.inf if self.low is None else self.low
        high = math.inf if self.high is None else self.high
        return low, high

    @property
    def vector(self) -> bool:
        """Whether a value is several numbers."""
        return self.width > 1

    @property
    def columns(self) -> list[str]:
        """Names of the dense columns of the dataset that hold it."""
        if self.vector:
            return vector_columns(self.name, self.width)
        return [self.name]

    @property
    def logarithmic(self) -> bool:
        """Whether sign(x) * log1p(|x|) is taken."""
        return self.transform.startswith("log1p")

    @property
    def binned(self) -> bool:
        """Whether the number of its bin stands for the value."""
        return self.transform in BINNINGS

    @property
    def standardised(self) -> bool:
        """Whether mean and standard deviation of the train rows are taken out."""
        return self.transform.endswith("standardise")

    @property
    def linear(self) -> bool:
        """Whether mean and standard deviation of the numbers themselves, not of their logarithms, are taken out."""
        return self.standardised and not self.logarithmic

    @property
    def zero_is_missing(self) -> bool:
        """Whether a value of 0 in the dataset may be the number zero or a missing value."""
        if self.transform not in ("none", "log1p"):
            return False
        # If the clip excludes 0, no number becomes 0.
        return not self.clip or self.clip[0] <= 0 <= self.clip[1]


@dataclass(frozen=True, kw_only=True)
class SparseSpec:
    """One categorical feature; ``rows`` caps its table, reserved rows included.

    ``table``: the feature whose table this one shares; "" if it has its own. ``mapping``, ``rows`` and other settings
    of a table are then those of that feature. ``holds``: one, list or map; "" if the separator tells.
    ``weights``: the column with the weights of a list's ids. ``cross_bins``: bounds of numbers of ``cross``; of a cross
    with several values, the first column holds them. ``sequence``: the one whose events it is a column of.
    """

    name: str
    column: str
    mapping: IdMapping
    rows: int
    min_count: int
    evict_after_days: int | None
    separator: str | None
    weight_separator: str | None
    cross: tuple[str, ...] = ()
    bins: int | None = None
    bins_by: str = PERCENTILE
    max_ids: int | None = None
    integer: bool = False
    required: bool = False
    when_full: str = "replace"
    table: str = ""
    holds: str = ""
    weights: str | None = None
    cross_bins: Mapping[str, Sequence[float]] = field(default_factory=dict)
    sequence: str = ""

    @property
    def owner(self) -> str:
        """The feature whose table it is."""
        return self.table or self.name

    @property
    def multi(self) -> bool:
        """Whether a row may hold several ids."""
        return self.separator is not None or self.holds in (LIST, MAP)

    @property
    def maps(self) -> bool:
        """Whether a field holds ids with their weights."""
        return self.holds == MAP

    @property
    def lists(self) -> bool:
        """Whether a row may look up several rows of the table: those of several ids, or several of one id."""
        return self.multi or self.mapping.rows_per_id > 1

    @property
    def weighted(self) -> bool:
        """Whether each id carries a weight."""
        return self.multi and (self.weight_separator is not None or self.weights is not None or self.maps)

    @property
    def seed(self) -> int:
        """Seed of the feature's xxhash64: depends on its table's name alone, so ids keep their hash in every run."""
        return xxhash.xxh64_intdigest(self.owner.encode())


@dataclass(frozen=True, kw_only=True)
class EventSource:
    """Where values of events are: a raw ``column``, a ``field`` of its structs ("": it holds the values themselves)."""

    column: str
    field: str = ""
    separator: str | None = None

    @staticmethod
    def of(path: str, separator: str | None) -> EventSource:
        """Return the source that a dotted ``path`` names."""
        column, _, inside = path.partition(".")
        return EventSource(column=column, field=inside, separator=separator)

    @property
    def shown(self) -> str:
        """Its name in messages."""
        if self.field:
            return f"{self.column}.{self.field}"
        return self.column


@dataclass(frozen=True, kw_only=True)
class SequenceSpec:
    """A sequence: the sources of its ``columns`` by feature, and of its events' times.

    ``drop_leaks``: events that are not before their row are left out, else such a row is rejected.
    """

    name: str
    columns: dict[str, EventSource]
    max_length: int
    time: EventSource | None = None
    age_bins: int = 64
    drop_leaks: bool = False

    @property
    def age(self) -> str:
        """The feature with the bins of the events' ages."""
        return event_feature(self.name, AGE)

    @property
    def features(self) -> tuple[str, ...]:
        """The features that hold its columns in the dataset."""
        if self.time is None:
            return tuple(self.columns)
        return (*self.columns, self.age)

    @property
    def sources(self) -> tuple[EventSource, ...]:
        """The sources of its columns, and of the times if there are any."""
        sources = list(self.columns.values())
        if self.time is not None:
            sources.append(self.time)
        return tuple(sources)


@dataclass(frozen=True, kw_only=True)
class HistoryPlan:
    """A history, which rows get as column ``name``: of the user in column ``by``, the newest ``most`` events.

    ``of``: the column of the log for each field of an event. ``time``: column of the rows' times. Events are strictly
    earlier than their row, by ``lag_minutes`` at least, and by no more than ``days`` (None: however much). ``where``:
    the column that says which events count; None: all do.
    """

    name: str
    by: str
    of: Mapping[str, str]
    time: str
    days: int | None
    most: int
    where: str | None = None
    lag_minutes: float = 0.0

    @property
    def reach(self) -> int:
        """Whole days before a row's own that may have events of its history.

        One day more than ``days``, because a day of 23 hours, or a day as written in another zone, moves its end.
        """
        assert self.days is not None, "a log of days has histories of days"
        return self.days + 1

    @property
    def read(self) -> list[str]:
        """The columns of the log that are read."""
        columns = [self.by, self.time, *self.of.values()]
        if self.where:
            columns.append(self.where)
        # Without repetitions, in order: a field of the events may also be the column of users.
        return list(dict.fromkeys(columns))

    def setting_of(self, column: str) -> str:
        """Return the setting that names ``column``, one of ``read``."""
        path = f"data.sequences.{self.name}"
        if column == self.time:
            return "data.timestamp"
        if column == self.by:
            return f"{path}.history.by"
        for feature, source in self.of.items():
            if column == source:
                return f"{path}.features.{feature}.column"
        return f"{path}.history.where"


@dataclass(frozen=True, kw_only=True)
class DataSpec:
    """The whole schema of a log. ``columns``: raw column -> the override that names it.

    ``hour_column``: where a row's hour is read, None if it is not needed; ``whole_hours``: it holds 0 to 23, no
    times. ``tasks``: those besides the main one; ``row_weight``: the raw column of weights. ``time_zone``: whose days
    and hours are meant. ``sampling``: which rows are or were left out. ``event_key``: the raw
    column that tells events apart. ``sequences``: their columns are in ``sparse``; ``row_time``: the raw column with
    the time that their events must lie before. ``histories``: raw columns of sequences that are built from the log.
    ``decimal``: the sign before the decimals of numbers in text; ``time_format``: how times are written there.
    ``quote``: what may surround a field of CSV; None: nothing.
    ``split_time``: the raw column whose times the rows are split by; None where they are split otherwise, or by days.
    ``left_out``: features that count as missing in every row.
    """

    label: str
    positive: str
    negative: str
    dense: tuple[DenseSpec, ...]
    sparse: tuple[SparseSpec, ...]
    day_column: str | None
    timestamp: str | None
    true_probability: bool
    missing: tuple[str, ...]
    strip: bool
    split: SplitConfig
    columns: dict[str, str]
    hour_column: str | None = None
    whole_hours: bool = False
    tasks: tuple[TaskSpec, ...] = ()
    row_weight: str | None = None
    time_zone: str | None = None
    event_key: str | None = None
    sampling: SamplingConfig = field(default_factory=SamplingConfig)
    sequences: tuple[SequenceSpec, ...] = ()
    row_time: str | None = None
    histories: tuple[HistoryPlan, ...] = ()
    decimal: str = "."
    time_format: str | None = None
    split_time: str | None = None
    quote: str | None = QUOTE
    left_out: tuple[str, ...] = ()

    @property
    def owners(self) -> tuple[SparseSpec, ...]:
        """The sparse features that have a table of their own."""
        return tuple(feature for feature in self.sparse if not feature.table)

    @property
    def has_day(self) -> bool:
        """Whether rows carry a day, which is kept in the dataset."""
        return self.day_column is not None or self.timestamp is not None

    @property
    def number_is_missing(self) -> bool:
        """Whether one of the strings that stand for a missing value reads as a number, such as -1."""
        return any(is_number(word.replace(self.decimal, ".")) for word in self.missing)

    @property
    def number_columns(self) -> frozenset[str]:
        """Raw columns of which only the number counts: an empty field is missing, and no number stands for missing."""
        if "" not in self.missing or self.number_is_missing or self.decimal != ".":
            return frozenset()
        # A column that is read as numbers loses its text: the ids 007 and 7, or 1.0 and 1, would be the same.
        read_otherwise = {self.label, self.day_column, self.timestamp, self.hour_column, self.row_weight}
        read_otherwise |= {self.event_key, self.split_time, self.sampling.column}
        for task in self.tasks:
            read_otherwise.add(task.column)
        for sparse in self.sparse:
            read_otherwise |= {sparse.column, sparse.weights, *sparse.cross}
        for sequence in self.sequences:
            read_otherwise |= {source.column for source in sequence.sources}
        for plan in self.histories:
            read_otherwise |= set(plan.read)
        numbers = set()
        for dense in self.dense:
            if dense.vector:
                read_otherwise.add(dense.column)
            numbers.add(dense.column)
        return frozenset(numbers - read_otherwise)


def is_number(word: str) -> bool:
    """Whether Python reads ``word`` as a number, as it does nan and inf."""
    try:
        float(word)
    except ValueError:
        return False
    return True


def require_columns(spec: DataSpec, available: Sequence[str], file: str, *, header: bool) -> None:
    """Raise DataError if ``file`` lacks a column of the schema, naming the nearest it has.

    Args:
        spec: the schema, whose columns are expected.
        available: the columns of the file.
        file: its name in messages.
        header: whether ``available`` was read from a first line, which may not hold names.
    """
    for column, override in spec.columns.items():
        count = available.count(column)
        if count == 1:
            continue
        if count:
            raise DataError(f"{file} has {count} columns called {column!r}, expected one", hint="rename all but one")
        message, hint = f"{file} has no column {column!r} ({override}); ", f"{override}=<one of them>"
        near = [name for name in available if name.lower() == column.lower()]
        if not near:
            near = difflib.get_close_matches(column, available, n=1, cutoff=0.5)
        if near:
            message += f"nearest: {near[0]}; "
            hint = f"{override}={near[0]}"
        other_separator = ""
        if len(available) == 1:
            # A single name that contains a usual separator is most likely a whole line, divided at the wrong one.
            other_separator = next((mark for mark in ";\t|, " if mark in available[0]), "")
        if header and other_separator:
            hint = f"data.separator='{other_separator}'".replace("\t", "\\t")
        elif header:
            hint += "; if the first line is no header: data.header=false data.columns=[<names>]"
        raise DataError(f"{message}it has: {', '.join(available)}", hint=hint)
