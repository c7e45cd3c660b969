"""One night of a model at a time: a lease in the store, held as ``launch/lease.py`` says.

``nightly/<model>/lease.json`` names owner, host, process, the time of its last renewal and for how long that holds.
Clocks decide nothing, but a wrong one is told.
"""

from __future__ import annotations

import json
import os
import socket
import time
import uuid
from collections.abc import Callable
from contextlib import AbstractContextManager, suppress
from typing import Any

from pipeline.errors import ArtifactError, LaunchError
from pipeline.launch.lease import CHECKS, Lease, watched
from pipeline.store import Store
from pipeline.store.conditional import Seen, SwappedError, is_conditional, look, swap

SETTLE_SECONDS = 1.0  # on a store without conditions, until what two wrote at once is one of the two for both
CLOCKS_DIFFER = 5.0  # seconds more than a renewal takes to be seen

Record = dict[str, Any]
Say = Callable[[str], None]


def lease_path(model: str) -> str:
    """Where the lease of ``model`` lies, relative to the store."""
    return f"nightly/{model}/lease.json"


def held(store: Store, model: str, seconds: float, doing: str, say: Say) -> AbstractContextManager[None]:
    """Hold the lease of ``model`` while ``doing`` (said to others); LaunchError, naming the holder, where it is held.

    A dead holder's is taken over ``seconds`` (its own) after it was first looked at. What a launcher that loses its
    lease began goes on with the next call.
    """
    return _StoreLease(store, model, seconds, doing, say).held()


class _StoreLease(Lease):
    def __init__(self, store: Store, model: str, seconds: float, doing: str, say: Say) -> None:
        super().__init__(f"the lock of model {model!r}", seconds)
        self.store, self.model, self.say = store, model, say
        self.path = lease_path(model)
        self.owner, self.seen = uuid.uuid4().hex, Seen(None)
        self.fixed = {"owner": self.owner, "host": socket.gethostname(), "pid": os.getpid(), "doing": doing}

    def acquire(self) -> None:
        """Take the lease where it is free, given up, or not renewed any more; LaunchError elsewhere."""
        seen = self._look()
        if (record := self._record(seen)) is not None:
            self._outwait(record)
            seen = self._look()
            if (now := self._record(seen)) is not None and now != record:
                raise self._busy(now)
        try:
            self.seen = swap(self.store, self.path, seen, self._renewed())
        except SwappedError as other:
            if (now := self._record(other.now)) is None:
                raise self._gone() from None
            raise self._busy(now) from None
        if not is_conditional(self.store):  # of two that wrote at once, the later one has it
            time.sleep(SETTLE_SECONDS)
            if (now := self._read()) is not None and now["owner"] != self.owner:
                raise self._busy(now)

    def _outwait(self, seen: Record) -> None:
        """Return once the holder was silent for its own time, or gave the lease up; LaunchError once it renews it."""
        seconds = float(seen["seconds"])
        self.say(
            f"{self.name} names {_holder(seen)}: it is looked at until that one renews it, or for "
            f"{seconds:g} s{_skew(seen, seconds)}"
        )
        now = watched(self._read, seconds, seen)
        if now is None:
            return
        if now != seen:
            raise self._busy(now)
        self.say(f"{_holder(seen)} did not renew its lock for {seconds:g} s: it is taken over")

    def renew(self) -> bool:
        """Whether the lease was still this launcher's, and is now for another while."""
        try:
            self.seen = swap(self.store, self.path, self.seen, self._renewed())
        except SwappedError as other:
            now = self._record(other.now)
            if now is None or now["owner"] != self.owner:
                return False
            self.seen = other.now  # an earlier renewal was done though its answer never came
            return self.renew()
        return True

    def release(self) -> None:
        """Leave the lease to the next launcher at once."""
        try:
            swap(self.store, self.path, self.seen, None)
        except SwappedError as other:
            now = self._record(other.now)
            if now is not None and now["owner"] == self.owner:
                self.seen = other.now
                self.release()

    def _look(self) -> Seen:
        return look(self.store, self.path)

    def _read(self) -> Record | None:
        return self._record(self._look())

    def _record(self, seen: Seen) -> Record | None:
        """What the lease says; None where there is none. ArtifactError where it does not parse."""
        if seen.data is None:
            return None
        with suppress(ValueError):
            record: Record = json.loads(seen.data)
            if isinstance(record, dict) and {*self.fixed, "renewed", "seconds"} <= record.keys():
                return record
        raise ArtifactError(
            f"{self.store.url_of(self.path)} does not say who works on model {self.model!r}",
            hint="remove that file, if nobody does",
        )

    def _renewed(self) -> bytes:
        record = {**self.fixed, "renewed": time.time(), "seconds": self.seconds}
        return (json.dumps(record, indent=1) + "\n").encode()

    def _gone(self) -> LaunchError:
        return LaunchError(
            f"model {self.model!r} was being worked on by another launcher until this moment",
            hint="the same command again",
        )

    def _busy(self, record: Record) -> LaunchError:
        return LaunchError(
            f"model {self.model!r} is being worked on already: {_holder(record)} holds {self.store.url_of(self.path)}"
            f"{_skew(record, self.seconds / CHECKS)}",
            hint="the same command once that one has ended, or publish.model=<another name>",
        )


def _holder(record: Record) -> str:
    return f"host {record['host']}, process {record['pid']} ({record['doing']})"


def _skew(record: Record, slack: float) -> str:
    """In words how far the holder's clock is from this one's, where that shows; "" elsewhere.

    ``slack``: seconds since it may have been written.
    """
    ahead = float(record["renewed"]) - time.time()
    if -slack - CLOCKS_DIFFER <= ahead <= CLOCKS_DIFFER:
        return ""
    if ahead < 0 and slack >= float(record["seconds"]):
        return ""  # an old record: its holder may simply be dead
    way = "ahead of" if ahead > 0 else "behind"
    return f"; its clock is {abs(ahead):,.0f} s {way} this machine's: set both by NTP, for dates to mean the same"
