"""Volcano jobs, submitted through TorchX's kubernetes scheduler by the adapter of ``launch/runner.py``."""

from __future__ import annotations

from pipeline.config import Config
from pipeline.launch.appdefs import pods_app
from pipeline.launch.kubernetes.api import Api
from pipeline.launch.kubernetes.jobs import ClusterRunner
from pipeline.launch.kubernetes.manifest import volcano_job
from pipeline.launch.runner import VolcanoAdapter
from pipeline.records.step import Step


class VolcanoRunner(ClusterRunner):
    """Gang scheduling, queues and priorities: all pods of a stage start, or none."""

    collection = "/apis/batch.volcano.sh/v1alpha1/namespaces/{namespace}/jobs"

    def __init__(self, config: Config, api: Api) -> None:
        super().__init__(config, api)
        self._torchx = VolcanoAdapter(api.client, self.namespace, config.launch.queue)

    def create(self, step: Step, name: str, attempt: int, config_url: str) -> None:
        """TorchX renders the job, we put in what it cannot say, TorchX submits it."""
        app = pods_app(step.name, self.config, config_url, name)
        self._torchx.submit(app, lambda rendered: volcano_job(self.config, step, name, attempt, rendered))

    def phase(self, name: str) -> str:
        """As TorchX tells it."""
        return self._torchx.state(name)

    def delete(self, name: str) -> None:
        """As TorchX does it."""
        self._torchx.cancel(name)

    def pod_selector(self, name: str) -> str:
        """The label that Volcano sets."""
        return f"volcano.sh/job-name={name}"
