"""Which sharding types each table may get: the user's list and pins, what the topology allows, what is worth trying.

No torch here. A choice that cannot run (no rows for some rank, columns too narrow) is never offered,
and a pin to one is an error that says why.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from dataclasses import dataclass

from pipeline.config import Config
from pipeline.contracts import DatasetSchema, Profile
from pipeline.errors import ArtifactError, ConfigError

DATA_PARALLEL = "data_parallel"
TABLE_WISE = "table_wise"
COLUMN_WISE = "column_wise"
ROW_WISE = "row_wise"
TABLE_ROW_WISE = "table_row_wise"
TABLE_COLUMN_WISE = "table_column_wise"
SHARDING_TYPES = (DATA_PARALLEL, TABLE_WISE, COLUMN_WISE, ROW_WISE, TABLE_ROW_WISE, TABLE_COLUMN_WISE)
COLUMN_TYPES = (COLUMN_WISE, TABLE_COLUMN_WISE)
SPLIT_TYPES = (COLUMN_WISE, ROW_WISE, TABLE_ROW_WISE, TABLE_COLUMN_WISE)

# FBGEMM's GPU kernels work on blocks of 128 columns: narrower column shards waste them unless the user asks.
MIN_COLUMNS = 128
MIN_PINNED_COLUMNS = 32
COLUMN_STEP = 4


@dataclass(frozen=True, kw_only=True)
class Table:
    """A table as the planner sees it; ``pooling``: mean ids per sample. Bytes are fp32 weights and row-wise state."""

    name: str
    rows: int
    dim: int
    pooling: float
    weighted: bool = False

    @property
    def bytes(self) -> int:
        """Weights (4 bytes an element) and row-wise Adagrad state (4 bytes a row)."""
        return self.rows * (self.dim + 1) * 4


@dataclass(frozen=True, kw_only=True)
class Choice:
    """Sharding types one table may get, narrowest column shard, and whether the user pinned it."""

    sharding: tuple[str, ...]
    columns: int
    pinned: bool = False


def tables_of(config: Config, schema: DatasetSchema, profile: Profile) -> list[Table]:
    """The tables in schema order; raises ArtifactError where ``profile.json`` lacks a feature of ``schema.json``."""
    tables = []
    for column in schema.sparse:
        if column.name not in profile.sparse:
            raise ArtifactError(
                f"profile.json has no figures for feature {column.name!r}, expected one entry for every sparse "
                "feature of schema.json",
                hint="stages=[ingest] force=true",
            )
        pooling = max(profile.sparse[column.name].pooling, 1e-3)
        table = Table(
            name=column.name,
            rows=column.rows,
            dim=config.model.embedding_dim,
            pooling=pooling,
            weighted=column.weighted,
        )
        tables.append(table)
    return tables


def choices(config: Config, tables: list[Table], heavy: float) -> dict[str, Choice]:
    """What the planner may try for every table.

    ``heavy``: tables below this share of a rank's fair load (bytes and lookups alike) are not offered split,
    which keeps 1,000 tables on 128 ranks searchable; 0 offers every type. Raises ConfigError for an
    unknown type, an unknown pinned table or a pin that cannot run.
    """
    _check_types(config, {table.name for table in tables})
    total_bytes = sum(table.bytes for table in tables)
    total_lookups = sum(table.pooling for table in tables)
    found = {}
    for table in tables:
        share = config.world_size * max(table.bytes / total_bytes, table.pooling / total_lookups)
        pin = config.plan.tables.get(table.name)
        found[table.name] = _pinned(config, table, pin) if pin else _free(config, table, share >= heavy)
    return found


def _check_types(config: Config, tables: set[str]) -> None:
    if not config.plan.sharding_types:
        raise ConfigError(
            f"plan.sharding_types is empty, expected some of: {', '.join(SHARDING_TYPES)}",
            hint="plan.sharding_types=[table_wise,row_wise]",
        )
    for name in config.plan.sharding_types:
        if name not in SHARDING_TYPES:
            raise ConfigError(
                f"plan.sharding_types names {name!r}, expected some of: {', '.join(SHARDING_TYPES)}",
                hint=f"plan.sharding_types=[{_nearest(name, SHARDING_TYPES)}]",
            )
    for table, name in config.plan.tables.items():
        if table not in tables:
            near = _nearest(table, tables)
            raise ConfigError(
                f"plan.tables pins {table!r}, but the dataset has no such table; the nearest is {near!r}",
                hint=f"~plan.tables.{table} +plan.tables.{near}={name}",
            )
        if name not in SHARDING_TYPES:
            raise ConfigError(
                f"plan.tables.{table} is {name!r}, expected one of: {', '.join(SHARDING_TYPES)}",
                hint=f"plan.tables.{table}={_nearest(name, SHARDING_TYPES)}",
            )


def _nearest(name: str, among: Iterable[str]) -> str:
    candidates = sorted(among)
    return (difflib.get_close_matches(name, candidates, n=1, cutoff=0.0) or candidates)[0]


def _pinned(config: Config, table: Table, pin: str) -> Choice:
    columns = pinned_columns(table.dim, _column_ranks(config, pin))
    why = _impossible(config, table, pin, columns)
    if why:
        instead = ROW_WISE if pin == TABLE_ROW_WISE and not _empty_ranks(table.rows, config.world_size) else TABLE_WISE
        raise ConfigError(
            f"plan.tables.{table.name} is {pin!r}, which cannot run: {why}",
            hint=f"plan.tables.{table.name}={instead}",
        )
    return Choice(sharding=(pin,), columns=columns, pinned=True)


def _free(config: Config, table: Table, heavy: bool) -> Choice:
    wanted = config.plan.sharding_types
    possible = [name for name in SHARDING_TYPES if name in wanted]
    possible = [name for name in possible if not _impossible(config, table, name, MIN_COLUMNS)]
    if not possible:
        why = _impossible(config, table, wanted[0], MIN_COLUMNS)
        raise ConfigError(
            f"plan.sharding_types=[{','.join(wanted)}] leaves nothing for table {table.name!r}: {why}",
            hint=f"plan.sharding_types=[{','.join(dict.fromkeys([TABLE_WISE, *wanted]))}]",
        )
    if config.world_size == 1 and TABLE_WISE in possible:
        return Choice(sharding=(TABLE_WISE,), columns=MIN_COLUMNS)
    worthwhile = [name for name in possible if _worthwhile(config, table, name, heavy)]
    return Choice(sharding=tuple(worthwhile or possible), columns=MIN_COLUMNS)


def _impossible(config: Config, table: Table, sharding: str, columns: int) -> str:
    """Why ``sharding`` cannot run for this table on this topology; empty if it can."""
    hardware = config.hardware
    if sharding in (TABLE_ROW_WISE, TABLE_COLUMN_WISE) and hardware.hosts == 1:
        plain = ROW_WISE if sharding == TABLE_ROW_WISE else COLUMN_WISE
        return f"it places a table on one of several hosts, hardware.hosts is 1 (use {plain})"
    if sharding in (ROW_WISE, TABLE_ROW_WISE):
        ranks = config.world_size if sharding == ROW_WISE else hardware.ranks_per_host
        if _empty_ranks(table.rows, ranks):
            return f"its {table.rows} rows in equal blocks over {ranks} ranks leave a rank without rows"
    if sharding in COLUMN_TYPES and (table.dim % columns or table.dim // columns < 2):
        return f"its {table.dim} columns do not split into two or more shards of at least {columns}"
    return ""


def _empty_ranks(rows: int, ranks: int) -> bool:
    """TorchRec gives every rank ceil(rows / ranks) rows while they last: the last ranks may get none."""
    return -(-rows // ranks) * (ranks - 1) >= rows


def _worthwhile(config: Config, table: Table, sharding: str, heavy: bool) -> bool:
    if sharding == DATA_PARALLEL:
        # A replica costs an all-reduce of the whole table each step, and a dense optimizer's sweep over it; below
        # one rank's batch of rows that is less than the lookups' own all-to-all.
        return config.world_size > 1 and table.rows <= config.train.global_batch // config.world_size
    return heavy or sharding not in SPLIT_TYPES


def _column_ranks(config: Config, sharding: str) -> int:
    return config.hardware.ranks_per_host if sharding == TABLE_COLUMN_WISE else config.world_size


def pinned_columns(dim: int, ranks: int) -> int:
    """Columns of a shard where the user pins a column split: one shard a rank, but none narrower than is sensible."""
    least = max(-(-dim // max(ranks, 2)), min(MIN_PINNED_COLUMNS, dim // 2), COLUMN_STEP)
    widths = [width for width in range(COLUMN_STEP, dim, COLUMN_STEP) if dim % width == 0 and width >= least]
    return widths[0] if widths else dim
