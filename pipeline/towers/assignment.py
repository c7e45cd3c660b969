"""From ``partition.*`` to towers: how many, on which hosts, and what cannot be. No torch here.

Looked at before a run starts (``check_partition``), so that a bad setting costs no ingestion.
"""

from __future__ import annotations

import difflib
from collections.abc import Sequence

from pipeline.config import Config
from pipeline.errors import ConfigError
from pipeline.records import Tower, TowerModuleSpec, Towers
from pipeline.towers.layout import layout_of
from pipeline.towers.plans import WHOLE_WORLD


def tower_count(config: Config) -> int:
    """Towers asked for: ``partition.towers``, or one a host."""
    return config.partition.towers or config.hardware.hosts


def tower_hosts(count: int, hosts: int) -> list[tuple[int, ...]]:
    """The hosts of each of ``count`` towers: hosts divided among few towers, or several towers on each host.

    ConfigError where neither divides the other.
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
    """The largest number of towers up to ``most`` that divides ``hosts`` or that they divide."""
    return max(n for n in range(1, most + 1) if hosts % n == 0 or n % hosts == 0)


def module_of(config: Config) -> TowerModuleSpec:
    """The tower module that ``partition`` describes."""
    part = config.partition
    return TowerModuleSpec(
        name=part.module, c=part.c, p=part.p, dim=part.dim or config.model.embedding_dim, cross_layers=part.cross_layers
    )


def towers_of(config: Config, assigned: Sequence[Sequence[str]], features: Sequence[str]) -> Towers:
    """``towers.json`` of features ``assigned`` to towers, placed on hosts; ConfigError where they do not fit."""
    hosts = tower_hosts(len(assigned), config.hardware.hosts)
    towers = Towers(
        partition=config.partition.name,
        towers=tuple(Tower(features=tuple(f), hosts=h) for f, h in zip(assigned, hosts, strict=True)),
        module=module_of(config),
    )
    return layout_of(towers, features, config.hardware.hosts, config.hardware.ranks_per_host).towers


def flat_towers(config: Config, features: Sequence[str]) -> Towers:
    """One tower with every feature on every host: ``partition=flat``."""
    everywhere = tuple(range(config.hardware.hosts))
    return Towers(partition="flat", towers=(Tower(features=tuple(features), hosts=everywhere),))


def check_partition(config: Config, features: Sequence[str]) -> None:
    """ConfigError where ``partition`` cannot be carried out on this hardware with these features, which it names."""
    part, count = config.partition, tower_count(config)
    if part.name == "flat":
        return
    tower_hosts(count, config.hardware.hosts)
    if count > len(features):
        raise ConfigError(
            f"{count} towers for {len(features)} features ({', '.join(features)}), expected a feature in each",
            hint=f"partition.towers={_fitting(len(features), config.hardware.hosts)}",
        )
    _check_shardings(config)
    _check_names(config, features)
    _check_together(config, count)
    _check_enough(config, features, count)
    if part.module == "dlrm" and part.c == part.p == 0:
        raise ConfigError("partition.c and partition.p are both 0: towers would put nothing out", hint="partition.c=1")


def _check_shardings(config: Config) -> None:
    """Some way to place tables must be left inside a tower's hosts, for those with a wish, too."""
    for name, pin in config.plan.tables.items():
        if pin.sharding in WHOLE_WORLD:
            path = f"plan.tables.{name}.sharding"
            raise ConfigError(
                f"{path} is {pin.sharding}, which reaches over all hosts: a tower's tables stay on its own",
                hint=f"++{path}=row_wise",
            )
    types = config.plan.sharding_types
    if types and set(types) <= set(WHOLE_WORLD):
        raise ConfigError(
            f"plan.sharding_types=[{','.join(types)}] reach over all hosts: a tower's tables stay on its own",
            hint=f"plan.sharding_types=[table_wise,row_wise,{','.join(types)}]",
        )


def _check_names(config: Config, features: Sequence[str]) -> None:
    named = [("partition.pins", name) for name in config.partition.pins]
    named += [("partition.groups", name) for group in config.partition.groups for name in group]
    for where, name in named:
        if name not in features:
            near = difflib.get_close_matches(name, features, n=1, cutoff=0.0)[0]
            raise ConfigError(
                f"{where} names {name!r}, which is no feature; the nearest is {near!r}",
                hint=f"{near} instead of {name}; the features are {', '.join(features)}",
            )


def _check_together(config: Config, count: int) -> None:
    for name, tower in config.partition.pins.items():
        if not 0 <= tower < count:
            raise ConfigError(
                f"partition.pins.{name} is {tower}, expected a tower between 0 and {count - 1}",
                hint=f"++partition.pins.{name}={max(0, min(tower, count - 1))}",
            )
    seen: set[str] = set()
    for group in config.partition.groups:
        for name in group:
            if name in seen:
                raise ConfigError(
                    f"partition.groups names {name!r} twice: it would be in two towers",
                    hint=f"{name} in one of the groups, once",
                )
            seen.add(name)
        wanted = {name: config.partition.pins[name] for name in group if name in config.partition.pins}
        if len(set(wanted.values())) > 1:
            shown = ", ".join(f"{name} to {tower}" for name, tower in wanted.items())
            raise ConfigError(
                f"partition.groups keeps {', '.join(group)} together, but partition.pins sends {shown}",
                hint=f"~partition.pins.{next(iter(wanted))}",
            )


def _check_enough(config: Config, features: Sequence[str], count: int) -> None:
    """Every tower must get a feature: those without a pin, groups counted once, fill the towers that no pin names."""
    group_of = {name: tuple(group) for group in config.partition.groups for name in group}
    units = {group_of.get(name, (name,)) for name in features}
    pinned = {unit for unit in units if any(name in config.partition.pins for name in unit)}
    empty = sorted(set(range(count)) - set(config.partition.pins.values()))
    free = [", ".join(unit) for unit in units - pinned]
    if len(free) < len(empty):
        fewer = _fitting(count - len(empty) + len(free), config.hardware.hosts)
        left = f"only {'; '.join(sorted(free))} can go there" if free else "every feature is pinned elsewhere"
        raise ConfigError(
            f"towers {', '.join(map(str, empty))} of {count} would get no feature: {left} "
            f"(groups stay together, and each tower needs a feature)",
            hint=f"partition.towers={fewer}, or fewer partition.pins and partition.groups",
        )
