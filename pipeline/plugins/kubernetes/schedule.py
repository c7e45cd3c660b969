"""The schedule on a cluster: its objects (accounts, their rights, a network policy, the CronJob), what is done with
them (apply, status, suspend, delete), and the job that the CronJob made for a night.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import date, datetime, timedelta

from pipeline.config import Config
from pipeline.config.compose import compose
from pipeline.config.secrets import check_overrides_of_schedule
from pipeline.core.errors import ConfigError, LaunchError
from pipeline.launch.protocol import NightJob
from pipeline.plugins.kubernetes.api_client import Api, connect
from pipeline.plugins.kubernetes.job_kinds import cluster_runner, indexed_job_phase
from pipeline.plugins.kubernetes.network import KIND, VERSION, among
from pipeline.plugins.kubernetes.pod_templates import (
    LAUNCHER,
    NIGHTJAR_LABELS,
    RUN_LABEL,
    Object,
    launcher_account,
    pod_template,
    run_label,
    stage_account,
)
from pipeline.plugins.kubernetes.rbac import rules
from pipeline.schedule.night_config import ANY_DAY, night_zone, run_name, split_arguments

NIGHT = "date=yesterday"  # the last whole day when the night's job was made, in schedule.time_zone
JOB = "NIGHTJAR_JOB"  # variable in the launcher's pod that holds the name of its job
OUTSIDE = ("launch.context=",)  # overrides that mean nothing inside the cluster
# Exit codes that the same command would return again: settings, data, plan, guard, gate, artifact.
FINAL_CODES = [2, 3, 4, 5, 6, 7]
LAUNCHER_GRACE_SECONDS = 30
RBAC = "rbac.authorization.k8s.io"
PLURALS = {
    "ServiceAccount": "serviceaccounts",
    "Role": "roles",
    "RoleBinding": "rolebindings",
    "NetworkPolicy": "networkpolicies",
    "CronJob": "cronjobs",
}
MANAGER = "nightjar"  # field manager of the fields that we set; fields of others stay as they are
SCHEDULED = "batch.kubernetes.io/cronjob-scheduled-timestamp"
LOOK_BACK_DAYS = 31
log = logging.getLogger(__name__)


def schedule_config(overrides: Sequence[str]) -> Config:
    """Return the configuration of nights with ``overrides``, composed and checked as `nightjar nightly` does it.

    ConfigError for settings that no schedule should use every night.
    """
    given, overrides = split_arguments(overrides, ("date", "job"))
    if given:
        name, value = next(iter(given.items()))
        raise ConfigError(
            f"{name}={value} is given, but every night of a schedule has its own: {NIGHT}",
            hint=f"nightjar nightly {name}={value} with the same overrides, for one night",
        )
    check_overrides_of_schedule(list(overrides))
    config = compose([*overrides, f"data.day={ANY_DAY}"], night=True)
    if config.force:
        raise ConfigError(
            "force=true is set, but in a schedule every retry of a night would throw away what it has made",
            hint="leave it out; for one night: nightjar nightly date=<its day> force=true",
        )
    zone, of_cron = night_zone(config), config.schedule.time_zone
    if zone != of_cron:
        where, hint = "data.time_zone", f"schedule.time_zone={zone}"
        if config.nightly.time_zone:
            where, hint = "nightly.time_zone", f"{hint}, and leave nightly.time_zone out"
        raise ConfigError(
            f"{where} is {zone} and schedule.time_zone is {of_cron}, but {NIGHT} is to mean the day before "
            "the CronJob's start",
            hint=hint,
        )
    return config


def schedule_objects(config: Config, overrides: Sequence[str]) -> list[Object]:
    """Return accounts, role, binding, policy and CronJob, named by the schedule, for nights with ``overrides``."""
    return [*access(config), network_policy(config), cron_job(config, overrides)]


def access(config: Config) -> list[Object]:
    """Return the service accounts of launcher and stages, and the launcher's role. Stages have no rights.

    The role is limited to the launcher's namespace. The user's own accounts are neither made nor deleted.
    """
    name, pods = launcher_account(config), config.launch.pods
    accounts = []
    for account, given in {name: pods.launcher_account, stage_account(config): pods.service_account}.items():
        if given is None:
            accounts.append(_object(config, "v1", "ServiceAccount", account, automountServiceAccountToken=False))
    role_name = f"{config.schedule.name}-launcher"
    subject = {"kind": "ServiceAccount", "name": name, "namespace": config.launch.namespace}
    role = {"apiGroup": RBAC, "kind": "Role", "name": role_name}
    return [
        *accounts,
        _object(config, f"{RBAC}/v1", "Role", role_name, rules=rules(config.launch)),
        _object(config, f"{RBAC}/v1", "RoleBinding", role_name, roleRef=role, subjects=[subject]),
    ]


def network_policy(config: Config) -> Object:
    """Return the policy by which pods of stages accept connections only from each other."""
    # All ports are open between them: the rendezvous has one, but gloo and NCCL take any that are free.
    return _object(config, VERSION, KIND, config.schedule.name, spec=among(NIGHTJAR_LABELS))


def cron_job(config: Config, overrides: Sequence[str]) -> Object:
    """Return the CronJob: one launcher at a time, which continues where the last one stopped."""
    schedule = config.schedule
    # The kubelet replaces $(NAME) by a variable's value, and $$ by $.
    inside = [text.replace("$", "$$") for text in overrides if not text.lstrip("+").startswith(OUTSIDE)]
    command = ["python", "-m", "pipeline.cli", "nightly", NIGHT, f"job=$({JOB})", *inside]
    labels = {**NIGHTJAR_LABELS, "nightjar/schedule": schedule.name}
    template = pod_template(config, LAUNCHER, command, {"TZ": schedule.time_zone}, labels, LAUNCHER_GRACE_SECONDS)
    of_job = {"name": JOB, "valueFrom": {"fieldRef": {"fieldPath": "metadata.labels['job-name']"}}}
    template["spec"]["containers"][0]["env"].insert(0, of_job)
    job = {
        "backoffLimit": schedule.retries,
        "activeDeadlineSeconds": math.ceil(3600 * schedule.deadline_hours),
        "podFailurePolicy": {
            "rules": [
                {"action": "FailJob", "onExitCodes": {"operator": "In", "values": FINAL_CODES}},
                # A drained node is not the launcher's fault: the next launcher attaches to the running stage.
                {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]},
            ]
        },
        "template": template,
    }
    spec: Object = {
        "schedule": schedule.cron,
        "timeZone": schedule.time_zone,
        "concurrencyPolicy": "Forbid",
        # Without a deadline, a night that was skipped during a long one would start right after it.
        "startingDeadlineSeconds": 60 * schedule.start_within_minutes,
    }
    # Leave the field out if false: `suspend` and kubectl own it then, and applying again does not resume the schedule.
    if schedule.suspended:
        spec["suspend"] = True
    spec |= {
        "successfulJobsHistoryLimit": schedule.keep,
        "failedJobsHistoryLimit": schedule.keep,
        "jobTemplate": {"metadata": {"labels": labels}, "spec": job},
    }
    return _object(config, "batch/v1", "CronJob", schedule.name, spec=spec)


def _object(config: Config, version: str, kind: str, name: str, **content: object) -> Object:
    labels = {**NIGHTJAR_LABELS, "nightjar/schedule": config.schedule.name}
    metadata = {"name": name, "namespace": config.launch.namespace, "labels": labels}
    return {"apiVersion": version, "kind": kind, "metadata": metadata, **content}


def collection(item: Object) -> str:
    """Return the API path of the collection that ``item`` belongs to."""
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
    # The CronJob goes first, since its launchers need their accounts and rights until they end.
    lines = []
    for item in reversed(objects):
        done = "does not exist" if api.find(_path(item)) is None else "deleted"
        api.delete(_path(item))
        lines.append(f"{item['kind'].lower()} {item['metadata']['name']} {done}")
    return lines


def suspend(api: Api, cron: Object, suspended: bool) -> None:
    """Suspend or resume the CronJob; LaunchError if there is none. A night in progress continues."""
    _live(api, cron)
    api.merge(_path(cron), {"spec": {"suspend": suspended}})


@dataclass(frozen=True)
class NightJobState:
    """One job of the CronJob. ``state``: running | succeeded | failed. ``exit_code``: its last launcher's, if any."""

    job: str
    started: str
    state: str
    exit_code: int | None


@dataclass(frozen=True)
class Status:
    """What the cluster knows about the schedule. ``last``: when it last started a launcher."""

    schedule: str
    suspended: bool
    last: str | None
    nights: list[NightJobState]

    def lines(self) -> list[str]:
        """Return the text of ``nightjar schedule status``."""
        state = "suspended" if self.suspended else "on"
        lines = [f"schedule {self.schedule} is {state}; last start: {self.last or 'none yet'}"]
        for night in self.nights:
            line = f"  {night.started}  {night.job}  {night.state}"
            if night.exit_code is not None:
                line += f", exit code {night.exit_code}"
            lines.append(line)
        return lines


def status(api: Api, cron: Object) -> Status:
    """Return the state of the CronJob and of its nights, newest first; LaunchError if there is no CronJob."""
    live = _live(api, cron)
    namespace = cron["metadata"]["namespace"]
    jobs = api.get(f"/apis/batch/v1/namespaces/{namespace}/jobs").get("items", [])
    # Compare the owner's uid, since a CronJob that was deleted and made again has the same name.
    owned = []
    for job in jobs:
        owners = [owner["uid"] for owner in job["metadata"].get("ownerReferences", [])]
        if live["metadata"]["uid"] in owners:
            owned.append(job)
    owned.sort(key=lambda job: job["metadata"]["creationTimestamp"], reverse=True)
    # Map the name of each job to the pod of its last launcher.
    last_pods: dict[str, Object] = {}
    pods = api.get(f"/api/v1/namespaces/{namespace}/pods", labelSelector="job-name").get("items", [])
    for pod in sorted(pods, key=lambda pod: str(pod["metadata"]["creationTimestamp"])):
        last_pods[pod["metadata"]["labels"].get("job-name")] = pod
    nights = []
    for job in owned:
        name, code = job["metadata"]["name"], None
        if name in last_pods:
            containers = last_pods[name].get("status", {}).get("containerStatuses") or [{}]
            code = (containers[0].get("state", {}).get("terminated") or {}).get("exitCode")
        nights.append(NightJobState(name, job["metadata"]["creationTimestamp"], indexed_job_phase(job), code))
    last = live.get("status", {}).get("lastScheduleTime")
    return Status(live["spec"]["schedule"], bool(live["spec"].get("suspend")), last, nights)


def _live(api: Api, cron: Object) -> Object:
    live = api.find(_path(cron))
    if live is None:
        name, namespace = cron["metadata"]["name"], cron["metadata"]["namespace"]
        raise LaunchError(
            f"there is no CronJob {name!r} in namespace {namespace}",
            hint="nightjar schedule apply with the same settings",
        )
    return live


def night_job(config: Config, name: str) -> NightJob:
    """Return the job ``name``; LaunchError if there is none."""
    namespace = config.launch.namespace
    job = _api(config).find(f"/apis/batch/v1/namespaces/{namespace}/jobs/{name}")
    if job is None:
        raise LaunchError(f"there is no job {name!r} in namespace {namespace}", hint="leave job= out")
    metadata, made = job["metadata"], job["metadata"]["creationTimestamp"]
    # The night is that of the time at which the job was due, since it may be made late, even after midnight. A job that
    # was made by hand has no such time.
    due = (metadata.get("annotations") or {}).get(SCHEDULED) or made
    started = (job.get("status") or {}).get("startTime") or made
    seconds = job["spec"].get("activeDeadlineSeconds")
    deadline = datetime.fromisoformat(started) + timedelta(seconds=seconds) if seconds else None
    return NightJob(datetime.fromisoformat(due), deadline)


def end_leftovers(config: Config, model: str, day: date, kept: Iterable[date]) -> None:
    """End running jobs of the model's nights before ``day``, except the ``kept`` ones.

    Their launchers are gone, since this process holds the model's lock, so their results would not be used.
    """
    # Find jobs by the names of the model's nights, so that no other run in the namespace is touched.
    days = {day - timedelta(days=back) for back in range(1, LOOK_BACK_DAYS + 1)} - set(kept)
    labels = {run_label(run_name(model, each)) for each in days}
    api = _api(config)
    runner = cluster_runner(config, api)
    query = f"{RUN_LABEL} in ({','.join(sorted(labels))})"
    for job in api.get(runner.jobs, labelSelector=query).get("items", []):
        if runner.phase_of(job) == "running" and "deletionTimestamp" not in job["metadata"]:
            name = job["metadata"]["name"]
            log.warning("night      job %s of an earlier night, whose launcher is gone, is ended", name)
            runner.delete(name)


def _api(config: Config) -> Api:
    return connect(config.launch.context).patient(60 * config.launch.outage_minutes)
