"""Slow threads where they meet, in every process that Python starts: `make test-slow-main` and `test-slow-others`.

On a quiet machine the thread that was first once is first always, so a test that a race decides passes for months. Here
the main thread or all other threads (``SLOW_THREADS``: main or others) wait some milliseconds before and after they
take a lock of a condition, set or await an event, use a queue, hand work to a pool, or start. What passes both ways
does not depend on who is first at these places.

Python imports a module of this name by itself, so it reaches processes that tests start, too.
"""

from __future__ import annotations

import functools
import os
import queue
import random
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

SLOW = os.environ.get("SLOW_THREADS", "")
SHORT, LONG = 0.004, 0.01  # seconds
LIMIT = 3000  # waits of a process, so that a loop over a queue does not take an hour

_draws = random.Random(os.getpid())
_waits = 0


def wait(seconds: float, probability: float = 0.5) -> None:
    """Wait, if this thread is a slow one and the draw says so."""
    global _waits
    is_main = threading.get_ident() == threading.main_thread().ident
    if is_main == (SLOW == "main") and _waits < LIMIT and _draws.random() < probability:
        _waits += 1
        time.sleep(seconds)


def wait_around(owner: type, name: str, seconds: float = SHORT) -> None:
    """Make a slow thread wait before and after the method ``name`` of ``owner``."""
    method = getattr(owner, name)

    @functools.wraps(method)
    def slowed(self: Any, *arguments: Any, **options: Any) -> Any:
        wait(seconds)
        result = method(self, *arguments, **options)
        wait(seconds)
        return result

    setattr(owner, name, slowed)


def wait_at_conditions() -> None:
    """Make a slow thread wait before it takes a condition's lock, and after it let go of it."""
    enter, leave = threading.Condition.__enter__, threading.Condition.__exit__

    def entered(self: threading.Condition) -> bool:
        wait(SHORT, 0.3)
        return enter(self)

    def left(self: threading.Condition, *error: Any) -> None:
        leave(self, *error)
        wait(SHORT, 0.3)

    threading.Condition.__enter__, threading.Condition.__exit__ = entered, left  # type: ignore[method-assign]


def begin_late() -> None:
    """Make a slow thread wait before it begins, or after it started another one."""
    start = threading.Thread.start

    def started(self: threading.Thread) -> None:
        if SLOW == "others":
            self.run = late(self.run)  # type: ignore[method-assign]
        start(self)
        if SLOW == "main":
            wait(LONG, 1.0)

    threading.Thread.start = started  # type: ignore[method-assign]


def late(run: Callable[[], None]) -> Callable[[], None]:
    """``run``, a while later."""

    def waits_first() -> None:
        time.sleep(LONG)
        run()

    return waits_first


if SLOW in ("main", "others"):
    for owner, names in ((threading.Event, ("set", "wait")), (queue.Queue, ("put", "get"))):
        for name in names:
            wait_around(owner, name)
    wait_around(ThreadPoolExecutor, "submit", LONG)
    wait_at_conditions()
    begin_late()
