"""One night of a model at a time: a lease in the store that its holder renews, taken over once it is not renewed.

``nightly/<model>/lease.json`` names owner, host, process, the time of its last renewal and for how long that holds.
Times of other machines decide nothing: whether the holder lives shows in the record changing while it is watched, for
as long as it promised (as in Kubernetes' leader election). So clocks may be wrong; a wrong one is told.
"""

from __future__ import annotations

import fcntl
import os
import signal
import socket
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

from pipeline.artifacts import Store, disk_errors
from pipeline.errors import ArtifactError, LaunchError, NightjarError

CHECKS = 6  # of the record, and renewals of it, while a lease lasts
SETTLE_SECONDS = 1.0  # on an object store, until what two writers wrote at once is one of the two for both
CLOCKS_DIFFER = 5.0  # seconds more than a renewal takes to be seen

Record = dict[str, Any]
Say = Callable[[str], None]


def lease_path(model: str) -> str:
    """Where the lease of ``model`` lies, relative to the store."""
    return f"nightly/{model}/lease.json"


@contextmanager
def held(store: Store, model: str, seconds: float, doing: str, say: Say) -> Iterator[None]:
    """Hold the lease of ``model`` while ``doing`` (said to others); LaunchError, naming the holder, where it is held.

    A dead holder's is taken over ``seconds`` (its own) after it was first looked at. A launcher that loses the lease,
    because it could not renew it in time, is told to end (SIGTERM); its work goes on with the next call.
    """
    lease = _Lease(store, model, seconds, doing)
    lease.acquire(say)
    ended = threading.Event()
    keeper = threading.Thread(target=lease.keep, args=(ended,), name="lease", daemon=True)
    keeper.start()
    try:
        yield
    finally:
        ended.set()
        keeper.join()
        lease.release()


class _Lease:
    def __init__(self, store: Store, model: str, seconds: float, doing: str) -> None:
        self.store, self.model, self.seconds = store, model, seconds
        self.path = lease_path(model)
        self.owner = uuid.uuid4().hex
        self.fixed = {"owner": self.owner, "host": socket.gethostname(), "pid": os.getpid(), "doing": doing}
        self.lost = False

    def acquire(self, say: Say) -> None:
        """Take the lease where it is free, given up, or not renewed any more; LaunchError elsewhere."""
        seen = self._read()
        if seen is not None:
            self._outwait(seen, say)
        with self._alone():
            now = self._read()
            if now is not None and now != seen:
                raise self._busy(now)
            self._write()
        if not self.store.is_local:  # no lock there: of two that wrote at once, the later one has it
            time.sleep(SETTLE_SECONDS)
            if (now := self._read()) is not None and now["owner"] != self.owner:
                raise self._busy(now)

    def _outwait(self, seen: Record, say: Say) -> None:
        """Return once the holder was silent for its own time, or gave the lease up; LaunchError once it renews it."""
        seconds = float(seen["seconds"])
        say(
            f"the lock of model {self.model!r} names {_holder(seen)}: it is looked at until that one renews it, or for "
            f"{seconds:g} s{_skew(seen, seconds)}"
        )
        last = time.monotonic() + seconds
        while time.monotonic() < last:
            time.sleep(seconds / CHECKS)
            now = self._read()
            if now is None:
                return
            if now != seen:
                raise self._busy(now)
        say(f"{_holder(seen)} did not renew its lock for {seconds:g} s: it is taken over")

    def keep(self, ended: threading.Event) -> None:
        """Renew until ``ended``; a lease that could not be renewed in time, or is another one's, is lost."""
        renewed = time.monotonic()
        while not ended.wait(self.seconds / CHECKS):
            with suppress(NightjarError, OSError):
                if self._renew():
                    renewed = time.monotonic()
                    continue
                self.lost = True
            if self.lost or time.monotonic() - renewed > self.seconds:
                self.lost = True
                sys.stderr.write(f"nightjar: this launcher lost the lock of model {self.model!r}; it ends here\n")
                os.kill(os.getpid(), signal.SIGTERM)
                return

    def _renew(self) -> bool:
        """Whether the lease was still this launcher's, and is now for another while."""
        with self._alone():
            now = self._read()
            if now is None or now["owner"] != self.owner:
                return False
            self._write()
        return True

    def release(self) -> None:
        """Leave the lease to the next launcher at once."""
        with suppress(NightjarError, OSError), self._alone():
            now = self._read()
            if now is not None and now["owner"] == self.owner:
                self.store.fs.rm_file(self.store.full(self.path))

    def _read(self) -> Record | None:
        self.store.fs.invalidate_cache(self.store.full(self.path))
        if not self.store.exists(self.path):
            return None
        with suppress(ArtifactError):
            record: Record = self.store.read_json(self.path)
            if isinstance(record, dict) and {*self.fixed, "renewed", "seconds"} <= record.keys():
                return record
        if not self.store.exists(self.path):  # its holder gave it up meanwhile
            return None
        raise ArtifactError(
            f"{self.store.url_of(self.path)} does not say who works on model {self.model!r}",
            hint="remove that file, if nobody does",
        )

    def _write(self) -> None:
        self.store.write_json(self.path, {**self.fixed, "renewed": time.time(), "seconds": self.seconds})

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """Nobody else reads and writes the lease: by a lock of its folder. Object stores have none."""
        if not self.store.is_local:
            yield
            return
        folder = self.store.full(self.path).rpartition("/")[0]
        with disk_errors(self.path, self.store.option):
            self.store.fs.makedirs(folder, exist_ok=True)
            handle = os.open(folder, os.O_RDONLY)
        try:
            with suppress(OSError):  # a file system without locks
                fcntl.flock(handle, fcntl.LOCK_EX)
            yield
        finally:
            os.close(handle)

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
