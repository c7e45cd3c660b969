"""What ``launch=kubernetes`` asks of a cluster: a runner of stages, the run's lease, and the job of a night."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from datetime import date

from pipeline.config import Config
from pipeline.launch.protocol import Launcher, NightJob, StageRunner


class KubernetesLauncher(Launcher):
    """Runs stages as jobs of a cluster. Every command loads this file, so cluster clients are imported late."""

    def runner(self, config: Config) -> StageRunner:
        """See ``Launcher.runner``; LaunchError if there are no credentials for the cluster."""
        from pipeline.plugins.kubernetes.api_client import connect
        from pipeline.plugins.kubernetes.job_kinds import cluster_runner

        return cluster_runner(config, connect(config.launch.context).patient(60 * config.launch.outage_minutes))

    @contextmanager
    def only_launcher(self, config: Config) -> Iterator[None]:
        """Hold the run's lease on the cluster. The run's network policy lasts as long, or as its jobs.

        LaunchError, before anything is written, where another launcher holds the lease, the API server does not answer,
        its clock differs or a right is missing.
        """
        from pipeline.plugins.kubernetes.api_client import check_clock, connect
        from pipeline.plugins.kubernetes.job_kinds import cluster_runner
        from pipeline.plugins.kubernetes.lease_object import held
        from pipeline.plugins.kubernetes.network import closed
        from pipeline.plugins.kubernetes.pod_templates import check_templates, run_label
        from pipeline.plugins.kubernetes.rbac import check_rights

        outage = 60 * config.launch.outage_minutes
        api = connect(config.launch.context).patient(outage)
        check_clock(api)
        check_rights(api, config.launch)
        check_templates(api, config)
        lease = f"nightjar-{run_label(str(config.run), 54)}"
        runner = cluster_runner(config, api)
        alone = held(api, config.launch.namespace, lease, config.launch.lease_seconds, outage)
        with alone, closed(api, config, runner.goes_on):
            yield

    def night_job(self, config: Config, name: str) -> NightJob:
        from pipeline.plugins.kubernetes.schedule import night_job

        return night_job(config, name)

    def end_leftovers(self, config: Config, model: str, day: date, kept: Iterable[date]) -> None:
        from pipeline.plugins.kubernetes.schedule import end_leftovers

        end_leftovers(config, model, day, kept)


KUBERNETES = KubernetesLauncher()
