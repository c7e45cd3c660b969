"""The ``plan`` group: limits and wishes for the sharding plan."""

from __future__ import annotations

from dataclasses import dataclass

from pipeline.config.fields import setting
from pipeline.errors import ConfigError

# Where tables may live, the fastest first.
TIERS = ("hbm", "hbm_cached", "ddr", "ssd")
SHARDING_TYPES = ("data_parallel", "table_wise", "column_wise", "row_wise", "table_row_wise", "table_column_wise")


@dataclass(kw_only=True)
class TablePin:
    """What one table must and must not get. Where a setting is empty or null, the planner chooses."""

    tier: str = setting("", choices=TIERS, doc="Memory tier of the table.")
    sharding: str = setting("", choices=SHARDING_TYPES, doc="Sharding type of the table.")
    cache_rows: int | None = setting(
        None, doc="For hbm_cached and ssd: rows that the faster memory keeps, over all ranks."
    )
    avoid: list[str] = setting(
        factory=list, choices=TIERS + SHARDING_TYPES, doc="Tiers and sharding types that the table must not get."
    )


@dataclass(kw_only=True)
class PlanConfig:
    """Limits and wishes for the sharding plan.

    A reserve is kept free on top of what the dense part, activations, inputs, communication and staging need.
    """

    sharding_types: list[str] = setting(
        factory=lambda: [
            "data_parallel",
            "table_wise",
            "row_wise",
            "column_wise",
            "table_row_wise",
            "table_column_wise",
        ],
        choices=SHARDING_TYPES,
        doc="Sharding types that the planner chooses from.",
    )
    hbm_reserve: float = setting(0.1, low=0.0, high=0.95, doc="Share of each rank's GPU memory to keep free.")
    ddr_reserve: float = setting(0.1, low=0.0, high=0.95, doc="Share of each rank's host memory to keep free.")
    ssd_reserve: float = setting(0.05, low=0.0, high=0.95, doc="Share of each rank's disk space to keep free.")
    tables: dict[str, TablePin] = setting(factory=dict, doc="Constraints on single tables, by name.")
    former: str | None = setting(
        None,
        doc="Plan, a path in the store, to reuse if nothing that it depends on has changed; null: none. A night sets "
        "it to the incumbent's plan.",
    )

    def check(self, path: str) -> None:
        """The planner needs a sharding type to choose."""
        if not self.sharding_types:
            raise ConfigError(
                f"{path}.sharding_types is empty, expected some of: {', '.join(SHARDING_TYPES)}",
                hint=f"{path}.sharding_types=[table_wise,row_wise]",
            )
