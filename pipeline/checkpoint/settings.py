"""Which settings of two recorded configurations differ."""

from __future__ import annotations

from typing import Any

from pipeline.config.renamed import with_new_names


def flatten(config: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Leaves of a nested configuration by dotted path; an empty group is a leaf."""
    leaves: dict[str, Any] = {}
    for name, value in config.items():
        if isinstance(value, dict) and value:
            leaves |= flatten(value, f"{prefix}{name}.")
        else:
            leaves[f"{prefix}{name}"] = value
    return leaves


def config_changes(then: dict[str, Any], now: dict[str, Any]) -> dict[str, list[Any]]:
    """Settings that differ, by their names now: {dotted path: [then, now]}; None where one does not have it."""
    a, b = flatten(with_new_names(then)), flatten(with_new_names(now))
    return {path: [a.get(path), b.get(path)] for path in {**a, **b} if a.get(path) != b.get(path)}
