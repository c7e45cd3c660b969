"""The ``launch`` group: how and where stages are started."""

from __future__ import annotations

from dataclasses import dataclass

from pipeline.config.fields import setting
from pipeline.config.pods import PodConfig
from pipeline.logs import FORMATS as LOG_FORMATS
from pipeline.specs import STAGES, inline_stages


@dataclass(kw_only=True)
class LaunchConfig:
    """How and where stages are started. Settings from ``job`` on are for Kubernetes alone."""

    name: str = setting(
        "local", choices=("local", "kubernetes"), doc="Stages run on this machine, or as jobs of a Kubernetes cluster."
    )
    inline: list[str] = setting(
        factory=inline_stages,
        choices=STAGES.names,
        doc="These stages run in the launcher's own process.",
    )
    attempts: int = setting(
        1, low=1, high=100, doc="A stage that dies is tried this often, each time from the newest checkpoint on."
    )
    deadline_minutes: float = setting(24 * 60.0, low=0.01, doc="A stage is cancelled after this many minutes.")
    logs: str = setting(
        "text",
        choices=LOG_FORMATS,
        doc="Log lines are text for people, or JSON objects, one a line, for what gathers a cluster's logs.",
    )
    limit_memory: str = setting(
        "auto",
        choices=("auto", "always", "never"),
        doc="Whether a memory cgroup keeps a host's ranks below `hardware.ddr_gib`. auto: if a plan has tables on SSD.",
    )
    lease_seconds: int = setting(
        30,
        low=3,
        high=3600,
        doc="On a cluster or an object store, another launcher takes over a run whose launcher has not renewed its "
        "lease for this many seconds.",
    )
    job: str = setting(
        "volcano",
        choices=("volcano", "indexed"),
        doc="Stages are Volcano jobs, or plain indexed jobs of batch/v1 without gang scheduling.",
    )
    context: str | None = setting(None, doc="This context of the kubeconfig is used; null: the current one.")
    namespace: str = setting("nightjar", doc="Jobs run in this namespace.")
    queue: str = setting("default", doc="Volcano jobs wait in this queue.")
    priority_class: str | None = setting(None, doc="Pods have this priority class; null: none.")
    min_hosts: int | None = setting(
        None,
        low=1,
        doc="A stage whose pods find no room continues with fewer hosts, but at least this many; null: it waits, and "
        "fails after `pending_minutes`.",
    )
    shrink_after_minutes: float = setting(
        5.0, low=0.01, doc="With `min_hosts`, a stage continues with fewer hosts after this many minutes without room."
    )
    pending_minutes: float = setting(
        15.0, low=0.01, doc="A pod that has not started after this many minutes is an error."
    )
    rendezvous_minutes: float = setting(10.0, low=0.01, doc="The pods of a stage must meet within this many minutes.")
    first_step_minutes: float = setting(
        30.0, low=0.01, doc="Training must take its first step within this many minutes."
    )
    port: int = setting(29_500, low=1024, high=65_535, doc="The pods of a stage meet at this port of the first one.")
    keep_hours: float = setting(24.0, low=0, doc="Finished jobs and their logs stay for this many hours.")
    pods: PodConfig = setting(factory=PodConfig, doc="The pods of the jobs.")
