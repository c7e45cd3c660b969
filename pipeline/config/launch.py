"""The ``launch`` group: how and where stages are started."""

from __future__ import annotations

from dataclasses import dataclass, field

from omegaconf import MISSING

STAGES = ("ingest", "plan", "partition", "train", "evaluate", "publish")
# What ``nightjar run`` does where ``stages`` names none: publishing is asked for.
DEFAULT_STAGES = STAGES[:-1]


@dataclass(kw_only=True)
class PodResources:
    """What one pod of a stage asks for, and may use at most: CPU cores, GiB of memory, and of that memory for /dev/shm.

    ``disk_gib``: of the node's own disk, for /tmp. ``gpus``: None is as many as the stage has ranks on a CUDA host.
    """

    cpu: float = 2.0
    memory_gib: float = 8.0
    shm_gib: float = 1.0
    disk_gib: float = 20.0
    gpus: int | None = None


@dataclass(kw_only=True)
class PodVolume:
    """A persistent volume claim and where pods find it."""

    claim: str = MISSING
    path: str = MISSING
    sub_path: str = ""
    read_only: bool = False


@dataclass(kw_only=True)
class Toleration:
    """A taint that pods put up with. ``operator``: Exists | Equal; ``effect``: empty for all."""

    key: str = MISSING
    operator: str = "Exists"
    value: str = ""
    effect: str = ""


@dataclass(kw_only=True)
class PodConfig:
    """Pods of stages, and of the launcher that a schedule starts.

    ``image``: by digest. ``service_account``: of the stages, which need no right; ``launcher_account``: of the
    launcher. ``user``: numeric, not root, also the group that owns the volumes. ``env``: plain variables; secrets only
    by reference: ``secret_env`` {variable: secret/key}, ``env_from`` all keys of these secrets. ``resources``: by
    stage, and of the launcher under its name.
    """

    image: str = ""
    pull_secrets: list[str] = field(default_factory=list)
    service_account: str = "nightjar-trainer"
    launcher_account: str = "nightjar-launcher"
    user: int = 10001
    env: dict[str, str] = field(default_factory=dict)
    secret_env: dict[str, str] = field(default_factory=dict)
    env_from: list[str] = field(default_factory=list)
    volumes: dict[str, PodVolume] = field(default_factory=dict)
    node_selector: dict[str, str] = field(default_factory=dict)
    tolerations: list[Toleration] = field(default_factory=list)
    resources: dict[str, PodResources] = field(default_factory=dict)


@dataclass(kw_only=True)
class LaunchConfig:
    """How stages are started. ``name``: local (TorchX ``local_cwd``) | kubernetes.

    ``inline``: stages that run in the launcher's own process. ``attempts``: tries of a stage that dies, each from the
    newest checkpoint on. ``deadline_minutes``: the longest one stage may take before the launcher cancels it.
    ``hold_memory``: whether a host's ranks are kept under ``hardware.ddr_gib``, auto (where the plan has tables on SSD)
    | always | never.

    Kubernetes: ``job``: volcano | indexed (``batch/v1``, no gang scheduling); ``context``: of the kubeconfig, null is
    the current one. ``pending_minutes``: until a pod that does not start is an error; ``rendezvous_minutes``: until
    the pods of a stage must have met, at ``port`` of the first; ``first_step_minutes``: until training must have taken
    one. ``lease_seconds``: after which a dead launcher's run may be taken over. ``keep_hours``: of finished jobs.
    ``min_hosts``: with so many at least, a stage whose pods have found no place for ``shrink_after_minutes`` goes on
    where the cluster has no room for all of ``hardware.hosts`` (null: it waits, and fails after ``pending_minutes``).
    """

    name: str = "local"
    inline: list[str] = field(default_factory=lambda: ["ingest", "plan", "partition"])
    attempts: int = 1
    deadline_minutes: float = 24 * 60.0
    hold_memory: str = "auto"
    job: str = "volcano"
    context: str | None = None
    namespace: str = "nightjar"
    queue: str = "default"
    priority_class: str | None = None
    min_hosts: int | None = None
    shrink_after_minutes: float = 5.0
    pending_minutes: float = 15.0
    rendezvous_minutes: float = 10.0
    first_step_minutes: float = 30.0
    port: int = 29_500
    lease_seconds: int = 30
    keep_hours: float = 24.0
    pods: PodConfig = field(default_factory=PodConfig)
