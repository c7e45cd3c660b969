"""Recorded configurations as plain data: their settings by path, and which of them differ."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pipeline.config.renamed import with_new_names


def leaves(config: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Leaves of a nested configuration by dotted path; an empty group is a leaf."""
    values: dict[str, Any] = {}
    for name, value in config.items():
        if isinstance(value, Mapping) and value:
            values |= leaves(value, f"{prefix}{name}.")
        else:
            values[f"{prefix}{name}"] = value
    return values


def config_changes(then: Mapping[str, Any], now: Mapping[str, Any]) -> dict[str, list[Any]]:
    """Settings that differ, by their names now: {dotted path: [then, now]}; None where one does not have it."""
    a, b = leaves(with_new_names(then)), leaves(with_new_names(now))
    return {path: [a.get(path), b.get(path)] for path in {**a, **b} if a.get(path) != b.get(path)}
