"""The ``launch`` group: how and where stages are started."""

from __future__ import annotations

from dataclasses import dataclass

from pipeline.config.fields import setting
from pipeline.config.pods import PodConfig
from pipeline.logs import FORMATS as LOG_FORMATS
from pipeline.specs import STAGES, inline_stages


@dataclass(kw_only=True)
class LaunchConfig:
    """How and where stages are started. Settings from ``job`` on are for Kubernetes alone, but for ``port``."""

    name: str = setting(
        "local",
        choices=("local", "hosts", "kubernetes"),
        doc="Run stages on this machine, one stage on several hosts on each of which a scheduler starts this command, "
        "or stages as jobs on a Kubernetes cluster.",
    )
    inline: list[str] = setting(
        factory=inline_stages,
        choices=STAGES.names,
        doc="Stages that run in the launcher's own process, or in a fork that has imported torch already.",
    )
    attempts: int = setting(
        1,
        low=1,
        high=100,
        doc="How often to try a stage that dies; each attempt continues from the newest checkpoint. From 2 on, "
        "attempts that committed a checkpoint do not count.",
    )
    deadline_minutes: float = setting(24 * 60.0, low=0.01, doc="Minutes after which a stage is cancelled.")
    logs: str = setting(
        "text",
        choices=LOG_FORMATS,
        doc="text for people, or json: one JSON object per line, for a cluster's log collector.",
    )
    torchrun: bool = setting(
        False,
        doc="On this machine, start CPU ranks by TorchX under torchrun, each of which imports torch anew, as GPU ranks "
        "are. false: fork them from one process that has imported it.",
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
        doc="On a cluster or an object store, another launcher takes over a run whose lease has not been renewed for "
        "this many seconds.",
    )
    host_index: int = setting(0, low=0, doc="With launch=hosts, which of `hardware.hosts` this one is, from 0.")
    first_host: str = setting("localhost", doc="With launch=hosts, name or address of host 0, where the ranks meet.")
    job: str = setting(
        "volcano",
        choices=("volcano", "indexed", "jobset"),
        doc="volcano: Volcano jobs. indexed: indexed jobs of batch/v1, without gang scheduling. jobset: the same in a "
        "JobSet.",
    )
    kueue: bool = setting(
        False, doc="Jobs start suspended, for Kueue to admit them into `queue`; with job=indexed or jobset."
    )
    context: str | None = setting(None, doc="Context of the kubeconfig; null: the current one.")
    namespace: str = setting("nightjar", doc="Namespace of the jobs.")
    queue: str = setting("default", doc="Queue of the Volcano jobs, or with `kueue` the LocalQueue.")
    priority_class: str | None = setting(None, doc="Priority class of the pods; null: none.")
    min_hosts: int | None = setting(
        None,
        low=1,
        doc="Smallest number of hosts that a stage may shrink to if its pods find no room; null: it waits, and fails "
        "after `pending_minutes`.",
    )
    shrink_after_minutes: float = setting(
        5.0, low=0.01, doc="With `min_hosts`, minutes without room after which a stage continues with fewer hosts."
    )
    grow: bool = setting(
        False, doc="A training that continues with fewer hosts takes the others back when there is room for them again."
    )
    grow_minutes: float = setting(
        10.0,
        low=0.01,
        doc="With `grow`, minutes after a change of hosts before a training asks for more; twice as many after each "
        "time that it had to give hosts up again.",
    )
    pending_minutes: float = setting(15.0, low=0.01, doc="Minutes within which a pod must start.")
    image_minutes: float = setting(5.0, low=0.0, doc="Minutes that a pod may wait for an image that cannot be pulled.")
    outage_minutes: float = setting(
        10.0, low=0.0, doc="Minutes that the API server may not answer, or deny everything; running stages continue."
    )
    rendezvous_minutes: float = setting(10.0, low=0.01, doc="Minutes within which the pods of a stage must meet.")
    first_step_minutes: float = setting(30.0, low=0.01, doc="Minutes within which training must take its first step.")
    port: int = setting(
        29_500, low=1024, high=65_535, doc="Port of the first pod or host, where those of a stage meet."
    )
    keep_hours: float = setting(24.0, low=0, doc="Hours for which finished jobs and their logs are kept.")
    pods: PodConfig = setting(factory=PodConfig, doc="The pods of the jobs.")
