"""The kinds of jobs that stages run as (``launch.job``): how the API server gets them, and runners that submit them.

Volcano jobs, plain indexed jobs with a service for the names of their pods, and JobSets.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence

from pipeline.config import Config
from pipeline.core.errors import ConfigError
from pipeline.launch.appdefs import hosts_of, pod_command, pod_environment, pods_app, roles_of, seconds_to_end
from pipeline.launch.runner import rendered_for_volcano
from pipeline.plugins.kubernetes.api_client import Api, RefusedError
from pipeline.plugins.kubernetes.jobs import ClusterRunner
from pipeline.plugins.kubernetes.pod_templates import (
    ATTEMPT_LABEL,
    PORT_NAME,
    Object,
    job_labels,
    job_name,
    pod_template,
)
from pipeline.records.runs import Step

VOLCANO = "batch.volcano.sh/v1alpha1"
JOBSET = "jobset.x-k8s.io/v1alpha2"
KUEUE_QUEUE = "kueue.x-k8s.io/queue-name"
# One lost pod ends the job: the others would wait for it, and the launcher submits the next attempt.
ENDING = [{"events": ["PodFailed", "PodEvicted"], "action": "TerminateJob"}]
VOLCANO_PHASES = {"Completed": "succeeded", "Failed": "failed", "Terminated": "failed", "Aborted": "cancelled"}


def volcano_job(config: Config, step: Step, name: str, attempt: int, config_url: str) -> Object:
    """Build the Volcano job of a stage from the one that TorchX renders.

    TorchX's job provides the tasks with their commands and variables; everything else comes from ``launch.pods``.
    """
    app = pods_app(step.name, config, config_url, name)
    rendered = rendered_for_volcano(app, config.launch.namespace, config.launch.queue)
    tasks = []
    for task in rendered["spec"]["tasks"]:
        container = task["template"]["spec"]["containers"][0]
        env = {entry["name"]: entry.get("value", "") for entry in container["env"]}
        # TorchX draws its own name for the app and puts it here.
        env["TORCHX_JOB_ID"] = f"kubernetes://nightjar/{config.launch.namespace}:{name}"
        # TorchX names a task <role>-<replica>.
        role = task["name"].rpartition("-")[0]
        template = _template(config, step, attempt, list(container["command"]), env, role)
        tasks.append({"name": task["name"], "replicas": 1, "template": template})
    spec: Object = {
        "schedulerName": "volcano",
        "queue": config.launch.queue,
        # Start all pods at once, or none.
        "minAvailable": len(tasks),
        # Volcano takes 0 for its default of 3. The launcher submits further attempts itself.
        "maxRetry": 1,
        "ttlSecondsAfterFinished": round(3600 * config.launch.keep_hours),
        "plugins": rendered["spec"]["plugins"],
        "policies": copy.deepcopy(ENDING),
        "tasks": tasks,
    }
    if config.launch.priority_class:
        spec["priorityClassName"] = config.launch.priority_class
    return {"apiVersion": VOLCANO, "kind": "Job", "metadata": _metadata(config, step, name, attempt), "spec": spec}


def indexed_job(config: Config, step: Step, name: str, attempt: int, config_url: str) -> Object:
    """Build the ``batch/v1`` job of a stage, a pod for each host. TorchX knows no such jobs."""
    hosts = hosts_of(step.name, config)
    # The kubelet replaces ``$(FIRST_POD)`` in the command by the value in ``env``, the name of the first pod.
    first = f"{name}-0.{name}" if hosts > 1 else "localhost"
    env = {"FIRST_POD": first, **pod_environment(step.name, config)}
    template = _template(config, step, attempt, pod_command(step.name, config, config_url, name), env)
    if hosts > 1:
        template["spec"]["subdomain"] = name
    spec = {**_indexed(template, hosts), "ttlSecondsAfterFinished": round(3600 * config.launch.keep_hours)}
    return _queued({"apiVersion": "batch/v1", "kind": "Job"}, spec, config, step, name, attempt)


def job_set(config: Config, step: Step, name: str, attempt: int, config_url: str) -> Object:
    """Build the JobSet of a stage: an indexed job for each role of its hosts, whose pods' names it makes known."""
    # The JobSet fails with its first pod, because it has no failure policy and its jobs have no retries.
    first = f"{name}-{step.name}-0-0.{name}" if hosts_of(step.name, config) > 1 else "localhost"
    jobs = []
    for role, hosts in roles_of(step.name, config).items():
        env = {"FIRST_POD": first, **pod_environment(step.name, config, role)}
        template = _template(config, step, attempt, pod_command(step.name, config, config_url, name, role), env, role)
        job = {"metadata": {"labels": dict(template["metadata"]["labels"])}, "spec": _indexed(template, hosts)}
        jobs.append({"name": role, "replicas": 1, "template": job})
    spec: Object = {
        "network": {"enableDNSHostnames": True, "subdomain": name, "publishNotReadyAddresses": True},
        "replicatedJobs": jobs,
        "ttlSecondsAfterFinished": round(3600 * config.launch.keep_hours),
    }
    return _queued({"apiVersion": JOBSET, "kind": "JobSet"}, spec, config, step, name, attempt)


def _indexed(template: Object, hosts: int) -> Object:
    spec: Object = {
        "completions": hosts,
        "parallelism": hosts,
        "completionMode": "Indexed",
        # The launcher submits the next attempt.
        "backoffLimit": 0,
        "template": template,
    }
    # The deadline is for the whole job; a pod's deadline would begin only when the pod starts.
    seconds = template["spec"].pop("activeDeadlineSeconds", None)
    if seconds is not None:
        spec["activeDeadlineSeconds"] = seconds
    return spec


def _queued(kind: Object, spec: Object, config: Config, step: Step, name: str, attempt: int) -> Object:
    metadata = _metadata(config, step, name, attempt)
    if config.launch.kueue:
        # Kueue admits suspended jobs into its queue.
        metadata["labels"][KUEUE_QUEUE] = config.launch.queue
        spec["suspend"] = True
    return {**kind, "metadata": metadata, "spec": spec}


def pod_service(config: Config, step: Step, name: str, attempt: int, owner: str) -> Object:
    """Return the headless service that names the pods of an indexed job; it is deleted with the job, uid ``owner``."""
    metadata = _metadata(config, step, name, attempt)
    if owner:
        reference = {"apiVersion": "batch/v1", "kind": "Job", "name": name, "uid": owner}
        metadata["ownerReferences"] = [reference]
    spec = {
        "clusterIP": "None",
        # Pods connect to each other before they are ready.
        "publishNotReadyAddresses": True,
        "selector": {"job-name": name},
        "ports": [{"name": PORT_NAME, "port": config.launch.port}],
    }
    return {"apiVersion": "v1", "kind": "Service", "metadata": metadata, "spec": spec}


def _metadata(config: Config, step: Step, name: str, attempt: int) -> Object:
    return {"name": name, "namespace": config.launch.namespace, "labels": job_labels(config, step, attempt)}


def _template(
    config: Config, step: Step, attempt: int, command: list[str], env: dict[str, str], role: str = ""
) -> Object:
    labels = job_labels(config, step, attempt)
    return pod_template(config, step.name, command, env, labels, seconds_to_end(step.name, config), role)


def require_cluster(config: Config) -> None:
    """Raise ConfigError if ``launch`` is not a cluster."""
    if config.launch.name != "kubernetes":
        raise ConfigError(f"launch={config.launch.name} starts no pods", hint="launch=kubernetes")


def stage_objects(config: Config, steps: Sequence[Step], config_url: str) -> list[Object]:
    """Return the objects of every stage that runs in pods, in order, as the launcher would submit first attempts.

    This asks no cluster.
    """
    require_cluster(config)
    objects: list[Object] = []
    for step in steps:
        if step.name not in config.stages or step.name in config.launch.inline:
            continue
        name = job_name(config, step, 1)
        objects.append(RUNNERS[config.launch.job].build(config, step, name, 1, config_url))
        if config.launch.job == "indexed" and hosts_of(step.name, config) > 1:
            objects.append(pod_service(config, step, name, 1, ""))
    return objects


def as_yaml(objects: Sequence[Object]) -> str:
    """Format ``objects`` as one YAML stream, for ``kubectl apply -f -``."""
    import yaml

    class Dumper(yaml.SafeDumper):
        # Labels and limits are the same object in several places, which YAML would write as &id001 and *id001.
        def ignore_aliases(self, data: object) -> bool:
            return True

    return yaml.dump_all(objects, Dumper=Dumper, sort_keys=False, default_flow_style=False, width=120)


class IndexedRunner(ClusterRunner):
    """Plain ``batch/v1`` indexed jobs, for clusters without Volcano: no gang scheduling, no queue."""

    collection = "/apis/batch/v1/namespaces/{namespace}/jobs"

    build = staticmethod(indexed_job)
    # The job controller sets this label.
    pod_label = "job-name"

    def complete(self, step: Step, job: Object) -> None:
        """Create the service by which several pods find the first one, and replace one that an earlier job left."""
        if hosts_of(step.name, self.config) == 1:
            return
        metadata, services = job["metadata"], f"/api/v1/namespaces/{self.namespace}/services"
        attempt = int(metadata["labels"][ATTEMPT_LABEL])
        service = pod_service(self.config, step, metadata["name"], attempt, metadata["uid"])
        while True:
            try:
                self.api.create(services, service)
                return
            except RefusedError as error:
                if error.status != 409:
                    raise
            # If the former service is gone by now, ``service`` stands in for it. That has no resource version, so it is
            # made again.
            former = (self.api.find(f"{services}/{metadata['name']}") or service)["metadata"]
            owners = [owner["uid"] for owner in former.get("ownerReferences", [])]
            if metadata["uid"] in owners and "deletionTimestamp" not in former and "resourceVersion" in former:
                return
            self.api.delete(f"{services}/{metadata['name']}")
            self.clock.sleep(self.poll_seconds)

    def phase_of(self, job: Object) -> str:
        return indexed_job_phase(job)


def indexed_job_phase(job: Object) -> str:
    """Return running | succeeded | failed, by the conditions of a ``batch/v1`` job."""
    return _phase_by_conditions(job, "Complete")


def _phase_by_conditions(job: Object, done: str) -> str:
    """Return running | succeeded | failed; ``done`` is the type of the condition of a job that has succeeded."""
    holding = set()
    for condition in job.get("status", {}).get("conditions") or []:
        if condition["status"] == "True":
            holding.add(condition["type"])
    if done in holding:
        return "succeeded"
    if "Failed" in holding:
        return "failed"
    return "running"


class JobSetRunner(ClusterRunner):
    """Indexed jobs in a JobSet, which gives their pods names and which Kueue and others handle as a whole."""

    collection = "/apis/jobset.x-k8s.io/v1alpha2/namespaces/{namespace}/jobsets"

    # The JobSet controller makes the job, the service and the pods, and sets this label.
    build = staticmethod(job_set)
    pod_label = "jobset.sigs.k8s.io/jobset-name"

    def phase_of(self, job: Object) -> str:
        return job_set_phase(job)


def job_set_phase(job: Object) -> str:
    """Return running | succeeded | failed, by the conditions of a JobSet."""
    return _phase_by_conditions(job, "Completed")


class VolcanoRunner(ClusterRunner):
    """Volcano jobs: gang scheduling, queues and priorities. All pods of a stage start, or none.

    TorchX renders them (``launch/runner.py``), and our own client with its time limits submits them.
    """

    build = staticmethod(volcano_job)
    pod_label = "volcano.sh/job-name"

    collection = "/apis/batch.volcano.sh/v1alpha1/namespaces/{namespace}/jobs"

    def phase_of(self, job: Object) -> str:
        # A job without a status, or with an unknown phase, counts as running.
        phase = ((job.get("status") or {}).get("state") or {}).get("phase", "")
        return VOLCANO_PHASES.get(phase, "running")


RUNNERS: dict[str, type[ClusterRunner]] = {"indexed": IndexedRunner, "jobset": JobSetRunner, "volcano": VolcanoRunner}


def cluster_runner(config: Config, api: Api) -> ClusterRunner:
    """Return the runner that submits stages in the form that ``launch.job`` names."""
    return RUNNERS[config.launch.job](config, api)
