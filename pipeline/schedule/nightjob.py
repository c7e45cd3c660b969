"""What a night on a cluster knows of the job that a CronJob made for it, and of the jobs that earlier nights left."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import date, datetime, timedelta

from pipeline.config import Config
from pipeline.errors import LaunchError
from pipeline.launch.kubernetes.api import Api
from pipeline.launch.kubernetes.credentials import connect
from pipeline.launch.kubernetes.names import RUN_LABEL, run_label
from pipeline.schedule.base import run_name

SCHEDULED = "batch.kubernetes.io/cronjob-scheduled-timestamp"
LOOK_BACK_DAYS = 31
log = logging.getLogger(__name__)


@dataclass(frozen=True)
class NightJob:
    """The job of a night. ``due``: when it was to start; ``deadline``: when its launchers are ended, None for never.

    Every launcher of the job finds the same times, however late it starts: date=yesterday counts from ``due``.
    """

    due: datetime
    deadline: datetime | None


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
    from pipeline.launch.schedulers import cluster_runner

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
