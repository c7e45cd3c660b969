"""Which sharding types and tiers each table may get: the user's list, what the topology allows, what is worth trying.

No torch here. A choice that cannot run (no rows for some rank, columns too narrow, no such tier) is never
offered; ``pins`` turns the user's pins of single tables into choices, or into errors that give the reason.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterable
from dataclasses import dataclass

from pipeline.config.data import DataConfig
from pipeline.config.hardware import HardwareConfig
from pipeline.config.plan import SHARDING_TYPES
from pipeline.embeddings.table_optimizer_config import table_rules
from pipeline.errors import ArtifactError
from pipeline.planning.cost import FLOAT
from pipeline.planning.hardware import tiers
from pipeline.planning.hitrate import HitCurve
from pipeline.planning.inputs import PlanInputs
from pipeline.specs.id_mapping import ID_MAPPINGS
from pipeline.specs.optimizers import TableOptimizer

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
class PlannedTable:
    """A table as the planner sees it; ``pooling``: mean ids per sample, of all its ``features``
    (names; none: one of its own). ``events``: how many of these are looked up one by one.
    Bytes are fp32 weights and the state of the ``optimizer``.

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
    features: tuple[str, ...] = ()
    events: float = 0.0

    @property
    def outputs(self) -> int:
        """Embeddings that a sample gets of it: one for each of its features, and one for each event."""
        return (len(self.features) or 1) + math.ceil(self.events)

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


def tables_of(inputs: PlanInputs) -> list[PlannedTable]:
    """The tables in schema order; raises ArtifactError where ``profile.json`` lacks a feature of ``schema.json``."""
    tables, profile = [], inputs.profile
    for column in inputs.schema.id_columns:
        if column.name not in profile.sparse:
            raise ArtifactError(
                f"profile.json has no figures for feature {column.name!r}, expected one entry for every sparse "
                "feature of schema.json",
                hint="stages=[ingest] force=true",
            )
    rules = table_rules(inputs.model, inputs.train)
    for each in inputs.schema.tables:
        measured = profile.table(each.columns)
        table = PlannedTable(
            name=each.name,
            rows=each.rows,
            dim=inputs.model.dim_of(each.name),
            pooling=max(measured.pooling, 1e-3),
            curve=HitCurve.from_profile(measured, lookups=profile.rows.get("train", 0) * measured.pooling),
            optimizer=rules.of(each.name),
            weighted=each.weighted,
            ranked=_ranked(inputs.data, each.name),
            features=each.features,
            events=sum(profile.sparse[name].pooling for name in each.events),
        )
        tables.append(table)
    return tables


def _ranked(data: DataConfig, table: str) -> bool:
    """Whether the table's rows are ordered by frequency, as the feature's mapping says."""
    feature = data.sparse.get(table)
    return feature is not None and ID_MAPPINGS.get(feature.mapping or data.sparse_defaults.mapping).ranked


def nearest(name: str, among: Iterable[str]) -> str:
    """The one of ``among`` that is most like ``name``."""
    candidates = sorted(among)
    return (difflib.get_close_matches(name, candidates, n=1, cutoff=0.0) or candidates)[0]


def table_tiers(hardware: HardwareConfig, table: PlannedTable) -> tuple[str, ...]:
    """The tiers of this hardware that may hold the table, fastest first: those that its optimizer can train."""
    return table.optimizer.tiers_on(hardware.device, tiers(hardware))


def tiers_of(sharding: str, offered: tuple[str, ...]) -> tuple[str, ...]:
    """The ``offered`` tiers that may hold a table of this ``sharding``; a replica lies in the device's memory."""
    if sharding == DATA_PARALLEL:
        return tuple(tier for tier in offered if tier == ("hbm" if "hbm" in offered else "ddr"))
    return tuple(tier for tier in offered if tier != "ssd" or sharding in SSD_TYPES)


def impossible(hardware: HardwareConfig, table: PlannedTable, sharding: str, columns: int) -> str:
    """Why ``sharding`` cannot run for this table on this topology; empty if it can."""
    if hardware.embedding_hosts and sharding not in (TABLE_WISE, COLUMN_WISE):
        return "with hardware.embedding_hosts it would exchange partial sums or copies with the workers, too"
    if sharding in (TABLE_ROW_WISE, TABLE_COLUMN_WISE) and hardware.hosts == 1:
        plain = ROW_WISE if sharding == TABLE_ROW_WISE else COLUMN_WISE
        return f"it places a table on one of several hosts, hardware.hosts is 1 (use {plain})"
    if sharding in (ROW_WISE, TABLE_ROW_WISE):
        ranks = hardware.world_size if sharding == ROW_WISE else hardware.ranks_per_host
        if empty_ranks(table.rows, ranks):
            return f"its {table.rows} rows in equal blocks over {ranks} ranks leave a rank without rows"
    if sharding in COLUMN_TYPES and table.optimizer.whole_rows:
        return "model.tables.*.max_norm looks at whole rows"
    if sharding in COLUMN_TYPES and (table.dim % columns or table.dim // columns < 2):
        return f"its {table.dim} columns do not split into two or more shards of at least {columns}"
    if sharding == TABLE_COLUMN_WISE and table.dim // columns > hardware.ranks_per_host:
        shards = table.dim // columns
        return f"its {shards} shards of {columns} columns are more than the {hardware.ranks_per_host} ranks of a host"
    return ""


def empty_ranks(rows: int, ranks: int) -> bool:
    """TorchRec gives every rank ceil(rows / ranks) rows while they last: the last ranks may get none."""
    return -(-rows // ranks) * (ranks - 1) >= rows
