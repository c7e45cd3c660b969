"""What a stage is: one object that knows its inputs, key, path, work and figures. Everything else asks the registry.

A stage is one file in ``pipeline/stages/`` whose ``SPEC`` is listed in ``pipeline/stages/__init__.py``. Rooms are
imported inside ``run`` and the other methods: composing a configuration imports every stage, but no torch.
"""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

from pipeline.records import Result
from pipeline.records.step import Step, run_directory

if TYPE_CHECKING:
    from pipeline.config import Config
    from pipeline.store import Artifact, Store


@dataclass(frozen=True)
class StageIO:
    """Who hears of a stage: ``interval`` takes a record of the training loop, ``close`` ends the progress line.

    ``on_point``: learns of every named point that training passes (``checkpoint.FaultPoint``).
    """

    interval: Callable[[dict[str, Any]], None] = lambda record: None
    close: Callable[[], None] = lambda: None
    on_point: Callable[[str], None] = lambda point: None


def always(config: Config) -> bool:
    """The condition of settings that always count."""
    return True


@dataclass(frozen=True)
class Use:
    """The settings at ``paths`` count where ``when`` holds.

    ``paths``: dotted, ``*`` for every entry of a dictionary or every field of a group. ``named``: not the value counts
    but what it names (a file, a checkpoint, a default), which the stage itself puts into the key.
    """

    paths: tuple[str, ...]
    when: Callable[[Config], bool] = always
    named: bool = False

    def covers(self, path: str) -> bool:
        """Whether the setting at ``path`` (``*``: an entry of a dictionary) is one of them."""
        parts = path.split(".")
        for pattern in (each.split(".") for each in self.paths):
            whole = len(pattern) == len(parts) or (len(pattern) < len(parts) and pattern[-1] == "*")
            if whole and all(one in ("*", other) for one, other in zip(pattern, parts, strict=False)):
                return True
        return False


def use(group: str, names: str, *, when: Callable[[Config], bool] = always, named: bool = False) -> Use:
    """A ``Use`` of the settings ``names``, separated by blanks, of ``group`` ("": the root)."""
    return Use(tuple(f"{group}.{name}" if group else name for name in names.split()), when, named)


def covered(uses: Iterable[Use], config: Config) -> dict[str, Any]:
    """The settings that ``uses`` cover, nested as in the configuration; of those that are ``named`` nothing."""
    settings: dict[str, Any] = {}
    for each in uses:
        if each.named or not each.when(config):
            continue
        for path in each.paths:
            for place, value in _values(config, path.split(".")):
                group = settings
                for name in place[:-1]:
                    group = group.setdefault(name, {})
                group[place[-1]] = value
    return settings


def _values(node: Any, parts: list[str]) -> Iterator[tuple[list[str], Any]]:
    """The place and value of every setting that ``parts`` mean below ``node``, a dataclass or a dictionary."""
    if not parts:
        yield [], dataclasses.asdict(node) if dataclasses.is_dataclass(node) and not isinstance(node, type) else node
        return
    entries = node if isinstance(node, dict) else {each.name: getattr(node, each.name) for each in fields(node)}
    head, *rest = parts
    quiet = set() if isinstance(node, dict) else _quiet(node)
    for name in (each for each in (entries if head == "*" else [head]) if each not in quiet):
        for place, value in _values(entries[name], rest):
            yield [name, *place], value


def _quiet(node: Any) -> set[str]:
    """The settings of dataclass ``node`` that are declared ``quiet`` (``config.fields``) and at their defaults."""
    told = ((each, any(getattr(known, "quiet", False) for known in each.metadata.values())) for each in fields(node))
    return {each.name for each, quiet in told if quiet and getattr(node, each.name) == each.default}


class Stage(ABC):
    """A stage: (configuration, input artifacts) -> artifact.

    ``name``: in ``stages=[..]`` and as a command; ``help``: what it does, behind its command's name. ``inputs``: the
    stages whose artifacts it reads, all of them earlier in the chain. ``settings``: what of the configuration decides
    its output, or whether there is any.

    ``by_default``: it runs where ``stages`` names none. ``inline``: on one machine it runs in the launcher's process,
    unless ``launch.inline`` says otherwise. ``needs_rows``: it cannot run on a list of tables. ``shared``: its
    artifacts lie outside the run's folder, so runs with the same key share them. ``distributed``: it runs on all ranks
    of the hardware, else on one. ``trains``: it takes training steps, of which the first must come in time, and it
    commits a checkpoint before it ends. ``modules``: what ``run`` imports that takes long; ranks are forked from a
    process that has done so.
    """

    name: str
    help: str
    inputs: tuple[str, ...] = ()
    settings: tuple[Use, ...] = ()
    by_default = True
    inline = False
    needs_rows = False
    shared = False
    distributed = False
    trains = False
    modules: tuple[str, ...] = ()

    def check(self, config: Config) -> None:  # noqa: B027 (most stages have nothing to check)
        """ConfigError where ``config`` names the stage, which cannot run with its other settings."""

    def key_settings(self, config: Config) -> dict[str, Any]:
        """What of the configuration the key covers, by its names now; ``named_settings`` come on top."""
        return covered(self.settings, config)

    def keys(self) -> dict[str, tuple[Use, ...]]:
        """The settings of its keys, by name: its own key, and those of what it keeps on the way."""
        return {self.name: self.settings}

    def named_settings(self, config: Config, store: Store, made: Mapping[str, Step]) -> dict[str, Any]:
        """What the key covers of that which settings name outside the configuration: files, checkpoints, versions.

        ``made``: the steps before this one, by their stages' names. Raises what looking there raises.
        """
        return {}

    def path(self, config: Config, key: str) -> str:
        """Where the artifact with ``key`` lies, relative to the store."""
        return f"{run_directory(str(config.run))}/{self.name}/{key}"

    def scratch(self, config: Config, store: Store, step: Step, *, forced: bool) -> tuple[str, ...]:
        """Other paths that belong to the artifact of ``step``. ``forced``: False asks the store nothing."""
        return ()

    @abstractmethod
    def run(
        self, step: Step, config: Config, store: Store, inputs: dict[str, Artifact], io: StageIO
    ) -> Artifact | None:
        """Do the stage on this rank; the committed artifact on rank 0, None elsewhere."""

    def draft(self, store: Store, step: Step) -> Any:
        """The artifact of ``step``, to be filled and committed within the context."""
        return store.draft(step.path, kind=self.name, key=step.key, config=step.config, inputs=step.input_keys)

    def accept(self, artifact: Artifact) -> None:  # noqa: B027 (most artifacts are accepted)
        """Raise the error that a run ends with though the stage was done; the launcher asks at the end of the chain."""

    def seconds_to_end(self, config: Config) -> float:
        """Seconds that a rank may take to end when it is told to."""
        return 0.0

    def shown(self, store: Store, path: str) -> str:
        """The text of the committed artifact at ``path``, for a run that ends with this stage and had nothing to do."""
        return ""

    def parts(self, summary: Mapping[str, Any]) -> dict[str, Any]:
        """The parts of ``result.json`` that the artifact's ``summary`` gives, by name; by default all of it.

        Those that ``records.Result`` has a field for are of that field's type.
        """
        return {self.name: dict(summary)} if summary else {}

    def lines(self, result: Result) -> dict[str, list[str]]:
        """What the table at the end of a run says of the stage's parts of ``result.json``, by name."""
        figures = ", ".join(f"{name} {value}" for name, value in self.facts(result))
        return {self.name: [figures]} if figures else {}

    def facts(self, result: Result) -> list[tuple[str, str]]:
        """Names and values that the report's details list of the stage's parts of ``result.json``."""
        part = result.others.get(self.name, {})
        return [(name, str(value)) for name, value in part.items() if isinstance(value, int | float | str)]
