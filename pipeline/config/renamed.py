"""Settings that have a new name: what people type, and what stores hold from before.

Artifact keys and run names are made of the names that a setting had first, so they keep their bytes. Recorded
configurations are read with either name.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pipeline.errors import ConfigError

# The first name of a setting -> its name now.
RENAMED = {
    "train.decay_share": "train.decay_ratio",
    "train.min_lr_share": "train.min_lr_factor",
    "launch.hold_memory": "launch.limit_memory",
    "nightly.timezone": "nightly.time_zone",
}
_FIRST = {now: first for first, now in RENAMED.items()}
_LISTS_SETTINGS = "checkpoint.allow"  # its values are names of settings


def renamed_error(path: str, before: str = "", after: str = "") -> ConfigError | None:
    """The error for a former name ``path``, None for any other; ``before``, ``after``: of the new name in the hint."""
    now = RENAMED.get(path)
    return ConfigError(f"{path} is now {now}", hint=f"{before}{now}{after}") if now else None


def with_new_names(record: Mapping[str, Any]) -> dict[str, Any]:
    """``record``, a configuration or part of one as plain data, with every setting under its name now."""
    return _renamed(record, RENAMED)


def with_first_names(record: Mapping[str, Any]) -> dict[str, Any]:
    """``record`` with every setting under its first name, as keys have it."""
    return _renamed(record, _FIRST)


def _renamed(record: Mapping[str, Any], names: Mapping[str, str], prefix: str = "") -> dict[str, Any]:
    """Names change within their group, at their place in the order, and where a value lists settings."""
    made: dict[str, Any] = {}
    for name, value in record.items():
        path = f"{prefix}{name}"
        last = names.get(path, path).rpartition(".")[2]
        if isinstance(value, Mapping):
            made[last] = _renamed(value, names, f"{path}.")
        else:
            made[last] = [names.get(each, each) for each in value] if path == _LISTS_SETTINGS and value else value
    return made
