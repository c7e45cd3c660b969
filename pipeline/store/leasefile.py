"""The record of a lease as a small file: owner, host, process, time of renewal and duration."""

from __future__ import annotations

import json
import os
import socket
import uuid
from contextlib import suppress
from dataclasses import dataclass, field

from pipeline.clock import CLOCK, Clock
from pipeline.errors import ArtifactError
from pipeline.store.conditional import Seen, is_conditional, read_marked, swap
from pipeline.store.files import Files
from pipeline.store.lease import Holder, request_seconds

SETTLE_SECONDS = 1.0  # without conditional writes, until two simultaneous writers see the same file
_FIELDS = {"owner", "host", "pid", "doing", "renewed", "seconds"}


@dataclass
class LeaseFile:
    """A ``LeaseTarget``: the lease ``name`` at ``path``. ``doing``: the holder's work, shown to others."""

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
