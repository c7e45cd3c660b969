"""One launcher a run on a cluster: a Lease object of Kubernetes, held as ``launch/lease.py`` says."""

from __future__ import annotations

import os
import socket
import uuid
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from datetime import UTC, datetime

from pipeline.errors import LaunchError
from pipeline.launch.kubernetes.api import Api, Object, RefusedError
from pipeline.launch.lease import Lease, watched


def held(
    api: Api, namespace: str, name: str, seconds: int, say: Callable[[str], None] = lambda line: None
) -> AbstractContextManager[None]:
    """Hold lease ``name``; LaunchError where another launcher does. A dead one's is taken after ``seconds``.

    ``say`` takes a line where that has to be waited for.
    """
    return _ClusterLease(api, namespace, name, seconds, say).held()


class _ClusterLease(Lease):
    def __init__(self, api: Api, namespace: str, name: str, seconds: int, say: Callable[[str], None]) -> None:
        super().__init__(f"lease {namespace}/{name}", seconds)
        self.api, self.say = api, say
        self.collection = f"/apis/coordination.k8s.io/v1/namespaces/{namespace}/leases"
        self.path = f"{self.collection}/{name}"
        self.metadata = {"name": name, "namespace": namespace}
        self.holder = f"{socket.gethostname()}-{os.getpid()}-{uuid.uuid4().hex[:6]}"

    def acquire(self) -> None:
        """Take the lease where it is free, or its holder does not renew it for as long as it promised."""
        record = self.api.find(self.path)
        if record is None:
            with self._conflict():
                self.api.create(self.collection, self._body({}))
            return
        spec = record.get("spec", {})
        if spec.get("holderIdentity"):
            self._outwait(record)
        with self._conflict(str(spec.get("holderIdentity") or "")):
            self.api.replace(self.path, self._body(record["metadata"]))

    def _outwait(self, record: Object) -> None:
        """Return once the holder was silent for its own time; LaunchError as soon as it is not."""
        holder = str(record["spec"]["holderIdentity"])
        seconds = float(record["spec"].get("leaseDurationSeconds") or self.seconds)
        self.say(f"launcher {holder} held this run: it is looked at for {seconds:g} s, whether it still lives")
        seen = str(record["metadata"]["resourceVersion"])
        now = watched(self._version, seconds, seen)
        if not now:
            raise LaunchError(f"{holder} ended just now", hint="the same command again")
        if now != seen:
            raise self._busy(holder)

    def _version(self) -> str:
        """Of the lease as somebody holds it; "" where nobody does."""
        now = self.api.find(self.path)
        return str(now["metadata"]["resourceVersion"]) if now and now["spec"].get("holderIdentity") else ""

    def renew(self) -> bool:
        """Whether the lease was still this launcher's, and is now for another while."""
        record = self.api.get(self.path)
        if record["spec"].get("holderIdentity") != self.holder:
            return False
        self.api.replace(self.path, self._body(record["metadata"]))
        return True

    def release(self) -> None:
        """Leave the lease to the next launcher at once."""
        record = self.api.get(self.path)
        if record["spec"].get("holderIdentity") == self.holder:
            record["spec"]["holderIdentity"] = ""
            self.api.replace(self.path, record)

    def _body(self, metadata: Object) -> Object:
        now = f"{datetime.now(UTC):%Y-%m-%dT%H:%M:%S.%fZ}"
        spec = {"holderIdentity": self.holder, "leaseDurationSeconds": self.seconds, "renewTime": now}
        named = {**self.metadata, **metadata}
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
            f"this run is running already: launcher {holder or '(another one)'} holds {self.name}",
            hint="wait until it has ended, or run=<another name>",
        )
