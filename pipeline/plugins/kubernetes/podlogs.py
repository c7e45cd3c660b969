"""The logs of a job's pods, followed as they are written, each line once however often a connection breaks."""

from __future__ import annotations

import re
import threading
import time
from collections import deque
from collections.abc import Iterable

from pipeline.core.errors import LaunchError
from pipeline.plugins.kubernetes.api_client import Api, Object
from pipeline.plugins.kubernetes.pod_templates import CONTAINER

STAMP = re.compile(rb"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(\.\d+)?(Z|[+-]\d\d:\d\d)")
LONGEST = 1 << 20  # bytes kept of one pod's log, from its end
AGAIN_SECONDS = 1.0
REST_SECONDS = 10.0  # time limit for the last lines of pods that have ended


class PodLogs:
    """Follows all given pods. Only rank 0 of a stage writes unless something goes wrong, so lines may mix."""

    def __init__(self, api: Api, namespace: str) -> None:
        self.api, self.namespace = api, namespace
        self._followers: dict[str, _LogFollower] = {}

    def show(self, pods: Iterable[Object]) -> None:
        """Follow those of ``pods`` that have started."""
        for pod in pods:
            name, status = pod["metadata"]["name"], pod.get("status", {})
            if name in self._followers:
                self._followers[name].ended = status.get("phase") in ("Succeeded", "Failed")
                continue
            # Before the stage's container starts there is no log, and asking for it is an error.
            for container in status.get("containerStatuses") or []:
                state = container.get("state", {})
                if container.get("name", CONTAINER) == CONTAINER and ("running" in state or "terminated" in state):
                    self._followers[name] = _LogFollower(self.api, self.namespace, name)
                    break

    def drain(self) -> bytes:
        """Return the lines that came since the last call."""
        return b"".join(follower.drain() for follower in self._followers.values())

    def finish(self) -> None:
        """Wait, not for long, until all lines of pods that have ended are here."""
        # Use one limit for all followers: there may be hundreds, and the kubelet that they ask may be gone.
        last = time.monotonic() + REST_SECONDS
        for follower in self._followers.values():
            follower.ended = True
            follower.thread.join(max(0.0, last - time.monotonic()))

    def leave(self) -> None:
        """Follow nothing any more."""
        for follower in self._followers.values():
            follower.ended = True

    def text(self) -> str:
        """Return all followed logs, each after its pod's name."""
        parts = []
        for name, follower in sorted(self._followers.items()):
            parts.append(f"==> {name} <==\n{follower.text()}")
        return "\n".join(parts)


class _LogFollower:
    def __init__(self, api: Api, namespace: str, pod: str) -> None:
        self.api, self.path = api, f"/api/v1/namespaces/{namespace}/pods/{pod}/log"
        self.ended = False
        self._fresh: deque[bytes] = deque()
        self._kept: deque[bytes] = deque()
        self._size = 0
        self._last = b""
        # Use a daemon thread, so that a log that goes on does not keep the launcher from ending.
        self.thread = threading.Thread(target=self._run, name=f"log of {pod}", daemon=True)
        self.thread.start()

    def drain(self) -> bytes:
        """Return the lines that came since the last call."""
        # append and popleft of a deque are atomic, so this thread and the follower's need no lock.
        lines = []
        while self._fresh:
            lines.append(self._fresh.popleft())
        return b"".join(lines)

    def text(self) -> str:
        """Return the kept part of the log."""
        return b"".join(list(self._kept)).decode(errors="replace")

    def _run(self) -> None:
        while True:
            ended = self.ended  # checked before the read, so that all lines written by then are read
            try:
                known = self._last
                since = {"sinceTime": known.decode()} if known else {}
                for line in self.api.lines(self.path, container=CONTAINER, follow="true", timestamps="true", **since):
                    self._take(line, known)
            except LaunchError:
                pass  # the pod or the connection may be gone
            if ended:
                return
            time.sleep(AGAIN_SECONDS)

    def _take(self, line: bytes, known: bytes) -> None:
        """Keep a line, without its time, unless it came before ``known``, when the connection broke."""
        stamp, _, text = line.partition(b" ")
        if not STAMP.fullmatch(stamp):  # the kubelet's own message, such as why it cannot read the rest
            stamp, text = self._last, line
        elif stamp <= known:
            # ``sinceTime`` counts in whole seconds, so the earlier lines of that second are sent again.
            return
        self._last = stamp
        self._fresh.append(text + b"\n")
        self._kept.append(text + b"\n")
        self._size += len(text) + 1
        while self._size > LONGEST:
            self._size -= len(self._kept.popleft())
