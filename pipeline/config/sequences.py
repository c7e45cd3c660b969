"""Sequences: what a user did before a row, as aligned columns of events."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace

from pipeline.config.features import MOST_ROWS, TAKEN_NAMES, SparseFeature
from pipeline.config.fields import setting
from pipeline.core.errors import ConfigError
from pipeline.core.registry import with_options
from pipeline.specs.id_mapping import mapping_of
from pipeline.specs.model import SEQUENCE_BLOCKS, SequenceBlock

# The column with the ages of a sequence's events, computed from their times.
AGE = "age"
# The field with the times of events in sequences that ingestion builds from the log.
EVENT_TIME = "time"
QUARANTINE, DROP = "quarantine", "drop"
_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_]*")


@dataclass(kw_only=True)
class EventColumn:
    """One thing that the events of a sequence have, such as an item or a category: an id an event."""

    column: str | None = setting(
        None,
        doc="Column of the events' ids, the oldest event's first: a column of lists, a JSON array, or text with "
        "`separator`. With a dot, the field of a column of lists of structs: history.item. null: the field of this "
        "name of the column with the sequence's name.",
    )
    table: str | None = setting(
        None,
        doc="Categorical feature whose ids and table rows the events have; null: a table of its own, by mapping vocab.",
    )
    rows: int | None = setting(
        None, low=3, high=MOST_ROWS, doc="Largest number of rows of an own table; null: `data.sparse_defaults.rows`."
    )
    min_count: int | None = setting(
        None, low=1, doc="Lookups after which an id gets a row of an own table; null: `data.sparse_defaults.min_count`."
    )

    def check(self, path: str) -> None:
        # The rows of a shared table are set where the table is.
        own = [name for name in ("rows", "min_count") if getattr(self, name) is not None]
        if self.table is not None and own:
            raise ConfigError(
                f"{path} shares the table of {self.table} and sets {' and '.join(own)}, expected them there",
                hint=" ".join(f"{path}.{name}=null" for name in own),
            )


@dataclass(kw_only=True)
class HistoryConfig:
    """How a sequence is built from the log itself: of each row, what its user did in earlier rows, newest last."""

    by: str | None = setting(
        None,
        doc="Column of the user; null: the log has the sequence. With it, `features.<name>.column` is the column of a "
        "row (null: that of the feature `table`, else of the same name), and the times are those of the rows.",
    )
    days: int | None = setting(
        7,
        low=1,
        high=366,
        doc="Age, in days of 24 hours, above which events are left out; null: none is, in a log without `data.day`.",
    )
    where: str | None = setting(
        None,
        doc="Column that says which rows are events: the label's where it is a click, any other where it is a number "
        "above 0; null: all rows are.",
    )
    lag_minutes: float = setting(
        0.0,
        low=0.0,
        doc="Age, in minutes, from which on events are known; 0: from the next moment on. As long as it takes until "
        "an event, and the label that `where` names, is in the histories of the server that asks the model.",
    )


@dataclass(kw_only=True)
class SequenceConfig:
    """Events of a row in the order of time, the oldest first. Its columns are as long as each other in every row."""

    features: dict[str, EventColumn] = setting(factory=dict, doc="What an event has, by name.")
    max_length: int = setting(
        100, low=1, high=100_000, doc="Largest number of events of a row; of more, the newest are taken."
    )
    target: str | None = setting(
        None,
        doc="Categorical feature of the row that attention compares the events with, one whose table they have; "
        "null: none.",
    )
    time: str | None = setting(
        None,
        doc="Column of the events' times, as `data.timestamp` is written; with a dot a field, as of `column`. An "
        "event's age, the time from it to the row's own, becomes one more column of the events, `age`, in bins of its "
        "logarithm. null: times are not known.",
    )
    age_bins: int = setting(64, low=2, high=1000, doc="Bins of the ages, from a second to 16 years.")
    leaks: str = setting(
        QUARANTINE,
        choices=(QUARANTINE, DROP),
        doc="What becomes of events at or after the row's own time. quarantine: the row is invalid. drop: these events "
        "are left out, and counted.",
    )
    separator: str | None = setting(None, doc="Text between the values of a field of text.")
    history: HistoryConfig = setting(
        factory=HistoryConfig, quiet=True, doc="Builds the sequence from the log, which then needs no column of it."
    )

    @property
    def built(self) -> bool:
        """Whether it is built from the log."""
        return self.history.by is not None

    @property
    def timed(self) -> bool:
        """Whether its events have times, and so ages."""
        return self.built or self.time is not None

    def check(self, path: str) -> None:
        # A sequence needs a column, and its name must be free.
        if self.built and (self.time is not None or self.separator is not None):
            what = "time" if self.time is not None else "separator"
            raise ConfigError(
                f"{path}.history builds the sequence from the log, but {path}.{what} is set: rows have times of their "
                "own and no lists",
                hint=f"{path}.{what}=null",
            )
        if not self.features:
            raise ConfigError(
                f"{path}.features is empty, expected what an event has", hint=f"'+{path}.features.item={{table: item}}'"
            )
        # Every timed sequence has ages; a sequence that ingestion builds also has the times as a field.
        taken: tuple[str, ...] = ()
        if self.built:
            taken = (AGE, EVENT_TIME)
        elif self.time is not None:
            taken = (AGE,)
        for name in self.features:
            expected = "a name of letters, digits and _"
            if name in taken:
                expected += f", and another one than {name}, which the events' times give"
            if not _NAME.fullmatch(name) or name in taken:
                raise ConfigError(
                    f"{path}.features has {name!r}, expected {expected}",
                    hint=f"~{path}.features.{name} +{path}.features.event_{_safe(name)}={{...}}",
                )


@dataclass(kw_only=True)
class SequenceOptions:
    """Options of a sequence's block; null: its own value. An option that it lacks is refused."""

    hidden: list[int] | None = setting(None, doc="Hidden widths of the MLP by which din weighs an event.")
    softmax: bool | None = setting(None, doc="Whether din's weights are shares of one.")
    layers: int | None = setting(None, low=1, high=64, doc="Layers of sasrec, bst or hstu.")
    heads: int | None = setting(None, low=1, high=256, doc="Heads of their attention.")
    ages: bool | None = setting(
        None, quiet=True, doc="Whether hstu weighs an event by its age too; the sequence needs times."
    )

    def check(self, path: str) -> None:
        # A layer must have a width.
        if any(width < 1 for width in self.hidden or ()):
            raise ConfigError(
                f"{path}.hidden is {self.hidden}, expected widths of at least 1", hint=f"{path}.hidden=[32,16]"
            )


@dataclass(kw_only=True)
class SequenceModel:
    """How the events of a sequence become a vector of the ranking model."""

    block: str = setting(
        "din",
        choices=SEQUENCE_BLOCKS.names,
        doc="What looks at the events.",
        more=lambda: " ".join(f"{each.name}: {each.doc}" for each in SEQUENCE_BLOCKS),
    )
    places: bool = setting(True, doc="Add a learned vector of its place, counted from the newest event, to each event.")
    options: SequenceOptions = setting(factory=SequenceOptions, doc="Options of `block`.")

    def check(self, path: str) -> None:
        # The block must have its options.
        self.block_at(path)

    def block_at(self, path: str) -> SequenceBlock:
        """Return the block with its options; ConfigError, naming ``path``, for an option that it lacks."""
        return with_options(SEQUENCE_BLOCKS, self.block, self.options, f"{path}.options")


def _safe(name: str) -> str:
    return re.sub(r"[^A-Za-z0-9_]", "_", name)


def given_sequences(sequences: Mapping[str, SequenceConfig]) -> dict[str, SequenceConfig]:
    """Return ``sequences`` for rows that already have those that ingestion builds: column ``<name>`` of structs."""
    given = {}
    for name, each in sequences.items():
        if each.built:
            # ``column`` names a column of the log's rows; the field of an event has the feature's own name.
            features = {event: replace(column, column=None) for event, column in each.features.items()}
            each = replace(each, history=HistoryConfig(), time=f"{name}.{EVENT_TIME}", features=features)
        given[name] = each
    return given


def event_feature(sequence: str, column: str) -> str:
    """Return the name of a column of a sequence in the dataset, and of its table if it has its own."""
    return f"{sequence}__{column}"


def check_sequences(
    path: str,
    sequences: Mapping[str, SequenceConfig],
    sparse: Mapping[str, SparseFeature],
    taken: set[str],
    default_mapping: str,
    default_separator: str | None,
) -> None:
    """Raise ConfigError for a ``taken`` name, and for tables and targets that no feature of ``sparse`` has."""
    for name, sequence in sequences.items():
        # The dataset has columns for a sequence's features beside all others, so their names must be free, too.
        columns = {event_feature(name, column) for column in (*sequence.features, AGE)}
        if not _NAME.fullmatch(name) or name in taken | TAKEN_NAMES or columns & taken:
            raise ConfigError(
                f"{path} has a sequence {name!r}, expected a name of letters, digits and _ that no feature has",
                hint=f"~{path}.{name}, and the same as {path}.{_safe(name)}_events",
            )
        for column, each in sequence.features.items():
            if each.table is not None:
                _check_table(f"{path}.{name}.features.{column}.table", each.table, sparse, default_mapping)
                if sequence.built and sparse[each.table].several(default_separator):
                    raise ConfigError(
                        f"{path}.{name}.features.{column}.table is {each.table!r}, whose rows have several ids or are "
                        "made of several columns: an event that is built from a row has one id of one column",
                        hint=f"{path}.{name}.features.{column}.table=null",
                    )
        # A target is compared with events by their vectors, so both must use the same table.
        tables = list(dict.fromkeys(each.table for each in sequence.features.values() if each.table))
        if sequence.target is not None and sequence.target not in tables:
            possible = tables[0] if tables else "null"
            raise ConfigError(
                f"{path}.{name}.target is {sequence.target!r}, expected a feature whose table the events have: "
                f"{', '.join(tables) or 'there is none'}",
                hint=f"{path}.{name}.target={possible}",
            )


def _check_table(path: str, table: str, sparse: Mapping[str, SparseFeature], default_mapping: str) -> None:
    # An event has one id with one row, so mappings with several rows per id and rows of bins cannot be shared.
    owner = sparse.get(table)
    if owner is None or owner.table is not None:
        if owner is not None:
            wrong, better = f"shares the table of {owner.table}", owner.table
        else:
            others = [name for name, each in sparse.items() if each.table is None]
            wrong, better = "is no categorical feature", others[0] if others else "null"
        raise ConfigError(
            f"{path} is {table!r}, which {wrong}, expected one with a table of its own", hint=f"{path}={better}"
        )
    mapping = mapping_of(owner.mapping, default_mapping, owner.bins)
    if not mapping.shareable or mapping.rows_per_id > 1:
        what, hint = "has bins of numbers", f"{path}=null"
        if not owner.bins:
            what = f"has mapping {mapping.name}"
            hint += f", or data.sparse.{table}.mapping=vocab"
        raise ConfigError(f"{path} is {table!r}, which {what}: events cannot have its rows", hint=hint)
