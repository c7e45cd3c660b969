"""Signals that end a launcher, as exceptions, so that children are stopped and ``result.json`` is written."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import NoReturn

from pipeline.core.errors import SIGNALLED, LaunchError

ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Interrupted(BaseException):
    """A signal asked the launcher to end; ``exit_code`` is 128 plus its number, as in shells."""

    def __init__(self, number: int, words: str = "") -> None:
        message = f"stopped by {signal.Signals(number).name}"
        if words:
            message += f"; {words}"
        super().__init__(message)
        self.number, self.exit_code = number, SIGNALLED + number


@contextmanager
def handled() -> Iterator[None]:
    """Make SIGINT, SIGTERM and SIGHUP raise Interrupted in the main thread; elsewhere nothing changes."""
    # Only the main thread may set signal handlers.
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def interrupt(number: int, frame: FrameType | None) -> NoReturn:
        raise Interrupted(number)

    former = {number: signal.signal(number, interrupt) for number in ENDING}
    try:
        yield
    finally:
        for number, handler in former.items():
            signal.signal(number, handler)


@contextmanager
def deadline(stage: str, minutes: float) -> Iterator[None]:
    """Raise LaunchError once ``minutes`` have passed (main thread only)."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def expire(number: int, frame: FrameType | None) -> NoReturn:
        raise LaunchError(
            f"the {stage} stage was stopped at its deadline of {minutes:g} minutes",
            hint=f"launch.deadline_minutes={2 * minutes:g}",
        )

    # Use a kernel timer, because a stage in this process has no loop that could check a clock.
    former = signal.signal(signal.SIGALRM, expire)
    try:
        signal.setitimer(signal.ITIMER_REAL, 60 * minutes)
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, former)
