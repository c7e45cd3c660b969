"""The schedule on a cluster: apply, status, suspend, delete."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pipeline.errors import LaunchError
from pipeline.launch.kubernetes.api import Api
from pipeline.launch.kubernetes.batch import phase_of
from pipeline.launch.kubernetes.pods import Object

PLURALS = {
    "ServiceAccount": "serviceaccounts",
    "Role": "roles",
    "RoleBinding": "rolebindings",
    "NetworkPolicy": "networkpolicies",
    "CronJob": "cronjobs",
}
MANAGER = "nightjar"  # of the fields that we set; what others set stays


def collection(item: Object) -> str:
    """The API path of the collection that ``item`` belongs to."""
    version = item["apiVersion"]
    root = f"/apis/{version}" if "/" in version else f"/api/{version}"
    return f"{root}/namespaces/{item['metadata']['namespace']}/{PLURALS[item['kind']]}"


def apply(api: Api, objects: Sequence[Object]) -> list[str]:
    """Create ``objects``, or set our fields of those that exist (server-side apply); returns a line for each.

    What others set stays: annotations of accounts, pull secrets, that a schedule is suspended. Raises LaunchError if
    the server refuses one. A dry run asks about all of them first, so that either all are applied or none.
    """
    for item in objects:
        if item["kind"] != "RoleBinding":  # its role does not exist yet, which only administrators may try
            api.apply(_path(item), item, MANAGER, dryRun="All")
    lines = []
    for item in objects:
        done = "created" if api.find(_path(item)) is None else "applied"
        api.apply(_path(item), item, MANAGER)
        lines.append(f"{item['kind'].lower()} {item['metadata']['name']} {done}")
    return lines


def _path(item: Object) -> str:
    return f"{collection(item)}/{item['metadata']['name']}"


def delete(api: Api, objects: Sequence[Object]) -> list[str]:
    """Delete ``objects``, last first; returns a line for each. Launchers end with their CronJob, stages go on."""
    lines = []
    for item in reversed(objects):
        name, path = item["metadata"]["name"], collection(item)
        present = api.find(f"{path}/{name}") is not None
        api.delete(f"{path}/{name}")
        lines.append(f"{item['kind'].lower()} {name} {'deleted' if present else 'does not exist'}")
    return lines


def suspend(api: Api, cron: Object, suspended: bool) -> None:
    """Suspend or resume the CronJob; LaunchError if there is none. A night in progress continues."""
    _live(api, cron)
    api.merge(f"{collection(cron)}/{cron['metadata']['name']}", {"spec": {"suspend": suspended}})


@dataclass(frozen=True)
class NightJob:
    """One job of the CronJob. ``state``: running | succeeded | failed. ``exit_code``: of its last launcher, if any."""

    job: str
    started: str
    state: str
    exit_code: int | None


@dataclass(frozen=True)
class Status:
    """What the cluster knows of the schedule. ``last``: when it last started a launcher."""

    schedule: str
    suspended: bool
    last: str | None
    nights: list[NightJob]

    def lines(self) -> list[str]:
        """The text of ``nightjar schedule status``."""
        state = "suspended" if self.suspended else "on"
        lines = [f"schedule {self.schedule} is {state}; last start: {self.last or 'none yet'}"]
        for night in self.nights:
            code = "" if night.exit_code is None else f", exit code {night.exit_code}"
            lines.append(f"  {night.started}  {night.job}  {night.state}{code}")
        return lines


def status(api: Api, cron: Object) -> Status:
    """The state of the CronJob and of its nights, newest first; LaunchError if there is no CronJob."""
    live = _live(api, cron)
    namespace = cron["metadata"]["namespace"]
    jobs = api.get(f"/apis/batch/v1/namespaces/{namespace}/jobs").get("items", [])
    uid = live["metadata"]["uid"]
    owned = [job for job in jobs if any(o["uid"] == uid for o in job["metadata"].get("ownerReferences", []))]
    pods = api.get(f"/api/v1/namespaces/{namespace}/pods", labelSelector="job-name").get("items", [])
    owned.sort(key=lambda job: job["metadata"]["creationTimestamp"], reverse=True)
    last = live.get("status", {}).get("lastScheduleTime")
    nights = [_night(job, pods) for job in owned]
    return Status(live["spec"]["schedule"], bool(live["spec"].get("suspend")), last, nights)


def _night(job: Object, pods: Sequence[Object]) -> NightJob:
    name = job["metadata"]["name"]
    own = [pod for pod in pods if pod["metadata"]["labels"].get("job-name") == name]
    own.sort(key=lambda pod: pod["metadata"]["creationTimestamp"])
    code = _exit_code(own[-1]) if own else None
    return NightJob(name, job["metadata"]["creationTimestamp"], phase_of(job), code)


def _exit_code(pod: Object) -> int | None:
    containers = pod.get("status", {}).get("containerStatuses") or [{}]
    code = (containers[0].get("state", {}).get("terminated") or {}).get("exitCode")
    return None if code is None else int(code)


def _live(api: Api, cron: Object) -> Object:
    name, namespace = cron["metadata"]["name"], cron["metadata"]["namespace"]
    live = api.find(f"{collection(cron)}/{name}")
    if live is None:
        raise LaunchError(
            f"there is no CronJob {name!r} in namespace {namespace}",
            hint="nightjar schedule apply with the same settings",
        )
    return live
