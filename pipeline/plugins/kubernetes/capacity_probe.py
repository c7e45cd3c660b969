"""Room for more hosts of a stage, held by a job of the stage's own kind and shape whose pods only wait.

So queues, quotas, admission by Kueue, gang scheduling and node groups treat it like the stage itself, and the launcher
needs no further rights. The pods wait at most ``HOLD_SECONDS`` if nobody ends them.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

from pipeline.core.errors import LaunchError
from pipeline.plugins.kubernetes.api_client import Api
from pipeline.plugins.kubernetes.pod_templates import CONTAINER, STAGE_LABEL, Object
from pipeline.records.runs import Step

HOLD_SECONDS = 3600
WAITING = ["python", "-c", f"import time; time.sleep({HOLD_SECONDS})"]
ASKING_SECONDS = 5.0  # time limit for an answer: training goes on meanwhile and needs attention


@dataclass(frozen=True)
class JobRoom:
    """Places that the pods of a job hold.

    ``job``: its path; ``runs(job)``: whether it has not ended; ``pods``: the path of pods; ``selector``: its pods.
    """

    api: Api
    job: str
    runs: Callable[[Object], bool]
    pods: str
    selector: str

    def hosts(self) -> int | None:
        """Return the number of pods that run; None if the job has ended."""
        # This is asked between two steps of a training, which must not wait long for the answer.
        api = self.api.brisk(ASKING_SECONDS)
        job = api.find(self.job)
        if job is None or not self.runs(job):
            return None
        # A pending pod is not placed yet.
        pods = api.get(self.pods, labelSelector=self.selector).get("items", [])
        return sum(pod.get("status", {}).get("phase") == "Running" for pod in pods)

    def leave(self) -> None:
        """Delete the job with its pods; they end themselves if the API server does not answer."""
        with suppress(LaunchError):
            self.api.brisk(ASKING_SECONDS).delete(self.job)


def room_of(step: Step) -> Step:
    """Return ``step`` under the name of its stage's room."""
    return replace(step, name=f"{step.name}-room")


def as_room(job: Object, step: Step) -> Object:
    """Return ``job`` of ``step`` with pods that only wait, each wherever it finds a place."""
    room: Object = copy.deepcopy(job)
    # A job's kind decides where its pods and their labels are, so all of them are searched for.
    for labels in _values(room, "labels"):
        if labels.get(STAGE_LABEL) == step.name:
            labels[STAGE_LABEL] = room_of(step).name
    for pod in list(_values(room, "spec")):
        if "containers" not in pod:
            continue
        # There is nothing to save, so pods end at once and free their places for the stage.
        pod["terminationGracePeriodSeconds"] = 1
        pod.pop("initContainers", None)
        # Keep only the stage's container: sidecars of ``launch.pods.patch`` have nothing to serve.
        (waiting,) = [each for each in pod["containers"] if each["name"] == CONTAINER]
        waiting["command"] = list(WAITING)
        pod["containers"] = [waiting]
    # The stage needs all its hosts at once, but room may come host by host.
    if "minAvailable" in room["spec"]:
        room["spec"]["minAvailable"] = 1
    return room


def _values(part: Any, key: str) -> Iterator[Any]:
    """Yield the objects at ``key`` anywhere in ``part``."""
    if isinstance(part, dict):
        if isinstance(part.get(key), dict):
            yield part[key]
        for each in part.values():
            yield from _values(each, key)
    elif isinstance(part, list):
        for each in part:
            yield from _values(each, key)
