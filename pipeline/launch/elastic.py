"""Elastic runs on a cluster: fewer hosts where there is no room for all of them, more again once there is."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace

from pipeline.clock import CLOCK, Clock
from pipeline.config import Config
from pipeline.errors import LaunchError
from pipeline.launch.protocol import GivenUpError, Room, StageRunner
from pipeline.records.runs import Step

LOOK_SECONDS = 2.0  # between two looks at the room and the checkpoints
log = logging.getLogger(__name__)


class NoRoomError(GivenUpError):
    """Pods of a stage find no place. ``running``: how many of its pods have one."""

    def __init__(self, message: str, *, hint: str = "", running: int = 0) -> None:
        super().__init__(message, hint=hint)
        self.running = running


def fewest_hosts(config: Config) -> int:
    """Hosts below which a run does not go on: ``launch.min_hosts``, else all of them."""
    return config.launch.min_hosts or config.hardware.hosts


def allowed_pending_minutes(config: Config, hosts: int) -> float:
    """Minutes that pods of a stage on ``hosts`` may find no place."""
    if hosts > fewest_hosts(config):
        return min(config.launch.shrink_after_minutes, config.launch.pending_minutes)
    return config.launch.pending_minutes


def with_fewer_hosts(config: Config, running: int) -> Config | None:
    """``config`` for as many hosts as have room, at least one less; None where there would be too few.

    Checkpoints hold rows, not shards, and the batches do not depend on the ranks; so what is left to do is another
    plan. A job keeps its size: a smaller one takes its place, and every time there are fewer hosts, so this ends.

    ``running``: pods that have a place; where it is none (gang scheduling starts all or none) one host less is tried.
    Nothing is forced any more: what ``force`` throws away is thrown away, and the checkpoints since are to go on from.
    """
    most = config.hardware.hosts - 1
    hosts = max(min(running or most, most), fewest_hosts(config))
    if hosts > most:
        return None
    return replace(config, hardware=replace(config.hardware, hosts=hosts), force=False)


class MoreRoomError(Exception):
    """A stage has ended to go on with ``hosts`` more hosts."""

    def __init__(self, hosts: int) -> None:
        super().__init__(f"room for {hosts} more hosts")
        self.hosts = hosts


class Growth:
    """Watches for room for hosts that a stage gave up (``launch.grow``).

    The scheduler takes the room for it, so that nobody else does and a node group grows for it. Once there is some and
    training has committed another checkpoint, the stage is told to end as on a node that is drained, and goes on from
    its newest checkpoint by a plan for more hosts. If they find no place after all, the run shrinks again. A stage that
    has committed no checkpoint yet may itself wait for room, which nothing is to take from it.

    ``missing``: how many; ``minutes``: before it asks for room; ``patience``: how many minutes it waits for the rest
    where there is room for some; ``reached()``: the newest checkpoint, None where the store does not say. ``told``: for
    how many more hosts the stage was to end, in a request whose answer is lost.
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
        self.told = 0
        self._room: Room | None = None
        self._began, self._goes_on = reached(), False
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
        """How many hosts to take now: there is room for them, and a checkpoint is committed since; 0: none yet."""
        if self.clock.monotonic() < self._next:
            return 0
        self._next = self.clock.monotonic() + LOOK_SECONDS
        try:
            return self._due()
        except LaunchError as error:
            log.warning("%-10s cannot ask for more hosts: %s", self.step.name, error.message)
            self.postpone()
            return 0

    def _due(self) -> int:
        if not self._has_progress():
            return 0
        if self._room is None:
            self._room = self.runner.room(self.step, self.missing)
            log.info("%-10s asks for room for %d more hosts", self.step.name, self.missing)
        hosts = self._room.hosts()
        if hosts is None:  # it was taken away, or held for long enough
            self.postpone()
        if not hosts:
            self._since = self._checkpoint = None
            return 0
        self._since = self.clock.monotonic() if self._since is None else self._since
        if hosts < self.missing and self.clock.monotonic() < self._since + 60 * self.patience:
            return 0
        now = self.reached()
        if self._checkpoint is None:
            self._checkpoint = now
            if now is not None:
                log.info("%-10s takes %d more hosts after its next checkpoint", self.step.name, hosts)
        return hosts if None not in (now, self._checkpoint) and now != self._checkpoint else 0

    def _has_progress(self) -> bool:
        """Whether the stage has committed a checkpoint since it is watched."""
        if not self._goes_on:
            now = self.reached()
            self._goes_on = None not in (now, self._began) and now != self._began
            self._began = now if self._began is None else self._began
        return self._goes_on


def with_more_hosts(config: Config, more: int) -> Config:
    """``config`` for ``more`` hosts than it has."""
    hardware = config.hardware
    return replace(config, hardware=replace(hardware, hosts=hardware.hosts + more))
