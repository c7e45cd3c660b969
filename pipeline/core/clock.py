"""Time as leases, deadlines and grace periods see it: the functions of ``time``, in an object that a test replaces."""

from __future__ import annotations

import threading
import time


class Clock:
    """The clock of this machine. Code that waits takes one as its argument ``clock``, with ``CLOCK`` as the default."""

    def time(self) -> float:
        """Return seconds since the epoch, as other machines know them too."""
        return time.time()

    def monotonic(self) -> float:
        """Return seconds of a clock that nobody sets, and that stands still while the machine is suspended."""
        return time.monotonic()

    def boottime(self) -> float:
        """Return seconds of a clock that nobody sets, and that goes on while the machine is suspended."""
        # Leases need it: they expire while a machine is suspended, and other machines do not wait for it.
        return time.clock_gettime(time.CLOCK_BOOTTIME)

    def sleep(self, seconds: float) -> None:
        """Let ``seconds`` pass."""
        time.sleep(seconds)

    def wait(self, event: threading.Event, seconds: float) -> bool:
        """Wait for ``event`` for up to ``seconds``; returns whether it is set."""
        return event.wait(seconds)


CLOCK = Clock()
