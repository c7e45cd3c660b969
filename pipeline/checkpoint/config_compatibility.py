"""Settings that differ between a checkpoint and the training that starts from it: safe, to be allowed, or refused.

Safe: how fast, where and on which machines training runs, and what data it sees. To be allowed by name: what makes
the training another one (learning rates, batch, optimizer, what an input value means), and where ids are read, which
may have another name by now. Refused: what makes the stored numbers mean something else. What a table's rows stand
for is the matter of ``id_compatibility``.
"""

from __future__ import annotations

import re
from dataclasses import asdict, fields, is_dataclass
from fnmatch import fnmatchcase
from typing import Any

from pipeline.checkpoint.id_compatibility import ALLOW, DEFAULTS, READ_EVERYWHERE, REFUSED, SAFE, SPARSE, ids_changes
from pipeline.config.checkpoint import CheckpointConfig, is_allowed
from pipeline.config.data import DataConfig
from pipeline.config.fields import default_of, setting_of
from pipeline.config.model import TableConfig
from pipeline.config.renamed import config_changes, with_new_names
from pipeline.errors import ConfigError
from pipeline.specs.id_mapping import ID_MAPPINGS
from pipeline.specs.model import MODELS
from pipeline.store.manifest import Artifact

# The first pattern that matches a setting decides; what none matches is safe.
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
_BEFORE_SCHEDULES = {"schedule": "constant", "decay_ratio": 1.0, "min_lr_factor": 0.0}
DATASET, RENAMED = "dataset", "checkpoint.rename."


def check_changes(
    artifact: Artifact, now: dict[str, Any], checkpoint: CheckpointConfig, data: DataConfig, dataset: str
) -> list[str]:
    """Raise ConfigError where ``now`` differs from what ``artifact`` was trained with in more than is allowed.

    ``now``: the whole configuration as a record; ``dataset``: key of the data set now. Returns lines about what was
    allowed. The error names each setting with both values and the override that lets it pass.
    """
    then, now = (_with_tables(_without_quiet(each)) for each in (_with_schedule(artifact.config), now))
    changes = _whole(config_changes(*_common_tables(then, now, checkpoint.rename)), then, now)
    dataset_then = artifact.inputs.get(DATASET)
    if dataset_then != dataset and _has_vocab(data) and data.mapping_from is None:
        # A vocabulary numbers its rows by the frequencies of its own data set, unless it is carried on.
        changes[DATASET] = [dataset_then, dataset]
    ids = ids_changes(then, now, checkpoint.rename)
    changes |= {path: [None, None] for path in ids if path not in changes}
    refused, unknown, lines = {}, {}, []
    for path, (old, new) in sorted(changes.items()):
        if path in ids:
            kind, text = ids[path].kind, _ids_text(path, old, new, ids[path].features)
        else:
            kind, text = classify(path, checkpoint.init_tables_only), f"{path} {_was(path, old, new)}"
        if kind == REFUSED:
            refused[path] = (old, text)
        elif kind == ALLOW and not is_allowed(path, checkpoint.allow):
            unknown[path] = (old, text)
        elif kind == ALLOW:
            lines.append(f"allowed: {text}")
    if refused or unknown:
        raise _error(artifact, refused, unknown, checkpoint)
    return lines


def _whole(changes: dict[str, list[Any]], then: dict[str, Any], now: dict[str, Any]) -> dict[str, list[Any]]:
    """``changes`` with one entry for each task, numeric feature and sequence that only one side has."""
    for group in ("tasks", "dense", "sequences"):
        sides = [config["data"].get(group, {}) for config in (then, now)]
        for name in sides[0].keys() ^ sides[1].keys():
            path, kept = f"data.{group}.{name}", f"data.{group}.{name}.kind"
            changes = {each: pair for each, pair in changes.items() if each == kept or not each.startswith(f"{path}.")}
            if group != "tasks":
                changes[path] = ["there", None] if name in sides[0] else [None, "there"]
    return changes


def _was(path: str, old: Any, new: Any) -> str:
    if _is_whole(path):
        return "is new" if old is None else "is gone"
    return f"was {_text(old)}, is {_text(new)}"


def _is_whole(path: str) -> bool:
    """Whether ``path`` is a numeric feature or a sequence as a whole."""
    return path.startswith(("data.dense.", "data.sequences.")) and path.count(".") == 2


def _ids_text(path: str, old: Any, new: Any, features: list[str]) -> str:
    """What changed, and of which tables the rows would serve other ids."""
    if path.startswith(RENAMED):
        former = path.removeprefix(RENAMED)
        return f"feature {former!r} is now {features[0]!r}, but the hash of its ids is seeded with the name"
    tables = f" (tables {', '.join(features[:5])}{', ...' * (len(features) > 5)})" if path.startswith(DEFAULTS) else ""
    return f"{path} was {_text(old)}, is {_text(new)}{tables}"


def _common_tables(
    then: dict[str, Any], now: dict[str, Any], rename: dict[str, str]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Both configurations with only the sparse features that both have, the former ones under their new names.

    A table that only one side has is left out or keeps its initial values: nothing there can contradict.
    """
    features = {rename.get(name, name): value for name, value in then["data"]["sparse"].items()}
    both = features.keys() & now["data"]["sparse"].keys()
    sides = []
    for config, sparse in ((then, features), (now, now["data"]["sparse"])):
        chosen = {name: sparse[name] for name in sparse if name in both}
        sides.append({**config, "data": {**config["data"], "sparse": chosen}})
    return sides[0], sides[1]


def _with_tables(config: dict[str, Any]) -> dict[str, Any]:
    """``config`` with only those settings of ``model.tables`` that are none of the defaults.

    Widths are left out: ``warm.match_tables`` compares those that tables have.
    """
    plain = {name: value for name, value in asdict(TableConfig()).items() if name != "dim"}
    tables = {
        name: {setting: each[setting] for setting, value in plain.items() if each.get(setting, value) != value}
        for name, each in config["model"].get("tables", {}).items()
    }
    model = {name: value for name, value in config["model"].items() if name != "tables"}
    changed = {name: each for name, each in tables.items() if each}
    return {**config, "model": {**model, "tables": changed} if changed else model}


def _without_quiet(config: dict[str, Any]) -> dict[str, Any]:
    """``config`` without the model's quiet settings at their defaults, which an older checkpoint does not know."""
    model = config["model"]
    if model.get("name") not in MODELS.names():
        return config
    quiet = {each.name: default_of(each) for each in fields(MODELS.get(model["name"]).config) if setting_of(each).quiet}
    plain = {name: _plain(value) for name, value in quiet.items()}
    kept = {name: value for name, value in model.items() if name not in plain or value != plain[name]}
    return {**config, "model": kept}


def _plain(value: Any) -> Any:
    return asdict(value) if is_dataclass(value) and not isinstance(value, type) else value


def _with_schedule(then: dict[str, Any]) -> dict[str, Any]:
    """``then`` under today's names, its learning rates constant where it is older than the settings that say so."""
    then = with_new_names(then)
    return {**then, "train": {**_BEFORE_SCHEDULES, **then["train"]}}


def classify(path: str, tables_only: bool) -> str:
    """REFUSED, ALLOW or SAFE: what a change of setting ``path`` means for stored numbers, the ids of rows apart."""
    if _matches(path, _REFUSED_TABLES):
        return REFUSED
    if path.startswith((f"{SPARSE}.", f"{DEFAULTS}.")):
        return SAFE
    if path == DATASET or path in READ_EVERYWHERE:
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


def _has_vocab(data: DataConfig) -> bool:
    default = data.sparse_defaults.mapping
    return bool(data.event_tables) or any(
        ID_MAPPINGS.get(feature.mapping or default).vocabulary for feature in data.sparse.values()
    )


def _text(value: Any) -> str:
    return "not set" if value is None else repr(value) if isinstance(value, str) else str(value)


def _error(
    artifact: Artifact,
    refused: dict[str, tuple[Any, str]],
    unknown: dict[str, tuple[Any, str]],
    checkpoint: CheckpointConfig,
) -> ConfigError:
    """``refused``, ``unknown``: {setting: its former value and what changed, in words}."""
    parts, hints = [], []
    if refused:
        parts.append(f"cannot be changed: {'; '.join(text for _, text in refused.values())}")
    if unknown:
        parts.append(f"must be allowed: {'; '.join(text for _, text in unknown.values())}")
    anew = bool(_of_dense(refused)) and not checkpoint.init_tables_only
    if left := [path for path in unknown if not anew or _stays(path)]:
        hints.append(f"checkpoint.allow=[{','.join([*checkpoint.allow, *left])}]")
        if where := [path for path in left if path.startswith("data.")]:
            back = " ".join(_typed(path, unknown[path][0]) for path in where)
            hints[-1] += f" if the ids and values are unchanged, else {back}"
    if refused:
        hints.append(_way_back(refused, checkpoint))
    return ConfigError(
        f"the settings differ from those of checkpoint {artifact.path}: {'; '.join(parts)}", hint=" and ".join(hints)
    )


def _of_dense(refused: dict[str, tuple[Any, str]]) -> list[str]:
    """The settings of ``refused`` that do not matter to a new dense part."""
    dense = ("model.", "data.tasks.", "data.sequences.")
    return [path for path in refused if path.startswith(dense) and not _matches(path, _REFUSED_TABLES)]


def _stays(path: str) -> bool:
    """Whether ``path`` must be allowed for a new dense part, too."""
    return path.startswith(("data.sparse", RENAMED)) or classify(path, True) == ALLOW


def _way_back(refused: dict[str, tuple[Any, str]], checkpoint: CheckpointConfig) -> str:
    """The overrides that let a training start in spite of what is refused."""
    dense = _of_dense(refused)
    others = [path for path in refused if path not in dense]
    renamed = {path: path.removeprefix(RENAMED) for path in others if path.startswith(RENAMED)}
    ways = ["checkpoint.init_tables_only=true"] if dense and not checkpoint.init_tables_only else []
    settings = [path for path in others if path not in renamed]
    if settings:
        ways.append(" ".join(_typed(path, refused[path][0]) for path in settings))
    if any(path.startswith(f"{SPARSE}.") for path in settings):
        ways[-1] += ", or give the feature another name and a new table"
    for former in renamed.values():
        column = checkpoint.rename[former]
        ways.append(f"keep the name: data.sparse.{former}.column={column} without checkpoint.rename of {former}")
    return " and ".join(ways)


def _typed(path: str, value: Any) -> str:
    """The override that gives setting ``path`` this value, as it is typed in a shell."""
    if _is_whole(path):
        return f"~{path}" if value is None else f"'+{path}={{...}}'"
    if isinstance(value, list):
        return f"{path}=[{','.join(map(str, value))}]"
    text = "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
    return f"{path}={text}" if re.fullmatch(r"[\w.+-]+", text) else f"'{path}=\"{text}\"'"
