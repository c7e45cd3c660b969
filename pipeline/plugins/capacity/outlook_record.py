"""What ``nightjar what-if --nights`` answers: tables that grow from night to night, and the plans that they will need.

Nights are numbered from the last one in the store, which is night 0. A band is [low, trend, high].
"""

from __future__ import annotations

from dataclasses import dataclass

from pipeline.records.record import Record, absent

Band = tuple[int, int, int]


@dataclass(frozen=True, kw_only=True)
class Reached(Record):
    """The ``night`` on which something is reached by the trend, and by the ends of the band; null: not by the end."""

    night: int | None = None
    earliest: int | None = None
    latest: int | None = None


@dataclass(frozen=True, kw_only=True)
class TableOutlook(Record):
    """A table's ``history`` of rows, oldest night first, and its projected ``rows`` by shown night.

    ``trend``: steady, rising, slowing, saturating; without growth: stopped, full, fixed, short (too few nights).
    ``limit``: of its rows, the value of ``setting``; ``when_full``: what happens to new ids then. ``full``: when.
    ``paths``: rows of every night, for the figure.
    """

    trend: str
    history: tuple[int, ...]
    limit: int
    setting: str
    when_full: str
    rows: dict[str, Band]
    full: Reached
    paths: tuple[Band, ...] = absent(())


@dataclass(frozen=True, kw_only=True)
class NightPlan(Record):
    """The plan of a ``night`` by the trend, or the ``problem`` where none fits, with ``hint``.

    ``tiers``: bytes of tables by memory over all ranks; ``filled``: of the fullest rank, as a share of its room for
    tables; ``tables``: their number by tier. ``moved``: from where to where, since the shown night before.
    """

    night: int
    day: str
    rows: int
    fits: bool
    step_ms: float | None = absent()
    tiers: dict[str, int] | None = absent()
    filled: dict[str, float] | None = absent()
    tables: dict[str, int] | None = absent()
    moved: dict[str, tuple[str, str]] | None = absent()
    problem: str | None = absent()
    hint: str | None = absent()


@dataclass(frozen=True, kw_only=True)
class TierOutlook(Record):
    """When the tables no longer fit into a memory and the faster ones; ``last``: whether no slower one is left.

    ``remedies``: overrides, each of which keeps the tables in it until the last night; all were planned.
    """

    full: Reached
    last: bool
    remedies: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Outlook(Record):
    """The next ``nights`` of ``model`` for one combination of ``settings``.

    ``read``: the days of the nights that the trends come from, oldest first; ``missing``: days between them without a
    night. ``band``: the share of outcomes that the bands are meant to hold. ``fits``: whether all nights have a plan.
    """

    settings: dict[str, str]
    hardware: str
    world_size: int
    model: str
    nights: int
    band: float
    read: tuple[str, ...]
    missing: tuple[str, ...]
    fits: bool
    tables: dict[str, TableOutlook]
    plans: tuple[NightPlan, ...]
    tiers: dict[str, TierOutlook]
    notes: tuple[str, ...] = ()
