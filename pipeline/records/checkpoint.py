"""``index.json`` of a checkpoint, and what ``nightjar ckpt`` answers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from pipeline.records.record import Record, absent


@dataclass(frozen=True, kw_only=True)
class TableSize(Record):
    """Rows of a table and their width."""

    rows: int
    dim: int


@dataclass(frozen=True, kw_only=True)
class Extent(Record):
    """A file with ``rows`` rows of ``table``, ``first`` to ``last``: their ``columns`` columns from ``column`` on."""

    file: str
    table: str
    first: int
    last: int
    rows: int
    column: int
    columns: int
    coding: str


@dataclass(frozen=True, kw_only=True)
class Index(Record):
    """The tables of the model, and the files that hold rows of them."""

    FILE: ClassVar[str] = "index.json"
    KIND: ClassVar[str] = "checkpoint's index"
    VERSION: ClassVar[int] = 2

    format: int = VERSION
    tables: dict[str, TableSize]
    files: list[Extent]


@dataclass(frozen=True, kw_only=True)
class ListedCheckpoint(Record):
    """A checkpoint of ``nightjar ckpt ls``. ``type``: baseline | difference | damaged | set aside.

    ``bytes``: of its own files; ``share``: of a full fp32 checkpoint; ``rests``: names that rest on it; ``problem``:
    what is wrong with its manifest; ``why`` it was set aside. What only a manifest says is None without one.
    """

    run: str
    name: str
    path: str
    step: int
    type: str
    parents: tuple[str, ...] = ()
    codings: tuple[str, ...] = ()
    rows: int | None = None
    bytes: int | None = None
    share: float | None = None
    created: float | None = None
    age_seconds: float | None = None
    problem: str = ""
    rests: tuple[str, ...] = ()
    why: str | None = absent()


@dataclass(frozen=True, kw_only=True)
class StoredTable(TableSize):
    """A table in a checkpoint: rows stored there, bytes, files and codings."""

    rows_stored: int
    bytes: int
    files: int
    codings: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class ShownCheckpoint(Record):
    """A checkpoint of ``nightjar ckpt show``: manifest, ``position`` in the training, tables, dense part, settings."""

    run: str
    name: str
    path: str
    step: int
    type: str
    parents: tuple[str, ...]
    codings: tuple[str, ...]
    rows: int
    bytes: int
    share: float
    created: float
    age_seconds: float
    key: str
    inputs: dict[str, str]
    summary: dict[str, Any]
    position: dict[str, Any]
    tables: dict[str, StoredTable]
    dense_bytes: int
    config: dict[str, Any]


@dataclass(frozen=True)
class Damage(Record):
    """One damaged or missing ``file`` of ``checkpoint`` (a path in the store)."""

    checkpoint: str
    file: str
    problem: str


@dataclass(frozen=True, kw_only=True)
class Verified(Record):
    """``checkpoint`` and its chain, of what was typed as ``name``; ``files`` and ``bytes``: read."""

    name: str
    checkpoint: str
    whole: bool
    files: int
    bytes: int
    damage: tuple[Damage, ...]


@dataclass(frozen=True, kw_only=True)
class TableDiff(Record):
    """Rows with a weight that differs, and the largest and mean absolute difference over all weights."""

    rows: int
    rows_changed: int
    largest: float
    mean: float


@dataclass(frozen=True, kw_only=True)
class DenseDiff(Record):
    """The differences of a parameter; where its ``shapes`` differ, these alone (None: it is not there)."""

    shapes: tuple[list[int] | None, list[int] | None] | None = absent()
    values: int | None = absent()
    largest: float | None = absent()
    mean: float | None = absent()


@dataclass(frozen=True, kw_only=True)
class CheckpointDiff(Record):
    """How checkpoint ``second`` differs from ``first``; None for a table or setting that one of them does not have."""

    first: str
    second: str
    steps: tuple[int, int]
    tables: dict[str, TableDiff]
    tables_differ: dict[str, tuple[TableSize | None, TableSize | None]]
    dense: dict[str, DenseDiff]
    config: dict[str, list[Any]]


@dataclass(frozen=True, kw_only=True)
class Compacted(Record):
    """A chain that became one baseline; ``compacted``: what the checkpoint rested on."""

    checkpoint: str
    step: int
    compacted: tuple[str, ...]
    bytes_before: int
    bytes: int


@dataclass(frozen=True, kw_only=True)
class ExportedTable(Record):
    """A file that holds a table."""

    table: str
    file: str
    rows: int
    dim: int
    bytes: int


@dataclass(frozen=True, kw_only=True)
class Exported(Record):
    """The tables of ``checkpoint`` as files for other programs."""

    checkpoint: str
    step: int
    files: tuple[ExportedTable, ...]
