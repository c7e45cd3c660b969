"""The schema that a data configuration describes: ``DataSpec`` with every default filled in."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from pipeline.config.data import DataConfig
from pipeline.config.features import LIST, ONE
from pipeline.config.sequences import DROP, EVENT_TIME, EventColumn, SequenceConfig, event_feature
from pipeline.config.tasks import TaskLabel
from pipeline.core.errors import ConfigError
from pipeline.ingest.schema import (
    DAY,
    QUOTE,
    TIME,
    DataSpec,
    DenseSpec,
    EventSource,
    HistoryPlan,
    SequenceSpec,
    SparseSpec,
)
from pipeline.records.dataset import (
    LABEL,
    NEGATIVE_RATE,
    RESERVED_ROWS,
    ROW_WEIGHT,
    SPLIT_HOUR,
    TRUE_PROBABILITY,
    task_column,
    weight_column,
)
from pipeline.specs.id_mapping import mapping_of
from pipeline.specs.label_kind import LABEL_KINDS, TaskSpec


def data_spec(data: DataConfig) -> DataSpec:
    """Return the schema that ``data`` describes. Raises ConfigError for settings that contradict each other."""
    synthetic = data.format == "synthetic"
    dense = _dense_specs(data)
    sparse = [_sparse_spec(data, name) for name in data.sparse]

    day, row_time = data.day_column or None, data.timestamp or None
    if synthetic:
        day, row_time = day or DAY, row_time or TIME
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
        for feature_name in sequence.features:
            events.append(_event_spec(data, sequence, feature_name))
        if config.built:
            histories.append(_history_plan(data, name, row_time or ""))

    # The time of a row is read only if the split or the ages of events need it.
    split_time = row_time if by_time else None
    event_time = row_time if any(sequence.time for sequence in sequences) else None
    columns = _columns(data, dense, sparse, day, hour, split_time or event_time)
    _add_event_columns(columns, sequences, histories)
    # A column of days takes precedence: the timestamp then tells no days, but may still split the rows.
    timestamp = None if day else data.timestamp
    # Other formats have no quotes: they keep the default, as in records of earlier releases.
    quote = data.quote if "csv" in (data.format, data.messages) else QUOTE
    spec = DataSpec(
        label=data.label.column,
        positive=data.label.positive,
        negative=data.label.negative,
        dense=tuple(dense),
        sparse=(*sparse, *events),
        day_column=day,
        timestamp=timestamp,
        true_probability=synthetic and data.label.column == LABEL,
        missing=tuple(data.missing),
        strip=data.strip,
        split=data.split,
        columns=columns,
        hour_column=hour,
        tasks=_task_specs(data.tasks),
        sequences=tuple(sequences),
        row_time=event_time,
        histories=tuple(histories),
        whole_hours=data.hour_column is not None,
        row_weight=data.weight,
        time_zone=data.time_zone,
        sampling=data.sampling,
        event_key=data.dedupe.key,
        decimal=data.decimal,
        time_format=data.time_format,
        split_time=split_time,
        quote=quote,
        left_out=tuple(data.leave_out),
    )
    _check_names(spec)
    return spec


def _dense_specs(data: DataConfig) -> list[DenseSpec]:
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
    return dense


def _task_specs(tasks: dict[str, TaskLabel]) -> tuple[TaskSpec, ...]:
    # Tasks are ordered by name, each after the one that it is given, however the configuration lists them. A model's
    # parts for a task go by its place, and records of a configuration have no order, so nothing else would show that a
    # checkpoint has other places.
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
    # A cross has several values only with a separator of its own: the default is meant for plain columns.
    separator = None
    if not feature.bins and feature.holds != ONE:
        separator = feature.separator or None
        if separator is None and not feature.cross:
            separator = defaults.separator
    column = feature.column or name
    if feature.cross:
        column = feature.cross[0]
    rows = owner.rows or defaults.rows
    if owner.bins:
        rows = RESERVED_ROWS + owner.bins
    holds = feature.holds
    if not holds and feature.weights:
        holds = LIST
    return SparseSpec(
        name=name,
        column=column,
        mapping=mapping_of(owner.mapping, defaults.mapping, owner.bins),
        rows=rows,
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
        holds=holds or "",
        weights=feature.weights,
        cross_bins={crossed: list(map(float, bounds)) for crossed, bounds in feature.cross_bins.items()},
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
    time_source = None
    if time is not None:
        time_source = EventSource.of(time, sequence.separator)
    return SequenceSpec(
        name=name,
        columns=columns,
        max_length=sequence.max_length,
        time=time_source,
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
    # Returns column `feature` of `sequence`: a feature of lists, which shares a table or has its own.
    configs = {}
    for name, config in data.sequences[sequence.name].features.items():
        configs[event_feature(sequence.name, name)] = config
    column = configs.get(feature, EventColumn())
    source = sequence.columns.get(feature, sequence.time)
    assert source is not None
    if column.table is not None:
        # The table's settings are those of the shared feature. How a field is divided is up to the sequence.
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
    rows, min_count, evict_after_days = column.rows or defaults.rows, column.min_count, defaults.evict_after_days
    if feature not in configs:
        # The ids of ages are bins: each gets and keeps a row of its own, however rare it is.
        rows, min_count, evict_after_days = RESERVED_ROWS + sequence.age_bins, 1, None
    return SparseSpec(
        name=feature,
        column=source.column,
        mapping=mapping_of("vocab", "vocab", None),
        rows=rows,
        min_count=min_count or defaults.min_count,
        when_full=defaults.when_full,
        evict_after_days=evict_after_days,
        separator=source.separator,
        weight_separator=None,
        holds=LIST,
        sequence=sequence.name,
    )


def _add_event_columns(
    columns: dict[str, str], sequences: Sequence[SequenceSpec], histories: Sequence[HistoryPlan]
) -> None:
    # If several settings name a column, messages about it name the first of them.
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
    if data.hour_column and hour:
        columns.setdefault(hour, "data.hour_column")
    elif hour:
        columns.setdefault(hour, "data.timestamp")
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
    names = set(taken)
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
            names.add(feature.name)
    for vector in spec.dense:
        if not vector.vector:
            continue
        shared = sorted(names.intersection(vector.columns))
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
