"""Names, labels and pod templates of stages and of the launcher; dictionaries, as the API has them."""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Iterator
from typing import Any

from pipeline.config import Config
from pipeline.config.kubernetes import EMBEDDING
from pipeline.config.launch import PodConfig, PodResources
from pipeline.core.errors import LaunchError
from pipeline.launch.appdefs import distributed, resources_of, roles_of
from pipeline.plugins.kubernetes.api_client import Api, Object, RefusedError
from pipeline.plugins.kubernetes.patch import CONTAINER, patched
from pipeline.records.runs import Step

LONGEST = 63  # of a DNS label, which a pod's host name is
# Labels of all pods.
NIGHTJAR_LABELS = {"app.kubernetes.io/name": "nightjar", "app.kubernetes.io/managed-by": "nightjar"}
RUN_LABEL, STAGE_LABEL, ATTEMPT_LABEL = "nightjar/run", "nightjar/stage", "nightjar/attempt"
GPU = "nvidia.com/gpu"
LAUNCHER = "launcher"
REFUSED = (400, 422)  # statuses of an answer that says what is wrong with a template


def stage_account(config: Config) -> str:
    """The service account of the stages' pods: the user's own, or the one that the schedule makes."""
    return config.launch.pods.service_account or f"{config.schedule.name}-stages"


def launcher_account(config: Config) -> str:
    """The service account of the launcher's pod: the user's own, or the one that the schedule makes."""
    return config.launch.pods.launcher_account or f"{config.schedule.name}-launcher"


def job_name(config: Config, step: Step, attempt: int) -> str:
    """``<run>-<stage>-<key>-a<attempt>``, short enough for ``-<stage>-<host>-0`` behind it.

    It is deterministic, so that a launcher finds the job that an earlier one submitted. The ten digits of the key cover
    the step's key and the image: a job of another image is another job.
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
    return {**NIGHTJAR_LABELS, **stage_selector(config, step), ATTEMPT_LABEL: str(attempt)}


def stage_selector(config: Config, step: Step) -> dict[str, str]:
    """The labels that all attempts of a run's stage share."""
    return {RUN_LABEL: run_label(str(config.run)), STAGE_LABEL: step.name}


def pod_template(
    config: Config,
    stage: str,
    command: list[str],
    env: dict[str, str],
    labels: dict[str, str],
    seconds: int,
    role: str = "",
) -> Object:
    """Template of one pod of ``stage``, which runs ``command`` and has ``seconds`` to end when it is told to.

    ``env``: variables beside those of ``launch.pods``; ``role``: of the pod, where the stage's pods have several, by
    which it has resources and patches of its own. Nothing in it may become root, write to the image or talk to
    the API server, but for the launcher.
    """
    pods, launcher, kind = config.launch.pods, stage == LAUNCHER, EMBEDDING if role == EMBEDDING else stage
    spec: Object = {
        "restartPolicy": "Never",
        "serviceAccountName": launcher_account(config) if launcher else stage_account(config),
        "automountServiceAccountToken": launcher,
        "enableServiceLinks": False,
        "terminationGracePeriodSeconds": seconds,
        "securityContext": {
            "runAsNonRoot": True,
            "runAsUser": pods.user,
            "runAsGroup": pods.user,
            "fsGroup": pods.user,
            "fsGroupChangePolicy": "OnRootMismatch",
            "seccompProfile": {"type": "RuntimeDefault"},
        },
        "containers": [_container(config, stage, command, env, kind)],
        "volumes": _volumes(pods, resources_of(pods, kind)),
    }
    if not launcher:
        spec["activeDeadlineSeconds"] = math.ceil(60 * config.launch.deadline_minutes)
    if config.launch.priority_class:
        spec["priorityClassName"] = config.launch.priority_class
    if pods.pull_secrets:
        spec["imagePullSecrets"] = [{"name": name} for name in pods.pull_secrets]
    if pods.node_selector:
        spec["nodeSelector"] = dict(pods.node_selector)
    if pods.tolerations:
        spec["tolerations"] = [
            {key: value for key, value in vars(toleration).items() if value} for toleration in pods.tolerations
        ]
    annotations = {
        "sidecar.istio.io/inject": "false",  # a service mesh's sidecar would keep the pod from ending
        "cluster-autoscaler.kubernetes.io/safe-to-evict": "false",  # a node less is not worth an attempt
    }
    return patched({"metadata": {"labels": dict(labels), "annotations": annotations}, "spec": spec}, pods, kind)


def _container(config: Config, stage: str, command: list[str], env: dict[str, str], kind: str) -> Object:
    pods = config.launch.pods
    container: Object = {
        "name": CONTAINER,
        "image": pods.image,
        "imagePullPolicy": "IfNotPresent",
        "command": command,
        "env": _environment(pods, env),
        "resources": _resources(config, kind),
        "volumeMounts": _mounts(pods),
        "securityContext": {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        },
        "terminationMessagePolicy": "FallbackToLogsOnError",
    }
    if distributed(stage) and config.hardware.hosts > 1:
        container["ports"] = [{"name": "c10d", "containerPort": config.launch.port}]
    if pods.env_from:
        container["envFrom"] = [{"secretRef": {"name": name}} for name in pods.env_from]
    return container


def _environment(pods: PodConfig, env: dict[str, str]) -> list[Object]:
    """Variables; the pod's address first, because later values may refer to it. Secrets are named, never quoted."""
    own = {"HOME": "/tmp", **env}  # the image is read-only
    variables: list[Object] = [{"name": "POD_IP", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}}]
    variables += [{"name": name, "value": value} for name, value in {**own, **pods.env}.items()]
    for name, reference in pods.secret_env.items():
        secret, _, key = reference.partition("/")
        variables.append({"name": name, "valueFrom": {"secretKeyRef": {"name": secret, "key": key}}})
    return variables


def _resources(config: Config, stage: str) -> Object:
    """Requests are the limits: a trainer that shares its cores or memory slows all others down.

    Pods of role ``EMBEDDING`` get no GPUs unless they ask for some.
    """
    asked = resources_of(config.launch.pods, stage)
    amounts = {
        "cpu": f"{round(1000 * asked.cpu)}m",
        "memory": mebibytes(asked.memory_gib),
        "ephemeral-storage": mebibytes(asked.disk_gib),
    }
    gpus = asked.gpus
    if gpus is None:
        gpus = config.hardware.ranks_per_host if config.hardware.device == "cuda" and distributed(stage) else 0
    if gpus:
        amounts[GPU] = str(gpus)
    return {"requests": amounts, "limits": dict(amounts)}


def mebibytes(gib: float) -> str:
    """``gib`` GiB as Kubernetes writes it."""
    return f"{round(1024 * gib)}Mi"


def _volumes(pods: PodConfig, asked: PodResources) -> list[Object]:
    """Shared memory (64 MB by default, too little for loaders and NCCL), /tmp, and the persistent volumes."""
    volumes: list[Object] = [
        {"name": "nightjar-shm", "emptyDir": {"medium": "Memory", "sizeLimit": mebibytes(asked.shm_gib)}},
        {"name": "nightjar-tmp", "emptyDir": {"sizeLimit": mebibytes(asked.disk_gib)}},
    ]
    for name, volume in pods.volumes.items():
        claim: Object = {"claimName": volume.claim}
        if volume.read_only:
            claim["readOnly"] = True
        volumes.append({"name": name, "persistentVolumeClaim": claim})
    return volumes


def _mounts(pods: PodConfig) -> list[Object]:
    mounts: list[Object] = [
        {"name": "nightjar-shm", "mountPath": "/dev/shm"},
        {"name": "nightjar-tmp", "mountPath": "/tmp"},
    ]
    for name, volume in pods.volumes.items():
        mount: Object = {"name": name, "mountPath": volume.path}
        if volume.sub_path:
            mount["subPath"] = volume.sub_path
        if volume.read_only:
            mount["readOnly"] = True
        mounts.append(mount)
    return mounts


def check_templates(api: Api, config: Config) -> None:
    """LaunchError for a pod that the server would refuse, or whose ``launch.pods.patch`` has fields it does not know.

    A dry run before anything starts, with strict field validation: the server keeps nothing. Servers older than 1.25
    drop unknown fields without a word, which shows in what they answer. Nothing is asked where there is no patch.
    """
    if not config.launch.pods.patch:
        return
    path = f"/api/v1/namespaces/{config.launch.namespace}/podtemplates"
    for stage in [*(stage for stage in config.stages if stage not in config.launch.inline), LAUNCHER]:
        template = pod_template(config, stage, ["true"], {}, {}, 1)
        body = {"apiVersion": "v1", "kind": "PodTemplate", "metadata": {"name": "nightjar-trial"}, "template": template}
        hint = f"launch.pods.patch.{stage} or .all; nightjar launch render shows the pods"
        try:
            answer = api.create(path, body, dryRun="All", fieldValidation="Strict")
        except RefusedError as error:
            if error.status not in REFUSED:
                raise
            raise LaunchError(f"pods of {stage}: {error.message}", hint=hint) from None
        if unknown := list(_dropped(template, answer.get("template") or {}, "")):
            raise LaunchError(f"pods of {stage}: the API server knows no field {', '.join(unknown)}", hint=hint)


def _dropped(sent: Any, kept: Any, path: str) -> Iterator[str]:
    """Paths of what was ``sent`` and is not in what the server ``kept``; empty values may be left out."""
    if isinstance(sent, dict):
        for name, value in sent.items():
            place = f"{path}.{name}".removeprefix(".")
            if not isinstance(kept, dict) or name not in kept:
                if value or value is True:
                    yield place
            else:
                yield from _dropped(value, kept[name], place)
    elif isinstance(sent, list) and isinstance(kept, list):
        for index, (one, other) in enumerate(zip(sent, kept, strict=False)):
            yield from _dropped(one, other, f"{path}[{index}]")
