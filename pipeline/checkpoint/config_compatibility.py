"""Classifies settings that differ between a checkpoint and a training that starts from it: safe, allow, refused.

Safe: how fast, where and on which machines training runs, and what data it sees. To be allowed by name: what makes the
training another one (learning rates, batch, optimizer, what an input value means), and where ids are read from, since
that may have been renamed. Refused: what changes the meaning of the stored numbers.

A row is trained for the ids that lead to it (``ids_changes``). Ids come from a column (or a cross of several, or a
number's bins), are cut out of its text, and find their row by the feature's mapping. If one of these changes, the same
row serves other ids, although names and sizes of the tables are the same. So features are compared by the settings in
force, with defaults filled in: writing a setting down differently changes nothing.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, is_dataclass
from fnmatch import fnmatchcase
from typing import Any

from pipeline.config.checkpoint import CheckpointConfig, is_allowed
from pipeline.config.data import DataConfig
from pipeline.config.features import PERCENTILE
from pipeline.config.fields import default_of, setting_of
from pipeline.config.model import TableConfig
from pipeline.config.renamed import config_changes, with_new_names
from pipeline.core.errors import ConfigError
from pipeline.specs.id_mapping import ID_MAPPINGS, mapping_of
from pipeline.specs.model import MODELS
from pipeline.store.manifest import Artifact

SAFE, ALLOW, REFUSED = "safe", "allow", "refused"
SPARSE, DEFAULTS = "data.sparse", "data.sparse_defaults"
# The settings that say where and how ids are read: only the user knows whether another name has the same ids.
_READ = ("column", "separator", "weight_separator")
# Settings for the text of every field, which may have changed in the logs, too.
READ_EVERYWHERE = ("data.strip", "data.quote")
# The first pattern that matches a setting decides; a setting that matches none is safe.
_REFUSED_TABLES = ("model.embedding_dim", "data.sequences.*.age_bins")  # the id of an age is the number of its bin
_REFUSED_DENSE = ("model.*", "data.tasks.*.kind", "data.tasks.*.given", "data.sequences.*.max_length")
_ALLOWED_MODEL = ("model.tables.*",)
_ALLOWED = (
    "seed",
    "train.global_batch",
    "train.lr",
    "train.sparse_lr",
    "train.dense_optimizer",
    "train.sparse_optimizer",
    "train.sparse_options.*",
    "train.dense_options.*",
    "train.dense_groups.*",
    "train.average.*",
    "train.weight_decay",
    "train.warmup_steps",
    "train.schedule",
    "train.decay_ratio",
    "train.min_lr_factor",
    "train.clip.*",
    "train.shuffle",
    "train.shuffle_window_groups",
    "train.precision",
    "data.label.*",
    "data.tasks.*",
    "train.tasks.*",
    "data.weight",
    "data.dense_transform",
    "data.dense.*",
    "data.missing",
    "data.sequences.*",
    "dataset",
)
# The behaviour of checkpoints that are older than the settings of a schedule.
_BEFORE_SCHEDULES = {"schedule": "constant", "decay_ratio": 1.0, "min_lr_factor": 0.0}
_DATASET, _RENAME = "dataset", "checkpoint.rename."
# Matches a whole numeric feature or sequence, not one of its settings.
_WHOLE_FEATURE = re.compile(r"data\.(dense|sequences)\.[^.]*")


@dataclass
class IdsChange:
    """What the change of a setting means for the rows of ``features``: REFUSED or ALLOW."""

    kind: str
    features: list[str] = field(default_factory=list)


def check_changes(
    artifact: Artifact, now: dict[str, Any], checkpoint: CheckpointConfig, data: DataConfig, dataset: str
) -> list[str]:
    """Check the differences between the settings that ``artifact`` was trained with and the present ones.

    Args:
        now: The whole configuration as a record.
        dataset: Key of the present data set.

    Returns:
        Messages about what was allowed.

    Raises:
        ConfigError: More differs than is allowed; names each setting with both values and the override that allows it.
    """
    # 1. Convert both configurations to the present form and compare them.
    then = with_new_names(artifact.config)
    then = {**then, "train": {**_BEFORE_SCHEDULES, **then["train"]}}
    then, now = _drop_defaults(then), _drop_defaults(now)
    changes = config_changes(*_keep_common_features(then, now, checkpoint.rename))
    changes = _merge_changes_of_one_side(changes, then, now)
    dataset_then = artifact.inputs.get(_DATASET)
    mappings = [feature.mapping or data.sparse_defaults.mapping for feature in data.sparse.values()]
    has_vocab = data.event_tables or any(ID_MAPPINGS.get(mapping).vocabulary for mapping in mappings)
    if dataset_then != dataset and has_vocab and data.mapping_from is None:
        # A vocabulary numbers its rows by the frequencies of its own data set, unless it continues another mapping.
        changes[_DATASET] = [dataset_then, dataset]
    ids = ids_changes(then, now, checkpoint.rename)
    for path in ids:
        changes.setdefault(path, [None, None])

    # 2. Classify each change by what it means for the stored numbers.
    refused: dict[str, str] = {}
    not_allowed: dict[str, str] = {}
    lines = []
    for path, (old, new) in sorted(changes.items()):
        if path in ids:
            kind, text = ids[path].kind, _describe_ids_change(path, old, new, ids[path].features)
        else:
            kind, text = classify(path, checkpoint.init_tables_only), _describe_change(path, old, new)
        if kind == REFUSED:
            refused[path] = text
        elif kind == ALLOW and not is_allowed(path, checkpoint.allow):
            not_allowed[path] = text
        elif kind == ALLOW:
            lines.append(f"allowed: {text}")
    if refused or not_allowed:
        former = {path: old for path, (old, _) in changes.items()}
        raise _refusal(artifact, refused, not_allowed, former, checkpoint)
    return lines


def classify(path: str, tables_only: bool) -> str:
    """Classify a change of setting ``path`` as REFUSED, ALLOW or SAFE, apart from what it means for the ids of rows."""
    if _matches(path, _REFUSED_TABLES):
        return REFUSED
    if path.startswith((f"{SPARSE}.", f"{DEFAULTS}.")):
        return SAFE
    if path == _DATASET or path in READ_EVERYWHERE:
        return ALLOW
    if tables_only:
        return SAFE
    if _matches(path, _ALLOWED_MODEL):
        return ALLOW
    if _matches(path, _REFUSED_DENSE):
        return REFUSED
    return ALLOW if _matches(path, _ALLOWED) else SAFE


def _matches(path: str, patterns: tuple[str, ...]) -> bool:
    return any(fnmatchcase(path, pattern) for pattern in patterns)


def _drop_defaults(config: dict[str, Any]) -> dict[str, Any]:
    # In ``model.tables``, settings at their defaults are dropped. Widths are not compared here: ``warm.match_tables``
    # compares the actual ones.
    table_defaults = asdict(TableConfig())
    del table_defaults["dim"]
    tables = {}
    for name, table in config["model"].get("tables", {}).items():
        changed = {}
        for setting, default in table_defaults.items():
            if table.get(setting, default) != default:
                changed[setting] = table[setting]
        if changed:
            tables[name] = changed
    model = {name: value for name, value in config["model"].items() if name != "tables"}
    if tables:
        model["tables"] = tables

    # Older checkpoints do not record the model's quiet settings, so those at their defaults are dropped.
    if model.get("name") in MODELS.names():
        for option in fields(MODELS.get(model["name"]).config):
            if setting_of(option).quiet:
                default = default_of(option)
                if is_dataclass(default) and not isinstance(default, type):
                    default = asdict(default)
                if option.name in model and model[option.name] == default:
                    del model[option.name]
    return {**config, "model": model}


def _keep_common_features(
    then: dict[str, Any], now: dict[str, Any], rename: dict[str, str]
) -> tuple[dict[str, Any], dict[str, Any]]:
    # Keeps only the sparse features that both have, the former ones under their new names. A table that only one side
    # has is left out or keeps its initial values, so it cannot contradict.
    features = {rename.get(name, name): value for name, value in then["data"]["sparse"].items()}
    current = now["data"]["sparse"]
    sides = []
    for config, sparse in ((then, features), (now, current)):
        common = {name: sparse[name] for name in sparse if name in features and name in current}
        sides.append({**config, "data": {**config["data"], "sparse": common}})
    return sides[0], sides[1]


def _merge_changes_of_one_side(
    changes: dict[str, list[Any]], then: dict[str, Any], now: dict[str, Any]
) -> dict[str, list[Any]]:
    # Replaces many entries by one for each task, numeric feature and sequence that only one side has.
    for group in ("tasks", "dense", "sequences"):
        before, after = then["data"].get(group, {}), now["data"].get(group, {})
        for name in before.keys() ^ after.keys():
            path = f"data.{group}.{name}"
            for setting in list(changes):
                if setting.startswith(f"{path}.") and setting != f"{path}.kind":
                    del changes[setting]
            if group != "tasks":
                changes[path] = ["there", None] if name in before else [None, "there"]
    return changes


def _describe_ids_change(path: str, old: Any, new: Any, features: list[str]) -> str:
    if path.startswith(_RENAME):
        former = path.removeprefix(_RENAME)
        return f"feature {former!r} is now {features[0]!r}, but the hash of its ids is seeded with the name"
    text = _describe_change(path, old, new)
    if path.startswith(DEFAULTS):
        # Name the tables whose rows would serve other ids.
        tables = features[:5] + ["..."] * (len(features) > 5)
        text += f" (tables {', '.join(tables)})"
    return text


def _describe_change(path: str, old: Any, new: Any) -> str:
    if _WHOLE_FEATURE.fullmatch(path):
        return f"{path} is new" if old is None else f"{path} is gone"
    texts = []
    for value in (old, new):
        text = str(value)
        if value is None:
            text = "not set"
        elif isinstance(value, str):
            text = repr(value)
        texts.append(text)
    return f"{path} was {texts[0]}, is {texts[1]}"


def _refusal(
    artifact: Artifact,
    refused: dict[str, str],
    not_allowed: dict[str, str],
    former: dict[str, Any],
    checkpoint: CheckpointConfig,
) -> ConfigError:
    # ``refused`` and ``not_allowed`` map settings to what changed, in words; ``former`` maps them to their former
    # values.
    parts, hints = [], []
    if refused:
        parts.append(f"cannot be changed: {'; '.join(refused.values())}")
    if not_allowed:
        parts.append(f"must be allowed: {'; '.join(not_allowed.values())}")
    # These settings are irrelevant if the dense part is not taken from the checkpoint.
    dense = []
    for path in refused:
        if path.startswith(("model.", "data.tasks.", "data.sequences.")) and not _matches(path, _REFUSED_TABLES):
            dense.append(path)
    with_new_dense = bool(dense) and not checkpoint.init_tables_only

    to_allow = []
    for path in not_allowed:
        matters_to_tables = path.startswith(("data.sparse", _RENAME)) or classify(path, True) == ALLOW
        if not with_new_dense or matters_to_tables:
            to_allow.append(path)
    if to_allow:
        hint = f"checkpoint.allow=[{','.join([*checkpoint.allow, *to_allow])}]"
        back = " ".join(_override(path, former[path]) for path in to_allow if path.startswith("data."))
        if back:
            hint += f" if the ids and values are unchanged, else {back}"
        hints.append(hint)
    if refused:
        ways = ["checkpoint.init_tables_only=true"] if with_new_dense else []
        renamed, settings = [], []
        for path in refused:
            if path.startswith(_RENAME):
                renamed.append(path.removeprefix(_RENAME))
            elif path not in dense:
                settings.append(path)
        if settings:
            way = " ".join(_override(path, former[path]) for path in settings)
            if any(path.startswith(f"{SPARSE}.") for path in settings):
                way += ", or give the feature another name and a new table"
            ways.append(way)
        for name in renamed:
            column = checkpoint.rename[name]
            ways.append(f"keep the name: data.sparse.{name}.column={column} without checkpoint.rename of {name}")
        hints.append(" and ".join(ways))
    return ConfigError(
        f"the settings differ from those of checkpoint {artifact.path}: {'; '.join(parts)}", hint=" and ".join(hints)
    )


def _override(path: str, value: Any) -> str:
    # Returns the override as it is typed in a shell.
    if _WHOLE_FEATURE.fullmatch(path):
        return f"~{path}" if value is None else f"'+{path}={{...}}'"
    if isinstance(value, list):
        return f"{path}=[{','.join(map(str, value))}]"
    # Hydra writes null and true where Python writes None and True.
    text = str(value)
    if value is None:
        text = "null"
    elif isinstance(value, bool):
        text = text.lower()
    return f"{path}={text}" if re.fullmatch(r"[\w.+-]+", text) else f"'{path}=\"{text}\"'"


def ids_changes(then: Mapping[str, Any], now: Mapping[str, Any], rename: Mapping[str, str]) -> dict[str, IdsChange]:
    """Find the settings that give rows of a common table to other ids: {setting: what it means}.

    ``then`` and ``now`` are configurations as plain data, the former one with its features under their own names.
    ``rename`` is {feature then: feature now}. A setting of ``data.sparse`` is named by the feature's present name.
    """
    before, after = then["data"], now["data"]
    changes: dict[str, IdsChange] = {}
    for name, feature in before["sparse"].items():
        new = rename.get(name, name)
        if new not in after["sparse"]:
            continue
        current = after["sparse"][new]
        table_then, table_now = feature.get("table"), current.get("table")
        # The rows of a different table are matched by its name instead.
        if rename.get(table_then or name, table_then or name) != (table_now or new):
            continue
        ids_then = _identify(name, feature, before["sparse_defaults"])
        ids_now = _identify(new, current, after["sparse_defaults"])
        if table_then:
            # The mapping and rows of a shared table are compared where they are set.
            for ids in (ids_then, ids_now):
                ids.pop("mapping")
                ids.pop("rows", None)
        if new != name and any(ID_MAPPINGS.get(ids["mapping"]).by_hash for ids in (ids_then, ids_now)):
            # The hash's seed is the feature's name, so renaming the feature changes its rows.
            changes[f"{_RENAME}{name}"] = IdsChange(REFUSED, [new])
        if feature.get("column") is None and current.get("column") is None:
            # If the feature was renamed, its column may have been renamed too.
            ids_then["column"] = ids_now.get("column")
        for setting in sorted(ids_then.keys() & ids_now.keys()):
            value_then, value_now = ids_then[setting], ids_now[setting]
            if value_then == value_now:
                continue
            # Either the same ids may exist under other names, which only the user knows, or they surely do not.
            same_length = setting == "cross" and value_then and value_now and len(value_then) == len(value_now)
            kind = ALLOW if setting in _READ or same_length else REFUSED
            # The feature's own setting is responsible, or else the default that it takes.
            own_then, own_now = feature.get(setting), current.get(setting)
            default_then, default_now = before["sparse_defaults"].get(setting), after["sparse_defaults"].get(setting)
            paths = []
            if own_then != own_now:
                paths.append(f"{SPARSE}.{new}.{setting}")
            if (own_then is None or own_now is None) and default_then != default_now:
                paths.append(f"{DEFAULTS}.{setting}")
            for path in paths:
                change = changes.setdefault(path, IdsChange(kind))
                if kind == REFUSED:
                    change.kind = REFUSED
                change.features.append(new)
    return changes


def _identify(name: str, feature: Mapping[str, Any], defaults: Mapping[str, Any]) -> dict[str, Any]:
    # Returns the settings that decide which ids a feature's rows stand for, without those that have no effect.
    cross, bins = list(feature.get("cross") or []), feature.get("bins")
    mapping = mapping_of(feature.get("mapping"), defaults["mapping"], bins)
    ids: dict[str, Any] = {"mapping": mapping.name, "cross": cross, "bins": bins}
    if bins:
        ids["bins_by"] = feature.get("bins_by") or PERCENTILE
    if cross:
        ids["cross_bins"] = dict(feature.get("cross_bins") or {})
    else:
        ids["column"] = feature.get("column") or name
    if not bins:
        separator = feature.get("separator")
        if not separator:
            separator = None if cross else defaults.get("separator")
        ids["separator"] = separator
        if separator:
            ids["weight_separator"] = feature.get("weight_separator") or defaults.get("weight_separator")
    if mapping.by_hash:
        ids["rows"] = feature.get("rows") or defaults["rows"]
    return ids
