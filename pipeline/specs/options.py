"""Options of a choice: the fields of its spec, which settings replace."""

from __future__ import annotations

from dataclasses import fields, is_dataclass, replace
from typing import Any, TypeVar

from pipeline.errors import ConfigError
from pipeline.specs.registry import Named, Registry

T = TypeVar("T", bound=Named)
_OWN = ("name", "doc")  # fields of every choice, which are no options


def with_options(registry: Registry[T], name: str, options: Any, path: str) -> T:
    """The choice called ``name`` with those ``options`` (a dataclass) that are not None.

    ConfigError where it has no field of an option's name; ``path``: of the options, for the message.
    """
    spec = registry.get(name)
    given = {each.name: value for each in fields(options) if (value := getattr(options, each.name)) is not None}
    known = _options_of(spec)
    for option, value in given.items():
        if option not in known:
            others = [each.name for each in registry if option in _options_of(each)]
            raise ConfigError(
                f"{path}.{option} is {value}, but {registry.setting}={name} does not have this option; "
                f"it has: {', '.join(known) or 'none'}",
                hint=f"{path}.{option}=null, or {registry.setting}={others[0] if others else name}",
            )
    return replace(spec, **given) if given else spec  # type: ignore[type-var]


def _options_of(spec: Any) -> list[str]:
    return [each.name for each in fields(spec) if each.name not in _OWN] if is_dataclass(spec) else []
