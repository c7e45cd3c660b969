"""Hydra composition: ``conf/`` and overrides over the schema of ``pipeline.config``, once, in the launcher.

Ranks never compose: they read the resolved YAML that ``to_yaml`` wrote and check it with ``from_yaml``.
No Hydra output directory, working directory change or logging set-up happens here.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import itertools
import json
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import yaml
from hydra import initialize_config_dir
from hydra._internal.hydra import Hydra
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.types import Override
from omegaconf import DictConfig, OmegaConf
from omegaconf._utils import get_yaml_loader

from pipeline.config import Config
from pipeline.config.checks import check, check_mapping_settings, check_validation_settings
from pipeline.config.compose import overrides as complaints
from pipeline.config.compose.hardware import with_machine
from pipeline.config.compose.trees import (
    CACHED_TREES,
    GROUP,
    check_settings,
    compose_cached,
    compose_lines,
    schema_for,
    store_models,
)
from pipeline.config.fields import check_name
from pipeline.config.gate import gate_settings
from pipeline.config.renamed import with_first_names, with_new_names
from pipeline.config.secrets import check_secrets, recorded
from pipeline.core.errors import ConfigError
from pipeline.core.registry import Registry
from pipeline.specs.model import MODELS

SCHEMA = "nightjar_schema"
ROOT = "config"
# The user's own configuration directory, beside the store.
OWN = "my"
# Settings of where and how a run works, which change neither its results nor its name.
NOT_IN_RUN_NAME = (
    "run",
    "store",
    "stages",
    "force",
    "launch",
    "schedule",
    "nightly",
    "gate",
    "publish",
    "tune",
    "search",
)


# ``Registry.state`` at the time when the schema was stored with Hydra.
_stored = -1


def conf_directory() -> Path:
    """Return the configuration tree: ``conf/`` beside the package in a checkout, ``pipeline/conf`` in a wheel."""
    # In a checkout, ``pipeline/conf`` is a link to the first candidate.
    here = Path(__file__).resolve().parents[1]
    for candidate in (here.parent / "conf", here / "conf"):
        if (candidate / f"{ROOT}.yaml").is_file():
            return candidate
    raise ConfigError(
        f"conf/{ROOT}.yaml is missing, expected beside the package or inside it", hint="reinstall nightjar"
    )


@contextmanager
def hydra_session(config_dir: str | None = None) -> Iterator[tuple[Hydra, list[str]]]:
    """Yield a Hydra object over ``conf/``, and the overrides that add ``config_dir`` to its search path.

    ``config_dir`` None: the directory ``my`` in the current directory, if there is one.
    """
    extra = []
    if config_dir is None and Path(OWN).is_dir():
        config_dir = OWN
    if config_dir is not None:
        path = Path(config_dir).resolve()
        if not path.is_dir():
            raise ConfigError(f"--config-dir {config_dir} is not a directory", hint="--config-dir <directory>")
        extra.append(f"hydra.searchpath=['file://{path}']")
    # Store the schema once, and again when registries have changed, because some defaults list their contents.
    global _stored
    if _stored != Registry.state:
        # Call this for its errors about packages' checks, to which OmegaConf would add lines of its own.
        gate_settings()
        ConfigStore.instance().store(name=SCHEMA, node=Config, provider="nightjar")
        _stored = Registry.state
    store_models()
    with initialize_config_dir(str(conf_directory()), job_name="nightjar", version_base="1.3"):
        hydra = GlobalHydra.instance().hydra
        assert hydra is not None
        yield hydra, extra


def compose(arguments: Sequence[str], config_dir: str | None = None, *, night: bool = False) -> Config:
    """Return the checked configuration for override ``arguments``, its ``run`` filled in.

    ``night``: the configuration is for nights, which find the checkpoint that they start from.
    Raises ConfigError with the nearest match for an unknown key or option, a wrong type or value.
    """
    with hydra_session(config_dir) as (hydra, extra):
        config = _resolve(compose_tree(hydra, arguments, extra))
    if not night:
        config.checkpoint.check_start()
    return config


def compose_tree(hydra: Hydra, arguments: Sequence[str], extra: Sequence[str] = ()) -> DictConfig:
    """Return the composed tree (its ``hydra`` node left out) for override ``arguments``; ConfigError as ``compose``."""
    # Hydra's messages are about structs and packages, so first look for the errors that can be found without it.
    parsed = checked_overrides(arguments, extra)
    complaints.refuse_sweeps(parsed)
    mended = complaints.mend_additions(parsed)
    lines = complaints.parse(mended)
    known = [*complaints.parse(extra), *lines]
    try:
        places = search_places(known)
        # Places that only Hydra can read, such as packages, may have changed unnoticed, so nothing is cached.
        if places is None:
            return compose_lines(hydra, ROOT, [*extra, *mended])
        return compose_cached(hydra, ROOT, extra, lines, group_options(known), places)
    except complaints.config_errors() as error:
        raise complaints.translate(error, parsed) from None


def checked_overrides(arguments: Sequence[str], extra: Sequence[str] = ()) -> list[Override]:
    """Return the parsed ``arguments``; ConfigError for one that does not parse or names no key, group or option."""
    parsed = complaints.parse(arguments)
    complaints.check_overrides(parsed, group_options([*complaints.parse(extra), *parsed]))
    return parsed


def group_options(overrides: Sequence[Override]) -> dict[str, list[str]]:
    """Return the options of every top-level group: files of ``conf/`` and added directories, and registered models.

    Read from the directories, because Hydra would compose the tree once for every group. Empty where the search path
    has something other than directories, which only Hydra can read.
    """
    places = search_places(overrides)
    if places is None:
        return {}
    options: dict[str, set[str]] = {GROUP: set(MODELS.names())}
    for place in places:
        for path in place.glob("*/*.y*ml"):
            options.setdefault(path.parent.name, set()).add(path.stem)
    return {group: sorted(names) for group, names in sorted(options.items())}


def search_places(overrides: Sequence[Override]) -> list[Path] | None:
    """Return ``conf/`` and the added directories of the search path; None if only Hydra can read something in it."""
    places = [conf_directory()]
    for override in overrides:
        if override.key_or_group == "hydra.searchpath":
            urls = [str(url) for url in cast(list[Any], override.value())]
            if any("://" in url and not url.startswith("file://") for url in urls):
                return None
            places += [Path(url.removeprefix("file://")) for url in urls]
    return places


def _resolve(tree: DictConfig) -> Config:
    try:
        check_settings(tree)
        config = OmegaConf.to_object(tree)
    except complaints.config_errors() as error:
        raise complaints.translate(error) from None
    assert isinstance(config, Config)
    config = with_machine(config)
    # These rules are not in ``check``, because recorded configurations, which may be older, need not obey them.
    check(config)
    check_mapping_settings(config.data)
    check_validation_settings(config)
    check_secrets(config)
    if config.run is None:
        return dataclasses.replace(config, run=f"{config.data.name}-{config_hash(config)[:8]}")
    check_name("run", config.run, "nightly")
    return config


def config_hash(config: Config) -> str:
    """Hash (64 hex digits) of what a run computes; its name, store, stages and launcher do not count."""
    # Use the first names of settings and sorted keys, so that renaming a setting, or moving it within its group, does
    # not change a run's name.
    record = with_first_names(dataclasses.asdict(config))
    for name in NOT_IN_RUN_NAME:
        del record[name]
    # The guard may stop a run, and the same run must continue after the guard's settings change.
    del record["train"]["guard"]
    return hashlib.sha256(json.dumps(record, sort_keys=True).encode()).hexdigest()


def sweep(arguments: Sequence[str]) -> list[list[str]]:
    """Return the jobs of a sweep: the overrides of each combination of the swept values, in Hydra's order.

    The job's number is appended to a given ``run``, so that every job has its own.
    """
    parsed = complaints.parse(arguments)
    named = [override for override in parsed if override.key_or_group == "run" and override.value() is not None]
    choices = []
    for override in parsed:
        # The run's name is not swept over: every job gets it with the job's number.
        if override in named:
            continue
        if not override.is_sweep_override():
            choices.append([override.input_line or ""])
            continue
        if not override.is_discrete_sweep():
            raise ConfigError(
                f"{override.input_line} is a continuous sweep, expected values to try",
                hint=f"{override.key_or_group}=1,2,3, or nightjar tune {override.input_line}",
            )
        key = override.get_key_element()
        choices.append([f"{key}={value}" for value in override.sweep_string_iterator()])
    jobs = []
    for number, values in enumerate(itertools.product(*choices)):
        names = [f"run={override.value()}-{number}" for override in named]
        jobs.append([*values, *names])
    return jobs


def to_yaml(config: Config) -> str:
    """Format ``config`` as the YAML of ``runs/<run>/config.yaml``, without the webhook."""
    try:
        return OmegaConf.to_yaml(OmegaConf.create(recorded(config)))
    except complaints.config_errors() as error:
        # A text with an unclosed interpolation, for example, can be composed, but its YAML could not be read.
        raise complaints.translate(error) from None


def from_yaml(text: str) -> Config:
    """Read the configuration that ``to_yaml`` wrote, of any age, and check it.

    Raises:
        ConfigError: It does not fit the schema.
    """
    try:
        config = OmegaConf.to_object(_recorded_tree(text, Registry.state))
    except complaints.config_errors() as error:
        raise complaints.translate(error) from None
    assert isinstance(config, Config)
    check(config)
    return config


# Cached, because a night reads the same few files many times (its own, and that of the run that it continues), and
# OmegaConf takes a sixth of a second for each. ``registered`` is only part of the key: the schema depends on plugins.
@functools.lru_cache(maxsize=CACHED_TREES)
def _recorded_tree(text: str, registered: object) -> DictConfig:
    # Not by OmegaConf.create, which would also build a tree that is not needed.
    written = yaml.load(text, Loader=get_yaml_loader())
    # An empty text has the default of every setting.
    if written is None:
        written = {}
    if not isinstance(written, dict):
        raise ConfigError(
            "the configuration is not a mapping of settings",
            hint="use runs/<run>/config.yaml, which nightjar run writes",
        )
    # Recorded settings are resolved, so anything that looks like a reference is plain text.
    plain = cast(dict[str, Any], _without_interpolations(written))
    # The schema is a copy already.
    tree = OmegaConf.unsafe_merge(schema_for(plain), with_new_names(plain))
    assert isinstance(tree, DictConfig)
    return tree


def _without_interpolations(value: Any) -> Any:
    # Escape references in ``value``: a file may come from elsewhere, and must not read our environment.
    if isinstance(value, dict):
        return {key: _without_interpolations(each) for key, each in value.items()}
    if isinstance(value, list):
        return [_without_interpolations(each) for each in value]
    if not isinstance(value, str):
        return value
    # In OmegaConf's grammar a backslash escapes ${, and two of them are one backslash before it.
    return re.sub(r"(\\*)\$\{", r"\1\1\\${", value)
