"""What the chain asks of a scheduler, whichever it is: submit a stage, follow it, end it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from datetime import date, datetime
from typing import Protocol

from pipeline.config import Config
from pipeline.core.errors import LaunchError
from pipeline.records.runs import Step


class GivenUpError(LaunchError):
    """The launcher gives up a stage that does not start or end in time: its job must be ended.

    After any other error, a job that outlasts its launcher is left alone.
    """


class StageJob(Protocol):
    """A stage that a scheduler runs. ``name``: what the scheduler calls it."""

    name: str

    def state(self) -> str:
        """Return queued (not admitted: no time limit counts) | running | succeeded | failed | cancelled | lost.

        Raises GivenUpError if it does not start in time, its subclass NoRoomError if there is no place for all of its
        processes, and LaunchError if the state is unknown.
        """

    def output(self) -> bytes:
        """Return what the stage wrote since the last call; once ``state`` has reported the end, all the rest."""

    def logs(self) -> str:
        """Return what all of its processes wrote, each after its name."""

    def death(self, logs: str) -> str:
        """Describe which process was killed and how; "" if none was. ``logs``: as above."""

    def stop(self, seconds: float) -> None:
        """Tell the stage to end, and wait up to ``seconds`` until it has. LaunchError if it cannot be told."""

    def cancel(self) -> None:
        """End the stage at once; no error if it has ended."""


class Room(Protocol):
    """Places for more hosts that a scheduler holds."""

    def hosts(self) -> int | None:
        """Return their number; None if they are no longer held or requested. LaunchError if it is unknown."""

    def leave(self) -> None:
        """Give the places back; no error if there are none."""


class StageRunner(Protocol):
    """A scheduler. ``outlasts``: stages go on after the launcher ends; ``poll_seconds``: between two looks at a stage.

    ``config``: applies to the stages that are submitted from now on.
    """

    config: Config
    outlasts: bool
    poll_seconds: float

    def expect(self, steps: Sequence[Step]) -> None:
        """Begin slow preparations for these steps, which will run in this order."""

    def takes(self, stage: str) -> bool:
        """Return whether inline ``stage`` should be submitted, so that the launcher need not import torch."""

    def find(self, step: Step) -> StageJob | None:
        """Return the unfinished job of ``step`` that an earlier launcher submitted; None if there is none."""

    def submit(self, step: Step, config_url: str) -> StageJob:
        """Start ``step`` of the run whose configuration lies at ``config_url``. LaunchError if it is refused."""

    def room(self, step: Step, hosts: int) -> Room:
        """Ask for places for ``hosts`` more hosts of ``step``. LaunchError if the scheduler cannot hold any."""

    def close(self) -> None:
        """Release what the launcher holds; stages that outlast it go on."""


@dataclass(frozen=True)
class NightJob:
    """The job of a night. ``due``: when it was to start; ``deadline``: when its launchers are ended, None for never.

    Every launcher of the job finds the same times, however late it starts: date=yesterday is relative to ``due``.
    """

    due: datetime
    deadline: datetime | None


class Launcher(ABC):
    """An option of ``launch`` that runs stages elsewhere: an entry point of group ``nightjar.launchers``."""

    @abstractmethod
    def runner(self, config: Config) -> StageRunner:
        """Connect to what runs the stages of ``config``."""

    @abstractmethod
    def only_launcher(self, config: Config) -> AbstractContextManager[None]:
        """Hold the run there; LaunchError, before anything is written, if another launcher holds it."""

    @abstractmethod
    def night_job(self, config: Config, name: str) -> NightJob:
        """Find the job ``name`` that started this launcher for a night; LaunchError if there is none."""

    @abstractmethod
    def end_leftovers(self, config: Config, model: str, day: date, kept: Iterable[date]) -> None:
        """End what still runs of nights of ``model`` before ``day``, except the ``kept`` ones."""
