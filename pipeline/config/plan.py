"""The ``plan`` group: limits and wishes for the sharding plan."""

from __future__ import annotations

from dataclasses import dataclass, field

# Where tables may live, the fastest first.
TIERS = ("hbm", "hbm_cached", "ddr", "ssd")


@dataclass(kw_only=True)
class TablePin:
    """What one table must and must not get. Empty and null: the planner chooses.

    ``tier``: hbm | hbm_cached | ddr | ssd. ``sharding``: a type of ``PlanConfig``. ``cache_rows``: rows over all ranks
    that the faster memory keeps of a table in hbm_cached or ssd. ``avoid``: tiers and sharding types it must not get.
    """

    tier: str = ""
    sharding: str = ""
    cache_rows: int | None = None
    avoid: list[str] = field(default_factory=list)


@dataclass(kw_only=True)
class PlanConfig:
    """Limits and wishes for the sharding plan.

    ``sharding_types``: the types the planner may choose from, of data_parallel | table_wise | column_wise | row_wise |
    table_row_wise | table_column_wise. ``*_reserve``: shares of each rank's memory and disk kept free on top of what
    is estimated for dense part, activations, inputs, communication and staging. ``tables``: wishes by table.
    ``former``: path in the store of a plan to take over where nothing changed since (set by the nightly run).
    """

    sharding_types: list[str] = field(
        default_factory=lambda: [
            "data_parallel",
            "table_wise",
            "row_wise",
            "column_wise",
            "table_row_wise",
            "table_column_wise",
        ]
    )
    hbm_reserve: float = 0.1
    ddr_reserve: float = 0.1
    ssd_reserve: float = 0.05
    tables: dict[str, TablePin] = field(default_factory=dict)
    former: str | None = None
