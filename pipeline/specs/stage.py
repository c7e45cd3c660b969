"""The base class of a stage, which knows its inputs, key, path, work and figures.

A stage is one file in ``pipeline/stages/`` whose ``SPEC`` is listed in ``pipeline/stages/__init__.py``. Its methods
import other rooms inside, because composing a configuration imports every stage but no torch.
"""

from __future__ import annotations

import dataclasses
import functools
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import MISSING, Field, dataclass, fields
from typing import TYPE_CHECKING, Any, Protocol, cast

from pipeline.records.result import Result
from pipeline.records.runs import Step, run_directory

if TYPE_CHECKING:
    from pipeline.config import Config
    from pipeline.store.artifacts import Draft, Store
    from pipeline.store.manifest import Artifact


@dataclass(frozen=True)
class StageIO:
    """Callbacks of a stage: ``interval`` gets a record of the training loop, ``close`` ends the progress line.

    ``on_point`` gets every fault point that training passes (``checkpoint.FaultPoint``).
    """

    interval: Callable[[dict[str, Any]], None] = lambda record: None
    close: Callable[[], None] = lambda: None
    on_point: Callable[[str], None] = lambda point: None


def always(config: Config) -> bool:
    """Return True: the condition that always holds."""
    return True


@dataclass(frozen=True)
class Use:
    """Settings that belong to a key if ``when`` holds.

    ``paths``: dotted; ``*`` stands for every entry of a dictionary or field of a group. ``named``: not the value
    counts, but what it names (a file, a checkpoint, a default), which the stage itself puts into the key.
    """

    paths: tuple[str, ...]
    when: Callable[[Config], bool] = always
    named: bool = False

    def covers(self, path: str) -> bool:
        """Whether the setting at ``path`` is covered. ``*`` in a path stands for an entry of a dictionary."""
        parts = path.split(".")
        for own_path in self.paths:
            pattern = own_path.split(".")
            # A * at the end also stands for a whole group, with everything below it.
            whole = len(pattern) == len(parts) or (len(pattern) < len(parts) and pattern[-1] == "*")
            if whole and all(name in ("*", part) for name, part in zip(pattern, parts, strict=False)):
                return True
        return False


def use(group: str, names: str, *, when: Callable[[Config], bool] = always, named: bool = False) -> Use:
    """Return a ``Use`` of the settings ``names``, separated by blanks, of ``group`` ("": the root)."""
    prefix = f"{group}." if group else ""
    return Use(tuple(f"{prefix}{name}" for name in names.split()), when, named)


def covered(uses: Iterable[Use], config: Config) -> dict[str, Any]:
    """Return the settings that ``uses`` cover, nested as in the configuration, without ``named`` ones."""
    settings: dict[str, Any] = {}
    for used in uses:
        if used.named or not used.when(config):
            continue
        for pattern in used.paths:
            for path, value in values_at(config, pattern.split(".")):
                group = settings
                for name in path[:-1]:
                    group = group.setdefault(name, {})
                group[path[-1]] = value
    return settings


def values_at(node: Any, parts: list[str]) -> Iterator[tuple[list[str], Any]]:
    """Yield path and value of every setting that ``parts`` match below ``node``, a dataclass or a dictionary."""
    if not parts:
        yield [], _plain(node)
        return
    head, *rest = parts
    names = [head]
    if head == "*":
        names = list(node) if isinstance(node, dict) else [declared.name for declared in fields(node)]
    for name in names:
        # Leave it out even if it is named, so that keys are the same as before the setting existed.
        if not isinstance(node, dict) and _is_quiet(node, name):
            continue
        entry = node[name] if isinstance(node, dict) else getattr(node, name)
        for path, value in values_at(entry, rest):
            yield [name, *path], value


def _plain(node: Any) -> Any:
    # Leave out the quiet settings of a dictionary's entries if they are at their defaults.
    if isinstance(node, dict):
        return {name: _plain_entry(entry) for name, entry in node.items()}
    if dataclasses.is_dataclass(node) and not isinstance(node, type):
        return dataclasses.asdict(node)
    return node


def _plain_entry(node: Any) -> Any:
    # Return plain data of a dictionary's entry and of the groups of settings in it, without quiet settings at defaults.
    if not dataclasses.is_dataclass(node):
        return node
    entry = dataclasses.asdict(cast(Any, node))
    for name in list(entry):
        if _is_quiet(node, name):
            del entry[name]
        elif dataclasses.is_dataclass(group := getattr(node, name)):
            entry[name] = _plain_entry(group)
    return entry


def _is_quiet(node: Any, name: str) -> bool:
    # Whether setting ``name`` of a dataclass is declared quiet (``config.fields``) and at its default.
    declared = _declared_quiet(node.__class__).get(name)
    if declared is None:
        return False
    default = declared.default
    if declared.default_factory is not MISSING:
        default = declared.default_factory()
    return bool(getattr(node, name) == default)


# Cached, because every key goes through the same few classes hundreds of times.
@functools.cache
def _declared_quiet(kind: type) -> dict[str, Field[Any]]:
    quiet = {}
    for each in fields(kind):
        if any(getattr(value, "quiet", False) for value in each.metadata.values()):
            quiet[each.name] = each
    return quiet


class Drafting(Protocol):
    """The context of a draft; it swallows no exception."""

    def __enter__(self) -> Draft:
        """Return the draft."""

    def __exit__(self, *error: Any) -> None:
        """Remove what was not committed."""


class Stage(ABC):
    """A stage: (configuration, input artifacts) -> artifact.

    ``name``: in ``stages=[..]`` and as a command; ``help``: what it does, behind its command's name. ``inputs``: the
    stages whose artifacts it reads, all of them earlier in the chain. ``settings``: what of the configuration decides
    its output, or whether there is any. ``revision``: raised by whoever changes what the same settings and inputs lead
    to, so that nothing made before is taken for it.

    ``by_default``: it runs where ``stages`` names none. ``inline``: on one machine it runs in the launcher's process,
    unless ``launch.inline`` says otherwise. ``needs_rows``: it cannot run on a list of tables. ``shared``: its
    artifacts lie outside the run's folder, so runs with the same key share them. ``distributed``: it runs on all ranks
    of the hardware, else on one. ``trains``: it takes training steps, of which the first must come in time, and it
    commits a checkpoint before it ends.
    """

    name: str
    help: str
    inputs: tuple[str, ...] = ()
    settings: tuple[Use, ...] = ()
    revision = 0
    by_default = True
    inline = False
    needs_rows = False
    shared = False
    distributed = False
    trains = False

    def check(self, config: Config) -> None:  # noqa: B027 (most stages have nothing to check)
        """Raise ConfigError if the stage cannot run with ``config``."""

    def unread_settings(self, config: Config) -> list[str]:
        """Return a sentence for each given setting without effect. A run logs them even if it skips the stage."""
        return []

    def key_settings(self, config: Config) -> dict[str, Any]:
        """Return the settings that the key covers, by their current names, without ``named_settings``."""
        return covered(self.settings, config)

    def keys(self) -> dict[str, tuple[Use, ...]]:
        """Return the settings of its keys, by name: its own key, and the keys of what it writes on the way."""
        return {self.name: self.settings}

    def named_settings(self, config: Config, store: Store, made: Mapping[str, Step]) -> dict[str, Any]:
        """Return what the key covers of things that settings name: files, checkpoints, versions.

        ``made``: the earlier steps, by stage.
        """
        return {}

    def path(self, config: Config, key: str) -> str:
        """Return the path of the artifact with ``key``, relative to the store."""
        return f"{run_directory(str(config.run))}/{self.name}/{key}"

    def scratch(self, config: Config, store: Store, step: Step, *, forced: bool) -> tuple[str, ...]:
        """Return other paths that belong to the artifact of ``step``. Do not read the store unless ``forced``."""
        return ()

    @abstractmethod
    def run(
        self, step: Step, config: Config, store: Store, inputs: dict[str, Artifact], io: StageIO
    ) -> Artifact | None:
        """Run the stage on this rank; returns the committed artifact on rank 0, None elsewhere."""

    def draft(self, store: Store, step: Step) -> Drafting:
        """Return the context for writing and committing the artifact of ``step``."""
        inputs = step.input_keys
        return cast(Drafting, store.draft(step.path, kind=self.name, key=step.key, config=step.config, inputs=inputs))

    def require_meant(self, step: Step, config: Config, store: Store) -> None:  # noqa: B027 (most keys tell enough)
        """Raise LaunchError if the artifact of ``step``, which another run made meanwhile, has other inputs."""

    def accept(self, artifact: Artifact) -> None:  # noqa: B027 (most artifacts are accepted)
        """Raise an error that ends the run although the stage is done. The launcher calls it after the last stage."""

    def modules(self, config: Config) -> tuple[str, ...]:
        """Return the slow imports of ``run``, above all torch: its rank is forked from a process that has made them.

        None of these may start threads when imported: a forked process does not have them.
        """
        return ()

    def seconds_to_end(self, config: Config) -> float:
        """Return the seconds that a rank may take to end after SIGTERM."""
        return 0.0

    def shown(self, store: Store, path: str) -> str:
        """Return the text about the artifact at ``path``, for a run that ends with this stage and had nothing to do."""
        return ""

    def parts(self, summary: Mapping[str, Any]) -> dict[str, Any]:
        """Return the parts of ``result.json`` from the artifact's ``summary``, by name; by default, all of it.

        A part with a field in ``records.Result`` has the type of that field.
        """
        if not summary:
            return {}
        return {self.name: dict(summary)}

    def lines(self, result: Result) -> dict[str, list[str]]:
        """Return the lines about the stage's parts of ``result.json``, by name, for the table at the end of a run."""
        figures = ", ".join(f"{name} {value}" for name, value in self.facts(result))
        if not figures:
            return {}
        return {self.name: [figures]}

    def facts(self, result: Result) -> list[tuple[str, str]]:
        """Return the names and values for the report's details, from the stage's parts of ``result.json``."""
        # Lists and mappings do not fit on a line; a stage that has some overrides this method.
        part = result.others.get(self.name, {})
        return [(name, str(value)) for name, value in part.items() if isinstance(value, int | float | str)]
