"""A stage's job as the API server gets it: a Volcano job, a plain indexed one with a service for its pods' names, or
a JobSet with one such job.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

from pipeline.config import Config
from pipeline.core.errors import ConfigError
from pipeline.launch.appdefs import hosts_of, pod_command, pod_environment, pods_app, roles_of, seconds_to_end
from pipeline.launch.runner import rendered_for_volcano
from pipeline.plugins.kubernetes.pod_templates import Object, job_labels, job_name, pod_template
from pipeline.records.runs import Step

VOLCANO = "batch.volcano.sh/v1alpha1"
JOBSET = "jobset.x-k8s.io/v1alpha2"
KUEUE_QUEUE = "kueue.x-k8s.io/queue-name"
# One lost pod ends the job: the others would wait for it, and the launcher submits the next attempt.
ENDING = [{"events": ["PodFailed", "PodEvicted"], "action": "TerminateJob"}]


def volcano_job(config: Config, step: Step, name: str, attempt: int, rendered: Object) -> Object:
    """The Volcano job of a stage, made of the one that TorchX ``rendered``.

    Of TorchX's stay the tasks and each one's command and variables; what it cannot say comes from ``launch.pods``.
    """
    tasks = [_task(config, step, name, attempt, task) for task in rendered["spec"]["tasks"]]
    spec: Object = {
        "schedulerName": "volcano",
        "queue": config.launch.queue,
        "minAvailable": len(tasks),  # all at once, or none
        "maxRetry": 1,  # 0 would become 3; attempts are the launcher's business
        "ttlSecondsAfterFinished": round(3600 * config.launch.keep_hours),
        "plugins": rendered["spec"]["plugins"],
        "policies": copy.deepcopy(ENDING),
        "tasks": tasks,
    }
    if config.launch.priority_class:
        spec["priorityClassName"] = config.launch.priority_class
    return {"apiVersion": VOLCANO, "kind": "Job", "metadata": _metadata(config, step, name, attempt), "spec": spec}


def _task(config: Config, step: Step, name: str, attempt: int, rendered: Object) -> Object:
    container = rendered["template"]["spec"]["containers"][0]
    env = {entry["name"]: entry.get("value", "") for entry in container["env"]}
    # TorchX draws a name of its own for the app and puts it here.
    env["TORCHX_JOB_ID"] = f"kubernetes://nightjar/{config.launch.namespace}:{name}"
    role = rendered["name"].rpartition("-")[0]  # TorchX's task: <role>-<replica>
    return {
        "name": rendered["name"],
        "replicas": 1,
        "template": _template(config, step, attempt, list(container["command"]), env, role),
    }


def indexed_job(config: Config, step: Step, name: str, attempt: int, command: Sequence[str], env: Object) -> Object:
    """The ``batch/v1`` job of a stage, a pod for each host; ``$(FIRST_POD)`` in ``command`` is the first one's name."""
    hosts = hosts_of(step.name, config)
    variables = {"FIRST_POD": f"{name}-0.{name}" if hosts > 1 else "localhost", **env}
    template = _template(config, step, attempt, list(command), variables)
    if hosts > 1:
        template["spec"]["subdomain"] = name
    spec = {**_indexed(template, hosts), "ttlSecondsAfterFinished": round(3600 * config.launch.keep_hours)}
    return _queued({"apiVersion": "batch/v1", "kind": "Job"}, spec, config, step, name, attempt)


def job_set(config: Config, step: Step, name: str, attempt: int, config_url: str) -> Object:
    """The JobSet of a stage: an indexed job for each role of its hosts; the JobSet makes their pods' names known.

    It fails with its first pod, for it has no failure policy and its jobs no retries.
    """
    jobs = [
        {"name": role, "replicas": 1, "template": _role_job(config, step, name, attempt, config_url, role, hosts)}
        for role, hosts in roles_of(step.name, config).items()
    ]
    spec: Object = {
        "network": {"enableDNSHostnames": True, "subdomain": name, "publishNotReadyAddresses": True},
        "replicatedJobs": jobs,
        "ttlSecondsAfterFinished": round(3600 * config.launch.keep_hours),
    }
    return _queued({"apiVersion": JOBSET, "kind": "JobSet"}, spec, config, step, name, attempt)


def _role_job(config: Config, step: Step, name: str, attempt: int, config_url: str, role: str, hosts: int) -> Object:
    first = f"{name}-{step.name}-0-0.{name}" if hosts_of(step.name, config) > 1 else "localhost"
    env = {"FIRST_POD": first, **pod_environment(step.name, config, role)}
    template = _template(config, step, attempt, pod_command(step.name, config, config_url, name, role), env, role)
    return {"metadata": {"labels": dict(template["metadata"]["labels"])}, "spec": _indexed(template, hosts)}


def _indexed(template: Object, hosts: int) -> Object:
    """The spec of a ``batch/v1`` job with a pod of ``template`` for each host."""
    spec: Object = {
        "completions": hosts,
        "parallelism": hosts,
        "completionMode": "Indexed",
        "backoffLimit": 0,  # the launcher submits the next attempt
        "template": template,
    }
    if (seconds := template["spec"].pop("activeDeadlineSeconds", None)) is not None:
        spec["activeDeadlineSeconds"] = seconds
    return spec


def _queued(kind: Object, spec: Object, config: Config, step: Step, name: str, attempt: int) -> Object:
    """The object; with ``launch.kueue`` suspended, until Kueue admits it into its queue."""
    metadata = _metadata(config, step, name, attempt)
    if config.launch.kueue:
        metadata["labels"][KUEUE_QUEUE] = config.launch.queue
        spec["suspend"] = True
    return {**kind, "metadata": metadata, "spec": spec}


def pod_service(config: Config, step: Step, name: str, attempt: int, owner: str) -> Object:
    """The headless service that gives the pods of an indexed job their names; it goes with the job, uid ``owner``."""
    metadata = _metadata(config, step, name, attempt)
    if owner:
        reference = {"apiVersion": "batch/v1", "kind": "Job", "name": name, "uid": owner}
        metadata["ownerReferences"] = [reference]
    spec = {
        "clusterIP": "None",
        "publishNotReadyAddresses": True,  # they meet before they are ready
        "selector": {"job-name": name},
        "ports": [{"name": "c10d", "port": config.launch.port}],
    }
    return {"apiVersion": "v1", "kind": "Service", "metadata": metadata, "spec": spec}


def _metadata(config: Config, step: Step, name: str, attempt: int) -> dict[str, Any]:
    labels = job_labels(config, step, attempt)
    return {"name": name, "namespace": config.launch.namespace, "labels": labels}


def _template(
    config: Config, step: Step, attempt: int, command: list[str], env: dict[str, str], role: str = ""
) -> Object:
    labels = job_labels(config, step, attempt)
    return pod_template(config, step.name, command, env, labels, seconds_to_end(step.name, config), role)


def require_cluster(config: Config) -> None:
    """ConfigError where ``launch`` is not a cluster."""
    if config.launch.name != "kubernetes":
        raise ConfigError(f"launch={config.launch.name} starts no pods", hint="launch=kubernetes")


def stage_objects(config: Config, steps: Sequence[Step], config_url: str) -> list[Object]:
    """The objects of every stage that ``config`` runs in pods, in order, as the launcher would submit first attempts.

    Asks no cluster.
    """
    require_cluster(config)
    objects: list[Object] = []
    for step in steps:
        if step.name in config.stages and step.name not in config.launch.inline:
            objects += _objects(config, step, config_url)
    return objects


def _objects(config: Config, step: Step, config_url: str) -> list[Object]:
    name = job_name(config, step, 1)
    if config.launch.job == "volcano":
        app = pods_app(step.name, config, config_url, name)
        rendered = rendered_for_volcano(app, config.launch.namespace, config.launch.queue)
        return [volcano_job(config, step, name, 1, rendered)]
    if config.launch.job == "jobset":
        return [job_set(config, step, name, 1, config_url)]
    command, env = pod_command(step.name, config, config_url, name), pod_environment(step.name, config)
    job = indexed_job(config, step, name, 1, command, env)
    if hosts_of(step.name, config) == 1:
        return [job]
    return [job, pod_service(config, step, name, 1, "")]


def as_yaml(objects: Sequence[Object]) -> str:
    """``objects`` as one YAML stream, for ``kubectl apply -f -``."""
    import yaml

    class Dumper(yaml.SafeDumper):
        def ignore_aliases(self, data: object) -> bool:
            return True

    return yaml.dump_all(objects, Dumper=Dumper, sort_keys=False, default_flow_style=False, width=120)
