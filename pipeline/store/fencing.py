"""Holds the main thread still while this process may have lost a lease, and ends it if it has.

A thread that keeps a lease cannot stop the others. A signal can: its handler runs in the main thread between two
instructions, also while that waits for a network or a child, and does not return before the lease is renewed. SIGURG is
used because a process that has no handler for it ignores it.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Protocol

from pipeline.core.clock import Clock
from pipeline.core.errors import LostLeaseError

SIGNAL = signal.SIGURG
CHECK_SECONDS = 0.05
# Seconds in which the main thread can end by itself before the process is ended.
LAST_SECONDS = 0.5


class Paused(Protocol):
    """What the main thread waits for."""

    def check(self) -> bool:
        """Whether it may go on; raises LostLeaseError or another error if it must end."""
        ...


_waiting_for: list[Paused] = []
_is_held = threading.Event()


def can_pause() -> bool:
    """Whether this is the main thread, which can be held."""
    return threading.current_thread() is threading.main_thread()


@contextmanager
def pausable() -> Iterator[None]:
    """Let ``hold`` hold the main thread in this context, which only the main thread may enter. May be nested."""
    former = signal.signal(SIGNAL, _wait)
    try:
        yield
    finally:
        signal.signal(SIGNAL, former)


def hold(what: Paused) -> None:
    """Hold the main thread until ``what`` lets it go on. Called in another thread, as often as need be."""
    if what not in _waiting_for:
        _waiting_for.append(what)
    # A thread that is held already checks the whole list, so it needs no further signal.
    if not _is_held.is_set():
        signal.pthread_kill(threading.main_thread().ident or 0, SIGNAL)


def _wait(number: int, frame: FrameType | None) -> None:
    # A signal may arrive while an earlier one holds the thread.
    if _is_held.is_set():
        return
    _is_held.set()
    try:
        while _waiting_for:
            # A copy, because threads that watch leases may add to the list meanwhile.
            for what in list(_waiting_for):
                try:
                    goes_on = what.check()
                except BaseException:
                    _waiting_for.remove(what)
                    raise
                if goes_on:
                    _waiting_for.remove(what)
            if _waiting_for:
                time.sleep(CHECK_SECONDS)
    finally:
        _is_held.clear()


def tell(text: str) -> None:
    """Write a line to standard error."""
    # os.write needs none of the locks that the held main thread may hold.
    os.write(2, f"nightjar: {text}\n".encode())


def end_soon(ended: threading.Event, clock: Clock) -> None:
    """End this process, unless its main thread sets ``ended`` within LAST_SECONDS. Children end with it."""
    if not clock.wait(ended, LAST_SECONDS):
        os._exit(LostLeaseError.exit_code)
