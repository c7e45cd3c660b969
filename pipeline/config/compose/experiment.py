"""An experiment file that stands for a list of overrides: the options of groups, and the settings that differ."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

from hydra._internal.hydra import Hydra
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf, open_dict

from pipeline.config.compose import NOT_IN_RUN_NAME, ROOT, checked_overrides, compose_tree, hydra_session
from pipeline.config.compose import overrides as complaints
from pipeline.core.errors import ConfigError


def experiment_file(arguments: Sequence[str], config_dir: str | None = None, about: Sequence[str] = ()) -> str:
    """Return the text of an experiment that composes like ``arguments``, except for where and how a run works.

    It names no other experiment, so a change of another one does not affect it. ``about``: comments. ConfigError if
    the overrides remove a setting, which no experiment can.
    """
    with hydra_session(config_dir) as (hydra, extra):
        wanted, chosen = _composed(hydra, arguments, extra)
        _, usual = _composed(hydra, (), extra)
        options = [f"{group}={name}" for group, name in chosen.items() if usual.get(group) != name]
        # Leave out settings that a group's option sets, since the file names the option instead.
        with_options, _ = _composed(hydra, options, extra)
        settings = _changes(with_options, wanted)
    lines = ["# @package _global_", *(f"# {line}" for line in about)]
    if options:
        lines.append("defaults:")
        lines += [f"  - override /{option.replace('=', ': ')}" for option in options]
    text = "\n".join(lines) + "\n"
    if settings:
        text += f"\n{OmegaConf.to_yaml(OmegaConf.create(settings))}"
    _require_equal(text, wanted, config_dir)
    return text


def _composed(hydra: Hydra, arguments: Sequence[str], extra: Sequence[str]) -> tuple[dict[str, Any], dict[str, str]]:
    # Return the settings that a run's name depends on, and the option of every group.
    mended = complaints.mend_additions(checked_overrides(arguments, extra))
    whole = hydra.compose_config(ROOT, [*extra, *mended], run_mode=RunMode.RUN, from_shell=True)
    choices = OmegaConf.to_container(whole.hydra.runtime.choices)
    assert isinstance(choices, dict)
    chosen = {}
    for group, name in choices.items():
        # Nested groups, with a slash, are Hydra's own.
        if "/" not in str(group) and group not in (*NOT_IN_RUN_NAME, "experiment"):
            chosen[str(group)] = str(name)
    return _settings(whole), chosen


def _settings(tree: DictConfig) -> dict[str, Any]:
    with open_dict(tree):
        for name in (*NOT_IN_RUN_NAME, "hydra"):
            tree.pop(name, None)
    # Do not resolve, so that an experiment keeps references to other settings and to the environment.
    settings = OmegaConf.to_container(tree)
    assert isinstance(settings, dict)
    return cast(dict[str, Any], settings)


def _changes(before: Mapping[str, Any], after: Mapping[str, Any], path: str = "") -> dict[str, Any]:
    # Return what must be set on ``before`` to get ``after``. A Hydra file cannot remove a setting.
    changes: dict[str, Any] = {}
    if gone := sorted(before.keys() - after.keys()):
        raise ConfigError(
            f"{path}{gone[0]} is removed, which an experiment file cannot say", hint=f"{path}{gone[0]}=.."
        )
    for name, value in after.items():
        former = before.get(name)
        if isinstance(value, Mapping) and isinstance(former, Mapping):
            if inner := _changes(former, value, f"{path}{name}."):
                changes[name] = inner
        # Compare as text, because NaN is not equal to itself.
        elif name not in before or repr(value) != repr(former):
            changes[name] = value
    return changes


def _require_equal(text: str, wanted: Mapping[str, Any], config_dir: str | None) -> None:
    # Compose ``text`` to test it, since it is written for others to run.
    with tempfile.TemporaryDirectory() as folder, hydra_session(config_dir) as (hydra, extra):
        Path(folder, "experiment").mkdir()
        Path(folder, "experiment", "written.yaml").write_text(text)
        urls = [f"file://{folder}"]
        for override in complaints.parse(extra):
            urls += map(str, cast(list[Any], override.value()))
        places = ",".join(f"'{url}'" for url in urls)
        tree = compose_tree(hydra, ["experiment=written"], [f"hydra.searchpath=[{places}]"])
        composed = _settings(tree)
    differing = _changes(composed, wanted) | _changes(wanted, composed)
    if differing:
        names = ", ".join(differing)
        raise ConfigError(f"no experiment file says what these overrides do: {names} differ", hint="use the overrides")
