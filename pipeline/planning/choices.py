"""Which sharding types and tiers each table may get: the user's list, what the topology allows, what is worth trying.

No torch here. A choice that cannot run (no rows for some rank, columns too narrow, no such tier) is never
offered; ``pins`` turns the user's wishes for single tables into choices, or into errors that say why not.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from dataclasses import dataclass

from pipeline.config import SHARDING_TYPES, Config
from pipeline.config.values import check_values
from pipeline.errors import ArtifactError, ConfigError
from pipeline.planning.cost import FLOAT
from pipeline.planning.hardware import tiers
from pipeline.planning.hitrate import HitCurve
from pipeline.records import DatasetSchema, Profile
from pipeline.specs import ID_MAPPINGS, TABLE_OPTIMIZERS
from pipeline.specs.table_optimizer import TableOptimizer

DATA_PARALLEL, TABLE_WISE, COLUMN_WISE, ROW_WISE, TABLE_ROW_WISE, TABLE_COLUMN_WISE = SHARDING_TYPES
COLUMN_TYPES = (COLUMN_WISE, TABLE_COLUMN_WISE)
SPLIT_TYPES = (COLUMN_WISE, ROW_WISE, TABLE_ROW_WISE, TABLE_COLUMN_WISE)
# A file holds whole rows: only these types read and write it in one piece.
SSD_TYPES = (TABLE_WISE, ROW_WISE)

# FBGEMM's GPU kernels work on blocks of 128 columns: narrower column shards waste them unless the user asks.
MIN_COLUMNS = 128
MIN_PINNED_COLUMNS = 32
COLUMN_STEP = 4


@dataclass(frozen=True, kw_only=True)
class Table:
    """A table as the planner sees it; ``pooling``: mean ids per sample. Bytes are fp32 weights and the state of the
    ``optimizer``.

    ``curve``: share of its lookups by hottest rows; ``ranked``: whether rows are numbered in falling frequency, so
    that the hottest ones are the first.
    """

    name: str
    rows: int
    dim: int
    pooling: float
    curve: HitCurve
    optimizer: TableOptimizer
    weighted: bool = False
    ranked: bool = False

    @property
    def bytes(self) -> int:
        """Weights (4 bytes an element) and optimizer state."""
        return self.rows * self.row_bytes(self.dim)

    def row_bytes(self, columns: int) -> int:
        """``columns`` weights of a row (4 bytes each) with their optimizer state."""
        return columns * FLOAT + self.optimizer.state_bytes(columns)


@dataclass(frozen=True, kw_only=True)
class Choice:
    """What one table may get: sharding types, tiers, cache size (None: any), narrowest column shard; pinned by whom."""

    sharding: tuple[str, ...]
    tiers: tuple[str, ...]
    columns: int
    cache_rows: int | None = None
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
        measured = profile.sparse[column.name]
        table = Table(
            name=column.name,
            rows=column.rows,
            dim=config.model.embedding_dim,
            pooling=max(measured.pooling, 1e-3),
            curve=HitCurve.measured(profile, column.name),
            optimizer=TABLE_OPTIMIZERS.get(config.train.sparse_optimizer),
            weighted=column.weighted,
            ranked=_ranked(config, column.name),
        )
        tables.append(table)
    return tables


def _ranked(config: Config, table: str) -> bool:
    """Whether the table's rows are ordered by frequency, as the feature's mapping says."""
    feature = config.data.sparse.get(table)
    return feature is not None and ID_MAPPINGS.get(feature.mapping or config.data.sparse_defaults.mapping).ranked


def choices(config: Config, tables: list[Table], heavy: float) -> dict[str, Choice]:
    """What the planner may try for every table.

    ``heavy``: tables below this share of a rank's fair load (bytes and lookups alike) are not offered split,
    which keeps 1,000 tables on 128 ranks searchable; 0 offers every type. Raises ConfigError for an
    unknown type, an unknown pinned table or a pin that cannot run.
    """
    from pipeline.planning.pins import check_pins, pinned

    check_values(config.plan, "plan")
    check_pins(config, {table.name for table in tables})
    total_bytes = sum(table.bytes for table in tables)
    total_lookups = sum(table.pooling for table in tables)
    found = {}
    for table in tables:
        share = config.world_size * max(table.bytes / total_bytes, table.pooling / total_lookups)
        pin = config.plan.tables.get(table.name)
        free = _free(config, table, share >= heavy) if pin is None or not pin.sharding else None
        found[table.name] = free if free and pin is None else pinned(config, table, free)
    return found


def nearest(name: str, among: Iterable[str]) -> str:
    """The one of ``among`` that is most like ``name``."""
    candidates = sorted(among)
    return (difflib.get_close_matches(name, candidates, n=1, cutoff=0.0) or candidates)[0]


def table_tiers(config: Config, table: Table) -> tuple[str, ...]:
    """The tiers of this hardware that the table may live in, fastest first; SSD where its optimizer's state fits."""
    return tuple(tier for tier in tiers(config.hardware) if tier != "ssd" or table.optimizer.fits_ssd)


def tiers_of(sharding: str, offered: tuple[str, ...]) -> tuple[str, ...]:
    """Those of the ``offered`` tiers that a table sharded so may live in: a replica in the device's memory alone."""
    if sharding == DATA_PARALLEL:
        return tuple(tier for tier in offered if tier == ("hbm" if "hbm" in offered else "ddr"))
    return tuple(tier for tier in offered if tier != "ssd" or sharding in SSD_TYPES)


def _free(config: Config, table: Table, heavy: bool) -> Choice:
    wanted = config.plan.sharding_types
    possible = [name for name in SHARDING_TYPES if name in wanted]
    possible = [name for name in possible if not impossible(config, table, name, MIN_COLUMNS)]
    if not possible:
        why = impossible(config, table, wanted[0], MIN_COLUMNS)
        raise ConfigError(
            f"plan.sharding_types=[{','.join(wanted)}] leaves nothing for table {table.name!r}: {why}",
            hint=f"plan.sharding_types=[{','.join(dict.fromkeys([TABLE_WISE, *wanted]))}]",
        )
    worthwhile = [name for name in possible if _worthwhile(config, table, name, heavy)] or possible
    if config.world_size == 1 and TABLE_WISE in possible:
        worthwhile = [TABLE_WISE]
    return Choice(sharding=tuple(worthwhile), tiers=table_tiers(config, table), columns=MIN_COLUMNS)


def impossible(config: Config, table: Table, sharding: str, columns: int) -> str:
    """Why ``sharding`` cannot run for this table on this topology; empty if it can."""
    hardware = config.hardware
    if sharding in (TABLE_ROW_WISE, TABLE_COLUMN_WISE) and hardware.hosts == 1:
        plain = ROW_WISE if sharding == TABLE_ROW_WISE else COLUMN_WISE
        return f"it places a table on one of several hosts, hardware.hosts is 1 (use {plain})"
    if sharding in (ROW_WISE, TABLE_ROW_WISE):
        ranks = config.world_size if sharding == ROW_WISE else hardware.ranks_per_host
        if empty_ranks(table.rows, ranks):
            return f"its {table.rows} rows in equal blocks over {ranks} ranks leave a rank without rows"
    if sharding in COLUMN_TYPES and (table.dim % columns or table.dim // columns < 2):
        return f"its {table.dim} columns do not split into two or more shards of at least {columns}"
    if sharding == TABLE_COLUMN_WISE and table.dim // columns > hardware.ranks_per_host:
        shards = table.dim // columns
        return f"its {shards} shards of {columns} columns are more than the {hardware.ranks_per_host} ranks of a host"
    return ""


def empty_ranks(rows: int, ranks: int) -> bool:
    """TorchRec gives every rank ceil(rows / ranks) rows while they last: the last ranks may get none."""
    return -(-rows // ranks) * (ranks - 1) >= rows


def _worthwhile(config: Config, table: Table, sharding: str, heavy: bool) -> bool:
    if sharding == DATA_PARALLEL:
        # A replica costs an all-reduce of the whole table each step, and a dense optimizer's sweep over it; below
        # one rank's batch of rows that is less than the lookups' own all-to-all.
        return config.world_size > 1 and table.rows <= config.train.batch // config.world_size
    if sharding == TABLE_ROW_WISE and config.hardware.ranks_per_host == 1:
        return False  # a host of one rank: table_wise by another name
    return heavy or sharding not in SPLIT_TYPES
