"""The ``data`` group: where the click logs are and what their columns mean."""

from __future__ import annotations

import difflib
import re
import urllib.parse
from dataclasses import dataclass
from datetime import date, timedelta

from omegaconf import MISSING

from pipeline.config.features import (
    TAKEN_NAMES,
    TRANSFORMS,
    DenseFeature,
    LabelConfig,
    SparseDefaults,
    SparseFeature,
    TableDefaults,
    TableFigures,
)
from pipeline.config.fields import check_name, check_time_format, check_time_zone, setting
from pipeline.config.ingest import ChecksConfig, DedupeConfig, SamplingConfig, SplitConfig, WatermarkConfig
from pipeline.config.sequences import AGE, SequenceConfig, check_sequences, event_feature
from pipeline.config.synthetic import SyntheticConfig
from pipeline.config.tasks import TaskLabel, check_task_names
from pipeline.core.errors import ConfigError
from pipeline.specs.connector import CONNECTORS, Connector
from pipeline.specs.id_mapping import mapping_of

# The day in a path: {day} is YYYY-MM-DD, and {day:%Y/%m/%d} has its own format.
DAY_FIELD = re.compile(r"\{day(:[^{}]*)?\}")
# File systems allow 255 bytes; the rest is for endings, and for what marks a file that is not whole yet.
MOST_NAME_BYTES = 200
# Formats of files and of sources without logs; CONNECTORS has the tables and streams.
FORMATS = ("criteo", "csv", "jsonl", "parquet", "orc", "avro", "synthetic", "tables")


def format_names() -> tuple[str, ...]:
    """Return what ``data.format`` can be."""
    return (*FORMATS, *CONNECTORS.names())


def connector_at(place: str) -> tuple[Connector | None, str]:
    """Return the connector and the ``data.path`` that <connector>:<path> names; None and ``place`` for files."""
    name, _, path = place.partition(":")
    # A colon alone does not make it a connector, since file names may have one.
    if not path or name not in CONNECTORS.names():
        return None, place
    return CONNECTORS.get(name), path


def connector_docs() -> str:
    """Return the documentation of the formats that are tables and streams."""
    return " ".join(f"{each.name}: {each.doc}" for each in CONNECTORS)


@dataclass(kw_only=True)
class DataConfig:
    """The click logs and the meaning of their columns."""

    name: str = setting(MISSING, doc="Name of the dataset in the store, and the default name of the model.")
    format: str = setting(
        MISSING,
        choices=format_names,
        doc="Format of the logs. synthetic generates logs. tables has no logs: it describes tables by their figures, "
        "for planning only.",
        more=connector_docs,
    )
    path: str | None = setting(
        None,
        doc="Where the logs are: a file, a directory or a glob on any fsspec URL. {day} or {day:%Y/%m/%d} in it "
        "stands for `data.day`.",
    )
    options: dict[str, str] = setting(
        factory=dict,
        quiet=True,
        doc="How a table or stream is reached: options of its library, by their names there. No secrets: manifests "
        "show them.",
    )
    snapshot: str | None = setting(
        None,
        quiet=True,
        doc="Which state of a table is read: a version (delta), the id of a snapshot (iceberg), a time "
        "YYYY-MM-DDTHH:MM:SSZ (bigquery), offsets such as 0:10-99,1:0-50 (kafka); null: the newest.",
    )
    messages: str | None = setting(
        None,
        quiet=True,
        choices=("jsonl", "csv", "avro"),
        doc="What a message of a stream is: an object of JSON, a line of CSV or a record of Avro; null: JSON.",
    )
    separator: str = setting(",", doc="Character that separates the fields of a CSV line.")
    quote: str | None = setting('"', doc="Character that may surround a CSV field; null: none.")
    header: bool = setting(True, doc="Whether the first line of a CSV file names the columns.")
    columns: list[str] = setting(factory=list, doc="The columns, in order, of a CSV file without a header line.")
    strip: bool = setting(False, doc="Strip blanks around the fields of a CSV line.")
    decimal: str = setting(
        ".", choices=(".", ","), quiet=True, doc="Sign before the decimals of numbers in text: 3.56 or 3,56."
    )
    missing: list[str] = setting(factory=lambda: [""], doc="Texts that stand for a missing value.")
    label: LabelConfig = setting(factory=LabelConfig, doc="The label column and its values.")
    tasks: dict[str, TaskLabel] = setting(
        factory=dict,
        quiet=True,
        doc="Further labels that the model learns beside `data.label`, by the names of their tasks.",
    )
    weight: str | None = setting(
        None, quiet=True, doc="Column with the weight of a row in loss and metrics, 0 or more; null: all weigh 1."
    )
    sampling: SamplingConfig = setting(
        factory=SamplingConfig, doc="Rows without a click of which a share is kept, here or before."
    )
    dedupe: DedupeConfig = setting(factory=DedupeConfig, doc="Which rows are one event, of which the first one stays.")
    timestamp: str | None = setting(None, doc="Column with the time of a row; null: none.")
    day_column: str | None = setting(None, doc="Column with the day of a row; null: none.")
    hour_column: str | None = setting(
        None,
        quiet=True,
        doc="Column with the hour of a row, 0 to 23, such as a partition's folder hour=07; null: `timestamp` tells it.",
    )
    time_zone: str | None = setting(
        None,
        quiet=True,
        doc="Time zone of days and hours, such as Europe/Berlin: times since 1970 and times with a zone or an offset "
        "are brought there, all others are its own. null: UTC, and times in text as they are written.",
    )
    time_format: str | None = setting(
        None,
        quiet=True,
        doc="How days and times in text are written, such as '%d.%m.%Y %H:%M:%S' (strptime's directives, as Polars "
        "reads them). With %z, times are in UTC, or in `time_zone`. null: YYYY-MM-DD HH:MM:SS, YYYYMMDD, and times "
        "since 1970.",
    )
    day: str | None = setting(
        None,
        doc="Day to ingest, YYYY-MM-DD, or a range of days, A..B; null: everything at `data.path`. With {day} in "
        "`data.path` it selects files, else rows.",
    )
    watermark: WatermarkConfig = setting(factory=WatermarkConfig, doc="When the logs of a day are complete.")
    late: str = setting(
        "quarantine",
        choices=("quarantine", "own_day"),
        doc="What to do with rows of another day in this day's files. quarantine: treat them as invalid. own_day: "
        "keep them for the dataset of their own day.",
    )
    late_days: int = setting(
        3, low=1, high=366, doc="With own_day, the number of days after which a late row is no longer kept."
    )
    mapping_from: str | None = setting(
        None,
        doc="Dataset, a path in the store, whose id mappings and fitted transforms to continue; null: start anew. A "
        "night sets it to the previous day's dataset.",
    )
    max_quarantine_share: float = setting(
        0.2, low=0.0, high=1.0, doc="Largest share of a day's rows in quarantine; the stage fails above it."
    )
    checks: ChecksConfig = setting(factory=ChecksConfig, doc="Checks of the finished dataset.")
    dense_transform: str = setting(
        "log1p_standardise", choices=TRANSFORMS, doc="Transform of the numeric features that set none."
    )
    sparse_defaults: SparseDefaults = setting(factory=SparseDefaults, doc="Defaults of the categorical features.")
    dense: dict[str, DenseFeature] = setting(factory=dict, doc="The numeric features, by name.")
    sparse: dict[str, SparseFeature] = setting(factory=dict, doc="The categorical features, by name.")
    sequences: dict[str, SequenceConfig] = setting(
        factory=dict, quiet=True, doc="What a user did before a row: sequences of events, by name."
    )
    leave_out: list[str] = setting(
        factory=list,
        quiet=True,
        doc="Features that count as missing in every row. So a model is trained and judged without them, on the same "
        "rows, tables and layers; `nightjar bisect` does that.",
    )
    aside: bool = setting(
        False,
        quiet=True,
        doc="Put the dataset under `datasets/<name>.aside`: it does not become the dataset of its day, from which "
        "later days go on.",
    )
    split: SplitConfig = setting(factory=SplitConfig, doc="How rows are split into train and test set.")
    synthetic: SyntheticConfig = setting(factory=SyntheticConfig, doc="What synthetic logs look like.")
    tables: dict[str, TableFigures] = setting(factory=dict, doc="The tables of format tables, by name.")
    table_defaults: TableDefaults = setting(factory=TableDefaults, doc="Defaults of the tables of format tables.")
    dense_features: int = setting(13, low=0, doc="Number of numeric features of format tables.")

    def check(self, path: str) -> None:
        # Check that a format has its settings, features have usable names, and days are known.
        check_name(f"{path}.name", self.name, "clicks")
        check_task_names(f"{path}.tasks", self.tasks)
        # Tables described by figures have no logs, so only their names are checked, which become parts of dotted paths
        # such as model.tables.<name>.
        if self.format == "tables":
            for name in self.tables:
                if set(name) & set("/."):
                    raise ConfigError(
                        f"{path}.tables has a table {name!r}, expected a name without '/' and '.'",
                        hint=f"call it {path}.tables.{re.sub('[/.]', '_', name)}",
                    )
            return
        if self.format != "synthetic" and not self.path:
            raise ConfigError(
                f"{path}.path is not set, so there are no click logs to read",
                hint=f"{path}.path=<file, directory or glob>",
            )
        self._check_connector(path)
        self._check_features(path)
        self._check_sequences(path)
        self._check_lengths(path)
        self._check_zone(path)
        self._check_window(path)
        self._check_day(path)
        self._check_split(path)

    def _check_connector(self, path: str) -> None:
        # Settings of tables and streams need a connector, and settings of files need files.
        connector, limit = self.connector, self.watermark
        if connector is None:
            of_tables = {
                "options": self.options,
                "snapshot": self.snapshot,
                "messages": self.messages,
                "watermark.later_rows": limit.later_rows,
            }
            for name, value in of_tables.items():
                if value:
                    raise ConfigError(
                        f"{path}.{name} is set, but {path}.format={self.format} is no table and no stream",
                        hint=f"{path}.format={CONNECTORS.names()[0]}, or without {path}.{name}",
                    )
            return
        if DAY_FIELD.search(self.path or ""):
            raise ConfigError(
                f"{path}.path={self.path} has {{day}}, but {path}.format={self.format} reads one table of all days",
                hint=f"{path}.path without {{day}}, and {path}.day_column or {path}.timestamp",
            )
        if self.messages is not None and not connector.messages:
            raise ConfigError(
                f"{path}.messages is {self.messages}, but {path}.format={self.format} has rows, not messages",
                hint=f"{path}.messages=null",
            )
        # A connector without a list of options passes all of them on to its library.
        known = connector.options
        for name in self.options:
            if known is not None and name not in known:
                raise ConfigError(
                    f"{path}.options has {name!r}, expected some of: {', '.join(known)}",
                    hint=f"~{path}.options.{name}",
                )
        if limit.success or limit.partitions or limit.min_partitions:
            raise ConfigError(
                f"{path}.watermark waits for files and folders, but {path}.format={self.format} has none",
                hint=f"{path}.watermark.success=null, partitions=[] and min_partitions=null; "
                f"{path}.watermark.later_rows=true waits for rows of a later day",
            )
        connector.check(self, path)

    def _check_features(self, path: str) -> None:
        if not self.sparse:
            raise ConfigError(
                f"{path}.sparse is empty, expected at least one categorical feature",
                hint=f"'+{path}.sparse.<column>={{}}'",
            )
        # Both would become the same column of the dataset.
        if shared := sorted(set(self.dense) & set(self.sparse)):
            raise ConfigError(
                f"feature {shared[0]!r} is in {path}.dense and in {path}.sparse, expected one of them",
                hint=f"~{path}.dense.{shared[0]}",
            )
        features = [*self.dense, *self.sparse]
        for name in self.leave_out:
            if name not in features:
                near = difflib.get_close_matches(name, features, n=1, cutoff=0.0)
                raise ConfigError(
                    f"{path}.leave_out has {name!r}, expected names of {path}.dense and {path}.sparse",
                    hint=f"{path}.leave_out=[{next(iter(near), '')}]",
                )
        for name, feature in self.sparse.items():
            # A feature's name becomes that of a submodule, which must not be an attribute of nn.Module or have a dot.
            if name in TAKEN_NAMES or "." in name:
                other = name.replace(".", "_")
                if name in TAKEN_NAMES:
                    other += "_id"
                column = feature.column or name
                raise ConfigError(
                    f"a feature of {path}.sparse is called {name!r}, a name that PyTorch reserves, expected another "
                    "name",
                    hint=f"~{path}.sparse.{name} +{path}.sparse.{other}={{column: {column}}}",
                )
            if feature.table is not None:
                self._check_shared(f"{path}.sparse.{name}.table", name, feature.table)

    def _check_lengths(self, path: str) -> None:
        # Tables, checkpoints and versions have files that are named after features, percent-encoded.
        for name in (*self.sparse, *self.event_tables):
            taken = len(urllib.parse.quote(name, safe=""))
            if taken <= MOST_NAME_BYTES:
                continue
            hint = f"a shorter name; the columns of {path}.sequences have theirs from the sequence and the column"
            if name in self.sparse:
                short, column = name[:20].replace(".", "_"), self.sparse[name].column or name
                hint = f"call it {path}.sparse.{short}, with column: {column}"
            raise ConfigError(
                f"the name of feature {name!r} takes {taken} bytes in names of files, expected at most "
                f"{MOST_NAME_BYTES} (letters and digits take one each, others up to 12)",
                hint=hint,
            )

    def _check_sequences(self, path: str) -> None:
        # Features, sequences and tasks are columns of one dataset.
        names = set(self.dense) | set(self.sparse) | set(self.tasks)
        defaults = self.sparse_defaults
        check_sequences(f"{path}.sequences", self.sequences, self.sparse, names, defaults.mapping, defaults.separator)
        timed = [name for name, each in self.sequences.items() if each.timed]
        # Ages of events are counted from the row's own time. Synthetic rows have one without a column.
        if timed and self.timestamp is None and self.format != "synthetic":
            own = "history.by" if self.sequences[timed[0]].built else "time"
            raise ConfigError(
                f"{path}.sequences.{timed[0]}.{own} is set, but {path}.timestamp names no column with the time of a "
                "row",
                hint=f"{path}.timestamp=<column>, or {path}.sequences.{timed[0]}.{own}=null",
            )
        for name, each in self.sequences.items():
            if each.built and each.history.where == self.label.column and self.label.window_days:
                raise ConfigError(
                    f"{path}.sequences.{name}.history.where is {self.label.column}, the label, whose clicks may come "
                    f"{self.label.window_days} days later ({path}.label.window_days): which of them a row could know "
                    "is not known",
                    hint=f"{path}.sequences.{name}.history.where=null, or {path}.label.window_days=0",
                )

    def _check_shared(self, path: str, name: str, table: str) -> None:
        # A shared table must belong to another feature, whose mapping gives rows to any ids.
        owner = self.sparse.get(table)
        if owner is None or table == name or owner.table is not None:
            others = [other for other, each in self.sparse.items() if each.table is None and other != name]
            near = next(iter(difflib.get_close_matches(table, others, n=1, cutoff=0.0)), "null")
            wrong = "is no such feature"
            if owner is not None and table != name:
                wrong = "shares a table itself"
            raise ConfigError(
                f"{path} is {table!r}, which {wrong}, expected another categorical feature with a table of its own",
                hint=f"{path}={near}",
            )
        mapping = mapping_of(owner.mapping, self.sparse_defaults.mapping, owner.bins)
        if not mapping.shareable:
            what, hint = "has bins of numbers", f"{path}=null"
            if not owner.bins:
                what = f"has mapping {mapping.name}, which looks at its rows alone"
                hint += f", or data.sparse.{table}.mapping=vocab"
            raise ConfigError(f"{path} is {table!r}, which {what}: no other feature can share its table", hint=hint)

    def table_of(self, feature: str) -> str:
        """Return the name of the table that embeds ``feature``: its own, or the one that it shares."""
        return self.sparse[feature].table or feature

    @property
    def vectors(self) -> list[str]:
        """The names of the model's vectors: the categorical features, and the sequences."""
        return [*self.sparse, *self.sequences]

    @property
    def shared_tables(self) -> list[list[str]]:
        """The features, and the sequences, of every table that several share, in order."""
        # Features first, so that a table shared with a sequence keeps its feature's place.
        by_table: dict[str, list[str]] = {}
        for name in self.sparse:
            by_table.setdefault(self.table_of(name), []).append(name)
        for name, tables in self.tables_of_sequences.items():
            for table in tables:
                by_table.setdefault(table, []).append(name)
        return [names for names in by_table.values() if len(names) > 1]

    @property
    def tables_of_sequences(self) -> dict[str, list[str]]:
        """The features whose tables the events have, by sequence; each once."""
        tables = {}
        for name, sequence in self.sequences.items():
            # Use keys of a dictionary rather than a set, to keep the order of the features.
            tables[name] = list(dict.fromkeys(each.table for each in sequence.features.values() if each.table))
        return tables

    @property
    def event_tables(self) -> tuple[str, ...]:
        """The tables that only columns of sequences use, by their features' names."""
        tables = []
        for name, sequence in self.sequences.items():
            for column, each in sequence.features.items():
                if each.table is None:
                    tables.append(event_feature(name, column))
            # This comes last. ``SequenceConfig.check`` refuses a column of this name in a timed sequence.
            if sequence.timed:
                tables.append(event_feature(name, AGE))
        return tuple(tables)

    @property
    def max_normed(self) -> frozenset[str]:
        """The numeric features with transform max_norm, which is a layer of the model."""
        return frozenset(name for name in self.dense if self.transform_of(name) == "max_norm")

    def transform_of(self, feature: str) -> str:
        """Return the transform of a numeric feature; for a vector without one, standardise."""
        each = self.dense[feature]
        if each.transform:
            return each.transform
        # ``dense_transform`` is meant for single numbers: a logarithm, for example, would change a vector's direction.
        return self.dense_transform if each.width == 1 else "standardise"

    @property
    def connector(self) -> Connector | None:
        """The connector that reads the table or stream named by ``format``; None for files."""
        return CONNECTORS.get(self.format) if self.format in CONNECTORS.names() else None

    @property
    def has_file_per_day(self) -> bool:
        """Whether the logs of every day are delivered separately, in their own files or by their arrival."""
        if self.connector is not None:
            return self.connector.by_day and self.day is not None
        return DAY_FIELD.search(self.path or "") is not None

    @property
    def days(self) -> list[date]:
        """The days that ``day`` names, in order; none if it is null. ConfigError unless it is a day or a range."""
        if self.day is None:
            return []
        first, _, last = self.day.partition("..")
        try:
            start, end = date.fromisoformat(first), date.fromisoformat(last or first)
            # fromisoformat also takes 20260131 and 2026-W05-6, but paths and keys need one form of a day.
            if not re.fullmatch(r"[\d-]{10}(\.\.[\d-]{10})?", self.day) or end < start:
                raise ValueError
        except ValueError:
            raise ConfigError(
                f"data.day is {self.day!r}, expected YYYY-MM-DD, or FIRST..LAST in order",
                hint="data.day=2026-01-31 or data.day=2026-01-01..2026-01-31",
            ) from None
        return [start + timedelta(days=i) for i in range((end - start).days + 1)]

    @property
    def _knows_days(self) -> bool:
        # A row's day is known from its file, from a column, or because the row is generated.
        return bool(self.has_file_per_day or self.day_column or self.timestamp or self.format == "synthetic")

    def _check_window(self, path: str) -> None:
        label = self.label
        if label.late_path is not None and not (label.window_days and DAY_FIELD.search(label.late_path)):
            what = "has no {day}"
            if not label.window_days:
                what = f"is set, but {path}.label.window_days is 0"
            raise ConfigError(
                f"{path}.label.late_path {what}",
                hint=f"'{path}.label.late_path=\"clicks/{{day}}/*.csv\"' {path}.label.window_days=7",
            )
        if label.late_path is not None and (self.connector is not None or self.format == "synthetic"):
            raise ConfigError(
                f"{path}.label.late_path is set, but its files are in the format of the log, and {path}.format="
                f"{self.format} is no format of files",
                hint=f"{path}.label.late_path=null: a click then comes as a row with the same {path}.dedupe.key",
            )
        if label.window_days and (self.dedupe.key is None or self.day is None):
            lacks, example = f"{path}.day", "2026-01-31"
            if self.dedupe.key is None:
                lacks, example = f"{path}.dedupe.key", "<a column of ids>"
            raise ConfigError(
                f"{path}.label.window_days is {label.window_days}, but {lacks} is null: clicks that come later are "
                "those of an event of a day",
                hint=f"{lacks}={example}",
            )
        if label.window_days and self.sampling.negatives is not None:
            raise ConfigError(
                f"{path}.label.window_days is {label.window_days} and {path}.sampling.negatives is "
                f"{self.sampling.negatives:g}: rows that are left out cannot be corrected later",
                hint=f"{path}.sampling.negatives=null, or {path}.label.window_days=0",
            )

    def _check_zone(self, path: str) -> None:
        check_time_zone(f"{path}.time_zone", self.time_zone)
        if self.time_zone is not None and self.format == "synthetic":
            raise ConfigError(
                f"{path}.time_zone is {self.time_zone}, but synthetic logs have days of their own",
                hint=f"{path}.time_zone=null",
            )
        check_time_format(f"{path}.time_format", self.time_format)
        if self.time_format is not None and not (self.timestamp or self.day_column):
            raise ConfigError(
                f"{path}.time_format is {self.time_format!r}, but neither {path}.timestamp nor {path}.day_column names "
                "a column",
                hint=f"{path}.timestamp=<column>, or {path}.time_format=null",
            )

    def _check_day(self, path: str) -> None:
        days = self.days
        if self.has_file_per_day and not days:
            raise ConfigError(
                f"{path}.path={self.path} has a file for each day, but {path}.day names none",
                hint=f"{path}.day=2026-01-31",
            )
        if days and not self._knows_days:
            raise ConfigError(
                f"{path}.day is {self.day}, but {path}.path has no {{day}}, and neither {path}.day_column nor "
                f"{path}.timestamp names a column with the day",
                hint=f"'{path}.path=\"logs/{{day}}/*.tsv\"', or {path}.day_column=<column>",
            )

    def _check_split(self, path: str) -> None:
        time_column = self.timestamp or self.hour_column
        if self.split.by == "time":
            if not self._knows_days:
                raise ConfigError(
                    f"{path}.split.by is 'time', but neither {path}.timestamp nor {path}.day_column names a column",
                    hint=f"{path}.timestamp=<column with the time of a row>, or {path}.split.by=hash",
                )
            # Within one day, only the time of a row tells earlier from later.
            tells_time = time_column or self.format == "synthetic"
            if self.day is not None and ".." not in self.day and not tells_time:
                raise ConfigError(
                    f"{path}.split.by is 'time', but the rows of {path}.day={self.day}, which is one day, tell no time",
                    hint=f"{path}.timestamp=<column with the time of a row>, or a range: "
                    f"{path}.day=2026-01-01..2026-01-08",
                )
        if self.split.by == "day" and self.day is not None and ".." not in self.day:
            raise ConfigError(
                f"{path}.split.by is 'day', but {path}.day={self.day} is one day, which cannot be split by day",
                hint=f"{path}.split.by=hash, or a range: {path}.day=2026-01-01..2026-01-08",
            )
        if self.split.by == "day" and not self._knows_days:
            raise ConfigError(
                f"{path}.split.by is 'day', but neither {path}.day_column nor {path}.timestamp names a column",
                hint=f"{path}.day_column=<column> or {path}.split.by=hash",
            )
        if self.split.by == "hours" and self.day is None:
            raise ConfigError(
                f"{path}.split.by is 'hours', which means the last hours of {path}.day, but {path}.day is null",
                hint=f"{path}.day=2026-01-31, or {path}.split.by=day for the last days of a log",
            )
        if self.split.by == "hours" and self.format != "synthetic" and time_column is None:
            raise ConfigError(
                f"{path}.split.by is 'hours', but {path}.timestamp names no column with the hour",
                hint=f"{path}.timestamp=<column>, {path}.hour_column=<column> or {path}.split.by=hash",
            )
