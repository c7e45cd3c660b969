"""Pods of the ``launch`` group: what they run, ask for and see on a Kubernetes cluster."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from omegaconf import MISSING

from pipeline.config.fields import setting


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
