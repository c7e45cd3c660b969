"""A lease: held by one process at a time, which renews it, and taken over by another once it is not renewed any more.

Times of other machines decide nothing: whether the holder lives shows in its record changing while it is watched, for
as long as it promised (as in Kubernetes' own leader election). So clocks may be wrong. Where the record lies is for
those who use it: ``kubernetes/lease.py`` (an object of the cluster), ``schedule/lock.py`` (a file of the store).
"""

from __future__ import annotations

import math
import os
import signal
import sys
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import TypeVar

from pipeline.errors import LaunchError

CHECKS = 6  # of the record, and renewals of it, while a lease lasts
Seen = TypeVar("Seen")


class Lease(ABC):
    """``name``: as the holder is told once it is lost; ``seconds``: for how long each renewal holds."""

    def __init__(self, name: str, seconds: float) -> None:
        self.name, self.seconds = name, seconds
        self.lost, self._telling = False, threading.Lock()
        self._since, self._asking_since = 0.0, math.inf  # when the last renewal that held began, and the one in flight

    @abstractmethod
    def acquire(self) -> None:
        """Take the lease where it is free, given up, or not renewed any more; LaunchError elsewhere."""

    @abstractmethod
    def renew(self) -> bool:
        """Whether the lease was still this process's, and is now for another while."""

    @abstractmethod
    def release(self) -> None:
        """Leave the lease, where it is still this process's, to the next one at once."""

    @contextmanager
    def held(self) -> Iterator[None]:
        """Acquire, renew in the background, release.

        A process that loses it, for it could not renew it in time, is told to end (SIGTERM); its stages go on. It is
        told before another one may take the lease, and also where a renewal hangs.
        """
        self.acquire()
        self._since, ended = time.monotonic(), threading.Event()
        keeper = threading.Thread(target=self._keep, args=(ended,), name="lease", daemon=True)
        try:
            keeper.start()
            threading.Thread(target=self._watch, args=(ended,), name="lease-watch", daemon=True).start()
        except RuntimeError as error:  # a limit of processes is reached; without a keeper the lease would be lost
            ended.set()
            self._leave()
            raise LaunchError(
                f"{self.name} cannot be kept: {error}",
                hint="the same command once the machine has room; look at ulimit -u and the container's pids limit",
            ) from error
        try:
            yield
        finally:
            ended.set()
            keeper.join(self.seconds)
            if not self.lost and not keeper.is_alive():
                self._leave()

    def _leave(self) -> None:
        """Release; where the store does not answer the next launcher waits for this one's time to end."""
        with suppress(Exception):  # clients of object stores have error classes of their own
            self.release()

    def _keep(self, ended: threading.Event) -> None:
        while not self.lost and not ended.wait(self.seconds / CHECKS):
            self._asking_since = time.monotonic()
            with suppress(Exception):  # it is tried again until the lease is over; nothing may end this thread
                if not self.renew():
                    self._lose()
                    return
                self._since = self._asking_since  # it holds from the write on, whenever the answer came
            self._asking_since = math.inf
            if self._is_over():
                self._lose()
                return

    def _watch(self, ended: threading.Event) -> None:
        """The keeper cannot tell that the lease is over while it waits for an answer."""
        while not ended.wait(self.seconds / CHECKS / 4):
            if time.monotonic() - self._asking_since > self.seconds / CHECKS and self._is_over():
                self._lose()
                return

    def _is_over(self) -> bool:
        """Whether another process may soon take the lease; a little early, for it counts by its own clock."""
        return time.monotonic() - self._since > self.seconds * (1 - 1 / CHECKS)

    def _lose(self) -> None:
        """Tell the process to end."""
        with self._telling:
            if self.lost:
                return
            self.lost = True
        sys.stderr.write(f"nightjar: this launcher lost {self.name}; it ends here\n")
        os.kill(os.getpid(), signal.SIGTERM)


def watched(look: Callable[[], Seen], seconds: float, seen: object) -> Seen:
    """What ``look`` says as soon as that is no longer ``seen``, or once ``seconds`` are over."""
    last = time.monotonic() + seconds
    while True:
        time.sleep(seconds / CHECKS)
        now = look()
        if now != seen or time.monotonic() >= last:
            return now
