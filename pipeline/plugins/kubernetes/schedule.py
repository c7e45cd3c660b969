"""The schedule on a cluster: apply, status, suspend, delete; and the job that its CronJob made for a night."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import date, datetime, timedelta

from pipeline.config import Config
from pipeline.core.errors import LaunchError
from pipeline.launch.protocol import NightJob
from pipeline.plugins.kubernetes.api_client import Api, connect
from pipeline.plugins.kubernetes.job_kinds import cluster_runner, indexed_job_phase
from pipeline.plugins.kubernetes.pod_templates import RUN_LABEL, Object, run_label
from pipeline.schedule.night_config import run_name

PLURALS = {
    "ServiceAccount": "serviceaccounts",
    "Role": "roles",
    "RoleBinding": "rolebindings",
    "NetworkPolicy": "networkpolicies",
    "CronJob": "cronjobs",
}
MANAGER = "nightjar"  # of the fields that we set; what others set stays
SCHEDULED = "batch.kubernetes.io/cronjob-scheduled-timestamp"
LOOK_BACK_DAYS = 31
log = logging.getLogger(__name__)


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
class NightJobState:
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
    nights: list[NightJobState]

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


def _night(job: Object, pods: Sequence[Object]) -> NightJobState:
    name = job["metadata"]["name"]
    own = [pod for pod in pods if pod["metadata"]["labels"].get("job-name") == name]
    own.sort(key=lambda pod: pod["metadata"]["creationTimestamp"])
    code = _exit_code(own[-1]) if own else None
    return NightJobState(name, job["metadata"]["creationTimestamp"], indexed_job_phase(job), code)


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


def night_job(config: Config, name: str) -> NightJob:
    """The job ``name``; LaunchError where there is none."""
    namespace = config.launch.namespace
    job = _api(config).find(f"/apis/batch/v1/namespaces/{namespace}/jobs/{name}")
    if job is None:
        raise LaunchError(f"there is no job {name!r} in namespace {namespace}", hint="leave job= out")
    metadata, made = job["metadata"], job["metadata"]["creationTimestamp"]
    due = (metadata.get("annotations") or {}).get(SCHEDULED) or made
    started = (job.get("status") or {}).get("startTime") or made
    seconds = job["spec"].get("activeDeadlineSeconds")
    deadline = datetime.fromisoformat(started) + timedelta(seconds=seconds) if seconds else None
    return NightJob(datetime.fromisoformat(due), deadline)


def end_leftovers(config: Config, model: str, day: date, kept: Iterable[date]) -> None:
    """End running jobs of the model's nights before ``day``, except the ``kept`` ones.

    Their launchers are gone, for this process holds the model: nobody would look at what they make.
    """
    api, days = _api(config), [day - timedelta(days=back) for back in range(1, LOOK_BACK_DAYS + 1)]
    labels = {run_label(run_name(model, each)) for each in days if each not in set(kept)}
    runner = cluster_runner(config, api)
    query = f"{RUN_LABEL} in ({','.join(sorted(labels))})"
    for job in api.get(runner.jobs, labelSelector=query).get("items", []):
        if runner.phase_of(job) == "running" and "deletionTimestamp" not in job["metadata"]:
            name = job["metadata"]["name"]
            log.warning("night      job %s of an earlier night, whose launcher is gone, is ended", name)
            runner.delete(name)


def _api(config: Config) -> Api:
    return connect(config.launch.context).patient(60 * config.launch.outage_minutes)
