"""The objects that start a launcher every night: accounts, their rights, and the CronJob."""

from __future__ import annotations

import math
from collections.abc import Sequence

from pipeline.compose import compose
from pipeline.config import Config, LaunchConfig
from pipeline.errors import ConfigError
from pipeline.launch.kubernetes.pods import LAUNCHER, Object, pod_template
from pipeline.launch.kubernetes.rights import rules
from pipeline.schedule.dates import ANY_DAY, taken

NIGHT = "date=yesterday"  # the last whole day, in schedule.time_zone
# Exit codes that the same command would return again: settings, data, plan, guard, gate, artifact.
FINAL_CODES = [2, 3, 4, 5, 6, 7]
LAUNCHER_GRACE_SECONDS = 30
RBAC = "rbac.authorization.k8s.io"


def schedule_config(overrides: Sequence[str]) -> Config:
    """The configuration of nights with ``overrides``, composed and checked as `nightjar nightly` does it."""
    given, overrides = taken(overrides, ("date",))
    if given:
        raise ConfigError(
            f"date={given['date']} is given, but every night of a schedule has its own: {NIGHT}",
            hint=f"nightjar nightly date={given['date']} with the same overrides, for one night",
        )
    return compose([*overrides, f"data.day={ANY_DAY}"])


def schedule_objects(config: Config, overrides: Sequence[str]) -> list[Object]:
    """Accounts, role, binding and CronJob. The nights run with ``overrides``."""
    return [*access(config.launch), cron_job(config, overrides)]


def access(launch: LaunchConfig) -> list[Object]:
    """The service accounts of launcher and stages, and the launcher's role in its namespace. Stages have no rights."""
    name, namespace = launch.pods.launcher_account, launch.namespace
    accounts = [
        _object("v1", "ServiceAccount", namespace, account, automountServiceAccountToken=False)
        for account in (name, launch.pods.service_account)
    ]
    subject = {"kind": "ServiceAccount", "name": name, "namespace": namespace}
    role = {"apiGroup": RBAC, "kind": "Role", "name": name}
    return [
        *accounts,
        _object(f"{RBAC}/v1", "Role", namespace, name, rules=rules(launch)),
        _object(f"{RBAC}/v1", "RoleBinding", namespace, name, roleRef=role, subjects=[subject]),
    ]


def cron_job(config: Config, overrides: Sequence[str]) -> Object:
    """The CronJob: one launcher at a time, which continues where the last one stopped."""
    schedule = config.schedule
    command = ["python", "-m", "pipeline.cli", "nightly", NIGHT, *(text.replace("$", "$$") for text in overrides)]
    labels = {**_labels(), "nightjar/schedule": schedule.name}
    template = pod_template(config, LAUNCHER, command, {"TZ": schedule.time_zone}, labels, LAUNCHER_GRACE_SECONDS)
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
        "suspend": schedule.suspended,
        "successfulJobsHistoryLimit": schedule.keep,
        "failedJobsHistoryLimit": schedule.keep,
        "jobTemplate": {"metadata": {"labels": labels}, "spec": job},
    }
    return _object("batch/v1", "CronJob", config.launch.namespace, schedule.name, spec=spec)


def _labels() -> dict[str, str]:
    return {"app.kubernetes.io/name": "nightjar", "app.kubernetes.io/managed-by": "nightjar"}


def _object(version: str, kind: str, namespace: str, name: str, **content: object) -> Object:
    metadata = {"name": name, "namespace": namespace, "labels": _labels()}
    return {"apiVersion": version, "kind": kind, "metadata": metadata, **content}
