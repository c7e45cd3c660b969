"""The protocol of a tracker: another program's view of runs and nights, written beside our own records."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from pipeline.errors import ConfigError

if TYPE_CHECKING:
    from pipeline.config import TrackConfig
    from pipeline.records import NightRecord, Result
    from pipeline.store import Store


class RunTracking(ABC):
    """What a tracker is told of one run. It may raise anything: it is asked again later, and the run goes on."""

    @abstractmethod
    def records(self, records: Sequence[Mapping[str, Any]]) -> None:
        """All records of ``metrics.jsonl`` so far, by step. The last may be gone: a resumed training repeats steps."""

    @abstractmethod
    def ended(self, result: Result, settings: Mapping[str, Any]) -> None:
        """The run has ended. ``settings``: those of its configuration that are plain values, by dotted name."""


class Tracker(ABC):
    """A choice of ``track.to``. ``package``: what it imports, installed by the extra of its own name."""

    name: str
    doc: str
    package: str

    def check(self, track: TrackConfig) -> None:
        """ConfigError where the package is missing, or a setting of this tracker."""
        if find_spec(self.package) is None:
            raise ConfigError(
                f"track.to names {self.name}, which needs the package {self.package}",
                hint=f"pip install 'nightjar[{self.name}]'",
            )

    @abstractmethod
    def run(self, track: TrackConfig, store: Store, run: str, model: str) -> RunTracking:
        """Begin, or go on, to track ``run`` of ``model``."""

    def night(self, track: TrackConfig, record: NightRecord) -> None:
        """A night has its outcome."""
        return
