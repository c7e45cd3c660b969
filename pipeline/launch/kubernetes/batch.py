"""Plain ``batch/v1`` indexed jobs, for clusters without Volcano: no gang scheduling, no queue."""

from __future__ import annotations

from pipeline.launch.appdefs import hosts_of, pod_command, pod_environment
from pipeline.launch.kubernetes.jobs import ClusterRunner
from pipeline.launch.kubernetes.manifest import indexed_job, pod_service
from pipeline.launch.kubernetes.pods import Object
from pipeline.records.step import Step


class IndexedRunner(ClusterRunner):
    """Submits stages through the API server itself; TorchX knows no such jobs."""

    collection = "/apis/batch/v1/namespaces/{namespace}/jobs"

    def create(self, step: Step, name: str, attempt: int, config_url: str) -> None:
        """Create the job, and for several pods the service by which they find the first one."""
        config = self.config
        command, env = pod_command(step.name, config, config_url, name), pod_environment(step.name, config)
        job = self.api.create(self.jobs, indexed_job(config, step, name, attempt, command, env))
        if hosts_of(step.name, config) > 1:
            service = pod_service(config, step, name, attempt, job["metadata"]["uid"])
            self.api.create(f"/api/v1/namespaces/{self.namespace}/services", service)

    def phase(self, name: str) -> str:
        """By the job's conditions."""
        job = self.api.find(f"{self.jobs}/{name}")
        if job is None:
            return "lost"
        return phase_of(job)

    def delete(self, name: str) -> None:
        """With its pods and its service, which it owns."""
        self.api.delete(f"{self.jobs}/{name}")

    def pod_selector(self, name: str) -> str:
        """The label that the job controller sets."""
        return f"job-name={name}"


def phase_of(job: Object) -> str:
    """running | succeeded | failed, by the conditions of a ``batch/v1`` job."""
    conditions = {c["type"] for c in job.get("status", {}).get("conditions") or [] if c["status"] == "True"}
    return "succeeded" if "Complete" in conditions else "failed" if "Failed" in conditions else "running"
