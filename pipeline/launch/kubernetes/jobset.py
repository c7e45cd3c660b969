"""Indexed jobs in a JobSet, which gives their pods names and is what Kueue and others know whole."""

from __future__ import annotations

from pipeline.launch.kubernetes.jobs import ClusterRunner
from pipeline.launch.kubernetes.manifest import job_set
from pipeline.launch.kubernetes.pods import Object
from pipeline.records.runs import Step


class JobSetRunner(ClusterRunner):
    """Submits stages as JobSets (``jobset.x-k8s.io/v1alpha2``)."""

    collection = "/apis/jobset.x-k8s.io/v1alpha2/namespaces/{namespace}/jobsets"

    def manifest(self, step: Step, name: str, attempt: int, config_url: str) -> Object:
        """The JobSet, whose controller makes job, service and pods."""
        return job_set(self.config, step, name, attempt, config_url)

    def phase_of(self, job: Object) -> str:
        """By its conditions."""
        return phase_of(job)

    def pod_selector(self, name: str) -> str:
        """The label that its controller sets."""
        return f"jobset.sigs.k8s.io/jobset-name={name}"


def phase_of(job: Object) -> str:
    """running | succeeded | failed, by the conditions of a JobSet."""
    conditions = {c["type"] for c in job.get("status", {}).get("conditions") or [] if c["status"] == "True"}
    return "succeeded" if "Completed" in conditions else "failed" if "Failed" in conditions else "running"
