"""A lease: one process holds and renews it, and another takes it over once it is no longer renewed.

No clocks of different machines are compared. A holder is alive if its record changes within the time that it promised,
as in Kubernetes' leader election. A ``Place`` stores the record: a file (``leasefile.py``) or an object of a cluster.
"""

from __future__ import annotations

import logging
import math
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Protocol

from pipeline.errors import LaunchError
from pipeline.store.conditional import Seen, SwappedError
from pipeline.store.refusals import taken

CHECKS = 6  # checks, and renewals, of the record per lease duration
CLOCKS_DIFFER = 5.0  # seconds beyond the time that a renewal takes to be seen
log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Holder:
    """The holder of a lease: its process ``id``, a ``text`` for messages, and the ``seconds`` that a renewal lasts.

    ``ahead``: seconds by which its last renewal is ahead of this machine's clock; None if unknown.
    """

    id: str
    text: str
    seconds: float
    ahead: float | None = None

    def skew(self, slack: float) -> str:
        """The difference between its clock and this machine's, in words; "" if there is none to see.

        ``slack``: largest age of the record in seconds.
        """
        ahead = self.ahead
        if ahead is None or -slack - CLOCKS_DIFFER <= ahead <= CLOCKS_DIFFER:
            return ""
        if ahead < 0 and slack >= self.seconds:
            return ""  # an old record: its holder may simply be dead
        way = "ahead of" if ahead > 0 else "behind"
        return f"; its clock is {abs(ahead):,.0f} s {way} this machine's; synchronize both with NTP"


class Place(Protocol):
    """Where the record of a lease is, and what the lease protects.

    ``name`` and ``where`` describe the lease in messages. ``taken`` says why a second process cannot work, and ``hint``
    what to do instead. ``id``: this process.
    """

    name: str
    where: str
    taken: str
    hint: str
    id: str

    @property
    def settle(self) -> float:
        """Seconds until both of two simultaneous writers see the same record; 0 with conditional writes."""
        ...

    def look(self) -> Seen:
        """Read the record."""
        ...

    def holder(self, seen: Seen) -> Holder | None:
        """The holder in the ``seen`` record; None if there is none."""
        ...

    def put(self, seen: Seen, *, free: bool = False) -> Seen:
        """Write this process (with ``free``, nobody) as the holder; SwappedError if the record is not as ``seen``."""
        ...


class Lease:
    """The lease at ``place``. ``seconds``: how long each renewal lasts."""

    def __init__(self, place: Place, seconds: float) -> None:
        self.place, self.seconds = place, seconds
        self.seen = Seen(None)
        self.lost, self._ending = False, threading.Lock()
        self._since, self._asking_since = 0.0, math.inf  # when the last successful renewal began, and the one in flight

    @contextmanager
    def held(self) -> Iterator[None]:
        """Acquire the lease, renew it in the background, and release it.

        A process that cannot renew its lease in time gets SIGTERM, before another one can take the lease and even while
        a renewal hangs. Its stages on a cluster continue.
        """
        self.acquire()
        self._since, ended = time.monotonic(), threading.Event()
        keeper = threading.Thread(target=self._keep, args=(ended,), name="lease", daemon=True)
        try:
            keeper.start()
            threading.Thread(target=self._watch, args=(ended,), name="lease-watch", daemon=True).start()
        except RuntimeError as error:  # no threads left; the lease could not be renewed
            ended.set()
            self._leave()
            raise LaunchError(
                f"{self.place.name} cannot be kept: {error}",
                hint="run the same command once the machine has room; check ulimit -u and the container's pids limit",
            ) from error
        try:
            yield
        finally:
            ended.set()
            keeper.join(self.seconds)
            if not self.lost and not keeper.is_alive():
                self._leave()

    def acquire(self) -> None:
        """Take the lease if it is free or no longer renewed; else LaunchError."""
        seen = self.place.look()
        if (holder := self.place.holder(seen)) is not None:
            seen = self._outwait(seen, holder)
        try:
            self.seen = self.place.put(seen)
        except SwappedError as other:
            raise self._taken(other.now) from None
        if self.place.settle:  # of two simultaneous writers, the later one wins
            time.sleep(self.place.settle)
            now = self.place.look()
            if not self._is_mine(now) and self.place.holder(now) is not None:
                raise self._taken(now)

    def renew(self) -> bool:
        """Renew the lease; returns whether this process still held it."""
        try:
            self.seen = self.place.put(self.seen)
        except SwappedError as other:
            if not self._is_mine(other.now):
                return False
            self.seen = other.now  # an earlier renewal succeeded, but its answer was lost
            return self.renew()
        return True

    def release(self) -> None:
        """Free the lease if this process still holds it."""
        try:
            self.place.put(self.seen, free=True)
        except SwappedError as other:
            if self._is_mine(other.now):
                self.seen = other.now
                self.release()

    def _outwait(self, seen: Seen, holder: Holder) -> Seen:
        """The record once the holder released the lease or failed to renew it in time; LaunchError if it renews it."""
        log.info(
            "%s holds %s: waiting %g s to see whether it renews its lease%s",
            holder.text, self.place.name, holder.seconds, holder.skew(holder.seconds),
        )  # fmt: skip
        now = watched(self.place.look, holder.seconds, seen)
        if now == seen:
            log.warning("%s did not renew its lease for %g s: taking it over", holder.text, holder.seconds)
        elif self.place.holder(now) is not None:
            raise self._taken(now)
        return now

    def _is_mine(self, seen: Seen) -> bool:
        holder = self.place.holder(seen)
        return holder is not None and holder.id == self.place.id

    def _taken(self, seen: Seen) -> LaunchError:
        holder = self.place.holder(seen)
        if holder is None:
            return LaunchError(f"{self.place.taken}: another launcher just ended", hint="run the same command again")
        where = f"{self.place.where}{holder.skew(self.seconds / CHECKS)}"
        return taken(self.place.taken, holder.text, where, self.place.hint)

    def _leave(self) -> None:
        """Release. If the store does not answer, the next launcher waits until the lease expires."""
        with suppress(Exception):  # object store clients have their own error classes
            self.release()

    def _keep(self, ended: threading.Event) -> None:
        while not self.lost and not ended.wait(self.seconds / CHECKS):
            self._asking_since = time.monotonic()
            with suppress(Exception):  # try again until the lease is over; nothing may end this thread
                if not self.renew():
                    self._lose()
                    return
                self._since = self._asking_since  # it counts from the write, not from the answer
            self._asking_since = math.inf
            if self._is_over():
                self._lose()
                return

    def _watch(self, ended: threading.Event) -> None:
        """Notice the end of the lease while the keeper waits for an answer."""
        while not ended.wait(self.seconds / CHECKS / 4):
            if time.monotonic() - self._asking_since > self.seconds / CHECKS and self._is_over():
                self._lose()
                return

    def _is_over(self) -> bool:
        """Whether another process may soon take the lease; a little early, because clocks differ."""
        return time.monotonic() - self._since > self.seconds * (1 - 1 / CHECKS)

    def _lose(self) -> None:
        """End this process."""
        with self._ending:
            if self.lost:
                return
            self.lost = True
        sys.stderr.write(f"nightjar: this launcher lost {self.place.name}; it stops now\n")
        os.kill(os.getpid(), signal.SIGTERM)


def watched(look: Callable[[], Seen], seconds: float, seen: Seen) -> Seen:
    """What ``look`` returns once that differs from ``seen``, or after ``seconds``."""
    last = time.monotonic() + seconds
    while True:
        time.sleep(seconds / CHECKS)
        now = look()
        if now != seen or time.monotonic() >= last:
            return now
