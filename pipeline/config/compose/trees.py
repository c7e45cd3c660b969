"""The schema of group ``model``, and composed trees, kept by all that they depend on."""

from __future__ import annotations

import functools
from collections import OrderedDict, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra._internal.hydra import Hydra
from hydra.core.config_store import ConfigStore
from hydra.core.override_parser.types import Override
from hydra.types import RunMode
from omegaconf import DictConfig, Node, OmegaConf, open_dict

from pipeline.config import Config
from pipeline.config.gate import gate_settings
from pipeline.config.model import ModelConfig
from pipeline.core.errors import ConfigError
from pipeline.core.registry import Registry
from pipeline.specs.model import MODELS

# The number of trees that a process caches; each takes about a megabyte.
CACHED_TREES = 16
_cache: OrderedDict[tuple[object, ...], DictConfig] = OrderedDict()


def compose_lines(hydra: Hydra, root: str, lines: Sequence[str]) -> DictConfig:
    """Compose the config ``root`` for override ``lines`` without its ``hydra`` node; Hydra's errors pass through."""
    # Use RunMode.RUN, because ``sweep`` has split sweeps into single runs already.
    tree = hydra.compose_config(root, list(lines), run_mode=RunMode.RUN, from_shell=True)
    with open_dict(tree):
        del tree["hydra"]
    return tree


def compose_cached(
    hydra: Hydra,
    root: str,
    extra: Sequence[str],
    parsed: Sequence[Override],
    groups: Mapping[str, Sequence[str]],
    places: Sequence[Path],
) -> DictConfig:
    """Compose ``extra`` and ``parsed`` like ``compose_lines``, but fast if only values differ from an earlier call.

    ``groups``: those of the YAML files in the directories ``places``, which must be all that there is to compose from.
    """
    values, lines = [], list(extra)
    for override in parsed:
        key_or_group = override.key_or_group
        # An override that names no option, no package and no setting of Hydra's changes only the composed tree.
        of_tree = override.package is None and "/" not in key_or_group and key_or_group not in groups
        if of_tree and key_or_group.split(".")[0] != "hydra":
            values.append(override)
        else:
            lines.append(override.input_line or "")
    key = (root, *lines, Registry.state, *_files(places, groups))
    if key not in _cache:
        _cache[key] = compose_lines(hydra, root, lines)
    _cache.move_to_end(key)
    while len(_cache) > CACHED_TREES:
        _cache.popitem(last=False)
    # Copy the tree, because Hydra writes the values into the tree that it is given.
    tree = copy_tree(_cache[key])
    ConfigLoaderImpl._apply_overrides_to_config(values, tree)
    return tree


def copy_tree(node: Any, parent: Any = None) -> Any:
    """Copy a tree of OmegaConf as ``copy.deepcopy`` does, which takes six times as long: half of a composition."""
    copied = object.__new__(type(node))
    attributes = dict(vars(node))
    content = attributes.get("_content")
    if isinstance(content, dict):
        attributes["_content"] = {key: copy_tree(child, copied) for key, child in content.items()}
    elif isinstance(content, list):
        attributes["_content"] = [copy_tree(child, copied) for child in content]
    elif isinstance(content, Node):
        attributes["_content"] = copy_tree(content, copied)
    metadata = attributes["_metadata"]
    described = object.__new__(type(metadata))
    vars(described).update(vars(metadata))
    described.flags = dict(metadata.flags)
    found = {name: dict(results) for name, results in metadata.resolver_cache.items()}
    described.resolver_cache = defaultdict(dict, found)
    attributes |= {"_metadata": described, "_parent": parent, "_flags_cache": None}
    # Not by ``setattr``, which sets a setting.
    vars(copied).update(attributes)
    return copied


def _files(places: Sequence[Path], groups: Iterable[str]) -> list[tuple[str, int, int]]:
    """Name, time and size of every YAML file that a tree may be composed from, in folders that are links, too.

    Nothing else in ``places`` is read: a project's directory may have environments and stores in it.
    """
    paths: list[Path] = []
    for place in places:
        paths += place.glob("*.y*ml")
        for group in groups:
            paths += (place / group).rglob("*.y*ml")
    files = []
    # Sort, because the order of a directory's entries may change although no file does.
    for path in sorted(paths):
        status = path.stat()
        files.append((str(path), status.st_mtime_ns, status.st_size))
    return files


GROUP = "model"


_stored: dict[str, type] = {}


def store_models() -> None:
    """Register the settings of every model with Hydra, as an option of group ``model``.

    Once a process: Hydra makes a tree of them, which takes a while.
    """
    # Compare the class as well as the name: a test may add another model under a name that was used before.
    for spec in MODELS:
        if _stored.get(spec.name) is not spec.config:
            ConfigStore.instance().store(group=GROUP, name=spec.name, node=spec.config, provider="nightjar")
            _stored[spec.name] = spec.config


def settings_class(name: str) -> type[ModelConfig]:
    """Return the dataclass of the settings of the model called ``name``; ConfigError if there is no such model."""
    settings: type[ModelConfig] = MODELS.get(name).config
    return settings


def schema_for(recorded: dict[Any, Any]) -> DictConfig:
    """Return the schema of a configuration, with the settings of the model that ``recorded`` names."""
    # Call this for its errors about packages' checks, to which OmegaConf would add lines of its own.
    gate_settings()
    model = recorded.get(GROUP)
    name = str(model["name"]) if isinstance(model, dict) and "name" in model else None
    # A copy, because whoever asks for a schema writes into it.
    schema: DictConfig = copy_tree(_schema_with(name, Registry.state))
    return schema


@functools.lru_cache(maxsize=CACHED_TREES)
def _schema_with(model: str | None, registered: object) -> DictConfig:
    # ``registered`` is only part of the key: the schema depends on plugins.
    schema: DictConfig = OmegaConf.structured(Config)
    # The type of field ``model`` has only what all models share, and would refuse a single model's settings.
    if model is not None:
        schema.model = settings_class(model)
    return schema


def check_settings(tree: DictConfig) -> None:
    """Raise ConfigError if the settings in the composed ``tree`` are not those of the model ``model.name``.

    A user's file that names a model without its settings gets their defaults.
    """
    name = OmegaConf.select(tree, f"{GROUP}.name", throw_on_missing=True)
    wanted, kind = settings_class(name), OmegaConf.get_type(tree, GROUP) or dict
    if kind is ModelConfig:
        tree.model = OmegaConf.merge(OmegaConf.structured(wanted), OmegaConf.to_container(tree.model))
    elif kind is not wanted:
        other = kind.__name__
        for spec in MODELS:
            if spec.config is kind:
                other = spec.name
                break
        raise ConfigError(
            f"model.name is {name!r}, but the settings are those of model {other!r}", hint=f"{GROUP}={name}"
        )
