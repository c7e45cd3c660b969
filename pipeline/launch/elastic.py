"""Elastic runs on a cluster: fewer hosts where there is no room for all of them, more again once there is."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace

from pipeline.config import Config
from pipeline.core.clock import CLOCK, Clock
from pipeline.core.errors import LaunchError
from pipeline.launch.protocol import GivenUpError, Room, StageRunner
from pipeline.records.runs import Step

# Seconds between two checks of the room and the checkpoints.
CHECK_SECONDS = 2.0
log = logging.getLogger(__name__)


class NoRoomError(GivenUpError):
    """Pods of a stage find no place. ``running``: the number of its pods that have one."""

    def __init__(self, message: str, *, hint: str = "", running: int = 0) -> None:
        super().__init__(message, hint=hint)
        self.running = running


def fewest_hosts(config: Config) -> int:
    """Return the hosts below which a run does not go on: ``launch.min_hosts``, else all of them."""
    return config.launch.min_hosts or config.hardware.hosts


def allowed_pending_minutes(config: Config, hosts: int) -> float:
    """Return the minutes that pods of a stage on ``hosts`` may find no place."""
    # A run that may shrink need not wait as long: it can go on with fewer hosts.
    if hosts > fewest_hosts(config):
        return min(config.launch.shrink_after_minutes, config.launch.pending_minutes)
    return config.launch.pending_minutes


def with_fewer_hosts(config: Config, running: int) -> Config | None:
    """Return ``config`` for as many hosts as have room, at least one less; None if there would be too few.

    Checkpoints hold rows, not shards, and the batches do not depend on the ranks; so what is left to do is another
    plan. A job keeps its size: a smaller one takes its place, and every time there are fewer hosts, so this ends.

    Args:
        running: Pods that have a place.
    """
    most = config.hardware.hosts - 1
    # Gang scheduling starts all pods or none. If no pod has a place, try one host less.
    hosts = max(min(running or most, most), fewest_hosts(config))
    if hosts > most:
        return None
    # ``force`` has discarded what it should, so the run now resumes from its own checkpoints.
    return replace(config, hardware=replace(config.hardware, hosts=hosts), force=False)


def with_more_hosts(config: Config, more: int) -> Config:
    """Return ``config`` for ``more`` hosts than it has."""
    hardware = config.hardware
    return replace(config, hardware=replace(hardware, hosts=hardware.hosts + more))


class MoreRoomError(Exception):
    """A stage has ended in order to go on with ``hosts`` more hosts."""

    def __init__(self, hosts: int) -> None:
        super().__init__(f"room for {hosts} more hosts")
        self.hosts = hosts


class Growth:
    """Watches for room for hosts that a stage gave up (``launch.grow``).

    The scheduler holds the room for it, so that nobody else takes it and a node group grows for it. Once there is room
    and training has committed another checkpoint, the stage ends as on a node that is drained, and resumes from its
    newest checkpoint by a plan for more hosts. If they find no place after all, the run shrinks again.

    Args:
        missing: The number of hosts that the stage gave up.
        minutes: How long to wait before asking for room.
        patience: Minutes to wait for the rest if there is room for some.
        reached: Returns the newest checkpoint, None if the store does not answer.

    Attributes:
        requested: How many more hosts the stage was to end for, in a request whose answer is lost.
    """

    def __init__(
        self,
        runner: StageRunner,
        step: Step,
        missing: int,
        minutes: float,
        patience: float,
        reached: Callable[[], str | None],
        clock: Clock = CLOCK,
    ) -> None:
        self.runner, self.step, self.missing, self.reached, self.clock = runner, step, missing, reached, clock
        self.minutes, self.patience = minutes, patience
        self.requested = 0
        self._room: Room | None = None
        self._first_checkpoint, self._has_progress = reached(), False
        self.postpone()

    def postpone(self) -> None:
        """Give the room back, and ask for it again after ``minutes``."""
        self.leave()
        self._next = self.clock.monotonic() + 60 * self.minutes
        self._since: float | None = None
        self._checkpoint: str | None = None

    def leave(self) -> None:
        """Give the room back."""
        if self._room is not None:
            self._room.leave()
        self._room = None

    def due(self) -> int:
        """Return how many hosts to take now: there is room, and a checkpoint is committed since; 0: none yet."""
        if self.clock.monotonic() < self._next:
            return 0
        self._next = self.clock.monotonic() + CHECK_SECONDS
        try:
            return self._due()
        except LaunchError as error:
            log.warning("%-10s cannot ask for more hosts: %s", self.step.name, error.message)
            self.postpone()
            return 0

    def _due(self) -> int:
        # A stage without a new checkpoint may itself still wait for room, which must not be taken from it.
        if not self._has_progress:
            now = self.reached()
            self._has_progress = _moved(self._first_checkpoint, now)
            if self._first_checkpoint is None:
                self._first_checkpoint = now
            if not self._has_progress:
                return 0
        if self._room is None:
            self._room = self.runner.room(self.step, self.missing)
            log.info("%-10s asks for room for %d more hosts", self.step.name, self.missing)
        hosts = self._room.hosts()
        # The room was taken away, or has been held for long enough.
        if hosts is None:
            self.postpone()
        # Room must last without a break, so the wait starts over when it is gone.
        if not hosts:
            self._since = self._checkpoint = None
            return 0
        if self._since is None:
            self._since = self.clock.monotonic()
        if hosts < self.missing and self.clock.monotonic() < self._since + 60 * self.patience:
            return 0
        now = self.reached()
        if self._checkpoint is None:
            self._checkpoint = now
            if now is not None:
                log.info("%-10s takes %d more hosts after its next checkpoint", self.step.name, hosts)
        return hosts if _moved(self._checkpoint, now) else 0


def _moved(before: str | None, now: str | None) -> bool:
    # None means that the store did not answer, which is not progress.
    return before is not None and now is not None and now != before
