"""Settings by their dotted paths, such as ``train.lr``: which there are, their types, and what a misspelt one means."""

from __future__ import annotations

import dataclasses
import difflib
import types
import typing
from collections.abc import Iterable, Iterator
from dataclasses import Field, dataclass
from typing import Any

from pipeline.config import Config, ModelConfig
from pipeline.config.meant import meant_by
from pipeline.specs import MODELS

_WORDS = {bool: "true or false", int: "a whole number", float: "a number", str: "a text"}


@dataclass(frozen=True)
class Place:
    """A setting or a group of the schema: its dotted ``path``, type, default and the dataclass field that declares it.

    ``*`` in the path stands for the name of each entry of a dictionary.
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
        """The group with its defaults, or an entry of it; None for a setting."""
        return self.default if dataclasses.is_dataclass(self.default) else self.group and self.group()

    @property
    def prefix(self) -> str:
        """What the paths of its own settings begin with."""
        return f"{self.path}.*." if self.has_entries else f"{self.path}."


def places(node: Any = None, prefix: str = "") -> Iterator[Place]:
    """All groups and settings below dataclass ``node`` (None: a default Config), each group before its own settings."""
    for place in _own(Config() if node is None else node, prefix):
        yield place
        if place.group:
            yield from places(place.inside(), place.prefix)


def settings() -> Iterator[Place]:
    """All settings of the configuration: what has a value of its own."""
    return (place for place in places() if not place.group)


def find_place(path: str) -> Place | None:
    """The group or setting that ``path`` means: ``data.sparse.*.rows`` for ``data.sparse.C1.rows``; None for none."""
    node: Any = Config()
    prefix, place = "", None
    parts = path.split(".")
    while parts:
        name = parts.pop(0)
        place = next((each for each in _own(node, prefix) if each.field.name == name), None) if node else None
        if place is None:
            return None
        node, prefix = place.inside(), place.prefix
        if place.has_entries and parts:
            parts.pop(0)  # the entry's name
    return place


def _own(node: Any, prefix: str) -> Iterator[Place]:
    seen: set[str] = set()
    for owner in [node, *(spec.config() for spec in MODELS)] if type(node) is ModelConfig else [node]:
        hints = typing.get_type_hints(type(owner))
        for each in dataclasses.fields(owner):
            if each.name not in seen:
                yield Place(f"{prefix}{each.name}", hints[each.name], getattr(owner, each.name), each)
        seen |= hints.keys()


def field_type(path: str) -> Any:
    """The type of the configuration field at a dotted ``path``, or None where the schema has no such field."""
    kind: Any = Config
    for part in path.split("."):
        kind = strip_none(kind)
        if dataclasses.is_dataclass(kind):
            kind = _hints(kind).get(part)
        elif typing.get_origin(kind) is dict:
            kind = entry_type(kind)
        elif typing.get_origin(kind) is list and part.isdigit():
            kind = typing.get_args(kind)[0]
        else:
            return None
        if kind is None:
            return None
    return kind


def children(path: str) -> list[str]:
    """Names of the settings and groups right below ``path`` ("": at the top)."""
    kind = strip_none(field_type(path)) if path else Config
    return list(_hints(kind)) if dataclasses.is_dataclass(kind) else []


def _hints(kind: Any) -> dict[str, Any]:
    """Names and types of the fields of dataclass ``kind``; of a model those of every registered one."""
    kinds = [kind, *(spec.config for spec in MODELS)] if kind is ModelConfig else [kind]
    return {name: hint for each in kinds for name, hint in typing.get_type_hints(each).items()}


def nearest(key: str, groups: Iterable[str] = ()) -> str | None:
    """The known key that ``key`` means, or is most like: under the same parent first, then anywhere."""
    if meant := meant_by(key):
        return meant
    parent, _, name = key.rpartition(".")
    if parent and name in children("") and not dataclasses.is_dataclass(strip_none(field_type(name))):
        return name  # train.seed: the setting stands above all groups
    siblings = children(parent) if parent else [*children(""), *groups]
    near = difflib.get_close_matches(name, siblings, n=1, cutoff=0.5)
    if near:
        return f"{parent}.{near[0]}" if parent else near[0]
    everything = [each.path for each in places() if "*" not in each.path and (not each.group or each.has_entries)]
    same_name = [path for path in everything if path.rpartition(".")[2] == name]
    return next(iter(same_name or difflib.get_close_matches(key, everything, n=1)), None)


def describe(kind: Any) -> str:
    """``kind`` in words: 'a number', 'a list [a,b] (of texts)'."""
    inner = strip_none(kind)
    none = " or null" if inner is not kind else ""
    if typing.get_origin(inner) is list:
        part = typing.get_args(inner)[0]
        nested = typing.get_origin(part) is list
        shape, part = ("a list of lists [[a,b],[c]]", typing.get_args(part)[0]) if nested else ("a list [a,b]", part)
        return f"{shape} (of {describe(part).removeprefix('a ')}s){none}"
    if typing.get_origin(inner) is dict or dataclasses.is_dataclass(inner):
        return f"a group of keys{none}"
    return _WORDS.get(inner, str(inner)) + none


def entry_type(kind: Any) -> Any:
    """``X`` of ``dict[str, X]``."""
    return typing.get_args(kind)[1]


def strip_none(kind: Any) -> Any:
    """``X`` of ``X | None``."""
    if typing.get_origin(kind) in (typing.Union, types.UnionType):
        rest = [part for part in typing.get_args(kind) if part is not type(None)]
        return rest[0] if len(rest) == 1 else kind
    return kind
