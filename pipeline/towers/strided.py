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

    ``pins``: {feature: its tower}, which takes the feature's group along; the others are dealt out in turn.
    """
    pins = pins or {}
    group_of = {name: tuple(group) for group in groups for name in group}
    home: dict[str, int] = {}
    turn = 0
    for name in features:
        if name in home:
            continue
        unit = group_of.get(name, (name,))
        pinned = [pins[member] for member in unit if member in pins]
        tower = pinned[0] if pinned else turn % count
        turn += not pinned
        home |= dict.fromkeys(unit, tower)
    return [[name for name in features if home[name] == tower] for tower in range(count)]
