"""From ``partition.*`` to towers: how many, on which hosts, what their modules cost, and checks. No torch at import.

``check_partition`` runs before anything else, so that a bad setting costs no ingestion.
"""

from __future__ import annotations

import difflib
import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from types import MappingProxyType

from pipeline.config.partition import PartitionConfig
from pipeline.config.plan import PlanConfig
from pipeline.errors import ConfigError
from pipeline.records.towers import Tower, TowerModuleSpec, Towers
from pipeline.specs.model import ModelCosts
from pipeline.towers.layout import WHOLE_WORLD, check_towers


def tower_count(partition: PartitionConfig, hosts: int) -> int:
    """The number of towers: ``partition.towers``, or one a host."""
    return partition.towers or hosts


def tower_hosts(count: int, hosts: int) -> list[tuple[int, ...]]:
    """The hosts of each of ``count`` towers: several hosts a tower, or several towers a host.

    Raises ConfigError where neither number divides the other.
    """
    if hosts % count == 0:
        span = hosts // count
        return [tuple(range(number * span, (number + 1) * span)) for number in range(count)]
    if count % hosts == 0:
        share = count // hosts
        return [(number // share,) for number in range(count)]
    raise ConfigError(
        f"{count} towers do not divide {hosts} hosts, expected a divisor or a multiple of {hosts}",
        hint=f"partition.towers={_fitting(count, hosts)}",
    )


def _fitting(most: int, hosts: int) -> int:
    """The largest number of towers, up to ``most``, that divides ``hosts`` or is a multiple of it."""
    return max(n for n in range(1, most + 1) if hosts % n == 0 or n % hosts == 0)


def towers_of(
    partition: PartitionConfig, dim: int, hosts: int, assigned: Sequence[Sequence[str]], features: Sequence[str]
) -> Towers:
    """``towers.json`` of ``features`` that are ``assigned`` to towers on ``hosts`` hosts; ``dim``: of the embeddings.

    Raises ConfigError where they do not fit.
    """
    low_rank = partition.module == "low_rank"
    towers = Towers(
        partition=partition.name,
        towers=tuple(
            Tower(features=tuple(f), hosts=h) for f, h in zip(assigned, tower_hosts(len(assigned), hosts), strict=True)
        ),
        module=TowerModuleSpec(
            name=partition.module,
            c=partition.c,
            p=partition.p,
            cross_layers=partition.cross_layers,
            dim=partition.dim or (-(-dim // 4) if low_rank else dim),
            rank=partition.rank if low_rank else 0,
        ),
    )
    check_towers(towers.towers, features, hosts)
    return towers


def flat_towers(hosts: int, features: Sequence[str]) -> Towers:
    """One tower with every feature on every host: ``partition=flat``."""
    return Towers(partition="flat", towers=(Tower(features=tuple(features), hosts=tuple(range(hosts))),))


def kept_together(partition: PartitionConfig, shared: Iterable[Sequence[str]]) -> PartitionConfig:
    """``partition`` with groups of the features and sequences that share a table, ``shared``: it lies in one tower."""
    groups = [list(group) for group in partition.groups]
    for names in (each for each in shared if len(each) > 1):
        joins = [group for group in groups if not set(group).isdisjoint(names)]
        groups = [group for group in groups if group not in joins]
        groups.append(list(dict.fromkeys([*itertools.chain(*joins), *names])))
    return replace(partition, groups=groups)


def check_partition(
    partition: PartitionConfig,
    plan: PlanConfig,
    hosts: int,
    features: Sequence[str],
    sequences: Mapping[str, Sequence[str]] = MappingProxyType({}),
) -> None:
    """Raise ConfigError where these ``features`` cannot be partitioned so on this number of ``hosts``.

    ``features``: those of the dataset, and its sequences; ``sequences``: by name, whose tables their events have.
    """
    if partition.name == "flat":
        return
    _check_sequences(partition, sequences)
    count = tower_count(partition, hosts)
    tower_hosts(count, hosts)
    if count > len(features):
        raise ConfigError(
            f"{count} towers for {len(features)} features ({', '.join(features)}), expected a feature in each",
            hint=f"partition.towers={_fitting(len(features), hosts)}",
        )
    _check_shardings(plan)
    _check_names(partition, features)
    _check_together(partition, count)
    _check_enough(partition, features, count, hosts)
    if partition.module == "dlrm" and partition.c == partition.p == 0:
        raise ConfigError("partition.c and partition.p are both 0, so towers have no output", hint="partition.c=1")


def _check_shardings(plan: PlanConfig) -> None:
    """Every table must have a sharding type, pinned or not, that stays within its tower's hosts."""
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


def _check_names(partition: PartitionConfig, features: Sequence[str]) -> None:
    named = [("partition.pins", name) for name in partition.pins]
    named += [("partition.groups", name) for group in partition.groups for name in group]
    for where, name in named:
        if name not in features:
            near = difflib.get_close_matches(name, features, n=1, cutoff=0.0)[0]
            raise ConfigError(
                f"{where} names {name!r}, which is not a feature; the nearest is {near!r}",
                hint=f"use {near} instead of {name}; the features are {', '.join(features)}",
            )


def _check_together(partition: PartitionConfig, count: int) -> None:
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
        wanted = {name: partition.pins[name] for name in group if name in partition.pins}
        if len(set(wanted.values())) > 1:
            shown = ", ".join(f"{name} to {tower}" for name, tower in wanted.items())
            raise ConfigError(
                f"partition.groups keeps {', '.join(group)} together, but partition.pins sends {shown}",
                hint=f"~partition.pins.{next(iter(wanted))}",
            )


def _check_sequences(partition: PartitionConfig, sequences: Mapping[str, Sequence[str]]) -> None:
    """A sequence is looked up where its tables are: with all features whose tables its events have."""
    for name, features in sequences.items():
        wanted = {each: partition.pins[each] for each in (*features, name) if each in partition.pins}
        if len(set(wanted.values())) > 1:
            first, shown = next(iter(wanted)), ", ".join(f"{each} to tower {tower}" for each, tower in wanted.items())
            moved = [each for each, tower in wanted.items() if tower != wanted[first]]
            raise ConfigError(
                f"partition.pins sends {shown}, but the events of sequence {name!r} are looked up in the tables of "
                f"{', '.join(features)}: a sequence and its tables lie in one tower",
                hint=" ".join(f"++partition.pins.{each}={wanted[first]}" for each in moved),
            )


def _check_enough(partition: PartitionConfig, features: Sequence[str], count: int, hosts: int) -> None:
    """Features without a pin must be enough for the towers that no pin names; a group counts as one."""
    group_of = {name: tuple(group) for group in partition.groups for name in group}
    units = {group_of.get(name, (name,)) for name in features}
    pinned = {unit for unit in units if any(name in partition.pins for name in unit)}
    empty = sorted(set(range(count)) - set(partition.pins.values()))
    free = [", ".join(unit) for unit in units - pinned]
    if len(free) < len(empty):
        fewer = _fitting(count - len(empty) + len(free), hosts)
        left = f"only {'; '.join(sorted(free))} can go there" if free else "every feature is pinned elsewhere"
        raise ConfigError(
            f"towers {', '.join(map(str, empty))} of {count} would get no feature: {left} "
            f"(groups stay together, and each tower needs a feature)",
            hint=f"partition.towers={fewer}, or fewer partition.pins and partition.groups",
        )


def strided(
    features: Sequence[str],
    count: int,
    pins: Mapping[str, int] | None = None,
    groups: Sequence[Sequence[str]] = (),
) -> list[list[str]]:
    """Features by tower, in their own order. A group counts as one feature, at the place of its first.

    ``pins``: {feature: its tower}; the feature's group goes with it. The others are dealt out in turn, the last of them
    to towers that would otherwise stay empty.
    """
    pins = pins or {}
    group_of = {name: tuple(group) for group in groups for name in group}
    units = list(dict.fromkeys(group_of.get(name, (name,)) for name in features))
    home = {name: pins[member] for unit in units for member in unit if member in pins for name in unit}
    free = [unit for unit in units if unit[0] not in home]
    for turn, unit in enumerate(free):
        empty = sorted(set(range(count)) - set(home.values()))
        tower = empty[0] if len(free) - turn <= len(empty) else turn % count
        home |= dict.fromkeys(unit, tower)
    return [[name for name in features if home[name] == tower] for tower in range(count)]


def modules_costs(spec: TowerModuleSpec, features: Sequence[int], width: int) -> ModelCosts:
    """The costs of a sample in the modules of towers with so many ``features`` each, of embeddings of ``width``.

    For the planner: counted on the built modules, as a ranking model's costs are.
    """
    each = [_tower_costs(spec, count, width) for count in features]
    return ModelCosts(
        flop=sum(one.flop for one in each),
        parameters=sum(one.parameters for one in each),
        activations=sum(one.activations for one in each),
    )


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
