"""Manifests without a cluster: the jobs of a run's stages, as the launcher would submit their first attempts."""

from __future__ import annotations

from collections.abc import Sequence

from pipeline.config import Config
from pipeline.errors import ConfigError
from pipeline.launch.appdefs import hosts_of, pod_command, pod_environment, pods_app
from pipeline.launch.kubernetes.manifest import indexed_job, job_set, pod_service, volcano_job
from pipeline.launch.kubernetes.names import job_name
from pipeline.launch.kubernetes.pods import Object
from pipeline.records.runs import Step


def require_cluster(config: Config) -> None:
    """ConfigError where ``launch`` is not a cluster."""
    if config.launch.name != "kubernetes":
        raise ConfigError(f"launch={config.launch.name} starts no pods", hint="launch=kubernetes")


def stage_objects(config: Config, steps: Sequence[Step], config_url: str) -> list[Object]:
    """The objects of every stage that ``config`` runs in pods, in order."""
    require_cluster(config)
    objects: list[Object] = []
    for step in steps:
        if step.name in config.stages and step.name not in config.launch.inline:
            objects += _objects(config, step, config_url)
    return objects


def _objects(config: Config, step: Step, config_url: str) -> list[Object]:
    name = job_name(config, step, 1)
    if config.launch.job == "volcano":
        from pipeline.launch.runner import rendered_for_volcano

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
