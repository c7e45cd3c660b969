"""Registries of choices: built-in ones, and those that installed packages add as entry points.

A registry imports the module with its built-in choices on first use. That imports no torch, so that a configuration can
be checked against the names. The options of a choice are fields of its spec, which settings replace (``with_options``).

Optional parts (``pipeline.plugins``) are found by Nightjar's own entry points, exactly as those of other packages are.
"""

from __future__ import annotations

import difflib
import functools
import importlib
import itertools
import re
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import fields, is_dataclass, replace
from importlib.metadata import Distribution, EntryPoint, entry_points
from typing import Any, Generic, Protocol, TypeVar

from pipeline.core.errors import ConfigError

NIGHTJAR = "nightjar"  # this distribution
# Entry points of ingestion engines.
ENGINES = "nightjar.engines"
# Entry points of launchers, which run stages on other machines.
LAUNCHERS = "nightjar.launchers"
# Entry points of executors, which take the steps of a training.
STEP_EXECUTORS = "nightjar.step_executors"
# Entry points of validations, which look at the validation rows while a model trains.
VALIDATIONS = "nightjar.validations"
BUILT_IN = "built in"
ADDED = "added by this process"


@functools.lru_cache(1)
def _installed(path: tuple[str, ...]) -> tuple[EntryPoint, ...]:
    # Reads one file of each installed package, some 20 ms in all, so this is done once in a process, for all groups,
    # unless sys.path changes.
    installed = entry_points()
    points: list[EntryPoint] = []
    for group in installed.groups:
        if group.startswith(f"{NIGHTJAR}."):
            points.extend(installed.select(group=group))
    return tuple(points)


def find_plugins(group: str) -> list[EntryPoint]:
    """Find what installed packages add to ``group``.

    Returns:
        Entry points by name, those of Nightjar's own plugins first.
    """
    # Sorted, because packages are found in the order of a directory, which differs between machines.
    points = [point for point in _installed(tuple(sys.path)) if point.group == group]
    return sorted(points, key=lambda point: (not _is_own(point), point.name))


def _is_own(point: EntryPoint) -> bool:
    return point.dist is not None and _name_and_version(point.dist)[0] == NIGHTJAR


def load_hooks(group: str) -> dict[str, Any]:
    """Load what Nightjar's plugins and other packages add to ``group``, by name.

    Raises:
        ConfigError: One cannot be imported, or two have the same name.
    """
    # Names are compared before anything is imported, so that a clash of names is reported even if a package cannot be
    # imported.
    points = _points_by_name(group)
    return {name: _load_hook(point) for name, point in points.items()}


def load_hook(group: str, name: str) -> Any | None:
    """Load what a plugin or a package adds to ``group`` as ``name``, and nothing else; None where there is none.

    Raises:
        ConfigError: It cannot be imported, or two of the group have the same name.
    """
    point = _points_by_name(group).get(name)
    if point is None:
        return None
    return _load_hook(point)


def _points_by_name(group: str) -> dict[str, EntryPoint]:
    points: dict[str, EntryPoint] = {}
    for point in find_plugins(group):
        if point.name in points:
            raise ConfigError(
                f"package {_package_of(point)} adds {point.name!r} to {group}, which has one of this name already",
                hint="rename its entry point, or uninstall one of the two packages",
            )
        points[point.name] = point
    return points


def _load_hook(point: EntryPoint) -> Any:
    return _import(point, f"package {_package_of(point)} adds {point.name!r} to {point.group}")


def _package_of(point: EntryPoint) -> str:
    return " ".join(_name_and_version(point.dist)) if point.dist else point.value


# Cached, because each question reads and parses the package's file of metadata anew, of which a command asks twenty.
@functools.lru_cache(maxsize=256)
def _name_and_version(package: Distribution) -> tuple[str, str]:
    return package.name, package.version


def find_package_at_fault(error: BaseException) -> str:
    """Return the installed package whose code raised ``error``, with file and line; "" where it was Nightjar's own.

    The innermost frame of Nightjar or of a package that extends it decides, because what a library raises is its
    caller's fault.
    """
    packages: dict[str, str] = {}
    for point in _installed(tuple(sys.path)):
        if not _is_own(point):
            packages[point.module.partition(".")[0]] = _package_of(point)
    # Walk all frames: if a package calls back into Nightjar and that fails, the package is not at fault.
    found = ""
    for frame, line in traceback.walk_tb(error.__traceback__):
        root = str(frame.f_globals.get("__name__", "")).partition(".")[0]
        if root in packages:
            found = f"package {packages[root]} ({frame.f_code.co_filename}, line {line})"
        elif root == "pipeline":
            found = ""
    return found


def _import(point: EntryPoint, added: str) -> Any:
    try:
        return point.load()
    except Exception as error:
        # A package may raise anything while it is imported. An ImportError's text is enough; other errors need their
        # class: str(KeyError("x")) is just 'x'.
        reason = f"{type(error).__name__}: {error}"
        if isinstance(error, ImportError):
            reason = str(error)
        raise ConfigError(
            f"{added}, which cannot be imported: {reason}", hint="install the package again, or uninstall it"
        ) from error


def expect_instance(kind: type) -> Callable[[Any], str]:
    """Return a ``problem`` of registries: "" for an instance of ``kind``, else what is wrong, in words."""

    def problem(spec: Any) -> str:
        if isinstance(spec, kind):
            return ""
        return f"which is {spec!r}, expected an instance of {kind.__name__}"

    return problem


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

    ``setting``: the key that chooses among them. ``home``: the module whose tuple ``SPECS`` lists the built-in ones;
    None: all are plugins. ``group``: the entry point group of plugins and of installed packages; None: packages cannot
    add any. ``problem``: a function that says what is wrong with a package's choice; "" if nothing is. ``further``:
    other settings that choose among them, with ``<name>`` for any name; ``paths`` lists all of them, with ``*`` for
    ``<name>``. ``all_apply``: all choices are used at once, and ``setting`` stands for the settings that they add.
    """

    # Changes whenever ``added`` changes the choices of any registry.
    state = 0

    def __init__(
        self,
        kind: str,
        *,
        setting: str,
        home: str | None = None,
        group: str | None = None,
        problem: Callable[[Any], str] = lambda spec: "",
        further: tuple[str, ...] = (),
        all_apply: bool = False,
    ) -> None:
        self.kind = kind
        self.setting = setting
        self.home = home
        self.group = group
        self.problem = problem
        self.paths = tuple(re.sub("<[^>]+>", "*", path) for path in (setting, *further))
        self.all_apply = all_apply
        self._specs: dict[str, T] | None = None
        self._origins: dict[str, str] = {}

    def __iter__(self) -> Iterator[T]:
        return iter(self._loaded().values())

    def names(self) -> tuple[str, ...]:
        """Return the names of all choices, built-in ones first."""
        return tuple(self._loaded())

    def get(self, name: str) -> T:
        """Return the choice ``name``; ConfigError with the nearest name if there is none."""
        specs = self._loaded()
        if name not in specs:
            near = difflib.get_close_matches(name, specs, 1, 0.5) or list(specs)
            hint = f"{self.setting}={near[0]}"
            if self.group:
                # A recorded configuration may come from a machine with a package that this one lacks.
                hint += f", or install the package that adds {self.kind} {name!r}"
            raise ConfigError(f"{self.setting} is {name!r}, expected one of: {', '.join(specs)}", hint=hint)
        return specs[name]

    def origin(self, name: str) -> str:
        """Return the origin of the choice ``name``: ``built in``, or the package and its version."""
        self._loaded()
        return self._origins[name]

    @contextmanager
    def added(self, *specs: T) -> Iterator[None]:
        """Make ``specs`` choices in this context, after the others. For tests and notebooks."""
        former, origins, state = self._loaded(), self._origins, Registry.state
        # Copies, because the former dictionaries are put back at the end of the context.
        self._specs, self._origins = dict(former), dict(origins)
        for spec in specs:
            self._specs[spec.name] = spec
            self._origins[spec.name] = ADDED
        own = Registry.state = next(_states)
        try:
            yield
        finally:
            self._specs, self._origins = former, origins
            # Contexts that overlap, and end in the order in which they began, leave other choices, which need a new
            # number.
            Registry.state = state if Registry.state == own else next(_states)

    def package(self, name: str) -> str:
        """Return the package and version that adds the choice ``name``; "" if it is built in, or is no choice."""
        self._loaded()
        origin = self._origins.get(name, BUILT_IN)
        return "" if origin in (BUILT_IN, ADDED) else origin

    def _loaded(self) -> dict[str, T]:
        if self._specs is not None:
            return self._specs
        specs: dict[str, T] = {}
        if self.home:
            for spec in importlib.import_module(self.home).SPECS:
                specs[spec.name] = spec
        origins = dict.fromkeys(specs, BUILT_IN)
        points = find_plugins(self.group) if self.group else []
        for point in points:
            package = _package_of(point)
            for spec in self._load(point, package):
                # Replacing a choice silently would give old runs' names another meaning.
                if spec.name in specs:
                    raise ConfigError(
                        f"package {package} adds {self.kind} {spec.name!r}, which {origins[spec.name]} has already",
                        hint="rename its entry point, or uninstall one of the two packages",
                    )
                specs[spec.name] = spec
                origins[spec.name] = BUILT_IN if _is_own(point) else package
        # Set only now, so that after an error the next call does not find half of the choices.
        self._specs, self._origins = specs, origins
        return specs

    def _load(self, point: EntryPoint, package: str) -> tuple[T, ...]:
        """Load what an entry point names: one choice of the same name, or a tuple of choices."""
        added = f"package {package} adds {self.kind} {point.name!r}"
        loaded = _import(point, added)
        specs: tuple[T, ...] = loaded if isinstance(loaded, tuple) else (loaded,)
        # An entry point with a tuple names a family of choices, so the names in it may differ.
        if not isinstance(loaded, tuple):
            name = getattr(loaded, "name", None)
            if name != point.name:
                raise ConfigError(
                    f"{added}, whose spec has the name {name!r}", hint="one name for the entry point and the spec"
                )
        # Checked here, where the message can name the package.
        for spec in specs:
            if problem := self.problem(spec):
                raise ConfigError(f"{added}, {problem}", hint="correct the package, or uninstall it")
        return specs


# Fields that every choice has and that are not options.
_OWN = ("name", "doc")


def with_options(registry: Registry[T], name: str, options: Any, path: str) -> T:
    """Return the choice called ``name`` with those ``options`` (a dataclass) that are not None.

    ConfigError if it has no field with an option's name; ``path``: where the options are set, for the message.
    """
    spec = registry.get(name)
    known = _options_of(spec)
    given: dict[str, Any] = {}
    for field in fields(options):
        option, value = field.name, getattr(options, field.name)
        if value is None:
            continue
        if option not in known:
            # Propose the first choice that has the option.
            others = [each.name for each in registry if option in _options_of(each)]
            other = others[0] if others else name
            raise ConfigError(
                f"{path}.{option} is {value}, but {registry.setting}={name} does not have this option; "
                f"it has: {', '.join(known) or 'none'}",
                hint=f"{path}.{option}=null, or {registry.setting}={other}",
            )
        given[option] = value
    # ``replace`` needs a dataclass, which a spec without options need not be.
    if not given:
        return spec
    return replace(spec, **given)  # type: ignore[type-var]


def _options_of(spec: Any) -> list[str]:
    if not is_dataclass(spec):
        return []
    return [each.name for each in fields(spec) if each.name not in _OWN]


# The protocols of these three take configurations, whose settings list the names as choices: nothing here may import
# ``pipeline.config``, not even for a type. ``pipeline.specs`` has the same registries with their types.
STAGES: Registry[Any] = Registry("stage", setting="stages", home="pipeline.stages", group="nightjar.stages")
TRACKERS: Registry[Any] = Registry("tracker", setting="track.to", group="nightjar.trackers")
SEARCH_PARTS: Registry[Any] = Registry("search part", setting="search.parts", group="nightjar.search_parts")


def default_stages() -> list[str]:
    """Return the default of ``stages``."""
    return [stage.name for stage in STAGES if stage.by_default]


def inline_stages() -> list[str]:
    """Return the default of ``launch.inline``."""
    return [stage.name for stage in STAGES if stage.inline]


def search_part_docs() -> str:
    """Return the documentation of the searchable parts."""
    return " ".join(f"{each.name}: {each.doc}" for each in SEARCH_PARTS)
