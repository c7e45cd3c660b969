"""The objects that start a launcher every night: accounts, their rights, and the CronJob."""

from __future__ import annotations

import math
from collections.abc import Sequence

from pipeline.config import Config
from pipeline.config.compose import compose
from pipeline.config.secrets import check_overrides_of_schedule
from pipeline.core.errors import ConfigError
from pipeline.plugins.kubernetes.network import KIND, VERSION, among
from pipeline.plugins.kubernetes.pod_templates import (
    LAUNCHER,
    NIGHTJAR_LABELS,
    Object,
    launcher_account,
    pod_template,
    stage_account,
)
from pipeline.plugins.kubernetes.rbac import rules
from pipeline.schedule.night_config import ANY_DAY, night_zone, split_arguments

NIGHT = "date=yesterday"  # the last whole day when the night's job was made, in schedule.time_zone
JOB = "NIGHTJAR_JOB"  # variable of the launcher's pod with the name of its job
OUTSIDE = ("launch.context=",)  # overrides that mean nothing inside the cluster
# Exit codes that the same command would return again: settings, data, plan, guard, gate, artifact.
FINAL_CODES = [2, 3, 4, 5, 6, 7]
LAUNCHER_GRACE_SECONDS = 30
RBAC = "rbac.authorization.k8s.io"


def schedule_config(overrides: Sequence[str]) -> Config:
    """The configuration of nights with ``overrides``, composed and checked as `nightjar nightly` does it.

    ConfigError for what no schedule should do every night.
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
        where = "nightly.time_zone" if config.nightly.time_zone else "data.time_zone"
        raise ConfigError(
            f"{where} is {zone} and schedule.time_zone is {of_cron}, but {NIGHT} is to mean the day before "
            "the CronJob's start",
            hint=f"schedule.time_zone={zone}"
            + (", and leave nightly.time_zone out" if config.nightly.time_zone else ""),
        )
    return config


def schedule_objects(config: Config, overrides: Sequence[str]) -> list[Object]:
    """Accounts, role, binding, network policy and CronJob, named by the schedule. The nights run with ``overrides``."""
    return [*access(config), network_policy(config), cron_job(config, overrides)]


def access(config: Config) -> list[Object]:
    """The service accounts of launcher and stages, and the launcher's role in its namespace. Stages have no rights.

    Accounts of the user's own are neither made nor deleted.
    """
    name, pods = launcher_account(config), config.launch.pods
    own = {name: pods.launcher_account, stage_account(config): pods.service_account}
    accounts = [
        _object(config, "v1", "ServiceAccount", account, automountServiceAccountToken=False)
        for account, given in own.items()
        if given is None
    ]
    role_name = f"{config.schedule.name}-launcher"
    subject = {"kind": "ServiceAccount", "name": name, "namespace": config.launch.namespace}
    role = {"apiGroup": RBAC, "kind": "Role", "name": role_name}
    return [
        *accounts,
        _object(config, f"{RBAC}/v1", "Role", role_name, rules=rules(config.launch)),
        _object(config, f"{RBAC}/v1", "RoleBinding", role_name, roleRef=role, subjects=[subject]),
    ]


def network_policy(config: Config) -> Object:
    """Pods of stages accept connections from each other alone: of the rendezvous, and of gloo and NCCL on any port."""
    return _object(config, VERSION, KIND, config.schedule.name, spec=among(NIGHTJAR_LABELS))


def cron_job(config: Config, overrides: Sequence[str]) -> Object:
    """The CronJob: one launcher at a time, which continues where the last one stopped."""
    schedule = config.schedule
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
    spec = {
        "schedule": schedule.cron,
        "timeZone": schedule.time_zone,
        "concurrencyPolicy": "Forbid",
        # Otherwise a night skipped during a long one would start right after it.
        "startingDeadlineSeconds": 60 * schedule.start_within_minutes,
        # Left out if false: `suspend` and kubectl own it then, and applying again does not resume the schedule.
        **({"suspend": True} if schedule.suspended else {}),
        "successfulJobsHistoryLimit": schedule.keep,
        "failedJobsHistoryLimit": schedule.keep,
        "jobTemplate": {"metadata": {"labels": labels}, "spec": job},
    }
    return _object(config, "batch/v1", "CronJob", schedule.name, spec=spec)


def _object(config: Config, version: str, kind: str, name: str, **content: object) -> Object:
    labels = {**NIGHTJAR_LABELS, "nightjar/schedule": config.schedule.name}
    metadata = {"name": name, "namespace": config.launch.namespace, "labels": labels}
    return {"apiVersion": version, "kind": kind, "metadata": metadata, **content}
