"""One launcher a run on a cluster: a Lease object of Kubernetes."""

from __future__ import annotations

import json
import os
import socket
import uuid
from contextlib import AbstractContextManager
from datetime import UTC, datetime

from pipeline.core.clock import CLOCK, Clock
from pipeline.plugins.kubernetes.api_client import Api, Object, RefusedError
from pipeline.store.conditional import Seen, SwappedError
from pipeline.store.lease import Holder, Lease, request_seconds


def held(
    api: Api, namespace: str, name: str, seconds: int, outage_seconds: float = 0.0, clock: Clock = CLOCK
) -> AbstractContextManager[None]:
    """Hold lease ``name``; LaunchError if another launcher does. A dead one's is taken after ``seconds``.

    ``outage_seconds``: how long the API server may not answer.
    """
    place = LeaseObject(api.brisk(request_seconds(seconds)), namespace, name, seconds)
    lease = Lease(place, seconds, acquire_seconds=outage_seconds, outage_seconds=outage_seconds, clock=clock)
    return lease.held()


class LeaseObject:
    """Lease ``namespace/name`` of the cluster as a ``LeaseTarget``: the object is the record, its version the mark."""

    taken, hint, agreement_delay = "this run is running already", "wait until it has ended, or run=<another name>", 0.0

    def __init__(self, api: Api, namespace: str, name: str, seconds: int) -> None:
        self.api, self.seconds = api, seconds
        self.name = self.where = f"lease {namespace}/{name}"
        self.collection = f"/apis/coordination.k8s.io/v1/namespaces/{namespace}/leases"
        self.path = f"{self.collection}/{name}"
        self.metadata = {"name": name, "namespace": namespace}
        self.id = f"{socket.gethostname()}-{os.getpid()}-{uuid.uuid4().hex[:6]}"

    def read(self) -> Seen:
        """Return the object as it is now."""
        record = self.api.find(self.path)
        if record is None:
            return Seen(None)
        return _seen(record)

    def holder(self, seen: Seen) -> Holder | None:
        """Return the lease's holder in the state ``seen``."""
        spec = json.loads(seen.data)["spec"] if seen.data else {}
        name = str(spec.get("holderIdentity") or "")
        # Other clients give a lease back by emptying this field.
        if not name:
            return None
        # Use the holder's own duration: its launch.lease_seconds may differ from this launcher's.
        seconds = float(spec.get("leaseDurationSeconds") or self.seconds)
        return Holder(name, f"launcher {name}", seconds)

    def put(self, seen: Seen, *, free: bool = False) -> Seen:
        """Write this launcher into the object, or with ``free`` delete it; SwappedError unless it is as ``seen``."""
        # The server checks these conditions: create fails if the object exists, replace and delete if its version
        # differs.
        try:
            if free:
                if seen.data is not None:
                    self.api.delete(self.path, seen.mark)
                return Seen(None)
            if seen.data is None:
                return _seen(self.api.create(self.collection, self._body({})))
            return _seen(self.api.replace(self.path, self._body(json.loads(seen.data)["metadata"])))
        except RefusedError as error:
            if error.status == 409 or (error.status == 404 and not error.passing):
                raise SwappedError(self.read()) from None
            raise

    def _body(self, metadata: Object) -> Object:
        now = f"{datetime.now(UTC):%Y-%m-%dT%H:%M:%S.%fZ}"
        spec = {"holderIdentity": self.id, "leaseDurationSeconds": self.seconds, "renewTime": now}
        named = {**self.metadata, **metadata}
        return {"apiVersion": "coordination.k8s.io/v1", "kind": "Lease", "metadata": named, "spec": spec}


def _seen(record: Object) -> Seen:
    return Seen(json.dumps(record).encode(), str(record["metadata"]["resourceVersion"]))
