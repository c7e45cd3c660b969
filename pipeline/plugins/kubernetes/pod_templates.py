"""Names, labels and pod templates of stages and of the launcher, with ``launch.pods.patch`` merged into them."""

from __future__ import annotations

import copy
import hashlib
import math
import re
from collections.abc import Iterator, Mapping
from typing import Any

from pipeline.config import Config
from pipeline.config.kubernetes import EMBEDDING, PATCH_ALL
from pipeline.config.launch import PodConfig, PodResources
from pipeline.core.errors import ConfigError, LaunchError
from pipeline.launch.appdefs import distributed, resources_of, roles_of
from pipeline.plugins.kubernetes.api_client import Api, Object, RefusedError
from pipeline.records.runs import Step

LONGEST = 63  # the limit of a DNS label, such as a pod's host name
# These labels are on all pods.
NIGHTJAR_LABELS = {"app.kubernetes.io/name": "nightjar", "app.kubernetes.io/managed-by": "nightjar"}
RUN_LABEL, STAGE_LABEL, ATTEMPT_LABEL = "nightjar/run", "nightjar/stage", "nightjar/attempt"
GPU = "nvidia.com/gpu"
LAUNCHER = "launcher"
REFUSED = (400, 422)  # statuses of an answer that says what is wrong with a template
CONTAINER = "nightjar"  # the container that runs the stage
PORT_NAME = "c10d"  # the port at which the ranks of several hosts meet
DIRECTIVE = "$patch"
# Fields of a pod template whose lists are merged, and the key that matches their items: the patch merge keys of
# ``core/v1`` types (Kubernetes, "Strategic Merge Patch", staging/src/k8s.io/apimachinery). Other lists are replaced as
# a whole.
KEYS = {
    "containers": "name",
    "initContainers": "name",
    "volumes": "name",
    "env": "name",
    "imagePullSecrets": "name",
    "volumeMounts": "mountPath",
    "volumeDevices": "devicePath",
    "ports": "containerPort",
    "hostAliases": "ip",
    "topologySpreadConstraints": "topologyKey",
    "resourceClaims": "name",
    "schedulingGates": "name",
}
OURS = "nightjar/"  # prefix of the labels by which the launcher finds its jobs again


def stage_account(config: Config) -> str:
    return config.launch.pods.service_account or f"{config.schedule.name}-stages"


def launcher_account(config: Config) -> str:
    return config.launch.pods.launcher_account or f"{config.schedule.name}-launcher"


def job_name(config: Config, step: Step, attempt: int) -> str:
    """Return ``<run>-<stage>-<key>-a<attempt>``, short enough to append ``-<stage>-<host>-0``.

    It is deterministic, so that a launcher finds the job that an earlier one submitted. The ten digits of the key cover
    the step's key and the image: a job of another image is another job.
    """
    digits = hashlib.sha256(f"{step.key} {config.launch.pods.image}".encode()).hexdigest()[:10]
    tail = f"-{step.name}-{digits}-a{attempt}"
    # A JobSet names its pods -<stage>-<job>-<host> and adds five random letters, which its webhook counts.
    longest = max(roles_of(step.name, config), key=len)
    suffix = f"-{longest}-0-{config.hardware.hosts - 1}"
    if config.launch.job == "jobset":
        suffix += "-abcde"
    return run_label(str(config.run), LONGEST - len(tail) - len(suffix)) + tail


def run_label(run: str, longest: int = LONGEST) -> str:
    """Return ``run`` as a unique DNS label of at most ``longest`` characters that starts with a letter."""
    slug = re.sub(r"[^a-z0-9]+", "-", run.lower()).strip("-")
    if not slug[:1].isalpha():
        slug = f"r-{slug}".strip("-")
    if slug == run and len(slug) <= longest:
        return slug
    # Two runs may have the same slug, such as ``a.b`` and ``a-b``: a hash of the whole name tells them apart.
    return f"{slug[: longest - 7].strip('-')}-{hashlib.sha256(run.encode()).hexdigest()[:6]}"


def job_labels(config: Config, step: Step, attempt: int) -> dict[str, str]:
    return {**NIGHTJAR_LABELS, **stage_selector(config, step), ATTEMPT_LABEL: str(attempt)}


def stage_selector(config: Config, step: Step) -> dict[str, str]:
    """Return the labels that all attempts of a run's stage share."""
    return {RUN_LABEL: run_label(str(config.run)), STAGE_LABEL: step.name}


def stage_query(config: Config, step: Step) -> str:
    """Return ``stage_selector`` as the value of a ``labelSelector``."""
    return ",".join(map("=".join, stage_selector(config, step).items()))


def pod_template(
    config: Config,
    stage: str,
    command: list[str],
    env: dict[str, str],
    labels: dict[str, str],
    seconds: int,
    role: str = "",
) -> Object:
    """Return the template of a pod of ``stage`` that runs ``command`` and has ``seconds`` to end after a signal.

    ``env``: variables besides those of ``launch.pods``; ``role``: the pod's role, if the stage's pods have several,
    which selects its resources and patches. Nothing in the pod may become root, write to the image or, except in the
    launcher, talk to the API server.
    """
    pods, launcher = config.launch.pods, stage == LAUNCHER
    # Embedding hosts are pods of the train stage, with their own resources and patches.
    kind = EMBEDDING if role == EMBEDDING else stage
    account = launcher_account(config) if launcher else stage_account(config)
    volumes, mounts = _volumes(pods, resources_of(pods, kind))
    container: Object = {
        "name": CONTAINER,
        "image": pods.image,
        "imagePullPolicy": "IfNotPresent",
        "command": command,
        "env": _environment(pods, env),
        "resources": _resources(config, kind),
        "volumeMounts": mounts,
        "securityContext": {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        },
        "terminationMessagePolicy": "FallbackToLogsOnError",
    }
    if distributed(stage) and config.hardware.hosts > 1:
        container["ports"] = [{"name": PORT_NAME, "containerPort": config.launch.port}]
    if pods.env_from:
        container["envFrom"] = [{"secretRef": {"name": name}} for name in pods.env_from]
    spec: Object = {
        "restartPolicy": "Never",
        "serviceAccountName": account,
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
        "containers": [container],
        "volumes": volumes,
    }
    # The launcher's deadline belongs to its job and covers all its pods (``cron_job``).
    if not launcher:
        spec["activeDeadlineSeconds"] = math.ceil(60 * config.launch.deadline_minutes)
    if config.launch.priority_class:
        spec["priorityClassName"] = config.launch.priority_class
    if pods.pull_secrets:
        spec["imagePullSecrets"] = [{"name": name} for name in pods.pull_secrets]
    if pods.node_selector:
        spec["nodeSelector"] = dict(pods.node_selector)
    if pods.tolerations:
        spec["tolerations"] = []
        for toleration in pods.tolerations:
            spec["tolerations"].append({key: value for key, value in vars(toleration).items() if value})
    annotations = {
        # A service mesh's sidecar would keep the pod from ending.
        "sidecar.istio.io/inject": "false",
        # Removing a node is not worth losing an attempt.
        "cluster-autoscaler.kubernetes.io/safe-to-evict": "false",
    }
    return patched({"metadata": {"labels": dict(labels), "annotations": annotations}, "spec": spec}, pods, kind)


def _environment(pods: PodConfig, env: dict[str, str]) -> list[Object]:
    # The pod's address comes first, because later values may refer to it.
    variables: list[Object] = [{"name": "POD_IP", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}}]
    # The home directory is /tmp, because the image is read-only.
    for name, value in ({"HOME": "/tmp"} | env | pods.env).items():
        variables.append({"name": name, "value": value})
    # Refer to secrets by name and never copy their values: manifests may be printed and committed.
    for name, reference in pods.secret_env.items():
        secret, _, key = reference.partition("/")
        variables.append({"name": name, "valueFrom": {"secretKeyRef": {"name": secret, "key": key}}})
    return variables


def _resources(config: Config, stage: str) -> Object:
    needed = resources_of(config.launch.pods, stage)
    amounts = {
        "cpu": f"{round(1000 * needed.cpu)}m",
        "memory": _mebibytes(needed.memory_gib),
        "ephemeral-storage": _mebibytes(needed.disk_gib),
    }
    gpus = needed.gpus
    if gpus is None:
        # Pods of role ``EMBEDDING`` get no GPUs unless they ask for some.
        gpus = 0
        if config.hardware.device == "cuda" and distributed(stage):
            gpus = config.hardware.ranks_per_host
    if gpus:
        amounts[GPU] = str(gpus)
    # Requests equal the limits: a trainer that shares its cores or memory slows all others down.
    return {"requests": amounts, "limits": dict(amounts)}


def _mebibytes(gib: float) -> str:
    return f"{round(1024 * gib)}Mi"


def _volumes(pods: PodConfig, resources: PodResources) -> tuple[list[Object], list[Object]]:
    """Return the volumes of a pod and where its container mounts them."""
    # Shared memory is 64 MB by default, which is too little for loaders and NCCL.
    shared = {"medium": "Memory", "sizeLimit": _mebibytes(resources.shm_gib)}
    volumes: list[Object] = [
        {"name": "nightjar-shm", "emptyDir": shared},
        {"name": "nightjar-tmp", "emptyDir": {"sizeLimit": _mebibytes(resources.disk_gib)}},
    ]
    mounts: list[Object] = [
        {"name": "nightjar-shm", "mountPath": "/dev/shm"},
        {"name": "nightjar-tmp", "mountPath": "/tmp"},
    ]
    for name, volume in pods.volumes.items():
        claim: Object = {"claimName": volume.claim}
        mount: Object = {"name": name, "mountPath": volume.path}
        if volume.sub_path:
            mount["subPath"] = volume.sub_path
        if volume.read_only:
            claim["readOnly"] = mount["readOnly"] = True
        volumes.append({"name": name, "persistentVolumeClaim": claim})
        mounts.append(mount)
    return volumes, mounts


def check_templates(api: Api, config: Config) -> None:
    """Raise LaunchError for a pod that the server would refuse, or whose patch has fields it does not know.

    Makes a dry run before anything starts, with strict field validation: the server keeps nothing. Servers older than
    1.25 drop unknown fields silently, which shows in their answers. Nothing is asked if there is no patch.
    """
    if not config.launch.pods.patch:
        return
    path = f"/api/v1/namespaces/{config.launch.namespace}/podtemplates"
    for stage in (*config.stages, LAUNCHER):
        # An inline stage runs in the launcher's own pod.
        if stage in config.launch.inline:
            continue
        template = pod_template(config, stage, ["true"], {}, {}, 1)
        body = {"apiVersion": "v1", "kind": "PodTemplate", "metadata": {"name": "nightjar-trial"}, "template": template}
        hint = f"launch.pods.patch.{stage} or .all; nightjar launch render shows the pods"
        try:
            answer = api.create(path, body, dryRun="All", fieldValidation="Strict")
        except RefusedError as error:
            if error.status not in REFUSED:
                raise
            raise LaunchError(f"pods of {stage}: {error.message}", hint=hint) from None
        unknown = list(_dropped(template, answer.get("template") or {}, ""))
        if unknown:
            raise LaunchError(f"pods of {stage}: the API server knows no field {', '.join(unknown)}", hint=hint)


def _dropped(sent: Any, kept: Any, path: str) -> Iterator[str]:
    """Yield paths of what was ``sent`` and that the server has not ``kept``; empty values may be left out."""
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


def patched(template: Object, pods: PodConfig, stage: str) -> Object:
    """Merge ``launch.pods.patch`` for all pods, then for ``stage``, into the ``template`` of a pod.

    Raises:
        ConfigError: A fragment changes what the launcher relies on, or its lists lack the field they go by.
    """
    # Check after each fragment, so that the error names the one to blame.
    result, expected = template, _essentials(template)
    for name in (PATCH_ALL, stage):
        fragment = pods.patch.get(name)
        if not fragment:
            continue
        where = f"launch.pods.patch.{name}"
        result = merged(result, fragment, where)
        for what, value in _essentials(result).items():
            if value != expected[what]:
                raise ConfigError(
                    f"{where} changes {what}: {value}, expected {expected[what]}, on which the launcher relies",
                    hint=f"leave it out of {where}; launch.* has settings for what Nightjar runs",
                )
    return result


def merged(base: Mapping[str, Any], patch: Mapping[str, Any], where: str) -> Object:
    """Merge ``patch`` into a copy of ``base``, as ``kubectl patch`` does.

    Dictionaries are merged, null removes a key. A list replaces the former one, but for the lists of ``KEYS``: their
    entries are merged by that field. ``{$patch: delete}`` removes an entry, ``{$patch: replace}`` takes the rest as is.

    Args:
        base: What is patched.
        patch: The fragment.
        where: The path for messages.
    """
    result = copy.deepcopy(dict(base))
    for name, value in patch.items():
        place = f"{where}.{name}"
        if name == DIRECTIVE:
            continue
        if value is None:
            result.pop(name, None)
        elif isinstance(value, Mapping):
            former = result.get(name)
            if value.get(DIRECTIVE) == "replace" or not isinstance(former, Mapping):
                former = {}
            result[name] = merged(former, value, place)
        elif isinstance(value, list) and name in KEYS:
            result[name] = _merged_list(result.get(name) or [], value, KEYS[name], place)
        else:
            result[name] = copy.deepcopy(value)
    return result


def _merged_list(base: list[Object], patch: list[Any], key: str, where: str) -> list[Object]:
    result = [copy.deepcopy(entry) for entry in base]
    for entry in patch:
        if not isinstance(entry, Mapping) or key not in entry:
            raise ConfigError(
                f"{where} has an entry without {key}, by which its entries are merged: {entry}",
                hint=f"{where}=[{{{key}:<which>,..}}]",
            )
        values = [former.get(key) for former in result]
        if entry.get(DIRECTIVE) == "delete":
            result = [former for former in result if former.get(key) != entry[key]]
        elif entry[key] not in values:
            result.append(merged({}, entry, where))
        else:
            place = values.index(entry[key])
            former = {} if entry.get(DIRECTIVE) == "replace" else result[place]
            result[place] = merged(former, entry, f"{where}.{entry[key]}")
    return result


def _essentials(template: Object) -> dict[str, Any]:
    # These parts of a pod find, start and end a stage.
    labels = template.get("metadata", {}).get("labels") or {}
    spec = template.get("spec", {})
    command = None
    for container in spec.get("containers") or []:
        if container.get("name") == CONTAINER:
            command = [*(container.get("command") or []), *(container.get("args") or [])]
            break
    return {
        f"labels {OURS}..": {name: value for name, value in labels.items() if name.startswith(OURS)},
        "spec.restartPolicy": spec.get("restartPolicy"),
        f"the command of container {CONTAINER}": command,
    }
