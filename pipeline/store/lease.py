"""A lease: one process holds and renews it, and another takes it over once it is no longer renewed.

No clocks of different machines are compared. A holder is alive if its record changes within the time that it promised,
as in Kubernetes' leader election. A ``LeaseTarget`` stores the record: a file (``LeaseFile``) or an object of a
cluster.

A holder that cannot renew in time stands still before anybody may take its lease (``fencing.py``). When the place
answers again, it goes on if the record is still its own, and ends if it is not: an outage that keeps everybody from
the record ends nobody.
"""

from __future__ import annotations

import json
import logging
import math
import os
import signal
import socket
import threading
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from typing import Protocol

from pipeline.clock import CLOCK, Clock
from pipeline.errors import ArtifactError, LaunchError, LostLeaseError
from pipeline.store.conditional import Seen, SwappedError, is_conditional, read_marked, swap
from pipeline.store.errors import taken
from pipeline.store.fencing import can_pause, end_soon, hold, pausable, tell
from pipeline.store.files import Files
from pipeline.store.retrying import passes
from pipeline.units import duration

CHECKS = 6  # checks, and renewals, of the record per lease duration
ACQUIRE_SECONDS = 2.0  # that a place may not answer when its lease is taken
LEAST_SECONDS = 1.0  # for the answer to a renewal
OUTAGE_SECONDS = 600.0  # that a holder stands still before it gives up
SETTLE_SECONDS = 1.0  # without conditional writes, until two simultaneous writers see the same file
CLOCKS_DIFFER = 5.0  # seconds beyond the time that a renewal takes to be seen
_FIELDS = {"owner", "host", "pid", "doing", "renewed", "seconds"}  # of the record in a ``LeaseFile``
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


class LeaseTarget(Protocol):
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
    def agreement_delay(self) -> float:
        """Seconds until both of two simultaneous writers see the same record; 0 with conditional writes."""
        ...

    def read(self) -> Seen:
        """Read the record."""
        ...

    def holder(self, seen: Seen) -> Holder | None:
        """The holder in the ``seen`` record; None if there is none."""
        ...

    def put(self, seen: Seen, *, free: bool = False) -> Seen:
        """Write this process (with ``free``, nobody) as the holder; SwappedError if the record is not as ``seen``."""
        ...


def request_seconds(seconds: float) -> float:
    """How long one request may take for a lease of ``seconds``."""
    return max(LEAST_SECONDS, seconds / CHECKS)


class Lease:
    """The lease at ``place``. ``seconds``: how long each renewal lasts.

    ``acquire_seconds``: how long the place may not answer when the lease is taken; ``outage_seconds``: when it is held.
    """

    def __init__(
        self,
        place: LeaseTarget,
        seconds: float,
        *,
        acquire_seconds: float = ACQUIRE_SECONDS,
        outage_seconds: float = OUTAGE_SECONDS,
        clock: Clock = CLOCK,
    ) -> None:
        self.place, self.seconds, self.clock = place, seconds, clock
        self.acquire_seconds, self.outage_seconds = acquire_seconds, outage_seconds
        self.seen = Seen(None)
        self.lost, self._ending = False, threading.Lock()
        self._paused, self._can_pause, self._ended = False, False, threading.Event()
        self._since = 0.0  # when the last successful renewal began

    @contextmanager
    def held(self) -> Iterator[None]:
        """Acquire the lease, renew it in the background, and release it.

        A process that cannot renew it in time stands still, before another one can take it and even while a renewal
        hangs. LostLeaseError is raised in the main thread where another one has it, LaunchError where nobody knows for
        ``outage_seconds``. Outside of the main thread, both are a SIGTERM. Stages on a cluster continue.
        """
        began = self.clock.boottime()
        self.acquire()
        self._since, self._can_pause = max(began, self._since), can_pause()
        keeper = threading.Thread(target=self._keep, name="lease", daemon=True)
        with pausable() if self._can_pause else nullcontext():
            try:
                keeper.start()
                threading.Thread(target=self._watch, name="lease-watch", daemon=True).start()
            except RuntimeError as error:  # no threads left; the lease could not be renewed
                self._ended.set()
                self._leave()
                raise LaunchError(
                    f"{self.place.name} cannot be kept: {error}",
                    hint="run the same command once the machine has room; check ulimit -u and the container's pids "
                    "limit",
                ) from error
            try:
                yield
            finally:
                self._ended.set()
                keeper.join(self.seconds)
                if not self.lost and not keeper.is_alive():
                    self._leave()

    def acquire(self) -> None:
        """Take the lease if it is free or no longer renewed; else LaunchError."""
        seen = self._asked(self.place.read)
        if (holder := self.place.holder(seen)) is not None:
            seen = self._outwait(seen, holder)
        self._since = self.clock.boottime()
        try:
            self.seen = self._asked(lambda: self.place.put(seen))
        except SwappedError as other:
            if not self._is_mine(other.now):  # else an earlier try succeeded, but its answer was lost
                raise self._taken(other.now) from None
            self.seen = other.now
        if self.place.agreement_delay:  # of two simultaneous writers, the later one wins
            self.clock.sleep(self.place.agreement_delay)
            there = self.place.read()
            if not self._is_mine(there) and self.place.holder(there) is not None:
                raise self._taken(there)

    def _asked(self, ask: Callable[[], Seen]) -> Seen:
        """What ``ask`` returns, asked again while the place does not answer, for up to ``acquire_seconds``."""
        last = self.clock.boottime() + self.acquire_seconds
        while True:
            try:
                return ask()
            except Exception as error:
                if self.clock.boottime() >= last or not passes(error):
                    raise
            self.clock.sleep(min(1.0, self.seconds / CHECKS))

    def renew(self) -> bool:
        """Renew the lease; returns whether this process still held it, or nobody did."""
        try:
            self.seen = self.place.put(self.seen)
        except SwappedError as other:
            if not self._is_mine(other.now) and self.place.holder(other.now) is not None:
                return False
            self.seen = other.now  # an earlier renewal succeeded, but its answer was lost; or somebody removed it
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
            holder.text,
            self.place.name,
            holder.seconds,
            holder.skew(holder.seconds),
        )
        there = watched(self.place.read, holder.seconds, seen, self.acquire_seconds, self.clock)
        if there == seen:
            log.warning("%s did not renew its lease for %g s: taking it over", holder.text, holder.seconds)
        elif self.place.holder(there) is not None:
            raise self._taken(there)
        return there

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

    def _keep(self) -> None:
        """Renew, sooner after a failure; nothing may end this thread."""
        pause = self.seconds / CHECKS
        while not self.lost and not self.clock.wait(self._ended, pause):
            began = self.clock.boottime()
            pause = min(1.0, self.seconds / CHECKS)
            with suppress(Exception):  # try again
                if not self.renew():
                    self._lose()
                    return
                self._since, pause = began, self.seconds / CHECKS  # it counts from the write, not from the answer
                self._go_on()

    def _watch(self) -> None:
        """Notice the end of the lease, also while the keeper waits for an answer."""
        while not self.lost and not self.clock.wait(self._ended, self.seconds / CHECKS / 4):
            if self._is_over():
                self._pause()

    def _is_over(self) -> bool:
        """Whether another process may soon take the lease; a little early, because clocks differ."""
        return self._silent_seconds() > self.seconds * (1 - 1 / CHECKS)

    def _silent_seconds(self) -> float:
        """Seconds since the last successful renewal began."""
        return self.clock.boottime() - self._since

    def _pause(self) -> None:
        """Let the main thread stand still; again, should it have gone on."""
        if not self._can_pause:
            self._lose()
            return
        if not self._paused:
            self._paused = True
            tell(
                f"{self.place.name} was not renewed for {self._silent_seconds():.0f} s: waiting, and doing nothing else"
            )
        hold(self)

    def _go_on(self) -> None:
        if self._paused:
            self._paused = False
            tell(f"{self.place.name} is renewed: going on")

    def check(self) -> bool:
        """Whether the main thread may go on (``fencing.py``)."""
        if self.lost:
            raise LostLeaseError(f"another launcher has {self.place.name}")
        if self._paused and (silent := self._silent_seconds()) > self.outage_seconds + self.seconds:
            raise LaunchError(
                f"{self.place.name} could not be renewed for {duration(silent)}",
                hint=f"run the same command again once {self.place.where} answers; running stages go on",
            )
        return not self._paused

    def _lose(self) -> None:
        """End this process."""
        with self._ending:
            if self.lost:
                return
            self.lost = True
        tell(f"this launcher lost {self.place.name}; it stops now")
        if not self._can_pause:
            os.kill(os.getpid(), signal.SIGTERM)
            return
        hold(self)
        end_soon(self._ended, self.clock)


def watched(
    look: Callable[[], Seen], seconds: float, seen: Seen, outage_seconds: float = 0.0, clock: Clock = CLOCK
) -> Seen:
    """What ``look`` returns once that differs from ``seen``, or after ``seconds``.

    Only a time with answers counts: nobody can renew a record while its place is away. Its error is raised after
    ``outage_seconds``.
    """
    since = heard = clock.boottime()
    while True:
        clock.sleep(seconds / CHECKS)
        try:
            there = look()
        except Exception as error:
            if clock.boottime() - heard > outage_seconds or not passes(error):
                raise
            since = math.inf
            continue
        heard = clock.boottime()
        since = min(since, heard)
        if there != seen or heard >= since + seconds:
            return there


@dataclass
class LeaseFile:
    """A ``LeaseTarget``: the lease ``name`` as a small file at ``path``, with owner, host, process and renewal.

    ``doing``: the holder's work, shown to others.
    """

    store: Files
    path: str
    name: str
    taken: str
    hint: str
    doing: str
    seconds: float
    clock: Clock = CLOCK
    id: str = field(default_factory=lambda: uuid.uuid4().hex)

    def __post_init__(self) -> None:
        self.where = self.store.url_of(self.path)

    @property
    def agreement_delay(self) -> float:
        """Known after the first write, whose answer shows whether an S3 has conditional writes."""
        return 0.0 if is_conditional(self.store) else SETTLE_SECONDS

    def read(self) -> Seen:
        """Read the file."""
        return read_marked(self.store, self.path, request_seconds(self.seconds))

    def holder(self, seen: Seen) -> Holder | None:
        """The holder in the ``seen`` record. ArtifactError if the file is invalid."""
        if seen.data is None:
            return None
        with suppress(ValueError, RecursionError):
            record = json.loads(seen.data)
            if isinstance(record, dict) and record.keys() >= _FIELDS:
                text = f"host {record['host']}, process {record['pid']} ({record['doing']})"
                ahead = float(record["renewed"]) - self.clock.time()
                return Holder(str(record["owner"]), text, float(record["seconds"]), ahead)
        raise ArtifactError(f"{self.where} does not say who holds {self.name}", hint="remove that file if nobody does")

    def put(self, seen: Seen, *, free: bool = False) -> Seen:
        """Write this process's record, or with ``free`` remove the file; SwappedError if it is not as ``seen``."""
        return swap(self.store, self.path, seen, None if free else self._record(), request_seconds(self.seconds))

    def _record(self) -> bytes:
        me = {"owner": self.id, "host": socket.gethostname(), "pid": os.getpid(), "doing": self.doing}
        record = {**me, "renewed": self.clock.time(), "seconds": self.seconds}
        return (json.dumps(record, indent=1) + "\n").encode()
