"""Pod templates of stages and of the launcher: what they ask for, see and may do; dictionaries, as the API has them."""

from __future__ import annotations

import math
from typing import Any

from pipeline.config import Config, PodConfig, PodResources
from pipeline.config.kubernetes import EMBEDDING
from pipeline.launch.appdefs import distributed, resources_of
from pipeline.launch.kubernetes.names import launcher_account, stage_account
from pipeline.launch.kubernetes.patch import CONTAINER, patched

Object = dict[str, Any]
GPU = "nvidia.com/gpu"
LAUNCHER = "launcher"


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
