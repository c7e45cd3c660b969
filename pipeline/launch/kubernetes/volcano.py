"""Volcano jobs: TorchX renders them (``launch/runner.py``), and our own client with its time limits submits them."""

from __future__ import annotations

from pipeline.launch.appdefs import pods_app
from pipeline.launch.kubernetes.jobs import ClusterRunner
from pipeline.launch.kubernetes.manifest import volcano_job
from pipeline.launch.kubernetes.pods import Object
from pipeline.launch.runner import rendered_for_volcano
from pipeline.records.runs import Step

ENDED = {"Completed": "succeeded", "Failed": "failed", "Terminated": "failed", "Aborted": "cancelled"}


class VolcanoRunner(ClusterRunner):
    """Gang scheduling, queues and priorities: all pods of a stage start, or none."""

    collection = "/apis/batch.volcano.sh/v1alpha1/namespaces/{namespace}/jobs"

    def manifest(self, step: Step, name: str, attempt: int, config_url: str) -> Object:
        """TorchX renders the job, we put in what it cannot say."""
        app = pods_app(step.name, self.config, config_url, name)
        rendered = rendered_for_volcano(app, self.namespace, self.config.launch.queue)
        return volcano_job(self.config, step, name, attempt, rendered)

    def phase_of(self, job: Object) -> str:
        """By the job's phase; one without a status, or with a phase that is not known, runs."""
        phase = ((job.get("status") or {}).get("state") or {}).get("phase", "")
        return ENDED.get(phase, "running")

    def pod_selector(self, name: str) -> str:
        """The label that Volcano sets."""
        return f"volcano.sh/job-name={name}"
