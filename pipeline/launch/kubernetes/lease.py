"""One launcher a run on a cluster: a Lease that its holder renews, and that others take over once it is not renewed.

Times of other machines are never compared with this one's: whether the holder lives shows in the record changing
while it is watched, as in Kubernetes' own leader election. So clocks may be wrong.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime

from pipeline.errors import LaunchError
from pipeline.launch.kubernetes.api import Api, Object, RefusedError

CHECKS = 6  # of the record while a dead holder's time runs out


@contextmanager
def held(
    api: Api, namespace: str, name: str, seconds: int, say: Callable[[str], None] = lambda line: None
) -> Iterator[None]:
    """Hold lease ``name``; LaunchError where another launcher does. A dead one's is taken after ``seconds``.

    ``say`` takes a line where that has to be waited for.
    A launcher that loses it, for it could not renew it in time, is told to end (SIGTERM); its stages go on.
    """
    lease = _Lease(api, namespace, name, seconds, say)
    lease.acquire()
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
    def __init__(self, api: Api, namespace: str, name: str, seconds: int, say: Callable[[str], None]) -> None:
        self.api, self.name, self.namespace, self.seconds, self.say = api, name, namespace, seconds, say
        self.path = f"/apis/coordination.k8s.io/v1/namespaces/{namespace}/leases"
        self.holder = f"{socket.gethostname()}-{os.getpid()}-{uuid.uuid4().hex[:6]}"
        self.lost = False

    def acquire(self) -> None:
        """Take the lease where it is free, or its holder does not renew it for as long as it promised."""
        record = self.api.find(f"{self.path}/{self.name}")
        if record is None:
            with self._conflict():
                self.api.create(self.path, self._body({}))
            return
        spec = record.get("spec", {})
        if spec.get("holderIdentity"):
            self._outwait(record)
        with self._conflict(str(spec.get("holderIdentity") or "")):
            self.api.replace(f"{self.path}/{self.name}", self._body(record["metadata"]))

    def _outwait(self, record: Object) -> None:
        """Return once the holder was silent for its own time; LaunchError as soon as it is not."""
        holder = str(record["spec"]["holderIdentity"])
        seconds = float(record["spec"].get("leaseDurationSeconds") or self.seconds)
        last = time.monotonic() + seconds
        self.say(f"launcher {holder} held this run: it is looked at for {seconds:g} s, whether it still lives")
        while time.monotonic() < last:
            time.sleep(seconds / CHECKS)
            now = self.api.find(f"{self.path}/{self.name}")
            if now is None or not now["spec"].get("holderIdentity"):
                raise LaunchError(f"{holder} ended just now", hint="the same command again")
            if now["metadata"]["resourceVersion"] != record["metadata"]["resourceVersion"]:
                raise self._busy(holder)

    def keep(self, ended: threading.Event) -> None:
        """Renew until ``ended``; one that could not be renewed in time is lost."""
        renewed = time.monotonic()
        while not ended.wait(self.seconds / CHECKS):
            with suppress(LaunchError):
                if self._renew():
                    renewed = time.monotonic()
                    continue
                self.lost = True
            if self.lost or time.monotonic() - renewed > self.seconds:
                sys.stderr.write(f"nightjar: this launcher lost lease {self.namespace}/{self.name}; it ends here\n")
                self.lost = True
                os.kill(os.getpid(), signal.SIGTERM)
                return

    def _renew(self) -> bool:
        """Whether the lease was still this launcher's, and is now for another while."""
        record = self.api.get(f"{self.path}/{self.name}")
        if record["spec"].get("holderIdentity") != self.holder:
            return False
        self.api.replace(f"{self.path}/{self.name}", self._body(record["metadata"]))
        return True

    def release(self) -> None:
        """Leave the lease to the next launcher at once."""
        with suppress(LaunchError):
            if self.lost:
                return
            record = self.api.get(f"{self.path}/{self.name}")
            if record["spec"].get("holderIdentity") == self.holder:
                record["spec"]["holderIdentity"] = ""
                self.api.replace(f"{self.path}/{self.name}", record)

    def _body(self, metadata: Object) -> Object:
        now = f"{datetime.now(UTC):%Y-%m-%dT%H:%M:%S.%fZ}"
        spec = {"holderIdentity": self.holder, "leaseDurationSeconds": self.seconds, "renewTime": now}
        named = {"name": self.name, "namespace": self.namespace, **metadata}
        return {"apiVersion": "coordination.k8s.io/v1", "kind": "Lease", "metadata": named, "spec": spec}

    @contextmanager
    def _conflict(self, holder: str = "") -> Iterator[None]:
        try:
            yield
        except RefusedError as error:
            if error.status == 409:
                raise self._busy(holder) from None
            raise

    def _busy(self, holder: str) -> LaunchError:
        return LaunchError(
            f"this run is running already: launcher {holder or '(another one)'} holds lease "
            f"{self.namespace}/{self.name}",
            hint="wait until it has ended, or run=<another name>",
        )
