"""What the ids of a table's rows are, in a checkpoint and now: settings whose change gives rows to other ids.

A row is trained for the ids that lead to it. They come from a column (or a cross of several, or a number's bins), are
cut out of its text, and find their row by the feature's mapping. Where one of these changes, the same row serves other
ids, though names and sizes of the tables are the same. So features are compared by what is in force for them, defaults
filled in: a setting that is only written down differently changes nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from pipeline.config.features import PERCENTILE
from pipeline.specs.id_mapping import ID_MAPPINGS, mapping_of

SAFE, ALLOW, REFUSED = "safe", "allow", "refused"
SPARSE, DEFAULTS = "data.sparse", "data.sparse_defaults"
# Settings that say where ids are read and how: only the user knows whether the same ids are there under another name.
_READ = ("column", "separator", "weight_separator")
# What the text of every field is: it may have changed in the logs, too.
READ_EVERYWHERE = ("data.strip", "data.quote")


@dataclass
class IdsChange:
    """What the change of a setting means for the rows of ``features``: REFUSED or ALLOW."""

    kind: str
    features: list[str] = field(default_factory=list)


def ids_changes(then: Mapping[str, Any], now: Mapping[str, Any], rename: Mapping[str, str]) -> dict[str, IdsChange]:
    """{setting: what it means} of those that give rows of a common table to other ids; others change no id.

    ``then``, ``now``: configurations as plain data, the former one with its features under their own names.
    ``rename``: {feature then: feature now}. A setting of ``data.sparse`` is named by the feature's name now.
    """
    before, after = then["data"], now["data"]
    changes: dict[str, IdsChange] = {}
    for name, feature in before["sparse"].items():
        new = rename.get(name, name)
        if new not in after["sparse"]:
            continue
        current = after["sparse"][new]
        shared = feature.get("table"), current.get("table")
        if rename.get(shared[0] or name, shared[0] or name) != (shared[1] or new):
            continue  # other tables, whose rows are matched by their names
        old_ids = _ids(name, feature, before["sparse_defaults"])
        new_ids = _ids(new, current, after["sparse_defaults"])
        if shared[0]:  # what is of the table is compared where it is set
            for ids in (old_ids, new_ids):
                ids.pop("mapping"), ids.pop("rows", None)
        if new != name and any(ID_MAPPINGS.get(ids["mapping"]).by_hash for ids in (old_ids, new_ids)):
            changes[f"checkpoint.rename.{name}"] = IdsChange(REFUSED, [new])  # the hash's seed is the feature's name
        if feature.get("column") is None and current.get("column") is None:
            old_ids["column"] = new_ids.get("column")  # a feature that is renamed may have had its column renamed
        for setting in sorted(old_ids.keys() & new_ids.keys()):
            if old_ids[setting] != new_ids[setting]:
                kind = _kind(setting, old_ids[setting], new_ids[setting])
                for path in _responsible(new, setting, (feature, before), (current, after)):
                    change = changes.setdefault(path, IdsChange(kind))
                    change.kind = REFUSED if REFUSED in (kind, change.kind) else ALLOW
                    change.features.append(new)
    return changes


def _ids(name: str, feature: Mapping[str, Any], defaults: Mapping[str, Any]) -> dict[str, Any]:
    """What decides which ids a feature's rows stand for: settings in force, those that do not count left out."""
    cross, bins = list(feature.get("cross") or []), feature.get("bins")
    mapping = mapping_of(feature.get("mapping"), defaults["mapping"], bins)
    ids: dict[str, Any] = {"mapping": mapping.name, "cross": cross, "bins": bins}
    if bins:
        ids["bins_by"] = feature.get("bins_by") or PERCENTILE
    if not cross:
        ids["column"] = feature.get("column") or name
    if cross:
        ids["cross_bins"] = dict(feature.get("cross_bins") or {})
    if not bins:
        separator = feature.get("separator") or (None if cross else defaults.get("separator"))
        ids["separator"] = separator
        if separator:
            ids["weight_separator"] = feature.get("weight_separator") or defaults.get("weight_separator")
    if mapping.by_hash:
        ids["rows"] = feature.get("rows") or defaults["rows"]
    return ids


def _responsible(
    name: str, setting: str, then: tuple[Mapping[str, Any], Any], now: tuple[Mapping[str, Any], Any]
) -> list[str]:
    """The paths whose change changed ``setting`` of a feature: its own, else the default it takes.

    ``then``, ``now``: the feature's settings and those of all data.
    """
    values = [side[0].get(setting) for side in (then, now)]
    defaults = [side[1]["sparse_defaults"].get(setting) for side in (then, now)]
    own = [f"{SPARSE}.{name}.{setting}"] if values[0] != values[1] else []
    return own + ([f"{DEFAULTS}.{setting}"] if None in values and defaults[0] != defaults[1] else [])


def _kind(setting: str, then: Any, now: Any) -> str:
    """Whether the same ids may be there under other names, which only the user knows, or can surely not be."""
    if setting in _READ or (setting == "cross" and then and now and len(then) == len(now)):
        return ALLOW
    return REFUSED
