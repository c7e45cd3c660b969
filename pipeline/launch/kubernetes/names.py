"""Names and labels of jobs: deterministic, so that a launcher finds the job that an earlier one submitted."""

from __future__ import annotations

import hashlib
import re

from pipeline.config import Config
from pipeline.launch.appdefs import roles_of
from pipeline.records.runs import Step

LONGEST = 63  # of a DNS label, which a pod's host name is
OURS = {"app.kubernetes.io/name": "nightjar", "app.kubernetes.io/managed-by": "nightjar"}  # labels of all pods
RUN_LABEL, STAGE_LABEL, ATTEMPT_LABEL = "nightjar/run", "nightjar/stage", "nightjar/attempt"


def stage_account(config: Config) -> str:
    """The service account of the stages' pods: the user's own, or the one that the schedule makes."""
    return config.launch.pods.service_account or f"{config.schedule.name}-stages"


def launcher_account(config: Config) -> str:
    """The service account of the launcher's pod: the user's own, or the one that the schedule makes."""
    return config.launch.pods.launcher_account or f"{config.schedule.name}-launcher"


def job_name(config: Config, step: Step, attempt: int) -> str:
    """``<run>-<stage>-<key>-a<attempt>``, short enough for ``-<stage>-<host>-0`` behind it.

    The ten digits of the key cover the step's key and the image: a job of another image is another job.
    """
    digits = hashlib.sha256(f"{step.key} {config.launch.pods.image}".encode()).hexdigest()[:10]
    tail = f"-{step.name}-{digits}-a{attempt}"
    # Pods of a JobSet: -<stage>-<job>-<host>, and five letters of their own; its webhook counts them.
    longest = max(roles_of(step.name, config), key=len)
    suffix = f"-{longest}-0-{config.hardware.hosts - 1}{'-abcde' if config.launch.job == 'jobset' else ''}"
    return run_label(str(config.run), LONGEST - len(tail) - len(suffix)) + tail


def run_label(run: str, longest: int = LONGEST) -> str:
    """``run`` as a DNS label of at most ``longest`` characters that starts with a letter; other runs have others."""
    slug = re.sub(r"[^a-z0-9]+", "-", run.lower()).strip("-")
    slug = slug if slug[:1].isalpha() else f"r-{slug}".strip("-")
    if slug == run and len(slug) <= longest:
        return slug
    return f"{slug[: longest - 7].strip('-')}-{hashlib.sha256(run.encode()).hexdigest()[:6]}"


def job_labels(config: Config, step: Step, attempt: int) -> dict[str, str]:
    """Labels of a stage's job and pods."""
    return {**OURS, **selector(config, step), ATTEMPT_LABEL: str(attempt)}


def selector(config: Config, step: Step) -> dict[str, str]:
    """The labels that all attempts of a run's stage share."""
    return {RUN_LABEL: run_label(str(config.run)), STAGE_LABEL: step.name}
