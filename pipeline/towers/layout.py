"""Which ranks hold which towers, the peers that exchange ids and vectors (DMT, 3.1), and the plans of tower hosts.

A group of tower hosts shares its towers. Rank j of a group looks up the group's features for the samples of its peers,
the ranks j of all groups. The paper (MLSys'24) prints the order of the peers as (g mod T, g div T), which is wrong if
ranks per host and hosts differ; here the peers are in the order of the groups.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from pipeline.config.hardware import HardwareConfig
from pipeline.config.plan import PlanConfig
from pipeline.core.errors import ConfigError
from pipeline.records.plan import Plan, TablePlan
from pipeline.records.towers import Tower, Towers

# Towers compute and send what peers wait for in so many pieces at most: each costs its latency, and calls of towers.
MOST_PIECES = 4
_AGAIN = "nightjar partition force=true rebuilds towers.json"
# TorchRec runs these over the hosts of all ranks, never within a process group.
WHOLE_WORLD = ("table_row_wise", "table_column_wise")


@dataclass(frozen=True)
class TowerHosts:
    """The ``hosts`` that share ``towers`` (by number); ``features`` are those of these towers, tower by tower."""

    hosts: tuple[int, ...]
    towers: tuple[int, ...]
    features: tuple[str, ...]


@dataclass(frozen=True)
class TowerLayout:
    """Towers on ``hosts`` of ``ranks_per_host`` ranks each; host h has the ranks from h * ranks_per_host on."""

    towers: Towers
    hosts: int
    ranks_per_host: int

    @cached_property
    def tower_hosts(self) -> tuple[TowerHosts, ...]:
        """The groups of hosts that share towers, in the order of their first hosts."""
        by_hosts: dict[tuple[int, ...], list[int]] = {}
        for number, tower in enumerate(self.towers.towers):
            by_hosts.setdefault(tower.hosts, []).append(number)
        groups = []
        for hosts, numbers in sorted(by_hosts.items()):
            features: list[str] = []
            for number in numbers:
                features += self.towers.towers[number].features
            groups.append(TowerHosts(hosts, tuple(numbers), tuple(features)))
        return tuple(groups)

    @property
    def features(self) -> tuple[str, ...]:
        """All features, group by group: the order in which the peers exchange them."""
        features: tuple[str, ...] = ()
        for group in self.tower_hosts:
            features += group.features
        return features

    @property
    def vectors(self) -> tuple[str, ...]:
        """Names of the towers' output vectors, group by group; a vector of one feature has the feature's name."""
        module, towers = self.towers.module, self.towers.towers
        if module.by_feature:
            return self.features
        names = []
        for group in self.tower_hosts:
            for number in group.towers:
                for vector in range(module.vectors(len(towers[number].features))):
                    names.append(f"{vector} of tower {number}")
        return tuple(names)

    def tower_ranks(self, group: int) -> list[int]:
        """Return the global ranks of the tower hosts with number ``group``, ascending."""
        ranks: list[int] = []
        for host in self.tower_hosts[group].hosts:
            first = host * self.ranks_per_host
            ranks += range(first, first + self.ranks_per_host)
        return ranks

    def tower_hosts_of(self, rank: int) -> int:
        """Return the number of the tower hosts that a global rank belongs to."""
        host = rank // self.ranks_per_host
        return next(number for number, group in enumerate(self.tower_hosts) if host in group.hosts)

    def peers(self, place: int) -> list[int]:
        """Return the global ranks at ``place`` of every group of tower hosts, in their order."""
        return [self.tower_ranks(group)[place] for group in range(len(self.tower_hosts))]


def peer_pieces(peers: int) -> list[tuple[range, float, float]]:
    """Divide what a rank's other ``peers`` wait for into pieces, which leave one after the other.

    Returns:
        Of each piece (steps, begin, end): the peers so many steps ahead around a ring, which starts from the rank
        itself so that no rank is sent to by all others at once, and the part of their samples as shares of all.
    """
    if peers == 2:
        only = range(1, 2)
        return [(only, 0.0, 0.5), (only, 0.5, 1.0)]
    pieces = min(MOST_PIECES, peers - 1)
    return [(range(1 + number, peers, pieces), 0.0, 1.0) for number in range(pieces)]


def layout_of(towers: Towers, features: Sequence[str], hosts: int, ranks_per_host: int) -> TowerLayout:
    """Lay ``towers`` out on this hardware; raises ConfigError as ``check_towers`` does."""
    check_towers(towers.towers, features, hosts)
    return TowerLayout(towers, hosts, ranks_per_host)


def check_towers(towers: Sequence[Tower], features: Sequence[str], hosts: int) -> None:
    """Raise ConfigError unless each of ``features`` is in one tower and the towers divide the ``hosts`` evenly."""
    home: dict[str, int] = {}
    groups = set()
    for number, tower in enumerate(towers):
        groups.add(tower.hosts)
        if not tower.features:
            raise ConfigError(
                f"tower {number} has no feature, expected at least one in each of {len(towers)} towers",
                hint="a smaller partition.towers or other partition.pins",
            )
        for feature in tower.features:
            if feature in home:
                raise ConfigError(
                    f"feature {feature!r} is in tower {home[feature]} and in tower {number}, expected in one tower",
                    hint=_AGAIN,
                )
            home[feature] = number
    missing = [name for name in features if name not in home]
    unknown = [name for name in home if name not in features]
    if missing or unknown:
        what = f"not in the dataset: {', '.join(unknown)}"
        if missing:
            what = f"no tower has: {', '.join(missing)}"
        raise ConfigError(f"the towers and the dataset have different features; {what}", hint=_AGAIN)

    # Overlapping groups name a host twice, which the comparison with all hosts also finds.
    placed = sorted(itertools.chain(*groups))
    if placed != list(range(hosts)) or len(set(map(len, groups))) != 1:
        shown = [f"{', '.join(tower.features)} on hosts {list(tower.hosts)}" for tower in towers]
        raise ConfigError(
            f"the towers do not divide the {hosts} hosts, expected equally many hosts for each tower, two towers to "
            f"share all hosts or none, and hosts 0 to {hosts - 1} all used; got {'; '.join(shown)}",
            hint=_AGAIN,
        )


def tower_hosts_settings(
    plan: PlanConfig, hardware: HardwareConfig, group: TowerHosts, tables: Collection[str]
) -> tuple[PlanConfig, HardwareConfig]:
    """Return the settings with which the planner places the ``tables`` of one group of tower hosts."""
    types = [kind for kind in plan.sharding_types if kind not in WHOLE_WORLD]
    pins = {}
    for table, pin in plan.tables.items():
        # The planner rejects a pin of a table that it does not have.
        if table in tables:
            pins[table] = pin
    # The global batch stays the same, since every rank of the group looks up the samples of all its peers.
    return replace(plan, sharding_types=types, tables=pins), replace(hardware, hosts=len(group.hosts))


def united_plan(layout: TowerLayout, plans: Sequence[Plan], features: Sequence[str]) -> Plan:
    """Return the ``plans`` of all tower hosts as one plan of all ranks, tables in the order ``features``."""
    tables: dict[str, TablePlan] = {}
    memory, phases, reserved = [], [], []
    for group, plan in enumerate(plans):
        # A group's plan numbers its own ranks from 0.
        ranks = layout.tower_ranks(group)
        for name, table in plan.tables.items():
            shards = tuple(replace(shard, rank=ranks[shard.rank]) for shard in table.shards)
            tables[name] = replace(table, shards=shards)
        memory.append(plan.memory)
        phases.append(plan.phases)
        reserved.append(plan.reserved)
    return replace(
        plans[0],
        world_size=layout.hosts * layout.ranks_per_host,
        ranks_per_host=layout.ranks_per_host,
        tables={name: tables[name] for name in features},
        memory=_by_global_rank(layout, memory),
        phases=_by_global_rank(layout, phases),
        reserved=_by_global_rank(layout, reserved),
        # All groups wait for the slowest one in the exchange of vectors.
        predicted_step_ms=max(plan.predicted_step_ms for plan in plans),
        gap=max(plan.gap for plan in plans),
    )


def _by_global_rank(layout: TowerLayout, figures: Sequence[Sequence[Any]]) -> list[Any]:
    # A plan may lack these figures, and a list for only some ranks would be taken for that of all.
    if not all(figures):
        return []
    by_rank: dict[int, Any] = {}
    for group, group_figures in enumerate(figures):
        by_rank |= zip(layout.tower_ranks(group), group_figures, strict=True)
    return [by_rank[rank] for rank in sorted(by_rank)]
