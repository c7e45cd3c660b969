"""Overrides against the schema: one clear message for an unknown key or option, or a wrong type.

Hydra's own messages are about structs and packages. ``check_overrides`` comes first and names the nearest match;
``translate`` turns the remaining errors of Hydra and OmegaConf into a ConfigError.
"""

from __future__ import annotations

import difflib
import re
import typing
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields, is_dataclass
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException
from omegaconf import DictConfig
from omegaconf.errors import GrammarParseError, MissingMandatoryValue, OmegaConfBaseException

from pipeline.config.paths import children, describe, entry_type, field_type, find_place, nearest, strip_none
from pipeline.config.plan import TIERS, TablePin
from pipeline.config.renamed import renamed_error
from pipeline.config.secrets import WEBHOOK, without_secret
from pipeline.core.errors import ConfigError
from pipeline.specs.model import MODELS


def parse(overrides: Sequence[str]) -> list[Override]:
    """Return the parsed ``overrides``; ConfigError for a text that is not ``key=value``, ``+key=value`` or ``~key``."""
    parser = OverridesParser.create()
    parsed = []
    for text in overrides:
        if "=" not in text and not text.startswith("~"):
            key = text if field_type(text) is not None else nearest(text)
            kind = field_type(key) if key else None
            hint = "train.lr=0.01"
            if kind is not None:
                hint = f"{key}=<{describe(kind)}>"
            raise ConfigError(f"{text!r} is not an override, expected key=value", hint=hint)
        try:
            parsed.append(parser.parse_override(text))
        except HydraException as error:
            shown = without_secret(text)
            message = f"the override {shown!r} cannot be read"
            # Hydra's reason quotes the override, too.
            if shown == text:
                message += f": {str(error).splitlines()[0]}"
            # Quotes around the value are for Hydra's grammar; quotes around the whole override are for the shell.
            key, _, value = shown.partition("=")
            if key != key.rstrip():
                hint = f"leave out the blanks around =: {key.strip()}={value.strip()}"
            elif not value or re.search("['\"]", value):
                hint = "quote values with spaces or brackets: 'data.separator=\"|\"'"
            else:
                hint = f"quote the value: '{key}=\"{value}\"'"
            raise ConfigError(message, hint=hint) from None
    return parsed


def mend_additions(overrides: Iterable[Override]) -> list[str]:
    """Return the overrides' texts, ``+data.dense.I9={..}`` written as ``+data.dense={I9: {..}}``.

    OmegaConf does not add an entry to a typed dictionary, but merges a dictionary into it. For the same reason
    ``rename={a: b}``, which sets entries of a dictionary, becomes ``++rename={a: b}``.
    """
    texts = []
    for override in overrides:
        text = override.input_line or ""
        plain = not (override.is_add() or override.is_force_add() or override.is_sweep_override())
        if plain and _is_mapping(override) and typing.get_origin(field_type(override.key_or_group)) is dict:
            text = f"++{text}"
        parts = override.key_or_group.split(".")
        # Only the outermost dictionary on the path matters: everything below its entry is merged along with the entry.
        depths = range(1, len(parts)) if override.is_add() or override.is_force_add() else range(0)
        for depth in depths:
            group, inner = ".".join(parts[:depth]), parts[depth:]
            kind = field_type(group)
            if typing.get_origin(kind) is dict and is_dataclass(entry_type(kind)):
                opening = "".join(f"{{{part}: " for part in inner)
                text = f"+{group}={opening}{override.get_value_element_as_str()}{'}' * len(inner)}"
                break
        texts.append(text)
    return texts


def refuse_sweeps(overrides: Iterable[Override]) -> None:
    """Raise ConfigError for the first override that gives several values without ``-m``."""
    for override in overrides:
        if override.is_sweep_override():
            # Hydra takes a,b for a sweep even if the setting is a list and [a,b] was meant, so the hint shows both.
            key, shown = override.get_key_element(), without_secret(override.input_line or "")
            raise ConfigError(
                f"{shown} has several values, expected one",
                hint=f"-m {shown} sweeps over them; {key}=[{shown.partition('=')[2]}] is one list",
            )


def check_overrides(overrides: Iterable[Override], groups: Mapping[str, Sequence[str]]) -> None:
    """Raise ConfigError for the first override whose key or group option does not exist.

    ``groups``: options of every top-level Hydra group.
    """
    for override in overrides:
        key = override.key_or_group
        # Hydra checks its own settings.
        if key == "hydra" or key.startswith(("hydra.", "hydra/")):
            continue
        # A mapping, as in model={embedding_dim: 8}, sets the group's settings; anything else chooses an option.
        if key in groups and not _is_mapping(override):
            _check_option(override, groups[key])
            continue
        if field_type(key) is not None:
            continue
        value = ""
        if not override.is_delete():
            value = f"={_value_text(override)}"
        if renamed := renamed_error(key, after=f"={_value_text(override)}"):
            raise renamed
        near = nearest(key, groups)
        if not near:
            raise ConfigError(f"{key} is unknown", hint=_listing(key))
        # A typing error in the webhook's name does not make its value less secret.
        if value and near == WEBHOOK:
            value = "=<its value>"
        raise ConfigError(f"{key} is unknown; did you mean {near}?", hint=f"{near}{value}")


def _check_option(override: Override, options: Sequence[str]) -> None:
    if override.is_delete():
        return
    if not override.is_sweep_override() and override.value() is None:
        raise ConfigError(
            f"{override.key_or_group}=null chooses nothing, expected one of: {', '.join(options)}",
            hint=f"{override.key_or_group}={options[0]}, or leave this override out",
        )
    group = override.key_or_group
    values: list[Any] = []
    if not override.is_sweep_override():
        chosen = override.value()
        values = chosen if isinstance(chosen, list) else [chosen]
    elif override.is_discrete_sweep():
        values = list(override.sweep_string_iterator())
    for value in map(str, values):
        if value in options or value.endswith(".yaml") and value[:-5] in options:
            continue
        near = difflib.get_close_matches(value, options, n=1)
        if near:
            meant, hint = f"; did you mean {group}={near[0]}? Expected", f"{group}={near[0]}"
        else:
            meant, hint = ", expected", f"{group}=<one of these>"
        # ``nightjar calibrate`` writes such files to a directory that the user has to name.
        if value.startswith("measured_"):
            hint = f"-cd <directory with {group}/{value}.yaml>, or {hint}"
        raise ConfigError(f"{group}={value} is unknown{meant} one of: {', '.join(options)}", hint=hint)


def _listing(key: str) -> str:
    # Say where the settings beside ``key`` are listed, if no setting resembles it enough to be proposed.
    parent = key.rpartition(".")[0]
    if parent and find_place(parent) is not None:
        return f"nightjar explain {parent} lists its settings"
    return "nightjar run --cfg job lists every key"


def translate(error: Exception, overrides: Sequence[Override] = ()) -> ConfigError:
    """Return the ConfigError for Hydra's or OmegaConf's ``error``."""
    # Hydra wraps OmegaConf's errors, which have the key as an attribute, into its own, which have it only in the text.
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, MissingMandatoryValue) and cause.full_key:
            return ConfigError(f"{cause.full_key} is not set", hint=f"{cause.full_key}=<value>")
        if isinstance(cause, GrammarParseError) and cause.full_key:
            return ConfigError(
                f"{cause.full_key} has a text with ${{ that no }} ends", hint=f"{cause.full_key} without ${{"
            )
        if isinstance(cause, OmegaConfBaseException) and getattr(cause, "full_key", None):
            return _about_key(str(cause.full_key), cause, overrides)
        cause = cause.__cause__
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    # For a wrong value in a group's file, Hydra puts file, reason and key into one text.
    in_file = re.match(r"In '(?P<file>[^']+)'.*?\n(?P<reason>[^\n]+).*?full_key: (?P<key>\S*)", str(error), re.DOTALL)
    if in_file:
        return _about_file(f"{in_file['file']}.yaml", in_file["reason"], in_file["key"])
    mark = getattr(error, "problem_mark", None)
    # A text that is no file, such as a recorded configuration, has a name in brackets.
    if mark is not None and not mark.name.startswith("<"):
        problem = getattr(error, "problem", None) or lines[0]
        return ConfigError(
            f"{mark.name}, line {mark.line + 1}, is not valid YAML: {problem}", hint=f"correct {mark.name}"
        )
    merged = re.match(r"Error merging override (?P<key>[\w.]+)=", str(error))
    # OmegaConf names no key for a nested list of the wrong type.
    if merged and field_type(merged["key"]) is not None:
        return _about_key(merged["key"], OmegaConfBaseException(str(error)), overrides)
    return ConfigError("; ".join(lines[:3]) or type(error).__name__, hint="nightjar run --cfg job shows the whole tree")


def _about_file(file: str, reason: str, key: str) -> ConfigError:
    # Return the error for what ``file`` sets ``key`` to; "": OmegaConf does not say which.
    hint = f"correct {file}"
    if not key:
        # This happens where a dictionary of groups is given as a list.
        hint += ": names with their settings, such as 'sparse: {user: {}, ad: {}}', not a list"
        return ConfigError(f"{file} has a list where a group of keys is expected: {reason}", hint=hint)
    if "is not Optional" in reason and is_dataclass(field_type(key)):
        hint += f", which has no value after the colon: '{key.rpartition('.')[2]}: {{}}' takes the defaults"
    about = _about_key(key, OmegaConfBaseException(reason), ())
    return ConfigError(f"{file}: {about.message}", hint=hint)


def _about_key(key: str, error: OmegaConfBaseException, overrides: Sequence[Override]) -> ConfigError:
    # Return the ConfigError for ``error`` about ``key``: renamed, unknown, not added yet, or of the wrong type.
    # OmegaConf names the entry of a list, such as model.top_mlp[0], but an override gives the whole list.
    key = re.sub(r"(\[\d+\])+$", "", key)
    # ``field_type`` knows the settings of all models, so only the error tells which model's dataclass refused this one.
    refused = re.search(r"[Kk]ey '\w+' not in '(\w+)'", str(error))
    if refused and re.fullmatch(r"model\.\w+", key):
        return _about_model(key, refused[1])
    if renamed := renamed_error(key, after="=<value>"):
        return renamed
    kind = field_type(key)
    if kind is None:
        near = nearest(key)
        meant = f"; did you mean {near}?" if near else ""
        return ConfigError(f"{key} is unknown{meant}", hint=near or _listing(key))
    # Find the override of the key itself, and one of a setting below it.
    given: Override | None = None
    inner: Override | None = None
    for override in overrides:
        if override.is_delete():
            continue
        if override.key_or_group == key:
            given = given or override
        elif override.key_or_group.startswith(f"{key}."):
            inner = inner or override
    # An entry of a dictionary must be added before it is set. Only the error's text distinguishes this case.
    if given is not None:
        if "not in" in str(error) and field_type(key.rpartition(".")[0]) is not None and not given.is_add():
            return _absent(key, error, str(given.input_line))
    elif "not in struct" in str(error).lower():
        if inner is not None:
            return _absent(key, error, str(inner.input_line))
        value = f"<{describe(kind)}>"
        if is_dataclass(kind) or typing.get_origin(kind) is dict:
            value = "{}"
        return ConfigError(f"{key} does not exist here yet", hint=f"+{key}={value} adds it")
    return _wrong_type(key, kind, error, given)


def _absent(key: str, error: OmegaConfBaseException, line: str) -> ConfigError:
    # Return the error for entry ``key`` that the override ``line`` assumes to exist; similar entries are proposed.
    group, _, name = key.rpartition(".")
    names = list(error.parent_node.keys()) if isinstance(error.parent_node, DictConfig) else []
    near = difflib.get_close_matches(name, map(str, names), n=1)
    if not near:
        return ConfigError(f"{key} does not exist here yet", hint=f"+{line} adds it")
    meant = f"{group}.{near[0]}"
    return ConfigError(
        f"{key} does not exist here yet; did you mean {meant}?",
        hint=f"{line.replace(key, meant, 1)}, or +{line} adds it",
    )


def _wrong_type(key: str, kind: Any, error: OmegaConfBaseException, given: Override | None) -> ConfigError:
    # Return the error for a value that is not of type ``kind``; ``given`` is its override, or None for a file.
    text = "" if given is None else _value_text(given)
    plain = given is not None and not _is_mapping(given)
    if re.fullmatch(r"plan\.tables\.[^.]+", key):
        value = text if plain else ""
        shown = repr(value) if value else "a plain value"
        keys = ", ".join(field.name for field in fields(TablePin))
        # The hint uses the key of the pin that the word belongs to.
        name = "tier" if value in TIERS else "sharding"
        return ConfigError(
            f"{key} is {shown}, expected one of its keys: {keys}", hint=f"+{key}.{name}={value or 'row_wise'}"
        )
    if plain and is_dataclass(strip_none(kind)):
        names = children(key)
        paths = ", ".join(f"{key}.{name}" for name in names)
        return ConfigError(f"{key} is {text!r}, expected one of its settings: {paths}", hint=f"{key}.{names[0]}={text}")
    expected = describe(kind)
    got, hint = f": {str(error).splitlines()[0]};", f"{key}=<{expected}>"
    if given:
        got = f" is {text!r},"
        # The hint adds the brackets that are missing; a list of lists may lack both pairs, or only the outer one.
        missing = 2 if "list of lists" in expected else int("list" in expected)
        missing -= len(text[:missing]) - len(text[:missing].lstrip("["))
        if missing > 0:
            hint = f"{key}={'[' * missing}{text}{']' * missing}"
    return ConfigError(f"{key}{got} expected {expected}", hint=hint)


def _about_model(key: str, owner: str) -> ConfigError:
    # Return the error for a setting that the chosen model, with the dataclass ``owner``, does not have.
    spec = next((spec for spec in MODELS if spec.config.__name__ == owner), None)
    if spec is None:
        line = f"defaults: [{MODELS.names()[0]}, _self_]"
        return ConfigError(
            f"{key} is a setting of one model, and the file does not say of which, expected '{line}' at its top",
            hint=line,
        )
    names = [field.name for field in fields(spec.config)]
    near = difflib.get_close_matches(key.removeprefix("model."), names, 1, 0.5) or names[-1:]
    return ConfigError(
        f"{key} is unknown to model {spec.name!r}; did you mean model.{near[0]}?", hint=f"model.{near[0]}=<value>"
    )


def config_errors() -> tuple[type[Exception], ...]:
    """Return what Hydra and OmegaConf raise for a user's mistake."""
    import yaml

    return (HydraException, OmegaConfBaseException, yaml.YAMLError)


def _value_text(override: Override) -> str:
    # Return the text after the first ``=``, as typed.
    return (override.input_line or "").partition("=")[2]


def _is_mapping(override: Override) -> bool:
    return not override.is_delete() and isinstance(override.value(), dict)
