"""A lease: one process holds it and renews it; another one takes it over once it is no longer renewed.

Other machines' clocks decide nothing. A holder is alive if its record changes while it is watched, for as long as it
promised (as in Kubernetes' own leader election). A ``Place`` says where the record is: a file of the store
(``leasefile.py``) or an object of a cluster.
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

CHECKS = 6  # of the record, and renewals of it, while a lease lasts
CLOCKS_DIFFER = 5.0  # seconds more than a renewal takes to be seen
log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Holder:
    """Who holds a lease: ``id`` of this one process, ``text`` for people, the seconds that each renewal holds.

    ``ahead``: seconds that its last renewal lies ahead of this machine's clock; None where that is not compared.
    """

    id: str
    text: str
    seconds: float
    ahead: float | None = None

    def skew(self, slack: float) -> str:
        """How far its clock is from this machine's, in words; "" where that does not show.

        ``slack``: seconds since the record may have been written.
        """
        ahead = self.ahead
        if ahead is None or -slack - CLOCKS_DIFFER <= ahead <= CLOCKS_DIFFER:
            return ""
        if ahead < 0 and slack >= self.seconds:
            return ""  # an old record: its holder may simply be dead
        way = "ahead of" if ahead > 0 else "behind"
        return f"; its clock is {abs(ahead):,.0f} s {way} this machine's; synchronize both with NTP"


class Place(Protocol):
    """Where a lease's record is, and what the lease protects.

    ``name`` and ``where``: the lease in messages; ``taken``: what a second process cannot do; ``hint``: what it may do
    instead; ``id``: this process.
    """

    name: str
    where: str
    taken: str
    hint: str
    id: str

    @property
    def settle(self) -> float:
        """Seconds until two writes at once are one for both; 0 where writes are conditional."""
        ...

    def look(self) -> Seen:
        """The record as it is now."""
        ...

    def holder(self, seen: Seen) -> Holder | None:
        """Who holds the lease as it was ``seen``; None where nobody does."""
        ...

    def put(self, seen: Seen, *, free: bool = False) -> Seen:
        """Write that this process holds the lease (``free``: nobody does); SwappedError unless it is as ``seen``."""
        ...


class Lease:
    """The lease at ``place``; ``seconds``: for how long each renewal holds."""

    def __init__(self, place: Place, seconds: float) -> None:
        self.place, self.seconds = place, seconds
        self.seen = Seen(None)
        self.lost, self._ending = False, threading.Lock()
        self._since, self._asking_since = 0.0, math.inf  # when the last renewal that held began, and the one in flight

    @contextmanager
    def held(self) -> Iterator[None]:
        """Acquire, renew in the background, release.

        A process that loses the lease, because it could not renew it in time, gets SIGTERM; its stages go on. It gets
        it before another one may take the lease, even while a renewal hangs.
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
        """Take the lease where it is free, given up, or no longer renewed; LaunchError elsewhere."""
        seen = self.place.look()
        if (holder := self.place.holder(seen)) is not None:
            seen = self._outwait(seen, holder)
        try:
            self.seen = self.place.put(seen)
        except SwappedError as other:
            raise self._taken(other.now) from None
        if self.place.settle:  # of two that wrote at once, the later one has it
            time.sleep(self.place.settle)
            now = self.place.look()
            if not self._is_mine(now) and self.place.holder(now) is not None:
                raise self._taken(now)

    def renew(self) -> bool:
        """Whether the lease was still this process's, and is now for another while."""
        try:
            self.seen = self.place.put(self.seen)
        except SwappedError as other:
            if not self._is_mine(other.now):
                return False
            self.seen = other.now  # an earlier renewal was done though its answer never came
            return self.renew()
        return True

    def release(self) -> None:
        """Leave the lease, where it is still this process's, to the next one at once."""
        try:
            self.place.put(self.seen, free=True)
        except SwappedError as other:
            if self._is_mine(other.now):
                self.seen = other.now
                self.release()

    def _outwait(self, seen: Seen, holder: Holder) -> Seen:
        """The record once the holder left the lease, or did not renew it in its own time; LaunchError once it does."""
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
        """End this process."""
        with self._ending:
            if self.lost:
                return
            self.lost = True
        sys.stderr.write(f"nightjar: this launcher lost {self.place.name}; it stops now\n")
        os.kill(os.getpid(), signal.SIGTERM)


def watched(look: Callable[[], Seen], seconds: float, seen: Seen) -> Seen:
    """What ``look`` returns as soon as that is no longer ``seen``, or once ``seconds`` are over."""
    last = time.monotonic() + seconds
    while True:
        time.sleep(seconds / CHECKS)
        now = look()
        if now != seen or time.monotonic() >= last:
            return now
