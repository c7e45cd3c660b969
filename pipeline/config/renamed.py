"""Settings that have been renamed, and recorded configurations as plain data, of which some have the former names.

Artifact keys and run names use the first name of a setting, so their bytes stay. Recorded configurations are read with
either name. An old name on the command line is an error.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pipeline.core.errors import ConfigError

# Maps the first name of a setting to its current name.
RENAMED = {
    "train.decay_share": "train.decay_ratio",
    "train.min_lr_share": "train.min_lr_factor",
    "launch.hold_memory": "launch.limit_memory",
    "nightly.timezone": "nightly.time_zone",
}
_FIRST = {now: first for first, now in RENAMED.items()}
# The setting whose values are names of settings.
_LISTS_SETTINGS = "checkpoint.allow"


def renamed_error(path: str, before: str = "", after: str = "") -> ConfigError | None:
    """Return the error for an old name, or None. ``before``, ``after``: text around the new name in the hint."""
    now = RENAMED.get(path)
    return ConfigError(f"{path} is now {now}", hint=f"{before}{now}{after}") if now else None


def parse_recorded(text: str) -> Any:
    """Return the plain data in ``text``, the YAML of a recorded configuration, with the names of its time.

    For settings that are only compared or shown: ``from_yaml``, which checks them against the schema, takes sixty times
    as long.
    """
    import yaml

    # The loader that uses libyaml is eight times as fast, but PyYAML may be built without it.
    return yaml.load(text, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader)) or {}


def with_new_names(record: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``record``, plain data of a configuration or a part of one, with the current names."""
    return _renamed(record, RENAMED)


def with_first_names(record: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``record`` with the first names, as keys use them."""
    return _renamed(record, _FIRST)


def _renamed(record: Mapping[str, Any], names: Mapping[str, str], prefix: str = "") -> dict[str, Any]:
    # Rename keys in place, and the settings that a value lists.
    made: dict[str, Any] = {}
    for name, value in record.items():
        path = f"{prefix}{name}"
        last = names.get(path, path).rpartition(".")[2]
        if isinstance(value, Mapping):
            value = _renamed(value, names, f"{path}.")
        elif path == _LISTS_SETTINGS and value:
            value = [names.get(each, each) for each in value]
        # Insert it at the former name's place, so that the order of the settings does not change.
        made[last] = value
    return made


def leaves(config: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return the leaves of a nested configuration by dotted path; an empty group is a leaf."""
    values: dict[str, Any] = {}
    for name, value in config.items():
        if isinstance(value, Mapping) and value:
            values |= leaves(value, f"{prefix}{name}.")
        else:
            values[f"{prefix}{name}"] = value
    return values


def config_changes(then: Mapping[str, Any], now: Mapping[str, Any]) -> dict[str, list[Any]]:
    """Return the settings that differ, by current name: {dotted path: [then, now]}; None if one does not have it."""
    a, b = leaves(with_new_names(then)), leaves(with_new_names(now))
    changes = {}
    # A union of dictionaries, unlike one of sets, keeps the order of the settings. A setting that is null counts as
    # absent, so a new setting with this default is no change.
    for path in {**a, **b}:
        if a.get(path) != b.get(path):
            changes[path] = [a.get(path), b.get(path)]
    return changes
