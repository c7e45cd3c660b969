"""Why a pod does not start, and how one died: what the API server says, with a hint."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from pipeline.plugins.kubernetes.pod_templates import CONTAINER, Object

# Reasons of a waiting container that waiting does not remove.
NO_IMAGE = ("InvalidImageName", "ErrImageNeverPull")
# Reasons that may pass: a registry may be down, or the image still on its way into it.
LATE_IMAGE = ("ImagePullBackOff", "ErrImagePull", "ImageInspectError", "RegistryUnavailable")
NO_CONFIG = ("CreateContainerConfigError", "CreateContainerError", "RunContainerError")
SIGTERM, SIGKILL = 143, 137
LOST_SECONDS = 60.0  # time after the grace period by which a working kubelet has ended a pod


@dataclass(frozen=True)
class PodProblem:
    """Why a pod does not run yet.

    ``hopeless``: waiting does not help; ``no_room``: the cluster has no place for it; ``image``: it cannot be pulled.
    """

    message: str
    hint: str
    hopeless: bool = False
    no_room: bool = False
    image: bool = False


def pending_problem(pod: Object) -> PodProblem | None:
    """Return why ``pod`` is pending; None if it is not."""
    status, name = pod.get("status", {}), pod["metadata"]["name"]
    if status.get("phase", "Pending") != "Pending":
        return None
    for container in [*(status.get("initContainerStatuses") or []), *(status.get("containerStatuses") or [])]:
        waiting = container.get("state", {}).get("waiting") or {}
        reason, message = str(waiting.get("reason", "")), str(waiting.get("message", "")).strip()
        if reason in NO_IMAGE or reason in LATE_IMAGE:
            return PodProblem(
                f"pod {name} cannot get its image {container.get('image')}: {reason}: {message}",
                "launch.pods.image=<an image that exists>, launch.pods.pull_secrets=[<secret>] for a private registry",
                hopeless=reason in NO_IMAGE,
                image=True,
            )
        if reason in NO_CONFIG:
            return PodProblem(
                f"pod {name} cannot be made: {reason}: {message}",
                "create what is missing, or mend launch.pods.secret_env and launch.pods.env_from",
                True,
            )
    for condition in status.get("conditions") or []:
        if condition.get("type") == "PodScheduled" and condition.get("status") == "False":
            text = f"{condition.get('reason', '')}: {condition.get('message', '')}"
            return PodProblem(
                f"pod {name} finds no node: {text.strip(': ')}",
                "launch.pods.resources.<stage>, launch.pods.node_selector, launch.pods.tolerations, or more nodes",
                no_room=True,
            )
    return PodProblem(f"pod {name} is pending", f"kubectl describe pod {name}")


def job_problem(job: Object, queue: str, pods: int = 0, hosts: int = 1, warnings: Sequence[str] = ()) -> PodProblem:
    """Return why a job has no pods yet, or ``pods`` where it should have one for each of ``hosts``.

    ``warnings``: what controllers said about it, newest first.
    """
    state = job.get("status", {}).get("state") or {}
    words = [str(state.get("message") or "")]
    for condition in job.get("status", {}).get("conditions") or []:
        words.append(str(condition.get("message") or ""))
    if job.get("spec", {}).get("suspend"):
        words.insert(0, f"it is suspended, until Kueue admits it into queue {queue!r}")
    # Put a full quota first: it explains the other messages, such as that pods could not be created.
    words = sorted(filter(None, (*words, *warnings)), key=lambda word: "exceeded quota" not in word)
    text = next(iter(words), f"queue {queue!r} may be full or closed, or the controller down")
    name = job["metadata"]["name"]
    has = f"{pods} of {hosts} pods" if pods else "no pods"
    hint = f"kubectl describe {job.get('kind', 'job').lower()} {name}"
    return PodProblem(f"job {name} has {has}: {text}", hint, no_room=True)


def death(pods: Sequence[Object], hosts: int, stage: str) -> str:
    """Describe the pod that ended a stage by being killed; "" if none was, so that its own output counts."""
    # The pod that ended first is the cause: torchrun ends the other hosts when one is missing.
    for pod in sorted(pods, key=_ended):
        status, name = pod.get("status", {}), pod["metadata"]["name"]
        if is_lost(pod):
            return f"pod {name} does not end, and its node is not ready: it counts as lost"
        if status.get("reason") == "DeadlineExceeded":
            return f"pod {name} was ended at its deadline (launch.deadline_minutes)"
        if status.get("reason"):
            return f"pod {name} was taken away: {status['reason']}: {status.get('message', '')}".strip(": ")
        ended = _terminated(pod)
        if ended.get("reason") == "OOMKilled":
            return f"pod {name} ran out of memory; launch.pods.resources.{stage}.memory_gib is its limit"
        if ended.get("exitCode") == SIGKILL:
            return f"pod {name} was killed (exit code {SIGKILL}): most often its node went away or ran out of memory"
        # The pod ended by itself, so its last output explains it better.
        if ended.get("exitCode") and "deletionTimestamp" not in pod["metadata"] and ended["exitCode"] != SIGTERM:
            return ""
    if any("deletionTimestamp" in pod["metadata"] for pod in pods) or len(pods) < hosts:
        return "the cluster took one of its pods away (a drained or preempted node)"
    return ""


def is_alive(pod: Object) -> bool:
    """Return whether processes of ``pod`` may run, or may start yet."""
    return pod.get("status", {}).get("phase", "Pending") in ("Pending", "Running", "Unknown") and not is_lost(pod)


def is_lost(pod: Object) -> bool:
    """Return whether ``pod`` is Terminating for much longer than its grace on a node that is not ready.

    Nobody will report its end. The node's kubelet would have ended it; that it is not ready is in the pod's condition.
    """
    due, status = pod["metadata"].get("deletionTimestamp"), pod.get("status", {})
    if due is None or status.get("phase") in ("Succeeded", "Failed"):
        return False
    ready = {condition.get("type"): condition.get("status") for condition in status.get("conditions") or []}
    late = time.time() - datetime.fromisoformat(due).timestamp()  # ``due`` is the end of the grace period
    return late > LOST_SECONDS and (ready.get("Ready") != "True" or status.get("reason") == "NodeLost")


def _terminated(pod: Object) -> dict[str, Any]:
    """Return how the stage's container ended; {} if it runs. It may have sidecars (``launch.pods.patch``)."""
    containers = pod.get("status", {}).get("containerStatuses") or [{}]
    own = next((each for each in containers if each.get("name") == CONTAINER), containers[0])
    terminated: dict[str, Any] = own.get("state", {}).get("terminated") or {}
    return terminated


def _ended(pod: Object) -> tuple[str, bool]:
    """Return the time at which the pod's container ended, as a sort key; killed ones come first within a second."""
    ended = _terminated(pod)
    # A pod that still runs sorts after all times, which begin with a year.
    return str(ended.get("finishedAt") or "9999"), ended.get("exitCode") != SIGKILL
