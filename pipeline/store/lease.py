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

from pipeline.core.clock import CLOCK, Clock
from pipeline.core.errors import ArtifactError, LaunchError, LostLeaseError
from pipeline.core.retrying import passes
from pipeline.core.units import duration
from pipeline.store.conditional import Seen, SwappedError, is_conditional, read_marked, swap
from pipeline.store.errors import taken
from pipeline.store.fencing import can_pause, end_soon, hold, pausable, tell
from pipeline.store.files import Files

# Checks, and renewals, of the record per lease duration.
CHECKS = 6
# Seconds that a place may not answer when its lease is taken.
ACQUIRE_SECONDS = 2.0
# Minimum seconds to wait for the answer to a renewal.
LEAST_SECONDS = 1.0
# Seconds that a holder stands still before it gives up.
OUTAGE_SECONDS = 600.0
# Seconds until two simultaneous writers see the same file in a store without conditional writes.
SETTLE_SECONDS = 1.0
# Seconds by which clocks may differ, beyond the time that a renewal takes to be seen, before messages say so.
CLOCKS_DIFFER = 5.0
# Keys of the record in a ``LeaseFile``.
_FIELDS = {"owner", "host", "pid", "doing", "renewed", "seconds"}
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
        """Describe the difference between its clock and this machine's; "" if there is none to see.

        ``slack``: largest age of the record in seconds.
        """
        ahead = self.ahead
        if ahead is None or -slack - CLOCKS_DIFFER <= ahead <= CLOCKS_DIFFER:
            return ""
        # The record is old, so its holder may simply be dead.
        if ahead < 0 and slack >= self.seconds:
            return ""
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
        """Return the holder in the ``seen`` record; None if there is none."""
        ...

    def put(self, seen: Seen, *, free: bool = False) -> Seen:
        """Write this process (with ``free``, nobody) as the holder; SwappedError if the record is not as ``seen``."""
        ...


def request_seconds(seconds: float) -> float:
    """Return how long one request may take for a lease of ``seconds``."""
    # A request that hangs must leave time to try again before the lease ends; slow stores need at least a second.
    return max(LEAST_SECONDS, seconds / CHECKS)


class Lease:
    """The lease at ``place``. ``seconds``: how long each renewal lasts.

    ``acquire_seconds``: how long the place may not answer when the lease is taken; ``outage_seconds``: when it is held.

    Two threads work while the lease is held: one renews it, and one watches the time, also while a renewal hangs.
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
        # When the last successful renewal began. It counts from the write, not from the answer.
        self._renewed_at = 0.0

    @contextmanager
    def held(self) -> Iterator[None]:
        """Acquire the lease, renew it in the background, and release it.

        A process that cannot renew it in time stands still, before another one can take it and even while a renewal
        hangs. LostLeaseError is raised in the main thread if another one has it, LaunchError if nobody can tell for
        ``outage_seconds``. Outside of the main thread, both become a SIGTERM. Stages on a cluster continue.
        """
        began = self.clock.boottime()
        self.acquire()
        self._renewed_at = max(began, self._renewed_at)
        self._can_pause = can_pause()
        keeper = threading.Thread(target=self._keep_renewing, name="lease", daemon=True)
        with pausable() if self._can_pause else nullcontext():
            try:
                keeper.start()
                threading.Thread(target=self._watch, name="lease-watch", daemon=True).start()
            except RuntimeError as error:
                # No threads are left, so the lease could not be renewed.
                self._ended.set()
                self._try_release()
                raise LaunchError(
                    f"{self.place.name} cannot be kept: {error}",
                    hint="run the same command once the machine has room; check ulimit -u and the container's pids "
                    "limit",
                ) from error
            try:
                yield
            finally:
                self._ended.set()
                # A renewal that still hangs may be written after a release, and would take the lease again. So the
                # lease is left to expire instead.
                keeper.join(self.seconds)
                if not self.lost and not keeper.is_alive():
                    self._try_release()

    def acquire(self) -> None:
        """Take the lease if it is free or no longer renewed; else LaunchError."""
        # 1. Is there a holder, and does it live?
        seen = self._ask(self.place.read)
        holder = self.place.holder(seen)
        if holder is not None:
            log.info(
                "%s holds %s: waiting %g s to see whether it renews its lease%s",
                holder.text,
                self.place.name,
                holder.seconds,
                holder.skew(holder.seconds),
            )
            # The holder's own duration counts: this process may be configured with another one.
            current = watched(self.place.read, holder.seconds, seen, self.acquire_seconds, self.clock)
            if current == seen:
                log.warning("%s did not renew its lease for %g s: taking it over", holder.text, holder.seconds)
            elif self.place.holder(current) is not None:
                raise self._taken_error(current)
            seen = current

        # 2. Write this process's record over what was seen.
        self._renewed_at = self.clock.boottime()
        try:
            self.seen = self._ask(lambda: self.place.put(seen))
        except SwappedError as other:
            # If it is ours, an earlier try succeeded, but its answer was lost.
            if not self._is_mine(other.now):
                raise self._taken_error(other.now) from None
            self.seen = other.now

        # 3. Without conditional writes, the later one of two simultaneous writers wins.
        if self.place.agreement_delay:
            self.clock.sleep(self.place.agreement_delay)
            current = self.place.read()
            if not self._is_mine(current) and self.place.holder(current) is not None:
                raise self._taken_error(current)

    def _ask(self, request: Callable[[], Seen]) -> Seen:
        # Asks again while the place does not answer, for up to ``acquire_seconds``.
        deadline = self.clock.boottime() + self.acquire_seconds
        while True:
            try:
                return request()
            except Exception as error:
                if self.clock.boottime() >= deadline or not passes(error):
                    raise
            self.clock.sleep(min(1.0, self.seconds / CHECKS))

    def renew(self) -> bool:
        """Renew the lease; returns whether this process still held it, or nobody did."""
        try:
            self.seen = self.place.put(self.seen)
        except SwappedError as other:
            if not self._is_mine(other.now) and self.place.holder(other.now) is not None:
                return False
            # An earlier renewal succeeded, but its answer was lost; or somebody removed the record.
            self.seen = other.now
            return self.renew()
        return True

    def release(self) -> None:
        """Free the lease if this process still holds it."""
        try:
            self.place.put(self.seen, free=True)
        except SwappedError as other:
            # The last renewal may have been written although its answer was lost. Other records are other processes'.
            if self._is_mine(other.now):
                self.seen = other.now
                self.release()

    def _try_release(self) -> None:
        # If the store does not answer, the next launcher waits until the lease expires. Any class of error counts:
        # object store clients have their own.
        with suppress(Exception):
            self.release()

    def _is_mine(self, seen: Seen) -> bool:
        # Compare ids, because host and process number are not unique: in containers every launcher may be process 1.
        holder = self.place.holder(seen)
        return holder is not None and holder.id == self.place.id

    def _taken_error(self, seen: Seen) -> LaunchError:
        holder = self.place.holder(seen)
        if holder is None:
            return LaunchError(f"{self.place.taken}: another launcher just ended", hint="run the same command again")
        where = f"{self.place.where}{holder.skew(self.seconds / CHECKS)}"
        return taken(self.place.taken, holder.text, where, self.place.hint)

    def _keep_renewing(self) -> None:
        pause = self.seconds / CHECKS
        while not self.lost and not self.clock.wait(self._ended, pause):
            began = self.clock.boottime()
            # Try again sooner after a failure. Nothing may end this thread, so any error is a reason to try again.
            pause = min(1.0, self.seconds / CHECKS)
            with suppress(Exception):
                if not self.renew():
                    self._lose()
                    return
                self._renewed_at = began
                pause = self.seconds / CHECKS
                if self._paused:
                    self._paused = False
                    tell(f"{self.place.name} is renewed: going on")

    def _watch(self) -> None:
        # The lease ends a little early, because clocks differ: another process may soon take it.
        while not self.lost and not self.clock.wait(self._ended, self.seconds / CHECKS / 4):
            silent = self.clock.boottime() - self._renewed_at
            if silent <= self.seconds * (1 - 1 / CHECKS):
                continue
            if not self._can_pause:
                self._lose()
                continue
            if not self._paused:
                self._paused = True
                tell(f"{self.place.name} was not renewed for {silent:.0f} s: waiting, and doing nothing else")
            # Called at each turn, in case the main thread has gone on.
            hold(self)

    def check(self) -> bool:
        """Whether the main thread may go on (``fencing.py``)."""
        if self.lost:
            raise LostLeaseError(f"another launcher has {self.place.name}")
        silent = self.clock.boottime() - self._renewed_at
        if self._paused and silent > self.outage_seconds + self.seconds:
            raise LaunchError(
                f"{self.place.name} could not be renewed for {duration(silent)}",
                hint=f"run the same command again once {self.place.where} answers; running stages go on",
            )
        return not self._paused

    def _lose(self) -> None:
        # Ends this process, once: both threads may come here.
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
    read: Callable[[], Seen], seconds: float, seen: Seen, outage_seconds: float = 0.0, clock: Clock = CLOCK
) -> Seen:
    """Return what ``read`` returns once that differs from ``seen``, or after ``seconds``.

    Its error is raised after ``outage_seconds``.
    """
    # Only a time with answers counts: nobody can renew a record while its place is away.
    since = heard = clock.boottime()
    while True:
        clock.sleep(seconds / CHECKS)
        try:
            current = read()
        except Exception as error:
            if clock.boottime() - heard > outage_seconds or not passes(error):
                raise
            since = math.inf
            continue
        heard = clock.boottime()
        since = min(since, heard)
        if current != seen or heard >= since + seconds:
            return current


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
        """Return the holder in the ``seen`` record. ArtifactError if the file is invalid."""
        if seen.data is None:
            return None
        # An invalid record is an error, not a free lease: its writer may be a live process of another release.
        with suppress(ValueError, RecursionError):
            record = json.loads(seen.data)
            if isinstance(record, dict) and record.keys() >= _FIELDS:
                text = f"host {record['host']}, process {record['pid']} ({record['doing']})"
                ahead = float(record["renewed"]) - self.clock.time()
                return Holder(str(record["owner"]), text, float(record["seconds"]), ahead)
        raise ArtifactError(f"{self.where} does not say who holds {self.name}", hint="remove that file if nobody does")

    def put(self, seen: Seen, *, free: bool = False) -> Seen:
        """Write this process's record, or with ``free`` remove the file; SwappedError if it is not as ``seen``."""
        data = None
        if not free:
            record = {
                "owner": self.id,
                "host": socket.gethostname(),
                "pid": os.getpid(),
                "doing": self.doing,
                "renewed": self.clock.time(),
                "seconds": self.seconds,
            }
            data = (json.dumps(record, indent=1) + "\n").encode()
        return swap(self.store, self.path, seen, data, request_seconds(self.seconds))
