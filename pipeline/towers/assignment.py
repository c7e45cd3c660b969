"""Turns ``partition.*`` into towers: their number, hosts, costs of modules, and checks. No torch at import.

``check_partition`` runs before anything else, so that a bad setting is found before ingestion.
"""

from __future__ import annotations

import difflib
import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from types import MappingProxyType

from pipeline.config.plan import PartitionConfig, PlanConfig
from pipeline.core.errors import ConfigError
from pipeline.records.towers import MODULES_WITH_RANK, Tower, TowerModuleSpec, Towers
from pipeline.specs.model import ModelCosts
from pipeline.towers.layout import WHOLE_WORLD, check_towers

# The modules that read each of these settings; all other modules ignore it.
MODULES_OF_SETTING = {
    "c": ("dlrm",),
    "p": ("dlrm",),
    "dim": ("dlrm", "dcn", "low_rank", "dcn_low_rank"),
    "cross_layers": ("dcn", "low_rank"),
    "rank": MODULES_WITH_RANK,
}


def tower_count(partition: PartitionConfig, hosts: int) -> int:
    """Return the number of towers: ``partition.towers``, or one per host."""
    return partition.towers or hosts


def tower_counts(partition: PartitionConfig, hosts: int) -> list[int]:
    """Return the numbers of towers that ``partition.auto`` chooses among, ``tower_count`` first.

    Half as many towers, each on two hosts, have more features that meet in one; fewer ones save little.
    """
    counts = [tower_count(partition, hosts)]
    # Pins name towers by number, and so decide how many there are.
    if not partition.towers and not partition.pins and hosts >= 4 and hosts % 2 == 0:
        counts.append(hosts // 2)
    return counts


def tower_hosts(count: int, hosts: int) -> list[tuple[int, ...]]:
    """Return the hosts of each of ``count`` towers: several hosts per tower, or several towers per host.

    Raises:
        ConfigError: Neither number divides the other.
    """
    if hosts % count == 0:
        span = hosts // count
        return [tuple(range(first, first + span)) for first in range(0, hosts, span)]
    if count % hosts == 0:
        towers_per_host = count // hosts
        return [(number // towers_per_host,) for number in range(count)]
    raise ConfigError(
        f"{count} towers do not divide {hosts} hosts, expected a divisor or a multiple of {hosts}",
        hint=f"partition.towers={largest_count(count, hosts)}",
    )


def largest_count(most: int, hosts: int) -> int:
    """Return the largest number of towers, up to ``most``, that divides ``hosts`` or is a multiple of it."""
    return max(count for count in range(1, most + 1) if hosts % count == 0 or count % hosts == 0)


def towers_of(
    partition: PartitionConfig, dim: int, hosts: int, assigned: Sequence[Sequence[str]], features: Sequence[str]
) -> Towers:
    """Build ``towers.json`` of ``features``, ``assigned`` by tower; ``dim`` is the width of the embeddings.

    Raises:
        ConfigError: The towers do not fit.
    """
    low_rank = partition.module in MODULES_WITH_RANK
    # By default, a low-rank tower sends vectors of a quarter of the width.
    module_dim = partition.dim or (-(-dim // 4) if low_rank else dim)
    module = TowerModuleSpec(
        name=partition.module,
        c=partition.c,
        p=partition.p,
        cross_layers=partition.cross_layers,
        dim=module_dim,
        rank=partition.rank if low_rank else 0,
    )
    return Towers(partition=partition.name, towers=place_towers(assigned, features, hosts), module=module)


def place_towers(assigned: Sequence[Sequence[str]], features: Sequence[str], hosts: int) -> tuple[Tower, ...]:
    """Place the towers on the hosts.

    Args:
        assigned: The features of every tower.
        features: All features, each of which must be in one tower.
        hosts: How many there are.

    Raises:
        ConfigError: The towers do not fit.
    """
    placed = []
    for names, own_hosts in zip(assigned, tower_hosts(len(assigned), hosts), strict=True):
        placed.append(Tower(features=tuple(names), hosts=own_hosts))
    check_towers(placed, features, hosts)
    return tuple(placed)


def flat_towers(hosts: int, features: Sequence[str]) -> Towers:
    """Return one tower with every feature on every host: ``partition=flat``."""
    return Towers(partition="flat", towers=(Tower(features=tuple(features), hosts=tuple(range(hosts))),))


def kept_together(partition: PartitionConfig, shared: Iterable[Sequence[str]]) -> PartitionConfig:
    """Return ``partition`` with groups of features and sequences that share a table, which lies in one tower.

    ``shared`` has those of each table.
    """
    groups = list(map(list, partition.groups))
    for names in shared:
        if len(names) < 2:
            continue
        merged: list[str] = []
        others = []
        for group in groups:
            if set(group).isdisjoint(names):
                others.append(group)
            else:
                merged += group
        groups = [*others, list(dict.fromkeys([*merged, *names]))]
    return replace(partition, groups=groups)


def check_partition(
    partition: PartitionConfig,
    plan: PlanConfig,
    hosts: int,
    features: Sequence[str],
    sequences: Mapping[str, Sequence[str]] = MappingProxyType({}),
) -> None:
    """Check that ``features``, those of the dataset and its sequences, can be partitioned on ``hosts`` hosts.

    Args:
        sequences: For each sequence by name, the features whose tables its events use.

    Raises:
        ConfigError: They cannot be.
    """
    if partition.name == "flat":
        return
    _check_sequences(partition, sequences)
    count = tower_count(partition, hosts)
    # This raises an error if neither number divides the other.
    tower_hosts(count, hosts)
    if count > len(features):
        raise ConfigError(
            f"{count} towers for {len(features)} features ({', '.join(features)}), expected a feature in each",
            hint=f"partition.towers={largest_count(len(features), hosts)}",
        )
    # Every table needs a sharding type, pinned or not, that stays within its tower's hosts.
    for name, pin in plan.tables.items():
        if pin.sharding in WHOLE_WORLD:
            path = f"plan.tables.{name}.sharding"
            raise ConfigError(
                f"{path} is {pin.sharding}, which spreads over all hosts, but a tower's tables stay on its own",
                hint=f"++{path}=row_wise",
            )
    types = plan.sharding_types
    if types and set(types) <= set(WHOLE_WORLD):
        raise ConfigError(
            f"plan.sharding_types=[{','.join(types)}] spread over all hosts, but a tower's tables stay on its own",
            hint=f"plan.sharding_types=[table_wise,row_wise,{','.join(types)}]",
        )
    _check_pins_and_groups(partition, features, count)
    _check_enough_features(partition, features, count, hosts)
    if partition.module == "dlrm" and partition.c == partition.p == 0:
        raise ConfigError("partition.c and partition.p are both 0, so towers have no output", hint="partition.c=1")


def unread_settings(partition: PartitionConfig) -> list[str]:
    """Return a sentence for each setting that ``partition.module`` does not read, if it is not at its default.

    They are no error: a study may try modules and their sizes together. Where ``partition.auto`` chooses the module,
    they belong to those that it may choose.
    """
    if partition.auto and partition.module == "pass_through":
        return []
    sentences = []
    defaults = PartitionConfig()
    for name, modules in MODULES_OF_SETTING.items():
        value, default = getattr(partition, name), getattr(defaults, name)
        if value != default and partition.module not in modules:
            sentences.append(
                f"partition.{name} is {value}, but partition.module is {partition.module}, which does not read it; "
                f"expected {default}, or one of the modules that do: {', '.join(modules)}"
            )
    return sentences


def _check_pins_and_groups(partition: PartitionConfig, features: Sequence[str], count: int) -> None:
    named = {"partition.pins": [*partition.pins], "partition.groups": [*itertools.chain(*partition.groups)]}
    for setting, names in named.items():
        for name in names:
            if name not in features:
                # With a cutoff of 0 there is always a nearest name.
                near = difflib.get_close_matches(name, features, n=1, cutoff=0.0)[0]
                raise ConfigError(
                    f"{setting} names {name!r}, which is not a feature; the nearest is {near!r}",
                    hint=f"use {near} instead of {name}; the features are {', '.join(features)}",
                )
    for name, tower in partition.pins.items():
        if not 0 <= tower < count:
            raise ConfigError(
                f"partition.pins.{name} is {tower}, expected a tower between 0 and {count - 1}",
                hint=f"++partition.pins.{name}={max(0, min(tower, count - 1))}",
            )
    seen: set[str] = set()
    for group in partition.groups:
        for name in group:
            if name in seen:
                raise ConfigError(
                    f"partition.groups names {name!r} twice, but a feature belongs to one tower",
                    hint=f"name {name} in one group only",
                )
            seen.add(name)
        pinned = {name: partition.pins[name] for name in group if name in partition.pins}
        if len(set(pinned.values())) > 1:
            shown = ", ".join(f"{name} to {tower}" for name, tower in pinned.items())
            raise ConfigError(
                f"partition.groups keeps {', '.join(group)} together, but partition.pins sends {shown}",
                hint=f"~partition.pins.{next(iter(pinned))}",
            )


def _check_sequences(partition: PartitionConfig, sequences: Mapping[str, Sequence[str]]) -> None:
    # A sequence is looked up where its tables are: together with all features whose tables its events use.
    for name, features in sequences.items():
        pinned = {member: partition.pins[member] for member in (*features, name) if member in partition.pins}
        if len(set(pinned.values())) <= 1:
            continue
        first_tower = next(iter(pinned.values()))
        sent, moves = [], []
        for member, tower in pinned.items():
            sent.append(f"{member} to tower {tower}")
            if tower != first_tower:
                moves.append(f"++partition.pins.{member}={first_tower}")
        raise ConfigError(
            f"partition.pins sends {', '.join(sent)}, but the events of sequence {name!r} are looked up in the tables "
            f"of {', '.join(features)}: a sequence and its tables lie in one tower",
            hint=" ".join(moves),
        )


def _check_enough_features(partition: PartitionConfig, features: Sequence[str], count: int, hosts: int) -> None:
    # The features without a pin must be enough for the towers that no pin names, where a group counts as one.
    free = []
    for unit in group_units(features, partition.groups):
        if partition.pins.keys().isdisjoint(unit):
            free.append(", ".join(unit))
    empty = sorted(set(range(count)) - set(partition.pins.values()))
    if len(free) >= len(empty):
        return
    fewer = largest_count(count - len(empty) + len(free), hosts)
    left = "every feature is pinned elsewhere"
    if free:
        left = f"only {'; '.join(sorted(free))} can go there"
    raise ConfigError(
        f"towers {', '.join(map(str, empty))} of {count} would get no feature: {left} "
        f"(groups stay together, and each tower needs a feature)",
        hint=f"partition.towers={fewer}, or fewer partition.pins and partition.groups",
    )


def group_units(features: Sequence[str], groups: Sequence[Sequence[str]]) -> list[tuple[str, ...]]:
    """Return what moves together: groups, at the place of their first feature, and all other features alone."""
    group_of: dict[str, tuple[str, ...]] = {}
    for group in groups:
        group_of |= dict.fromkeys(group, tuple(group))
    return list(dict.fromkeys(group_of.get(name, (name,)) for name in features))


def strided(
    features: Sequence[str],
    count: int,
    pins: Mapping[str, int] | None = None,
    groups: Sequence[Sequence[str]] = (),
) -> list[list[str]]:
    """Deal features out to ``count`` towers in turn, the last ones to towers that would otherwise stay empty.

    Args:
        pins: The towers of some features; a feature's group goes with it.
        groups: Features that stay together; a group counts as one feature, at the place of its first.

    Returns:
        The features by tower, in their own order.
    """
    pins = pins or {}
    home: dict[str, int] = {}
    free = []
    for unit in group_units(features, groups):
        tower = None
        for name in unit:
            tower = pins.get(name, tower)
        if tower is None:
            free.append(unit)
        else:
            home |= dict.fromkeys(unit, tower)
    for turn, unit in enumerate(free):
        tower = turn % count
        # Pins may leave towers empty at the end of the turns, in which case the last units go to those.
        empty = sorted(set(range(count)) - set(home.values()))
        if len(free) - turn <= len(empty):
            tower = empty[0]
        home |= dict.fromkeys(unit, tower)
    towers: list[list[str]] = [[] for _ in range(count)]
    for name in features:
        towers[home[name]].append(name)
    return towers


def modules_costs(spec: TowerModuleSpec, features: Sequence[int], width: int) -> ModelCosts:
    """Return the costs of a sample in the modules of towers, counted on the built modules, for the planner.

    ``features`` has their number by tower; ``width`` is that of their embeddings.
    """
    costs = ModelCosts(flop=0.0, parameters=0, activations=0)
    for count in features:
        costs = costs.plus(_tower_costs(spec, count, width))
    return costs


@lru_cache(maxsize=256)
def _tower_costs(spec: TowerModuleSpec, features: int, width: int) -> ModelCosts:
    if spec.name == "pass_through":
        return ModelCosts(flop=0.0, parameters=0, activations=0)
    import torch

    from pipeline.models.costs import SAMPLES, module_costs
    from pipeline.towers.modules import tower_module

    with torch.device("meta"):
        module = tower_module(spec, features, width)
        embeddings = torch.zeros(SAMPLES, features, width, requires_grad=True)
    return module_costs(module, embeddings)
