"""Settings that differ between a checkpoint and the training that starts from it: safe, to be allowed, or refused.

Safe: how fast, where and on which machines training runs, and what data it sees. To be allowed by name: what makes
the training another one (learning rates, batch, optimizer, what an input value means). Refused: what makes the stored
numbers mean something else.
"""

from __future__ import annotations

from dataclasses import asdict
from fnmatch import fnmatchcase
from typing import Any

from pipeline.artifacts import Artifact
from pipeline.checkpoint.commands import config_changes
from pipeline.config import CheckpointConfig, Config
from pipeline.errors import ConfigError

# The first pattern that matches a setting decides; what none matches is safe.
_REFUSED_TABLES = ("model.embedding_dim", "data.sparse_defaults.mapping", "data.sparse.*.mapping")
_REFUSED_DENSE = ("model.*",)
_ALLOWED = (
    "seed", "train.global_batch", "train.lr", "train.sparse_lr", "train.dense_optimizer", "train.sparse_optimizer",
    "train.weight_decay", "train.warmup_steps", "train.schedule", "train.decay_share", "train.min_lr_share",
    "train.clip.*", "train.shuffle", "train.shuffle_window_groups", "train.precision", "data.label.*",
    "data.dense_transform", "data.dense.*", "data.missing", "dataset",
)  # fmt: skip
_BEFORE_SCHEDULES = {"schedule": "constant", "decay_share": 1.0, "min_lr_share": 0.0}
_HASHED = ("hash", "double_hash")
_HASHED_ROWS = ("data.sparse_defaults.rows", "data.sparse.*.rows")
DATASET = "dataset"


def check_changes(artifact: Artifact, config: Config, dataset: str) -> list[str]:
    """Raise ConfigError where ``config`` differs from what ``artifact`` was trained with in more than is allowed.

    ``dataset``: key of the data set now. Returns lines about what was allowed. The error names each setting with both
    values and the override that lets it pass.
    """
    checkpoint = config.checkpoint
    changes = config_changes(*_common_tables(_with_schedule(artifact.config), asdict(config), checkpoint.rename))
    then = artifact.inputs.get(DATASET)
    if then != dataset and _has_vocab(config) and config.data.mapping_from is None:
        # A vocabulary numbers its rows by the frequencies of its own data set, unless it is carried on.
        changes[DATASET] = [then, dataset]
    refused, unknown, lines = [], [], []
    for path, (old, new) in sorted(changes.items()):
        kind = classify(path, config, checkpoint.init_tables_only)
        text = f"{path} was {_text(old)}, is {_text(new)}"
        if kind == "refused":
            refused.append(text)
        elif kind == "allow" and not _is_allowed(path, checkpoint.allow):
            unknown.append((path, text))
        elif kind == "allow":
            lines.append(f"allowed: {text}")
    if refused or unknown:
        raise _error(artifact, refused, unknown, checkpoint)
    return lines


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


def _with_schedule(then: dict[str, Any]) -> dict[str, Any]:
    """``then``, its learning rates constant where it is older than the settings that say so."""
    return {**then, "train": {**_BEFORE_SCHEDULES, **then["train"]}}


def classify(path: str, config: Config, tables_only: bool) -> str:
    """``refused``, ``allow`` or ``safe``: what a change of setting ``path`` means for stored tables and dense part."""
    if _matches(path, _REFUSED_TABLES):
        return "refused"
    if _matches(path, _HASHED_ROWS):
        return "refused" if _hashed(path, config) else "safe"
    if tables_only:
        return "allow" if path == DATASET else "safe"
    if _matches(path, _REFUSED_DENSE):
        return "refused"
    return "allow" if _matches(path, _ALLOWED) else "safe"


def _matches(path: str, patterns: tuple[str, ...]) -> bool:
    return any(fnmatchcase(path, pattern) for pattern in patterns)


def _hashed(path: str, config: Config) -> bool:
    """Whether setting ``path`` is the size of a hashed table: an id's row is its hash modulo that size."""
    default = config.data.sparse_defaults
    parts = path.split(".")
    if parts[1] == "sparse_defaults":
        return any((f.mapping or default.mapping) in _HASHED and f.rows is None for f in config.data.sparse.values())
    feature = config.data.sparse.get(".".join(parts[2:-1]))
    return feature is not None and (feature.mapping or default.mapping) in _HASHED


def _has_vocab(config: Config) -> bool:
    default = config.data.sparse_defaults.mapping
    return any((feature.mapping or default) in ("vocab", "learned") for feature in config.data.sparse.values())


def _is_allowed(path: str, allow: list[str]) -> bool:
    """Whether ``allow`` names the setting or a group it lies in."""
    return any(path == name or path.startswith(f"{name}.") for name in allow)


def _text(value: Any) -> str:
    return "not set" if value is None else repr(value) if isinstance(value, str) else str(value)


def _error(
    artifact: Artifact, refused: list[str], unknown: list[tuple[str, str]], checkpoint: CheckpointConfig
) -> ConfigError:
    parts = []
    if refused:
        parts.append(f"cannot be changed: {'; '.join(refused)}")
    if unknown:
        parts.append(f"must be allowed: {'; '.join(text for _, text in unknown)}")
    hints = []
    if unknown:
        allow = [*checkpoint.allow, *(path for path, _ in unknown)]
        hints.append(f"checkpoint.allow=[{','.join(allow)}]")
    if refused:
        dense = not checkpoint.init_tables_only and any(
            text.startswith("model.") and "embedding_dim" not in text for text in refused
        )
        hints.append("checkpoint.init_tables_only=true" if dense else "the settings it was trained with")
    return ConfigError(
        f"the settings differ from those of checkpoint {artifact.path}: {'; '.join(parts)}", hint=" and ".join(hints)
    )
