"""Settings: their declaration (``setting``), and the walk that compares every value with it (``check_values``)."""

from __future__ import annotations

import dataclasses
import difflib
import math
import re
from collections.abc import Callable, Iterable
from dataclasses import MISSING, Field, dataclass, field
from typing import Any, Protocol, runtime_checkable
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

from pipeline.core.errors import ConfigError

METADATA = "setting"
AUTO = "auto"
_NOTHING: Any = object()
_PLAIN = {"str", "int", "float", "bool"}


@dataclass(frozen=True, kw_only=True)
class Setting:
    """The declaration of a field besides its type and default.

    ``doc``: the documentation, with the unit. ``low``, ``high``: a closed range; None: open. ``choices``: the allowed
    values (of a list or dictionary, of its entries), or a function that lists registered ones. ``auto``: the word
    ``auto`` is allowed besides numbers, or besides true and false without a range. ``more``: documentation of
    registered choices, which ``text`` appends.
    ``quiet``: at its default the setting stays out of artifact keys, so adding it changes no key.
    """

    doc: str
    low: float | None = None
    high: float | None = None
    choices: tuple[str, ...] | Callable[[], Iterable[str]] | None = None
    auto: bool = False
    more: Callable[[], str] | None = None
    quiet: bool = False

    @property
    def text(self) -> str:
        """The whole documentation."""
        return f"{self.doc} {self.more()}" if self.more else self.doc

    def allowed(self) -> tuple[str, ...]:
        """Return the allowed values; empty if every value of the type is allowed."""
        # Ask registries each time, because tests and notebooks add choices temporarily.
        if callable(self.choices):
            return tuple(self.choices())
        return self.choices or ()


def setting(
    default: Any = _NOTHING,
    *,
    doc: str,
    factory: Callable[[], Any] | None = None,
    low: float | None = None,
    high: float | None = None,
    choices: tuple[str, ...] | Callable[[], Iterable[str]] | None = None,
    auto: bool = False,
    more: Callable[[], str] | None = None,
    quiet: bool = False,
) -> Any:
    """Return a dataclass field with its ``Setting``; ``default`` or ``factory`` as in ``dataclasses.field``."""
    metadata = {METADATA: Setting(doc=doc, low=low, high=high, choices=choices, auto=auto, more=more, quiet=quiet)}
    if factory is not None:
        return field(default_factory=factory, metadata=metadata)
    # ``_NOTHING`` stands for no default, because None is a default like any other.
    if default is _NOTHING:
        return field(metadata=metadata)
    return field(default=default, metadata=metadata)


def default_of(each: Field[Any]) -> Any:
    """Return the default of a dataclass field; ``MISSING`` if it has none."""
    return each.default if each.default_factory is MISSING else each.default_factory()


def setting_of(each: Field[Any]) -> Setting:
    """Return the ``Setting`` of a dataclass field; KeyError if the field was not declared by ``setting``."""
    known: Setting = each.metadata[METADATA]
    return known


_DIRECTIVES = ("Y", "y", "m", "b", "B", "h", "d", "e", "j", "F", "D", "H", "I", "M", "S", "T", "R", "p", "P", "z", "%")
_NAME = r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,99}"


@runtime_checkable
class Checked(Protocol):
    """A group that checks its settings against each other."""

    def check(self, path: str) -> None:
        # Raise ConfigError if settings of the group at ``path`` contradict each other.
        ...


def check_values(node: Any, path: str = "") -> None:
    """Raise ConfigError for the first value below dataclass ``node``, at ``path``, that its setting does not allow.

    This includes the entries of dictionaries and lists. A node's own ``check`` runs after its settings are checked.
    """
    prefix = f"{path}." if path else ""
    for each in dataclasses.fields(node):
        value, place = getattr(node, each.name), f"{prefix}{each.name}"
        _check_shape(value, place, str(each.type))
        _check(value, place, each)
    if isinstance(node, Checked):
        node.check(path)


def _check_shape(value: Any, path: str, kind: str) -> None:
    # OmegaConf accepts a list or group as an entry of a list of plain values, and anything that ``${...}`` stands for.
    if value is None and kind.endswith(" | None"):
        return
    kind = kind.removesuffix(" | None")
    if kind.startswith("list["):
        if not isinstance(value, list):
            raise ConfigError(f"{path} is {value!r}, expected a list [a,b]", hint=f"{path}=[{value or ''}]")
        inner = kind[len("list[") : -1]
        for entry in value:
            if isinstance(entry, list | dict) and set(inner.split(" | ")) <= _PLAIN:
                flat: list[Any] = []
                for each in value:
                    flat += each if isinstance(each, list | dict) else [each]
                raise ConfigError(
                    f"{path} has {entry!r}, expected a list [a,b] of plain values",
                    hint=f"{path}=[{','.join(map(str, flat))}]",
                )
            _check_shape(entry, path, inner)
    elif kind.startswith("dict["):
        if not isinstance(value, dict):
            raise ConfigError(f"{path} is {value!r}, expected a group of keys", hint=f"{path}={{}}")
        inner = kind.partition(", ")[2][:-1]
        for name, entry in value.items():
            _check_shape(entry, f"{path}.{name}", inner)
    elif isinstance(value, list | dict) and set(kind.split(" | ")) <= _PLAIN:
        raise ConfigError(f"{path} is {value!r}, expected a plain value", hint=f"{path}=<a plain value>")


def _check(value: Any, path: str, each: Field[Any]) -> None:
    known: Setting | None = each.metadata.get(METADATA)
    if dataclasses.is_dataclass(value):
        check_values(value, path)
    elif isinstance(value, dict):
        for name, entry in value.items():
            _check(entry, f"{path}.{name}", each)
    elif isinstance(value, list):
        for entry in value:
            if dataclasses.is_dataclass(entry):
                check_values(entry, path)
        allowed = known.allowed() if known is not None else ()
        for entry in value:
            # The hint shows the whole list, because an override replaces a list as a whole.
            if allowed and entry not in allowed:
                mended = ",".join(nearest_of(name, allowed) for name in value)
                raise ConfigError(
                    f"{path} names {entry!r}, expected some of: {', '.join(allowed)}", hint=f"{path}=[{mended}]"
                )
    # A default is always allowed.
    elif known is not None and value is not None and value != each.default:
        check_value(value, path, known)


def check_value(value: Any, path: str, known: Setting) -> None:
    """Raise ConfigError if ``value`` is not among the choices of its setting, or outside the bounds."""
    allowed = known.allowed()
    if allowed and value not in allowed:
        raise ConfigError(
            f"{path} is {value!r}, expected one of: {', '.join(allowed)}", hint=f"{path}={nearest_of(value, allowed)}"
        )
    if known.auto and isinstance(value, str):
        if value != AUTO:
            raise ConfigError(f"{path} is {value!r}, expected {AUTO} or {besides_auto(known)}", hint=f"{path}={AUTO}")
    elif known.low is not None or known.high is not None:
        number = float(value)
        # NaN is neither below nor above a bound, and would pass the comparisons.
        if not math.isfinite(number):
            raise ConfigError(f"{path} is {number}, expected a finite number", hint=f"{path}={_plain(known.low or 0)}")
        if known.low is not None and number < known.low:
            bound = known.low
        elif known.high is not None and number > known.high:
            bound = known.high
        else:
            return
        expected = span(known.low, known.high)
        raise ConfigError(f"{path} is {number:.10g}, expected {expected}", hint=f"{path}={_plain(bound)}")


def besides_auto(known: Setting) -> str:
    """Return the other values of a setting that may be ``auto``."""
    if known.low is None and known.high is None:
        return "true or false"
    return "a whole number"


def span(low: float | None, high: float | None) -> str:
    """Return a range in words; "" if it is open."""
    if low is not None and high is not None:
        return f"between {_plain(low)} and {_plain(high)}"
    if low is not None:
        return f"at least {_plain(low)}"
    if high is not None:
        return f"at most {_plain(high)}"
    return ""


def _plain(bound: float) -> str:
    # Write integers in full, so that 10000000000 can be copied into an override, which 1e+10 cannot.
    return str(bound) if isinstance(bound, int) else f"{bound:.10g}"


def nearest_of(value: Any, allowed: tuple[str, ...]) -> str:
    """Return the entry of ``allowed`` that is spelled most like ``value``, or else the first."""
    return next(iter(difflib.get_close_matches(str(value), allowed, n=1)), allowed[0])


def check_name(path: str, name: str, example: str) -> None:
    """Raise ConfigError if ``name`` cannot name a folder. ``example``: for the hint if no part of it is valid."""
    if not re.fullmatch(_NAME, name):
        # Replace dots as well: a name may have some, but must not begin with one.
        valid = re.sub(r"[^A-Za-z0-9_-]+", "-", name).strip("-")[:100] or example
        raise ConfigError(
            f"{path} is {name!r}, expected at most 100 letters, digits, '_', '.' and '-'", hint=f"{path}={valid}"
        )


def check_time_format(path: str, form: str | None) -> None:
    """Raise ConfigError unless ``form`` tells a whole day, and no hour without minutes, in known directives."""
    if form is None:
        return
    letters = set()
    for flag, digits, letter in re.findall(r"%([-_0]?)(\.?[369]?)(.?)", form):
        letters.add(letter)
        known = letter in _DIRECTIVES
        # Digits are allowed only for fractions of a second, such as %.3f.
        if digits:
            known = letter == "f" and not flag
        if not known:
            expected = " ".join(f"%{directive}" for directive in _DIRECTIVES)
            raise ConfigError(
                f"{path} is {form!r}, and %{flag}{digits}{letter} is none of {expected} and %.f",
                hint=f"{path}='%d.%m.%Y %H:%M:%S'",
            )
    day = letters & {"F", "D"} or (letters & {"Y", "y"} and (letters & set("mbBh") and letters & {"d", "e"}))
    if not (day or (letters & {"Y", "y"} and "j" in letters)):
        raise ConfigError(
            f"{path} is {form!r}, which does not tell the day, expected year, month and day",
            hint=f"{path}='%d.%m.%Y', or '%d.%m.%Y %H:%M:%S' with the time of the day",
        )
    hour, minute = letters & set("HIRT"), letters & set("MRT")
    # On a 12-hour clock, 07:30 may be morning or evening.
    half = "I" in letters and not letters & {"p", "P"}
    if bool(hour) != bool(minute) or half:
        more = "; %I needs %p" if half else ""
        raise ConfigError(
            f"{path} is {form!r}, expected hour and minute or neither{more}",
            hint=f"{path}='%d.%m.%Y %H:%M' or '%m/%d/%Y %I:%M %p'",
        )


def check_time_zone(path: str, zone: str | None) -> None:
    """Raise ConfigError if ``zone`` is not a time zone."""
    try:
        # The default must work even where no time zones are installed.
        if zone not in (None, "Etc/UTC"):
            ZoneInfo(str(zone))
    except (ZoneInfoNotFoundError, ValueError, OSError):
        raise ConfigError(
            f"{path} is {zone!r}, expected the name of a time zone", hint=f"{path}=Europe/Berlin"
        ) from None
