"""One launcher a run on a cluster: a Lease object of Kubernetes."""

from __future__ import annotations

import json
import os
import socket
import uuid
from contextlib import AbstractContextManager
from datetime import UTC, datetime

from pipeline.launch.kubernetes.api import Api, Object, RefusedError
from pipeline.store.conditional import Seen, SwappedError
from pipeline.store.lease import Holder, Lease


def held(api: Api, namespace: str, name: str, seconds: int) -> AbstractContextManager[None]:
    """Hold lease ``name``; LaunchError where another launcher does. A dead one's is taken after ``seconds``."""
    return Lease(LeaseObject(api, namespace, name, seconds), seconds).held()


class LeaseObject:
    """Lease ``namespace/name`` of the cluster. A ``Place``: the object is the record, its resource version the mark."""

    taken, hint, settle = "this run is running already", "wait until it has ended, or run=<another name>", 0.0

    def __init__(self, api: Api, namespace: str, name: str, seconds: int) -> None:
        self.api, self.seconds = api, seconds
        self.name = self.where = f"lease {namespace}/{name}"
        self.collection = f"/apis/coordination.k8s.io/v1/namespaces/{namespace}/leases"
        self.path = f"{self.collection}/{name}"
        self.metadata = {"name": name, "namespace": namespace}
        self.id = f"{socket.gethostname()}-{os.getpid()}-{uuid.uuid4().hex[:6]}"

    def look(self) -> Seen:
        """The object as it is now."""
        record = self.api.find(self.path)
        return Seen(None) if record is None else _seen(record)

    def holder(self, seen: Seen) -> Holder | None:
        """Who holds the lease as it was ``seen``."""
        spec = json.loads(seen.data)["spec"] if seen.data else {}
        name = str(spec.get("holderIdentity") or "")
        seconds = float(spec.get("leaseDurationSeconds") or self.seconds)
        return Holder(name, f"launcher {name}", seconds) if name else None

    def put(self, seen: Seen, *, free: bool = False) -> Seen:
        """Write this launcher, or with ``free`` nobody, into the object; SwappedError unless it is as ``seen``."""
        try:
            if seen.data is None:
                return _seen(self.api.create(self.collection, self._body({}, free)))
            return _seen(self.api.replace(self.path, self._body(json.loads(seen.data)["metadata"], free)))
        except RefusedError as error:
            if error.status == 409:
                raise SwappedError(self.look()) from None
            raise

    def _body(self, metadata: Object, free: bool) -> Object:
        now = f"{datetime.now(UTC):%Y-%m-%dT%H:%M:%S.%fZ}"
        spec = {
            "holderIdentity": "" if free else self.id, "leaseDurationSeconds": self.seconds, "renewTime": now,
        }  # fmt: skip
        named = {**self.metadata, **metadata}
        return {"apiVersion": "coordination.k8s.io/v1", "kind": "Lease", "metadata": named, "spec": spec}


def _seen(record: Object) -> Seen:
    return Seen(json.dumps(record).encode(), str(record["metadata"]["resourceVersion"]))
