"""How records become JSON and come back: one conversion for all of them."""

from __future__ import annotations

import dataclasses
import types
from collections.abc import Mapping
from functools import cache
from typing import Any, ClassVar, Protocol, Self, TypeVar, Union, cast, get_args, get_origin, get_type_hints

from pipeline.core.errors import ArtifactError

_UNLESS, _REST = "left out unless", "the rest"
_SCALARS: dict[object, tuple[str, tuple[type, ...]]] = {
    float: ("a number", (int, float)),
    int: ("a whole number", (int,)),
    str: ("a string", (str,)),
    bool: ("true or false", (bool,)),
}


def absent(default: Any = None, *, unless: str = "") -> Any:
    """Declare a field that is left out of the JSON at its default, so that an earlier release can read the record.

    ``unless``: the name of another field; if that field has a value, the default is written as well.
    """
    return dataclasses.field(default=default, metadata={_UNLESS: unless})


def rest() -> Any:
    """Declare a field for the keys that no other field has."""
    return dataclasses.field(default_factory=dict, metadata={_UNLESS: _REST})


class Record:
    """Base class of the records: frozen dataclasses whose JSON has the names and the order of their fields.

    A field with a default may be missing. Unknown keys are ignored, so a release may add some without a new version. A
    ``STRICT`` record refuses them, because it is an instruction. ``VERSION`` rises when a key is removed or changes its
    meaning; other versions are refused. JSON without ``VERSION_KEY`` has version 1.
    """

    FILE: ClassVar[str] = "the record"
    KIND: ClassVar[str] = "record"
    STRICT: ClassVar[bool] = False
    VERSION: ClassVar[int | str] = 1
    VERSION_KEY: ClassVar[str] = "format"
    REMEDY: ClassVar[str] = ""

    def to_json(self) -> dict[str, Any]:
        """Return plain data for ``json.dumps``."""
        record, kind = dict[str, Any](), cast(Any, type(self))
        # ``unless`` is None for a field that is always written, and "" for one that is left out at its default.
        for name, default, unless in _layout(kind):
            value = getattr(self, name)
            if unless == _REST:
                record |= plain(value)
            elif unless is None or value != default or (unless and getattr(self, unless) is not None):
                record[name] = plain(value)
        return record

    @classmethod
    def from_json(cls, data: object, where: str = "") -> Self:
        """Read what ``to_json`` wrote. ``where``: the file, for messages.

        Raises ArtifactError, with file and key, for another version, a missing key or a value of another type.
        """
        where = where or cls.FILE
        # Check the version first: a record of another version has other keys, which are not errors.
        version = data.get(cls.VERSION_KEY) if isinstance(data, Mapping) else None
        if version not in (None, cls.VERSION):
            raise ArtifactError(
                f"{where} has {cls.VERSION_KEY} {version}, expected {cls.VERSION}: another release wrote it",
                hint=cls.REMEDY,
            )
        try:
            return _record(cls, data)
        except _WrongError as error:
            key = ".".join(reversed(error.path)) or "it"
            kind = f"{cls.KIND} of {cls.VERSION_KEY} {cls.VERSION}"
            raise ArtifactError(f"{where} is not a {kind}: {key} {error}", hint=cls.REMEDY) from None


R = TypeVar("R", bound=Record)


class Reads(Protocol):
    """A store, as far as reading a record goes."""

    def read_json(self, path: str) -> Any:
        """Parse the file; ArtifactError if it is missing or damaged."""

    def url_of(self, path: str) -> str:
        """Return ``path`` for messages."""


def read(kind: type[R], store: Reads, path: str) -> R:
    """Read the record of type ``kind`` at ``path``; ArtifactError if the file is missing or invalid."""
    return kind.from_json(store.read_json(path), store.url_of(path))


class _WrongError(Exception):
    """A value that does not fit its type; ``path``: its key, the innermost part first."""

    def __init__(self, message: str, *path: str) -> None:
        super().__init__(message)
        self.path = [*path]


@cache
def _layout(kind: type) -> tuple[tuple[str, Any, str | None], ...]:
    """Return the fields with their defaults and their ``unless``; None for a field that is always written."""
    return tuple((field.name, field.default, field.metadata.get(_UNLESS)) for field in dataclasses.fields(kind))


@cache
def rest_field(kind: type) -> str | None:
    """Return the field of ``kind`` declared by ``rest``; None if there is none."""
    return next((name for name, _, unless in _layout(kind) if unless == _REST), None)


# Cached, because evaluating annotations is slow, and a file may have thousands of records of one class.
@cache
def hints_of(kind: type) -> dict[str, Any]:
    """Return the type of every field of dataclass ``kind``."""
    hints = get_type_hints(kind)
    return {field.name: hints[field.name] for field in dataclasses.fields(kind)}


@cache
def required(kind: type) -> frozenset[str]:
    """Return the fields of dataclass ``kind`` that have no default."""
    missing = dataclasses.MISSING
    fields = dataclasses.fields(kind)
    return frozenset(f.name for f in fields if f.default is missing and f.default_factory is missing)


def plain(value: Any) -> Any:
    """Convert ``value`` for ``json.dumps``: records inside it become plain data."""
    if isinstance(value, Record):
        return value.to_json()
    if isinstance(value, Mapping):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    return value


def _record(kind: Any, data: object) -> Any:
    if not isinstance(data, Mapping):
        raise _WrongError(f"is {_shown(data)}, expected an object")
    hints = hints_of(kind)
    # JSON without a version counts as version 1, so later versions must be written.
    needed = required(kind) if kind.VERSION == 1 else required(kind) | {kind.VERSION_KEY}
    if missing := sorted(needed - data.keys()):
        raise _WrongError("is missing", missing[0])
    if kind.STRICT and (unknown := sorted(data.keys() - hints.keys())):
        raise _WrongError("is unknown", unknown[0])
    rest_of = rest_field(kind)
    known = {name: _at(name, hint, data[name]) for name, hint in hints.items() if name in data and name != rest_of}
    if rest_of is not None:
        known[rest_of] = {name: value for name, value in data.items() if name not in hints}
    return kind(**known)


def _at(key: str, hint: Any, value: object) -> Any:
    # Build the path to a wrong value only as the exception propagates, so that valid records do not pay for it.
    try:
        return _convert(hint, value)
    except _WrongError as error:
        error.path.append(key)
        raise


def _convert(hint: Any, value: object) -> Any:
    """Convert ``value`` of JSON to the type ``hint``."""
    if hint is Any or hint is object:
        return value
    if hint in _SCALARS:
        words, classes = _SCALARS[hint]
        # bool is a subclass of int in Python.
        if isinstance(value, classes) and (hint is bool or not isinstance(value, bool)):
            return value
        raise _WrongError(f"is {_shown(value)}, expected {words}")
    if isinstance(hint, type) and issubclass(hint, Record):
        return _record(hint, value)
    origin, arguments = get_origin(hint), get_args(hint)
    if origin in (Union, types.UnionType):
        if value is None and types.NoneType in arguments:
            return None
        # Errors of all kinds but the last are suppressed, so the message is about the last one.
        kinds = [kind for kind in arguments if kind is not types.NoneType]
        for kind in kinds[:-1]:
            try:
                return _convert(kind, value)
            except _WrongError:
                continue
        return _convert(kinds[-1], value)
    if origin in (dict, Mapping):
        if not isinstance(value, Mapping):
            raise _WrongError(f"is {_shown(value)}, expected an object")
        return {key: _at(str(key), arguments[1], item) for key, item in value.items()}
    if not isinstance(value, list | tuple):
        raise _WrongError(f"is {_shown(value)}, expected a list")
    # This is a list, tuple[X, ...], tuple[X, Y], or a NamedTuple, which has no origin.
    if origin is list or arguments[1:] == (...,):
        kinds = [arguments[0]] * len(value)
    elif origin is None:
        kinds = list(get_type_hints(hint).values())
    else:
        kinds = list(arguments)
    if len(kinds) != len(value):
        raise _WrongError(f"has {len(value)} values, expected {len(kinds)}")
    items = [_at(str(index), kind, item) for index, (kind, item) in enumerate(zip(kinds, value, strict=True))]
    if origin is list:
        return items
    if origin is None:
        return hint(*items)
    return tuple(items)


def _shown(value: object) -> str:
    """Shorten ``value`` for a message."""
    text = repr(value)
    if len(text) <= 40:
        return text
    return f"{type(value).__name__} {text[:30]}..."
