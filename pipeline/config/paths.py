"""Settings by dotted path: types and defaults, and what a key that is no setting is likely to mean."""

from __future__ import annotations

import dataclasses
import difflib
import functools
import re
import types
import typing
from collections.abc import Callable, Iterable, Iterator
from dataclasses import Field, dataclass
from typing import Any

from pipeline.config import Config
from pipeline.config.model import ModelConfig
from pipeline.specs.model import MODELS

# Settings and their names in other tools, which newcomers type first. If several settings match, the one in the typed
# group counts, else the first.
_NAMES = {
    "train.lr": "learning_rate lr dense_lr",
    "train.sparse_lr": "embedding_lr embedding_learning_rate sparse_learning_rate",
    "train.global_batch evaluate.global_batch": "batch_size global_batch_size",
    "evaluate.global_batch": "eval_batch_size",
    "train.epochs": "epochs num_epochs max_epochs n_epochs",
    "train.max_steps": "num_steps total_steps",
    "train.dense_optimizer": "optimizer optim",
    "train.sparse_optimizer": "embedding_optimizer",
    "train.schedule": "scheduler lr_scheduler lr_schedule",
    "train.warmup_steps": "num_warmup_steps",
    "train.weight_decay": "l2",
    "train.clip.dense_norm": "grad_clip gradient_clipping max_grad_norm",
    "train.precision": "dtype amp mixed_precision",
    "train.threads_per_rank": "num_threads",
    "train.prefetch_batches": "num_workers",
    "train.log_every_steps": "log_interval",
    "model.embedding_dim": "embedding_size embed_dim emb_dim",
    "model.top_mlp model.bottom_mlp": "hidden_units hidden_sizes mlp",
    "data.sparse_defaults.rows": "num_embeddings vocab_size hash_size",
    "data.split.test_share": "test_size",
    "data.path": "input file files data_dir",
    "data.label.column": "target target_column label_column",
    "hardware.ranks_per_host": "world_size num_gpus gpus nproc_per_node",
    "hardware.hosts": "nodes num_nodes nnodes",
    "checkpoint.every_steps": "save_steps save_every",
    "checkpoint.init_from": "pretrained warm_start",
    "seed": "random_seed",
    "store": "output_dir",
    "run": "run_name",
}
ALIASES: dict[str, tuple[str, ...]] = {
    name: tuple(settings.split()) for settings, names in _NAMES.items() for name in names.split()
}


def setting_for_alias(key: str) -> str | None:
    """Return the setting that ``key`` means in another tool; None if it is not a name there."""
    parent, _, name = key.rpartition(".")
    paths = ALIASES.get(name.lower().replace("-", "_"), ())
    for path in paths:
        if path.rpartition(".")[0] == parent:
            return path
    return paths[0] if paths else None


# Types of annotations. Cached, because a long help asks for the same few classes at every setting.
_hints: Callable[[type], dict[str, Any]] = functools.cache(typing.get_type_hints)
_WORDS = {Any: "a value", bool: "true or false", int: "a whole number", float: "a number", str: "a string"}


@dataclass(frozen=True)
class SettingPlace:
    """A setting or a group: its dotted ``path``, its type, its default and its dataclass field.

    ``*`` in the path stands for the names of a dictionary's entries.
    """

    path: str
    kind: Any
    default: Any
    field: Field[Any]

    @property
    def group(self) -> Any:
        """The dataclass of a group, or of the entries of a dictionary of groups; None for a setting."""
        inner = entry_type(self.kind) if self.has_entries else strip_none(self.kind)
        return inner if dataclasses.is_dataclass(inner) else None

    @property
    def has_entries(self) -> bool:
        """Whether it is a dictionary."""
        return typing.get_origin(self.kind) is dict

    def inside(self) -> Any:
        """Return the group, or an entry of it, with defaults; None for a setting."""
        # A group's default may differ from its class's defaults, so it comes first.
        if dataclasses.is_dataclass(self.default):
            return self.default
        return self.group and self.group()

    @property
    def prefix(self) -> str:
        """The prefix of the paths of its settings."""
        return f"{self.path}.*." if self.has_entries else f"{self.path}."


def places(node: Any = None, prefix: str = "") -> Iterator[SettingPlace]:
    """Yield all groups and settings below dataclass ``node`` (None: a default Config), groups before their settings."""
    for place in _own(Config() if node is None else node, prefix):
        yield place
        if place.group:
            yield from places(place.inside(), place.prefix)


def settings() -> Iterator[SettingPlace]:
    """Return all settings of the configuration, without groups."""
    return (place for place in places() if not place.group)


def find_place(path: str) -> SettingPlace | None:
    """Return the group or setting at ``path`` (``data.sparse.*.rows`` for ``data.sparse.C1.rows``), or None."""
    return _walked(path)[0]


def field_type(path: str) -> Any:
    """Return the type of the setting, group or entry at ``path``; None if there is none."""
    return _walked(path)[1]


def _walked(path: str) -> tuple[SettingPlace, Any] | tuple[None, None]:
    # Return the last setting or group on ``path``, and the type at its end.
    node: Any = Config()
    place: SettingPlace | None = None
    prefix, kind = "", Config
    for part in path.split("."):
        kind = strip_none(kind)
        if dataclasses.is_dataclass(kind):
            by_name = {each.field.name: each for each in _own(node, prefix)}
            if part not in by_name:
                return None, None
            place = by_name[part]
            node, prefix, kind = place.inside(), place.prefix, place.kind
        # An entry may have any name: the place remains the dictionary's, and the type becomes that of its entries.
        elif typing.get_origin(kind) is dict:
            kind = entry_type(kind)
        elif typing.get_origin(kind) is list and part.isdigit():
            kind = typing.get_args(kind)[0]
        else:
            return None, None
    # ``split`` gives at least one part, and the first is looked up in a dataclass.
    assert place is not None
    return place, kind


def _own(node: Any, prefix: str) -> Iterator[SettingPlace]:
    # Yield everything directly below dataclass ``node``; for a model, the settings of all registered models.
    owners = [node]
    if type(node) is ModelConfig:
        owners += [spec.config() for spec in MODELS]
    # If several models have a setting, the first declaration counts.
    seen: set[str] = set()
    for owner in owners:
        hints = _hints(type(owner))
        for each in dataclasses.fields(owner):
            if each.name not in seen:
                yield SettingPlace(f"{prefix}{each.name}", hints[each.name], getattr(owner, each.name), each)
        seen |= hints.keys()


def children(path: str) -> list[str]:
    """Return the names of the settings and groups directly below ``path`` ("" for the top level)."""
    kind = strip_none(field_type(path)) if path else Config
    if not dataclasses.is_dataclass(kind):
        return []
    return [place.path for place in _own(kind(), "")]


def nearest(key: str, groups: Iterable[str] = ()) -> str | None:
    """Return the setting that ``key`` means or resembles most: first below the same parent, then anywhere."""
    if setting := setting_for_alias(key):
        return setting
    parent, _, name = key.rpartition(".")
    # For train.seed, the setting ``seed`` of the top level is meant.
    if parent and name in children("") and not dataclasses.is_dataclass(strip_none(field_type(name))):
        return name
    # Search below the same parent first: a typing error is likelier than a wrong group.
    siblings = children(parent) if parent else [*children(""), *groups]
    near = difflib.get_close_matches(name, siblings, n=1, cutoff=0.5)
    if near:
        return f"{parent}.{near[0]}" if parent else near[0]
    # Propose a name that exists in another group, however different the path is. Otherwise propose only a very similar
    # path, because a wrong guess is worse than none.
    everything = [each.path for each in places() if "*" not in each.path and (not each.group or each.has_entries)]
    same_name = [path for path in everything if path.rpartition(".")[2] == name]
    cutoff = 0.0 if same_name else 0.8
    near = difflib.get_close_matches(key, same_name or everything, n=1, cutoff=cutoff)
    return near[0] if near else None


def describe(kind: Any) -> str:
    """Describe ``kind`` in words: 'a number', 'a list [a,b] of strings'."""
    inner = strip_none(kind)
    none = " or null" if inner is not kind else ""
    if typing.get_origin(inner) is list:
        shape, part = "a list [a,b]", typing.get_args(inner)[0]
        if typing.get_origin(part) is list:
            shape, part = "a list of lists [[a,b],[c]]", typing.get_args(part)[0]
        entries = f"{describe(part).removeprefix('a ')}s"
        if dataclasses.is_dataclass(part):
            entries = "mappings"
        return f"{shape} of {entries}{none}"
    if typing.get_origin(inner) is dict or dataclasses.is_dataclass(inner):
        return f"a group of keys{none}"
    return _WORDS.get(inner, str(inner)) + none


def entry_type(kind: Any) -> Any:
    """Return ``X`` of ``dict[str, X]``."""
    return typing.get_args(kind)[1]


def strip_none(kind: Any) -> Any:
    """Return ``X`` of ``X | None``."""
    if typing.get_origin(kind) in (typing.Union, types.UnionType):
        # Leave a union of several types as it is, since none of them stands for the setting.
        rest = [part for part in typing.get_args(kind) if part is not type(None)]
        return rest[0] if len(rest) == 1 else kind
    return kind


def override_key(name: str) -> str | None:
    """Return ``name`` as a mapping's key in an override: ``user\\:id``; None for a name that only YAML can write.

    Hydra's grammar takes a backslash before some characters of a key, and no quotes around it.
    """
    word = name.lower().lstrip("+-")
    # Hydra would parse a key that reads as a number, a boolean or null, and it would no longer equal the name.
    number = re.fullmatch(r"[\d_.]+(e[+-]?[\d_]+)?|inf|nan", word)
    writable = re.fullmatch(r"[\w/\-+.$%*@?|\\()\[\]{}:=, ]+", name, re.ASCII)
    if number or not writable or name != name.strip() or word in ("null", "true", "false"):
        return None
    return re.sub(r"([\\()\[\]{}:=, ])", r"\\\1", name)
