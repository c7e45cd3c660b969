"""The user's pins of single tables (``plan.tables``): checks, and the choices they leave. No torch here."""

from __future__ import annotations

from dataclasses import replace

from pipeline.config.hardware import HardwareConfig
from pipeline.config.plan import PlanConfig, TablePin
from pipeline.errors import ConfigError
from pipeline.planning.choices import (
    COLUMN_STEP,
    MIN_PINNED_COLUMNS,
    ROW_WISE,
    TABLE_COLUMN_WISE,
    TABLE_ROW_WISE,
    TABLE_WISE,
    Choice,
    PlannedTable,
    empty_ranks,
    impossible,
    nearest,
    table_tiers,
    tiers_of,
)
from pipeline.planning.hardware import tiers
from pipeline.specs.optimizers import TABLE_OPTIMIZERS

CACHED = ("hbm_cached", "ssd")


def check_pins(plan: PlanConfig, tables: set[str]) -> None:
    """Raise ConfigError, with the nearest match, for a pin that names none of the ``tables``."""
    for table, pin in plan.tables.items():
        if table not in tables:
            near = nearest(table, tables)
            raise ConfigError(
                f"plan.tables names {table!r}, but the dataset has no such table; the nearest is {near!r}",
                hint=f"~plan.tables.{table} {_again(near, pin)}",
            )


def _again(table: str, pin: TablePin) -> str:
    """The pin as overrides for another table."""
    named = {"tier": pin.tier, "sharding": pin.sharding, "cache_rows": pin.cache_rows, "avoid": ",".join(pin.avoid)}
    parts = {key: f"[{value}]" if key == "avoid" else value for key, value in named.items() if value}
    return (
        " ".join(f"+plan.tables.{table}.{key}={value}" for key, value in parts.items()) or f"+plan.tables.{table}={{}}"
    )


def pinned(hardware: HardwareConfig, table: PlannedTable, pin: TablePin, free: Choice | None) -> Choice:
    """The table's choice under its ``pin``; ``free``: its choice without, None where the pin names the sharding.

    Raises ConfigError where the pin cannot run.
    """
    choice = free or _sharded(hardware, table, pin.sharding)
    choice = replace(choice, tiers=_tiers(hardware, table, pin), cache_rows=_cache_rows(table, pin), pinned=True)
    _check_tier(table.name, pin)
    sharding = tuple(name for name in choice.sharding if name not in pin.avoid)
    offered = tuple(tier for tier in choice.tiers if tier not in pin.avoid)
    choice = replace(choice, tiers=offered, sharding=tuple(name for name in sharding if tiers_of(name, offered)))
    if not choice.sharding:
        path, both = f"plan.tables.{table.name}", [name for name in (pin.tier, pin.sharding) if name in pin.avoid]
        why = (
            f"the pin both asks for {both[0]} and avoids it"
            if both
            else f"sharding {_or(sharding)}, tiers {_or(offered)}"
        )
        hint = f"{path}.avoid=[{','.join(name for name in pin.avoid if name not in both)}]" if both else f"~{path}"
        raise ConfigError(f"{path} leaves no placement for the table: {why}", hint=hint)
    return choice


def _or(names: tuple[str, ...]) -> str:
    return " or ".join(names) or "none"


def _sharded(hardware: HardwareConfig, table: PlannedTable, sharding: str) -> Choice:
    ranks = hardware.ranks_per_host if sharding == TABLE_COLUMN_WISE else hardware.world_size
    columns = pinned_columns(table.dim, ranks)
    why = impossible(hardware, table, sharding, columns)
    if why:
        fallback = sharding == TABLE_ROW_WISE and not empty_ranks(table.rows, hardware.world_size)
        raise ConfigError(
            f"plan.tables.{table.name}.sharding is {sharding!r}, which cannot run: {why}",
            hint=f"plan.tables.{table.name}.sharding={ROW_WISE if fallback else TABLE_WISE}",
        )
    return Choice(sharding=(sharding,), tiers=table_tiers(hardware, table), columns=columns)


def _tiers(hardware: HardwareConfig, table: PlannedTable, pin: TablePin) -> tuple[str, ...]:
    offered = table_tiers(hardware, table)
    if not pin.tier:
        return offered
    path = f"plan.tables.{table.name}.tier"
    if pin.tier not in offered and pin.tier in tiers(hardware):
        fused = next((each.name for each in TABLE_OPTIMIZERS if each.fused_on(hardware.device)), "")
        raise ConfigError(
            f"{path} is {pin.tier!r}, but table optimizer {table.optimizer.name} has no kernel for device "
            f"{hardware.device}, and only a kernel trains rows of that tier",
            hint=f"{path}={offered[0]}, or {_other_optimizer(table, fused)}",
        )
    if pin.tier not in offered:
        lack = "hardware.ssd_gib is 0" if pin.tier == "ssd" else f"hardware.device is {hardware.device}"
        mend = "hardware.ssd_gib=100" if pin.tier == "ssd" else f"{path}={offered[0]}"
        raise ConfigError(f"{path} is {pin.tier!r}, which hardware {hardware.name!r} lacks: {lack}", hint=mend)
    return (pin.tier,)


def _other_optimizer(table: PlannedTable, fused: str) -> str:
    limited = table.optimizer.whole_rows
    return f"model.tables.{table.name}.max_norm=null" if limited else f"train.sparse_optimizer={fused}"


def _check_tier(name: str, pin: TablePin) -> None:
    if pin.tier and pin.sharding and not tiers_of(pin.sharding, (pin.tier,)):
        expected = (
            "table_wise or row_wise" if pin.tier == "ssd" else "another type: a replica lies in the device's memory"
        )
        raise ConfigError(
            f"plan.tables.{name} has tier {pin.tier!r} with sharding {pin.sharding!r}, expected {expected}",
            hint=f"plan.tables.{name}.sharding={TABLE_WISE}",
        )


def _cache_rows(table: PlannedTable, pin: TablePin) -> int | None:
    if pin.cache_rows is None:
        return None
    path = f"plan.tables.{table.name}"
    if pin.tier not in CACHED:
        raise ConfigError(
            f"{path}.cache_rows is {pin.cache_rows}, but only tables pinned to {' or '.join(CACHED)} have a cache",
            hint=f"{path}.tier={CACHED[1]}",
        )
    if not 1 <= pin.cache_rows <= table.rows:
        raise ConfigError(
            f"{path}.cache_rows is {pin.cache_rows}, expected 1 to {table.rows}, the table's rows",
            hint=f"{path}.cache_rows={min(max(pin.cache_rows, 1), table.rows)}",
        )
    return pin.cache_rows


def pinned_columns(dim: int, ranks: int) -> int:
    """Columns of a shard where the user pins a column split: one shard a rank, but none narrower than is sensible."""
    least = max(-(-dim // max(ranks, 2)), min(MIN_PINNED_COLUMNS, dim // 2), COLUMN_STEP)
    widths = [width for width in range(COLUMN_STEP, dim, COLUMN_STEP) if dim % width == 0 and width >= least]
    return widths[0] if widths else dim
