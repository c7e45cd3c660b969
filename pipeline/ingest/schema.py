"""What the columns of a log mean: the data configuration with every default filled in."""

from __future__ import annotations

import difflib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import xxhash

from pipeline.config.data import DataConfig
from pipeline.config.features import BINNINGS, LIST, MAP, ONE, PERCENTILE
from pipeline.config.ingest import SamplingConfig, SplitConfig
from pipeline.config.sequences import AGE, DROP, EVENT_TIME, EventColumn, SequenceConfig, event_feature
from pipeline.config.tasks import TaskLabel
from pipeline.core.errors import ConfigError, DataError
from pipeline.ingest.histories.history_plan import HistoryPlan
from pipeline.records.dataset import (
    LABEL,
    NEGATIVE_RATE,
    RESERVED_ROWS,
    ROW_WEIGHT,
    SPLIT_HOUR,
    TRUE_PROBABILITY,
    task_column,
    vector_columns,
    weight_column,
)
from pipeline.specs.id_mapping import IdMapping, mapping_of
from pipeline.specs.label_kind import LABEL_KINDS, TaskSpec

DAY = "day"
# Columns of typed rows: two hashes of an event's key, and the label by the dataset's own logs, whatever came later.
EVENT, EVENT_CHECK, CAME_CLICKED = "event:key", "event:check", "event:clicked"
# Column of raw rows: the click is in other rows of these logs (1), in later ones (2).
CLICKED_LATER = "clicked later"
# Column of typed rows: the time by which they are split, in seconds since 1970.
SPLIT_TIME = "split_time"
# Column of synthetic logs: seconds since the day from which they count days.
TIME = "time"
CRITEO_COLUMNS = ["label", *(f"I{i}" for i in range(1, 14)), *(f"C{i}" for i in range(1, 27))]
# The default of `data.quote`, for formats without quotes, too.
QUOTE = '"'


@dataclass(frozen=True, kw_only=True)
class DenseSpec:
    """One numeric feature: the raw ``column`` it comes from, its ``transform``, and what its values may be.

    ``width``: numbers of a value, a vector above 1, whose ``separator`` is between them where it is text.
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
        return -math.inf if self.low is None else self.low, math.inf if self.high is None else self.high

    @property
    def vector(self) -> bool:
        """Whether a value is several numbers."""
        return self.width > 1

    @property
    def columns(self) -> list[str]:
        """Names of the dense columns of the dataset that hold it."""
        return vector_columns(self.name, self.width) if self.vector else [self.name]

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
        includes_zero = not self.clip or self.clip[0] <= 0 <= self.clip[1]
        return self.transform in ("none", "log1p") and includes_zero


@dataclass(frozen=True, kw_only=True)
class SparseSpec:
    """One categorical feature; ``rows`` caps its table, reserved rows included.

    ``table``: the feature whose table this one shares; "" where it has its own. ``mapping``, ``rows`` and what else
    is of a table are then those of that feature. ``holds``: one, list or map; "" where the separator tells.
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
        """Whether a row may look up several rows of the table: of several ids, or two of one."""
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
        """The source that a dotted ``path`` names."""
        column, _, inside = path.partition(".")
        return EventSource(column=column, field=inside, separator=separator)

    @property
    def shown(self) -> str:
        """Its name in messages."""
        return f"{self.column}.{self.field}" if self.field else self.column


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
        return (*self.columns, self.age) if self.time is not None else tuple(self.columns)

    @property
    def sources(self) -> tuple[EventSource, ...]:
        """All that is read."""
        sources = list(self.columns.values())
        if self.time is not None:
            sources.append(self.time)
        return tuple(sources)


@dataclass(frozen=True, kw_only=True)
class DataSpec:
    """The whole schema of a log. ``columns``: raw column -> the override that names it.

    ``hour_column``: where a row's hour is read, None where none is asked for; ``whole_hours``: it holds 0 to 23, no
    times. ``tasks``: those besides the main one; ``row_weight``: the raw column of weights. ``time_zone``: whose days
    and hours are meant. ``sampling``: which rows are or were left out. ``event_key``: the raw
    column that tells events apart. ``sequences``: their columns are in ``sparse``; ``row_time``: the raw column with
    the time that their events must lie before. ``histories``: raw columns of sequences that are built from the log.
    ``decimal``: the sign before the decimals of numbers in text; ``time_format``: how times are written there.
    ``quote``: what may surround a field of CSV; None: nothing.
    ``split_time``: the raw column whose times the rows are split by; None where they are split otherwise, or by days.
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
        return any(_is_number(word.replace(self.decimal, ".")) for word in self.missing)

    @property
    def number_columns(self) -> frozenset[str]:
        """Raw columns of which nothing but the number counts: an empty field is missing, no number stands for that."""
        if "" not in self.missing or self.number_is_missing or self.decimal != ".":
            return frozenset()
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


def _is_number(word: str) -> bool:
    try:
        float(word)
    except ValueError:
        return False
    return True


def data_spec(data: DataConfig) -> DataSpec:
    """Return the schema that ``data`` describes. Raises ConfigError for settings that contradict each other."""
    synthetic = data.format == "synthetic"
    dense = []
    for name, feature in data.dense.items():
        number = DenseSpec(
            name=name,
            column=feature.column or name,
            transform=data.transform_of(name),
            clip=tuple(feature.clip),
            bins=feature.bins,
            low=feature.min,
            high=feature.max,
            required=feature.required,
            width=feature.width,
            separator=feature.separator,
        )
        dense.append(number)
    sparse = [_sparse_spec(data, name) for name in data.sparse]

    day = data.day_column or (DAY if synthetic else None)
    row_time = data.timestamp or (TIME if synthetic else None)
    by_time = data.split.by == "time"
    hour = None
    if data.split.by == "hours":
        hour = data.hour_column or row_time
    elif by_time and row_time is None:
        # Rows without a time are split by their hour, or by their day.
        hour = data.hour_column

    sequences, events, histories = list[SequenceSpec](), list[SparseSpec](), list[HistoryPlan]()
    for name, config in data.sequences.items():
        sequence = _sequence_spec(name, config)
        sequences.append(sequence)
        events += [_event_spec(data, sequence, feature) for feature in sequence.features]
        if config.built:
            histories.append(_history_plan(data, name, row_time or ""))
    timed = any(sequence.time for sequence in sequences)

    columns = _columns(data, dense, sparse, day, hour, row_time if by_time or timed else None)
    _add_event_columns(columns, sequences, histories)
    spec = DataSpec(
        label=data.label.column,
        positive=data.label.positive,
        negative=data.label.negative,
        dense=tuple(dense),
        sparse=(*sparse, *events),
        day_column=day,
        timestamp=None if day else data.timestamp,
        true_probability=synthetic and data.label.column == LABEL,
        missing=tuple(data.missing),
        strip=data.strip,
        split=data.split,
        columns=columns,
        hour_column=hour,
        tasks=_task_specs(data.tasks),
        sequences=tuple(sequences),
        row_time=row_time if timed else None,
        histories=tuple(histories),
        whole_hours=data.hour_column is not None,
        row_weight=data.weight,
        time_zone=data.time_zone,
        sampling=data.sampling,
        event_key=data.dedupe.key,
        decimal=data.decimal,
        time_format=data.time_format,
        split_time=row_time if by_time else None,
        quote=data.quote if "csv" in (data.format, data.messages) else QUOTE,
    )
    _check_names(spec)
    return spec


def _task_specs(tasks: dict[str, TaskLabel]) -> tuple[TaskSpec, ...]:
    # By name, each behind the one that it is given, however the configuration lists them. A model's parts for a task go
    # by its place, and records of a configuration have no order, so nothing else would tell that a checkpoint's places
    # are others.
    def place(name: str) -> tuple[int, str]:
        depth, given = 0, tasks[name].given
        while given in tasks:
            depth, given = depth + 1, tasks[given].given
        return depth, name

    specs = []
    for name in sorted(tasks, key=place):
        task = tasks[name]
        spec = TaskSpec(
            name=name,
            column=task.column or name,
            kind=LABEL_KINDS.get(task.kind),
            positive=task.positive,
            negative=task.negative,
            given=task.given,
        )
        specs.append(spec)
    return tuple(specs)


def _sparse_spec(data: DataConfig, name: str) -> SparseSpec:
    feature, defaults = data.sparse[name], data.sparse_defaults
    owner = data.sparse[data.table_of(name)]
    separator = None
    if not feature.bins and feature.holds != ONE:
        separator = feature.separator or None
        if separator is None and not feature.cross:
            separator = defaults.separator
    cross_bins = {}
    for column, bounds in feature.cross_bins.items():
        cross_bins[column] = [float(bound) for bound in bounds]
    return SparseSpec(
        name=name,
        column=feature.cross[0] if feature.cross else feature.column or name,
        mapping=mapping_of(owner.mapping, defaults.mapping, owner.bins),
        rows=RESERVED_ROWS + owner.bins if owner.bins else owner.rows or defaults.rows,
        min_count=owner.min_count or defaults.min_count,
        when_full=owner.when_full or defaults.when_full,
        evict_after_days=owner.evict_after_days or defaults.evict_after_days,
        table=feature.table or "",
        separator=separator,
        weight_separator=feature.weight_separator or defaults.weight_separator,
        cross=tuple(feature.cross),
        bins=feature.bins,
        bins_by=feature.bins_by,
        max_ids=feature.max_ids,
        integer=feature.integer,
        required=feature.required,
        holds=feature.holds or (LIST if feature.weights else ""),
        weights=feature.weights,
        cross_bins=cross_bins,
    )


def _sequence_spec(name: str, sequence: SequenceConfig) -> SequenceSpec:
    # A history is built as a column of its own, whose structs have a field for each feature and the time.
    columns = {}
    for feature, event in sequence.features.items():
        path = f"{name}.{feature}"
        if not sequence.built and event.column:
            path = event.column
        columns[event_feature(name, feature)] = EventSource.of(path, sequence.separator)
    time = f"{name}.{EVENT_TIME}" if sequence.built else sequence.time
    return SequenceSpec(
        name=name,
        columns=columns,
        max_length=sequence.max_length,
        time=None if time is None else EventSource.of(time, sequence.separator),
        age_bins=sequence.age_bins,
        drop_leaks=sequence.leaks == DROP,
    )


def _history_plan(data: DataConfig, name: str, time: str) -> HistoryPlan:
    sequence = data.sequences[name]
    history, columns = sequence.history, dict[str, str]()
    for feature, event in sequence.features.items():
        if event.column:
            columns[feature] = event.column
        elif event.table:
            columns[feature] = data.sparse[event.table].column or event.table
        else:
            columns[feature] = feature
    return HistoryPlan(
        name=name,
        by=history.by or "",
        of=columns,
        time=time,
        days=history.days,
        most=sequence.max_length,
        where=history.where,
        lag_minutes=history.lag_minutes,
    )


def _event_spec(data: DataConfig, sequence: SequenceSpec, feature: str) -> SparseSpec:
    # The column `feature` of `sequence`: a feature of lists, which shares a table or has its own.
    configs = {}
    for name, config in data.sequences[sequence.name].features.items():
        configs[event_feature(sequence.name, name)] = config
    ages, column = feature not in configs, configs.get(feature, EventColumn())
    source = sequence.columns.get(feature, sequence.time)
    assert source is not None
    if column.table is not None:
        shared = _sparse_spec(data, column.table)
        return replace(
            shared,
            name=feature,
            column=source.column,
            table=column.table,
            sequence=sequence.name,
            holds=LIST,
            separator=source.separator,
            cross=(),
            cross_bins={},
            weights=None,
            weight_separator=None,
            max_ids=None,
            integer=False,
            required=False,
        )
    defaults = data.sparse_defaults
    return SparseSpec(
        name=feature,
        column=source.column,
        mapping=mapping_of("vocab", "vocab", None),
        rows=RESERVED_ROWS + sequence.age_bins if ages else column.rows or defaults.rows,
        min_count=1 if ages else column.min_count or defaults.min_count,
        when_full=defaults.when_full,
        evict_after_days=None if ages else defaults.evict_after_days,
        separator=source.separator,
        weight_separator=None,
        holds=LIST,
        sequence=sequence.name,
    )


def _add_event_columns(
    columns: dict[str, str], sequences: Sequence[SequenceSpec], histories: Sequence[HistoryPlan]
) -> None:
    for plan in histories:
        for column in plan.read:
            columns.setdefault(column, plan.setting_of(column))
    built = {plan.name for plan in histories}
    for sequence in sequences:
        if sequence.name in built:
            continue
        for feature, source in sequence.columns.items():
            name = feature.removeprefix(event_feature(sequence.name, ""))
            columns.setdefault(source.column, f"data.sequences.{sequence.name}.features.{name}.column")
        if sequence.time is not None:
            columns.setdefault(sequence.time.column, f"data.sequences.{sequence.name}.time")
    for name in built & columns.keys():
        raise ConfigError(
            f"data.sequences.{name} is built from the log as a column {name!r}, but {columns[name]} reads a column of "
            "that name from the log",
            hint=f"~data.sequences.{name}, and the same as +data.sequences.{name}_events",
        )


def _columns(
    data: DataConfig,
    dense: Sequence[DenseSpec],
    sparse: Sequence[SparseSpec],
    day: str | None,
    hour: str | None,
    time: str | None,
) -> dict[str, str]:
    columns = {data.label.column: "data.label.column"}
    for group, features in (("dense", dense), ("sparse", sparse)):
        for feature in features:
            columns.setdefault(feature.column, f"data.{group}.{feature.name}.column")
    for feature in sparse:
        for column in feature.cross:
            columns.setdefault(column, f"data.sparse.{feature.name}.cross")
        if feature.weights:
            columns.setdefault(feature.weights, f"data.sparse.{feature.name}.weights")
    if day:
        columns.setdefault(day, "data.day_column")
    elif data.timestamp:
        columns.setdefault(data.timestamp, "data.timestamp")
    if hour:
        columns.setdefault(hour, "data.hour_column" if data.hour_column else "data.timestamp")
    if time:
        columns.setdefault(time, "data.timestamp")
    for name, task in data.tasks.items():
        columns.setdefault(task.column or name, f"data.tasks.{name}.column")
    if data.weight:
        columns.setdefault(data.weight, "data.weight")
    if data.dedupe.key:
        columns.setdefault(data.dedupe.key, "data.dedupe.key")
    if data.sampling.column:
        columns.setdefault(data.sampling.column, "data.sampling.column")
    return columns


def _check_names(spec: DataSpec) -> None:
    taken = {LABEL, TRUE_PROBABILITY}
    if spec.has_day:
        taken.add(DAY)
    if spec.hour_column:
        taken.add(SPLIT_HOUR)
    if spec.row_weight:
        taken.add(ROW_WEIGHT)
    if spec.sampling.active:
        taken.add(NEGATIVE_RATE)
    for sparse in spec.sparse:
        if sparse.weighted:
            taken.add(weight_column(sparse.name))
    for task in spec.tasks:
        taken.add(task_column(task.name))
    for group, features in (("dense", spec.dense), ("sparse", spec.sparse)):
        for feature in features:
            if feature.name in taken or set(feature.name) & set("/."):
                safe = feature.name.replace("/", "_").replace(".", "_")
                raise ConfigError(
                    f"data.{group} has a feature called {feature.name!r}, which the dataset uses itself or "
                    "which cannot name a file and a module ('/' and '.' are not allowed)",
                    hint=f"give it another name and keep its column: '+data.{group}.my_{safe}={{column: "
                    f"{feature.column}}}' in place of {feature.name!r}",
                )
    names = taken | {dense.name for dense in spec.dense} | {sparse.name for sparse in spec.sparse}
    for vector in spec.dense:
        shared = sorted(names & set(vector.columns)) if vector.vector else []
        if shared:
            raise ConfigError(
                f"data.dense.{vector.name} is a vector, and {shared[0]!r}, the name of one of its columns in the "
                "dataset, is also that of another feature",
                hint=f"'+data.dense.{vector.name}_vector={{column: {vector.column}, width: {vector.width}}}' in "
                f"place of {vector.name!r}",
            )
    if spec.positive == spec.negative:
        raise ConfigError(
            f"data.label.positive and data.label.negative are both {spec.positive!r}, expected two values",
            hint="data.label.positive=1 data.label.negative=0",
        )


def require_columns(spec: DataSpec, available: Sequence[str], file: str, *, header: bool) -> None:
    """Raise DataError if ``file`` lacks a column of the schema, naming the nearest it has.

    Args:
        spec: the schema, whose columns are expected.
        available: the columns of the file.
        file: its name in messages.
        header: whether ``available`` was read from a first line, which may be none of names.
    """
    for column, override in spec.columns.items():
        count = available.count(column)
        if count == 1:
            continue
        if count:
            raise DataError(f"{file} has {count} columns called {column!r}, expected one", hint="rename all but one")
        near = [name for name in available if name.lower() == column.lower()]
        if not near:
            near = difflib.get_close_matches(column, available, n=1, cutoff=0.5)
        hint = f"{override}={near[0] if near else '<one of them>'}"
        other_separator = ""
        if len(available) == 1:
            other_separator = next((mark for mark in ";\t|, " if mark in available[0]), "")
        if header and other_separator:
            hint = f"data.separator='{other_separator}'".replace("\t", "\\t")
        elif header:
            hint += "; if the first line is no header: data.header=false data.columns=[<names>]"
        raise DataError(
            f"{file} has no column {column!r} ({override}); {f'nearest: {near[0]}; ' if near else ''}"
            f"it has: {', '.join(available)}",
            hint=hint,
        )
