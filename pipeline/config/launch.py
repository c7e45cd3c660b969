"""The ``launch`` group: how and where stages are started, and the pods of a Kubernetes cluster."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from omegaconf import MISSING

from pipeline.config.fields import setting
from pipeline.core.logs import FORMATS as LOG_FORMATS
from pipeline.core.registry import LAUNCHERS, STAGES, find_plugins, inline_stages


@dataclass(kw_only=True)
class PodResources:
    """What one pod of a stage asks for, and may use at most."""

    cpu: float = setting(2.0, doc="CPU cores.")
    memory_gib: float = setting(8.0, doc="Memory in GiB, including /dev/shm.")
    shm_gib: float = setting(1.0, doc="The part of the memory for /dev/shm, in GiB.")
    disk_gib: float = setting(20.0, doc="Disk space of the node for /tmp, in GiB.")
    gpus: int | None = setting(None, doc="GPUs; null: as many as the stage has ranks on a cuda host.")


@dataclass(kw_only=True)
class PodVolume:
    """A persistent volume claim and where pods find it."""

    claim: str = setting(MISSING, doc="Name of the persistent volume claim.")
    path: str = setting(MISSING, doc="Mount path in the pods.")
    sub_path: str = setting("", doc="Mount only this folder of the volume; empty: all of it.")
    read_only: bool = setting(False, doc="Mount the volume read-only.")


@dataclass(kw_only=True)
class Toleration:
    """A taint of nodes that pods tolerate."""

    key: str = setting(MISSING, doc="Key of the taint.")
    operator: str = setting("Exists", doc="Exists tolerates any value of the taint, Equal the one in `value`.")
    value: str = setting("", doc="Value of the taint, for operator Equal.")
    effect: str = setting("", doc="Effect of the taint to tolerate; empty: all.")


@dataclass(kw_only=True)
class PodConfig:
    """Pods of the stages, and of the launcher that a schedule starts."""

    image: str = setting("", doc="Image of the pods, by digest.")
    pull_secrets: list[str] = setting(factory=list, doc="Secrets for pulling the image.")
    service_account: str | None = setting(
        None, doc="Account of the stages, of your own; null: `<schedule.name>-stages`, which a schedule makes."
    )
    launcher_account: str | None = setting(
        None, doc="Account of a schedule's launcher, of your own; null: `<schedule.name>-launcher`, made as well."
    )
    user: int = setting(
        10001,
        low=1,
        high=2**31 - 1,
        doc="Numeric user of the pods, not root; it is also the group that owns the volumes.",
    )
    env: dict[str, str] = setting(factory=dict, doc="Plain environment variables. Put secrets into `secret_env`.")
    secret_env: dict[str, str] = setting(
        factory=dict, doc="Environment variables with values from secrets: {variable: secret/key}."
    )
    env_from: list[str] = setting(factory=list, doc="Secrets whose keys all become environment variables.")
    volumes: dict[str, PodVolume] = setting(factory=dict, doc="Volumes of the pods, by name.")
    node_selector: dict[str, str] = setting(factory=dict, doc="Labels of the nodes that pods may run on.")
    tolerations: list[Toleration] = setting(factory=list, doc="Taints of nodes that pods tolerate.")
    patch: dict[str, Any] = setting(
        factory=dict,
        doc="Fragments of a pod's manifest, merged into it as `kubectl patch` merges them (strategic merge): by stage, "
        "for the launcher under launcher, for pods on embedding hosts under embedding, for all pods under all.",
    )
    resources: dict[str, PodResources] = setting(
        factory=dict,
        doc="Resources of a pod, by stage; those of the launcher under launcher, of embedding hosts under embedding.",
    )


def launcher_names() -> tuple[str, ...]:
    """List the choices of ``launch``: this machine, this host among several, and launchers of plugins."""
    return ("local", "hosts", *(point.name for point in find_plugins(LAUNCHERS)))


@dataclass(kw_only=True)
class LaunchConfig:
    """How and where stages are started. Settings from ``job`` on are for Kubernetes alone, but for ``port``."""

    name: str = setting(
        "local",
        choices=launcher_names,
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
