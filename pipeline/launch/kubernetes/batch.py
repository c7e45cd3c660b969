"""Plain ``batch/v1`` indexed jobs, for clusters without Volcano: no gang scheduling, no queue."""

from __future__ import annotations

from pipeline.launch.appdefs import hosts_of, pod_command, pod_environment
from pipeline.launch.kubernetes.api import RefusedError
from pipeline.launch.kubernetes.jobs import ClusterRunner
from pipeline.launch.kubernetes.manifest import indexed_job, pod_service
from pipeline.launch.kubernetes.names import ATTEMPT_LABEL
from pipeline.launch.kubernetes.pods import Object
from pipeline.records.runs import Step


class IndexedRunner(ClusterRunner):
    """Submits stages through the API server itself; TorchX knows no such jobs."""

    collection = "/apis/batch/v1/namespaces/{namespace}/jobs"

    def manifest(self, step: Step, name: str, attempt: int, config_url: str) -> Object:
        """The job, by our own rendering."""
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
        return phase_of(job)

    def pod_selector(self, name: str) -> str:
        """The label that the job controller sets."""
        return f"job-name={name}"


def phase_of(job: Object) -> str:
    """running | succeeded | failed, by the conditions of a ``batch/v1`` job."""
    conditions = {c["type"] for c in job.get("status", {}).get("conditions") or [] if c["status"] == "True"}
    return "succeeded" if "Complete" in conditions else "failed" if "Failed" in conditions else "running"


def _is_of(service: Object, job: str) -> bool:
    """Whether the job with uid ``job`` owns ``service``, which is not being deleted."""
    metadata = service["metadata"]
    owners = [owner["uid"] for owner in metadata.get("ownerReferences", [])]
    return job in owners and "deletionTimestamp" not in metadata and "resourceVersion" in metadata
