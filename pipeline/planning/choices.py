"""The sharding types and tiers that each table may get: what the topology allows, and what the user's pins leave.

A choice that cannot run (no rows for some rank, columns too narrow, no such tier) is never offered; the user's pins of
single tables become choices, or errors that give the reason. This module does not import torch.
"""

from __future__ import annotations

import difflib
import math
from dataclasses import dataclass, replace

from pipeline.config.hardware import HardwareConfig
from pipeline.config.plan import SHARDING_TYPES, PlanConfig, TablePin
from pipeline.core.errors import ArtifactError, ConfigError
from pipeline.embeddings.table_optimizers import table_rules
from pipeline.planning.cost import FLOAT
from pipeline.planning.hardware import tiers
from pipeline.planning.hitrate import HitCurve
from pipeline.planning.inputs import PlanInputs
from pipeline.specs.id_mapping import ID_MAPPINGS
from pipeline.specs.optimizers import TABLE_OPTIMIZERS, TableOptimizer

DATA_PARALLEL, TABLE_WISE, COLUMN_WISE, ROW_WISE, TABLE_ROW_WISE, TABLE_COLUMN_WISE = SHARDING_TYPES
COLUMN_TYPES = (COLUMN_WISE, TABLE_COLUMN_WISE)
SPLIT_TYPES = (COLUMN_WISE, ROW_WISE, TABLE_ROW_WISE, TABLE_COLUMN_WISE)
# A file on SSD holds whole rows, and only these types read and write a row in one piece.
SSD_TYPES = (TABLE_WISE, ROW_WISE)
CACHED_TIERS = ("hbm_cached", "ssd")
# FBGEMM's GPU kernels work on blocks of 128 columns: narrower column shards waste them unless the user asks.
MIN_COLUMNS = 128
MIN_PINNED_COLUMNS = 32
COLUMN_STEP = 4


@dataclass(frozen=True, kw_only=True)
class PlannedTable:
    """A table as the planner sees it. Bytes are fp32 weights and the state of the ``optimizer``.

    ``pooling`` is the mean number of ids per sample, over all its ``features`` (names; none: one of its own), and
    ``events`` the number of these that are looked up one by one. ``curve`` is the share of its lookups by hottest rows;
    ``ranked`` says whether rows are numbered by falling frequency, so that the hottest ones are the first.
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
        """The embeddings that a sample gets from it: one for each of its features, and one for each event."""
        return (len(self.features) or 1) + math.ceil(self.events)

    @property
    def bytes(self) -> int:
        """The bytes of weights (4 bytes per element) and optimizer state."""
        return self.rows * self.row_bytes(self.dim)

    def row_bytes(self, columns: int) -> int:
        """Return the bytes of ``columns`` weights of a row (4 bytes each) with their optimizer state."""
        return columns * FLOAT + self.optimizer.state_bytes(columns)


@dataclass(frozen=True, kw_only=True)
class Choice:
    """What one table may get: sharding types, tiers, cache size (None: any), narrowest column shard; who pinned it."""

    sharding: tuple[str, ...]
    tiers: tuple[str, ...]
    columns: int
    cache_rows: int | None = None
    pinned: bool = False


def tables_of(inputs: PlanInputs) -> list[PlannedTable]:
    """Build the tables in schema order.

    Raises:
        ArtifactError: ``profile.json`` lacks a feature of ``schema.json``.
    """
    profile = inputs.profile
    for column in inputs.schema.id_columns:
        if column.name not in profile.sparse:
            raise ArtifactError(
                f"profile.json has no figures for feature {column.name!r}, expected one entry for every sparse "
                "feature of schema.json",
                hint="stages=[ingest] force=true",
            )
    rules = table_rules(inputs.model, inputs.train)
    train_rows = profile.rows.get("train", 0)
    tables = []
    for schema in inputs.schema.tables:
        measured = profile.table(schema.columns)
        # The feature's mapping says whether rows are numbered by frequency.
        feature = inputs.data.sparse.get(schema.name)
        ranked = False
        if feature is not None:
            ranked = ID_MAPPINGS.get(feature.mapping or inputs.data.sparse_defaults.mapping).ranked
        table = PlannedTable(
            name=schema.name,
            rows=schema.rows,
            dim=inputs.model.dim_of(schema.name),
            pooling=max(measured.pooling, 1e-3),
            curve=HitCurve.from_profile(measured, lookups=train_rows * measured.pooling),
            optimizer=rules.of(schema.name),
            weighted=schema.weighted,
            ranked=ranked,
            features=schema.features,
            events=sum(profile.sparse[name].pooling for name in schema.events),
        )
        tables.append(table)
    return tables


def table_tiers(hardware: HardwareConfig, table: PlannedTable) -> tuple[str, ...]:
    """Return the tiers of this hardware that can hold the table, fastest first: those that its optimizer can train."""
    return table.optimizer.tiers_on(hardware.device, tiers(hardware))


def tiers_of(sharding: str, offered: tuple[str, ...]) -> tuple[str, ...]:
    """Select the ``offered`` tiers that may hold a table of this ``sharding``."""
    if sharding == DATA_PARALLEL:
        # A replica lies in the device's memory.
        device_memory = "hbm" if "hbm" in offered else "ddr"
        return tuple(tier for tier in offered if tier == device_memory)
    return tuple(tier for tier in offered if tier != "ssd" or sharding in SSD_TYPES)


def find_obstacle(hardware: HardwareConfig, table: PlannedTable, sharding: str, columns: int) -> str:
    """Say why ``sharding`` cannot run for this table on this topology; empty if it can."""
    if hardware.embedding_hosts and sharding not in (TABLE_WISE, COLUMN_WISE):
        return "with hardware.embedding_hosts it would exchange partial sums or copies with the workers, too"
    if sharding in (TABLE_ROW_WISE, TABLE_COLUMN_WISE) and hardware.hosts == 1:
        plain = ROW_WISE if sharding == TABLE_ROW_WISE else COLUMN_WISE
        return f"it places a table on one of several hosts, hardware.hosts is 1 (use {plain})"
    if sharding in (ROW_WISE, TABLE_ROW_WISE):
        ranks = hardware.world_size if sharding == ROW_WISE else hardware.ranks_per_host
        if _leaves_empty_ranks(table.rows, ranks):
            return f"its {table.rows} rows in equal blocks over {ranks} ranks leave a rank without rows"
    if sharding in COLUMN_TYPES and table.optimizer.whole_rows:
        return "model.tables.*.max_norm looks at whole rows"
    if sharding in COLUMN_TYPES and (table.dim % columns or table.dim // columns < 2):
        return f"its {table.dim} columns do not split into two or more shards of at least {columns}"
    if sharding == TABLE_COLUMN_WISE and table.dim // columns > hardware.ranks_per_host:
        shards = table.dim // columns
        return f"its {shards} shards of {columns} columns are more than the {hardware.ranks_per_host} ranks of a host"
    return ""


def _leaves_empty_ranks(rows: int, ranks: int) -> bool:
    # TorchRec gives every rank ceil(rows / ranks) rows while there are any, so the last ranks may get none.
    return -(-rows // ranks) * (ranks - 1) >= rows


# Pins are what the user asks for single tables (``plan.tables``).


def check_pins(plan: PlanConfig, tables: set[str]) -> None:
    """Raise ConfigError, with the nearest match, for a pin that names none of the ``tables``."""
    for table, pin in plan.tables.items():
        if table in tables:
            continue
        known = sorted(tables)
        near = (difflib.get_close_matches(table, known, n=1, cutoff=0.0) or known)[0]
        # Write the pin as overrides for the nearest table.
        path = f"+plan.tables.{near}"
        overrides = []
        for key in ("tier", "sharding", "cache_rows"):
            if getattr(pin, key):
                overrides.append(f"{path}.{key}={getattr(pin, key)}")
        if any(pin.avoid):
            overrides.append(f"{path}.avoid=[{','.join(pin.avoid)}]")
        again = " ".join(overrides) or f"{path}={{}}"
        raise ConfigError(
            f"plan.tables names {table!r}, but the dataset has no such table; the nearest is {near!r}",
            hint=f"~plan.tables.{table} {again}",
        )


def apply_pin(hardware: HardwareConfig, table: PlannedTable, pin: TablePin, free: Choice | None) -> Choice:
    """Narrow a table's choice by its ``pin``; ConfigError if that leaves nothing, or cannot run.

    ``free`` is the table's choice without the pin, None if the pin names the sharding.
    """
    choice = free or _choose_pinned_sharding(hardware, table, pin.sharding)
    offered = _pinned_tiers(hardware, table, pin)
    cache_rows = _pinned_cache_rows(table, pin)
    path = f"plan.tables.{table.name}"
    if pin.tier and pin.sharding and not tiers_of(pin.sharding, (pin.tier,)):
        expected = "another type: a replica lies in the device's memory"
        if pin.tier == "ssd":
            expected = "table_wise or row_wise"
        raise ConfigError(
            f"{path} has tier {pin.tier!r} with sharding {pin.sharding!r}, expected {expected}",
            hint=f"{path}.sharding={TABLE_WISE}",
        )
    allowed = tuple(name for name in choice.sharding if name not in pin.avoid)
    offered = tuple(tier for tier in offered if tier not in pin.avoid)
    sharding = tuple(name for name in allowed if tiers_of(name, offered))
    if sharding:
        return replace(choice, sharding=sharding, tiers=offered, cache_rows=cache_rows, pinned=True)
    wanted_and_avoided = [name for name in (pin.tier, pin.sharding) if name in pin.avoid]
    if wanted_and_avoided:
        why = f"the pin both asks for {wanted_and_avoided[0]} and avoids it"
        avoid = [name for name in pin.avoid if name not in wanted_and_avoided]
        hint = f"{path}.avoid=[{','.join(avoid)}]"
    else:
        why = f"sharding {' or '.join(allowed) or 'none'}, tiers {' or '.join(offered) or 'none'}"
        hint = f"~{path}"
    raise ConfigError(f"{path} leaves no placement for the table: {why}", hint=hint)


def _choose_pinned_sharding(hardware: HardwareConfig, table: PlannedTable, sharding: str) -> Choice:
    # A pinned column split gets one shard per rank, but none narrower than is sensible.
    ranks = hardware.ranks_per_host if sharding == TABLE_COLUMN_WISE else hardware.world_size
    least = max(-(-table.dim // max(ranks, 2)), min(MIN_PINNED_COLUMNS, table.dim // 2), COLUMN_STEP)
    columns = table.dim
    for width in range(COLUMN_STEP, table.dim, COLUMN_STEP):
        if width >= least and table.dim % width == 0:
            columns = width
            break
    obstacle = find_obstacle(hardware, table, sharding, columns)
    if obstacle:
        fallback = TABLE_WISE
        if sharding == TABLE_ROW_WISE and not _leaves_empty_ranks(table.rows, hardware.world_size):
            fallback = ROW_WISE
        path = f"plan.tables.{table.name}.sharding"
        raise ConfigError(f"{path} is {sharding!r}, which cannot run: {obstacle}", hint=f"{path}={fallback}")
    return Choice(sharding=(sharding,), tiers=table_tiers(hardware, table), columns=columns)


def _pinned_tiers(hardware: HardwareConfig, table: PlannedTable, pin: TablePin) -> tuple[str, ...]:
    offered = table_tiers(hardware, table)
    if not pin.tier:
        return offered
    if pin.tier in offered:
        return (pin.tier,)
    path = f"plan.tables.{table.name}.tier"
    if pin.tier in tiers(hardware):
        if table.optimizer.whole_rows:
            other = f"model.tables.{table.name}.max_norm=null"
        else:
            fused = next((spec.name for spec in TABLE_OPTIMIZERS if spec.fused_on(hardware.device)), "")
            other = f"train.sparse_optimizer={fused}"
        raise ConfigError(
            f"{path} is {pin.tier!r}, but table optimizer {table.optimizer.name} has no kernel for device "
            f"{hardware.device}, and only a kernel trains rows of that tier",
            hint=f"{path}={offered[0]}, or {other}",
        )
    if pin.tier == "ssd":
        lack, hint = "hardware.ssd_gib is 0", "hardware.ssd_gib=100"
    else:
        lack, hint = f"hardware.device is {hardware.device}", f"{path}={offered[0]}"
    raise ConfigError(f"{path} is {pin.tier!r}, which hardware {hardware.name!r} lacks: {lack}", hint=hint)


def _pinned_cache_rows(table: PlannedTable, pin: TablePin) -> int | None:
    if pin.cache_rows is None:
        return None
    path = f"plan.tables.{table.name}"
    if pin.tier not in CACHED_TIERS:
        raise ConfigError(
            f"{path}.cache_rows is {pin.cache_rows}, but only tables pinned to {' or '.join(CACHED_TIERS)} have a "
            "cache",
            hint=f"{path}.tier={CACHED_TIERS[1]}",
        )
    if not 1 <= pin.cache_rows <= table.rows:
        raise ConfigError(
            f"{path}.cache_rows is {pin.cache_rows}, expected 1 to {table.rows}, the table's rows",
            hint=f"{path}.cache_rows={min(max(pin.cache_rows, 1), table.rows)}",
        )
    return pin.cache_rows
