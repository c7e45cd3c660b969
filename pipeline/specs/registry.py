"""Registries of choices: built-in ones, and those that installed packages add as entry points.

A registry imports the module with its built-in choices on first use. That imports no torch, so that a configuration can
be checked against the names. The options of a choice are fields of its spec, which settings replace (``with_options``).
"""

from __future__ import annotations

import difflib
import importlib
import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import fields, is_dataclass, replace
from importlib.metadata import EntryPoint, entry_points
from typing import Any, Generic, Protocol, TypeVar

from pipeline.errors import ConfigError

BUILT_IN = "built in"
ADDED = "added by this process"


class Named(Protocol):
    """A choice has a ``name``, which a configuration uses."""

    @property
    def name(self) -> str:
        """The name in the configuration."""
        ...


T = TypeVar("T", bound=Named)
_states = itertools.count(1)


class Registry(Generic[T]):
    """The choices of one ``kind``, such as model, by name and in the order of registration.

    ``setting``: the key that chooses among them. ``home``: the module whose tuple ``SPECS`` lists the built-in ones.
    ``group``: the entry point group for installed packages; None: packages cannot add any. ``problem``: a function that
    says what is wrong with a package's choice; "" if nothing is. ``all_apply``: no setting chooses, all of them are
    used at once; then ``setting`` stands for the settings that they bring.
    """

    state = 0  # another number whenever the choices of any registry are others than those that packages bring

    def __init__(
        self,
        kind: str,
        *,
        setting: str,
        home: str,
        group: str | None = None,
        problem: Callable[[Any], str] = lambda spec: "",
        all_apply: bool = False,
    ) -> None:
        self.kind = kind
        self.setting = setting
        self.home = home
        self.group = group
        self.problem = problem
        self.all_apply = all_apply
        self._specs: dict[str, T] | None = None
        self._origins: dict[str, str] = {}

    def __iter__(self) -> Iterator[T]:
        return iter(self._loaded().values())

    def names(self) -> tuple[str, ...]:
        """The names of all choices, built-in ones first."""
        return tuple(self._loaded())

    def get(self, name: str) -> T:
        """The choice ``name``; ConfigError with the nearest name if there is none."""
        specs = self._loaded()
        if name not in specs:
            near = difflib.get_close_matches(name, specs, 1, 0.5) or list(specs)
            other = f", or install the package that adds {self.kind} {name!r}" if self.group else ""
            raise ConfigError(
                f"{self.setting} is {name!r}, expected one of: {', '.join(specs)}",
                hint=f"{self.setting}={near[0]}{other}",
            )
        return specs[name]

    def origin(self, name: str) -> str:
        """The origin of the choice ``name``: ``built in``, or the package and its version."""
        self._loaded()
        return self._origins[name]

    @contextmanager
    def added(self, *specs: T) -> Iterator[None]:
        """Context in which ``specs`` are choices too, after the others. For tests and notebooks."""
        former, origins, state = self._loaded(), self._origins, Registry.state
        self._specs = {**former, **{spec.name: spec for spec in specs}}
        self._origins = {**origins, **{spec.name: ADDED for spec in specs}}
        own = Registry.state = next(_states)
        try:
            yield
        finally:
            self._specs, self._origins = former, origins
            # Contexts that overlap, and end in the order in which they began, leave choices that are new.
            Registry.state = state if Registry.state == own else next(_states)

    def package(self, name: str) -> str:
        """The package and version that adds the choice ``name``; "" for one that is built in."""
        origin = self.origin(name)
        return "" if origin in (BUILT_IN, ADDED) else origin

    def _loaded(self) -> dict[str, T]:
        if self._specs is None:
            built_in: tuple[T, ...] = importlib.import_module(self.home).SPECS
            specs = {spec.name: spec for spec in built_in}
            origins = dict.fromkeys(specs, BUILT_IN)
            for point in entry_points(group=self.group) if self.group else ():
                package = f"{point.dist.name} {point.dist.version}" if point.dist else point.value
                if point.name in specs:
                    raise ConfigError(
                        f"package {package} adds {self.kind} {point.name!r}, which {origins[point.name]} has already",
                        hint="rename its entry point, or uninstall one of the two packages",
                    )
                specs[point.name] = self._load(point, package)
                origins[point.name] = package
            self._specs, self._origins = specs, origins
        return self._specs

    def _load(self, point: EntryPoint, package: str) -> T:
        """Load a package's choice; ConfigError if it cannot be imported or is invalid."""
        added = f"package {package} adds {self.kind} {point.name!r}"
        try:
            spec: T = point.load()
        except Exception as error:  # a package may raise anything while it is imported
            reason = str(error) if isinstance(error, ImportError) else f"{type(error).__name__}: {error}"
            raise ConfigError(
                f"{added}, which cannot be imported: {reason}", hint="install the package again, or uninstall it"
            ) from error
        if (name := getattr(spec, "name", None)) != point.name:
            raise ConfigError(
                f"{added}, whose spec has the name {name!r}", hint="one name for the entry point and the spec"
            )
        if problem := self.problem(spec):
            raise ConfigError(f"{added}, {problem}", hint="correct the package, or uninstall it")
        return spec


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
