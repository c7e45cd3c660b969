"""The kinds of jobs that stages run as (``launch.job``): plain indexed jobs, JobSets and Volcano jobs."""

from __future__ import annotations

from pipeline.config import Config
from pipeline.launch.appdefs import hosts_of, pod_command, pod_environment, pods_app
from pipeline.launch.runner import rendered_for_volcano
from pipeline.plugins.kubernetes.api_client import Api, RefusedError
from pipeline.plugins.kubernetes.job_manifest import indexed_job, job_set, pod_service, volcano_job
from pipeline.plugins.kubernetes.jobs import ClusterRunner
from pipeline.plugins.kubernetes.pod_templates import ATTEMPT_LABEL, Object
from pipeline.records.runs import Step

VOLCANO_PHASES = {"Completed": "succeeded", "Failed": "failed", "Terminated": "failed", "Aborted": "cancelled"}


class IndexedRunner(ClusterRunner):
    """Plain ``batch/v1`` indexed jobs, for clusters without Volcano: no gang scheduling, no queue."""

    collection = "/apis/batch/v1/namespaces/{namespace}/jobs"

    def manifest(self, step: Step, name: str, attempt: int, config_url: str) -> Object:
        """The job, by our own rendering: TorchX knows no such jobs."""
        command, env = pod_command(step.name, self.config, config_url, name), pod_environment(step.name, self.config)
        return indexed_job(self.config, step, name, attempt, command, env)

    def complete(self, step: Step, job: Object) -> None:
        """For several pods, the service by which they find the first one; one that an earlier job left is replaced."""
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
            there = self.api.find(f"{services}/{metadata['name']}") or service
            if _is_of(there, metadata["uid"]):
                return
            self.api.delete(f"{services}/{metadata['name']}")
            self.clock.sleep(self.poll_seconds)

    def phase_of(self, job: Object) -> str:
        """By the job's conditions."""
        return indexed_job_phase(job)

    def pod_selector(self, name: str) -> str:
        """The label that the job controller sets."""
        return f"job-name={name}"


def indexed_job_phase(job: Object) -> str:
    """running | succeeded | failed, by the conditions of a ``batch/v1`` job."""
    return _phase_by_conditions(job, "Complete")


def _phase_by_conditions(job: Object, done: str) -> str:
    """running | succeeded | failed; ``done``: the type of the condition that holds once the job has succeeded."""
    conditions = {c["type"] for c in job.get("status", {}).get("conditions") or [] if c["status"] == "True"}
    return "succeeded" if done in conditions else "failed" if "Failed" in conditions else "running"


def _is_of(service: Object, job: str) -> bool:
    """Whether the job with uid ``job`` owns ``service``, which is not being deleted."""
    metadata = service["metadata"]
    owners = [owner["uid"] for owner in metadata.get("ownerReferences", [])]
    return job in owners and "deletionTimestamp" not in metadata and "resourceVersion" in metadata


class JobSetRunner(ClusterRunner):
    """Indexed jobs in a JobSet, which gives their pods names and is what Kueue and others know whole."""

    collection = "/apis/jobset.x-k8s.io/v1alpha2/namespaces/{namespace}/jobsets"

    def manifest(self, step: Step, name: str, attempt: int, config_url: str) -> Object:
        """The JobSet, whose controller makes job, service and pods."""
        return job_set(self.config, step, name, attempt, config_url)

    def phase_of(self, job: Object) -> str:
        """By its conditions."""
        return job_set_phase(job)

    def pod_selector(self, name: str) -> str:
        """The label that its controller sets."""
        return f"jobset.sigs.k8s.io/jobset-name={name}"


def job_set_phase(job: Object) -> str:
    """running | succeeded | failed, by the conditions of a JobSet."""
    return _phase_by_conditions(job, "Completed")


class VolcanoRunner(ClusterRunner):
    """Volcano jobs: gang scheduling, queues and priorities. All pods of a stage start, or none.

    TorchX renders them (``launch/runner.py``), and our own client with its time limits submits them.
    """

    collection = "/apis/batch.volcano.sh/v1alpha1/namespaces/{namespace}/jobs"

    def manifest(self, step: Step, name: str, attempt: int, config_url: str) -> Object:
        """TorchX renders the job, we put in what it cannot say."""
        app = pods_app(step.name, self.config, config_url, name)
        rendered = rendered_for_volcano(app, self.namespace, self.config.launch.queue)
        return volcano_job(self.config, step, name, attempt, rendered)

    def phase_of(self, job: Object) -> str:
        """By the job's phase; one without a status, or with a phase that is not known, runs."""
        phase = ((job.get("status") or {}).get("state") or {}).get("phase", "")
        return VOLCANO_PHASES.get(phase, "running")

    def pod_selector(self, name: str) -> str:
        """The label that Volcano sets."""
        return f"volcano.sh/job-name={name}"


def cluster_runner(config: Config, api: Api) -> ClusterRunner:
    """What submits stages in the form that ``launch.job`` names."""
    if config.launch.job == "indexed":
        return IndexedRunner(config, api)
    if config.launch.job == "jobset":
        return JobSetRunner(config, api)
    return VolcanoRunner(config, api)
