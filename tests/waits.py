"""How tests wait: for an event, by a clock that they turn themselves, or not at all where the code pauses."""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NoReturn, TypeVar
from unittest import mock

import pytest

from pipeline.core import retrying
from pipeline.core.clock import CLOCK, Clock

PATIENCE = 600.0  # seconds; what happens at all happens within them on any machine
LOOK_SECONDS = 0.01  # between two looks
Found = TypeVar("Found")


def until(
    look: Callable[[], Found], why: Callable[[], str] = str, seconds: float = PATIENCE, every: float = LOOK_SECONDS
) -> Found:
    """Look until something is found.

    The limit decides nothing: only what never comes takes all of it.

    Args:
        look: Gives what is waited for; anything false means that it is not there yet.
        why: Gives the text of the AssertionError.
        seconds: How long to look.
        every: Seconds between two looks.

    Returns:
        What ``look`` gave.
    """
    last = time.monotonic() + seconds
    while not (found := look()):
        if time.monotonic() > last:
            raise AssertionError(f"nothing within {seconds:g} s: {why()}")
        time.sleep(every)
    return found


def be_interrupted() -> NoReturn:
    """Wait for the exception that a signal raises in this thread."""
    threading.Event().wait(PATIENCE)
    raise AssertionError("nothing has interrupted the wait")


class TurnedClock(Clock):
    """A clock that stands still until a test turns it.

    With ``runs``, a ``sleep`` turns it by the seconds it is to last, so code of one thread never waits. Without, who
    sleeps waits until somebody turns the clock, as who waits for an event always does.
    """

    def __init__(self, *, runs: bool = True) -> None:
        self.runs, self._now, self._changed = runs, 0.0, threading.Lock()
        self._ends: dict[int, float] = {}  # until when each waiting thread waits

    def stand_in(self, patch: pytest.MonkeyPatch) -> None:
        """Be the machine's clock until the test ends, for code that nobody hands another one."""
        for name in ("time", "monotonic", "boottime", "sleep", "wait"):
            patch.setattr(CLOCK, name, getattr(self, name))

    def time(self) -> float:
        """Return the seconds since the epoch at the start, 2026-01-05, and those that the clock was turned by."""
        return 1_767_571_200.0 + self._now

    def monotonic(self) -> float:
        """Return by how many seconds the clock was turned."""
        return self._now

    def boottime(self) -> float:
        """Return by how many seconds the clock was turned."""
        return self._now

    def turn(self, seconds: float) -> None:
        """Let ``seconds`` pass at once."""
        with self._changed:
            self._now += seconds

    def turn_to(self, seconds: float) -> None:
        """Let time pass until ``seconds`` after the start."""
        with self._changed:
            self._now = seconds

    def sleep(self, seconds: float) -> None:
        """Turn the clock, or wait until it was turned by ``seconds``."""
        if self.runs:
            self.turn(seconds)
        else:
            self.wait(threading.Event(), seconds)

    def wait(self, event: threading.Event, seconds: float) -> bool:
        """Wait until ``event`` is set or the clock was turned by ``seconds``; returns whether it is set."""
        end = self._ends[threading.get_ident()] = self._now + seconds
        try:
            until(lambda: event.is_set() or self._now >= end)
        finally:
            del self._ends[threading.get_ident()]
        return event.is_set()

    def waiting(self) -> int:
        """Return how many threads wait for a time that has not come: those that are not busy."""
        return sum(end > self._now for end in list(self._ends.values()))

    @contextmanager
    def turning(self, seconds: float, when: Callable[[], bool]) -> Iterator[None]:
        """Within: turn the clock by ``seconds`` each time that ``when`` holds, in a thread of its own."""
        over = threading.Event()

        def turn() -> None:
            while not over.wait(LOOK_SECONDS):
                if when():
                    self.turn(seconds)

        thread = threading.Thread(target=turn)
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join()


@contextmanager
def no_waits() -> Iterator[None]:
    """As many tries as ever, and no pauses, of stores and of ranks."""
    from pipeline.checkpoint import collectives

    none = tuple(0.0 for _ in collectives.PAUSES)
    with mock.patch.object(retrying, "FIRST_SECONDS", 0.0), mock.patch.object(collectives, "PAUSES", none):
        yield
