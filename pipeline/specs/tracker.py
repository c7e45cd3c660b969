"""The protocol of a tracker: another program's view of runs and nights, written beside our own records."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from pipeline.core.errors import ConfigError

if TYPE_CHECKING:
    from pipeline.config.nightly import TrackConfig
    from pipeline.records.night import NightRecord
    from pipeline.records.result import Result
    from pipeline.store.artifacts import Store


@dataclass(frozen=True)
class ServedVersion:
    """A version that serves or has served. ``uri``: where it lies. ``by``, ``reason``: of what happened to it last.

    ``run``, ``verdict`` and ``ne`` are those of the run that made it.
    """

    version: str
    uri: str
    run: str | None
    verdict: str | None
    ne: float | None
    by: str
    reason: str


@dataclass(frozen=True)
class Served:
    """The versions of ``model`` that have served, oldest first, and the one that serves now."""

    model: str
    serving: str | None
    versions: tuple[ServedVersion, ...]


class RunTracking(ABC):
    """What a tracker is told of one run. It may raise anything: it is asked again later, and the run goes on."""

    @abstractmethod
    def records(self, records: Sequence[Mapping[str, Any]]) -> None:
        """Receive all records of ``metrics.jsonl`` so far, by step.

        The last ones of an earlier call may be missing, because a resumed training repeats steps.
        """

    @abstractmethod
    def ended(self, result: Result, settings: Mapping[str, Any]) -> None:
        """Receive the end of the run. ``settings``: its configuration's plain values, by dotted name."""


class Tracker(ABC):
    """A choice of ``track.to``. ``package``: what it imports, installed by the extra of its own name; None: nothing."""

    name: str
    doc: str
    package: str | None = None

    def check(self, track: TrackConfig) -> None:
        """Check that the package and this tracker's settings are there.

        Raises:
            ConfigError: One is missing.
        """
        if self.package is not None and not _installed(self.package):
            raise ConfigError(
                f"track.to names {self.name}, which needs the package {self.package}",
                hint=f"pip install 'nightjar[{self.name}]'",
            )

    @abstractmethod
    def run(self, track: TrackConfig, store: Store, run: str, model: str) -> RunTracking:
        """Begin, or go on, to track ``run`` of ``model``."""

    def night(self, track: TrackConfig, store: Store, record: NightRecord) -> None:
        """Receive a night's outcome."""
        return

    def serving(self, track: TrackConfig, store: Store, served: Served) -> None:
        """Receive the serving version after a run that may have published, a promotion or a rollback."""
        return


def _installed(package: str) -> bool:
    try:
        return find_spec(package) is not None
    except ModuleNotFoundError:
        # For a dotted name, find_spec imports the parent package, which may be missing, too.
        return False
