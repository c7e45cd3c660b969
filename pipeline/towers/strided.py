"""The strided assignment of features to towers: tower k gets features k, k + T, k + 2T, ... (the paper's baseline)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence


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
