"""Stages as TorchX AppDefs: one role, torchrun around ``nightjar worker``.

On one host torchrun is ``pipeline.launch.agent``, which listens on the loopback alone; several hosts meet by its c10d
rendezvous.
"""

from __future__ import annotations

import math
import sys
from typing import TYPE_CHECKING

from pipeline.config import Config
from pipeline.config.kubernetes import EMBEDDING
from pipeline.config.launch import PodConfig, PodResources
from pipeline.cpus import available_cpus
from pipeline.logs import level_arguments
from pipeline.specs import STAGES

if TYPE_CHECKING:
    from torchx.specs import AppDef

MARGIN_SECONDS = 5  # over what a stage needs to end by itself
ALONE, MEETING = ["-m", "pipeline.launch.agent"], ["-m", "torch.distributed.run"]


def distributed(name: str) -> bool:
    """Whether what is called ``name`` runs on all ranks: some stages do, the launcher's pod does not."""
    return any(stage.distributed for stage in STAGES if stage.name == name)


def ranks_of(stage: str, config: Config) -> int:
    """Ranks that ``stage`` runs on here: all of this machine's, or one."""
    return config.machine_ranks if distributed(stage) else 1


def stage_app(stage: str, config: Config, config_url: str, *, columns: int = 0, launcher: int = 0) -> AppDef:
    """The AppDef of one stage of the run whose resolved configuration lies at ``config_url``.

    ``columns``: width of the launcher's terminal, 0 where its output is none; ``launcher``: the process whose end
    ends the ranks, 0 for none.
    """
    worker = ["-m", "pipeline.cli", "worker", *worker_arguments(stage, config_url, columns=columns, launcher=launcher)]
    return _app(f"{config.run}-{stage}", stage, [*_torchrun(stage, config), *worker], rank_environment(stage, config))


def worker_arguments(stage: str, config_url: str, *, columns: int = 0, launcher: int = 0) -> list[str]:
    """The arguments of ``nightjar worker`` for a rank on this machine; as ``stage_app``."""
    shown = ["--to-launcher", "--columns", str(columns), "--launcher", str(launcher)]
    return [stage, config_url, *shown, *level_arguments()]


def rank_environment(stage: str, config: Config) -> dict[str, str]:
    """Threads of the native libraries of a rank on this machine: its share of the cores."""
    return _threads(stage, config, available_cpus() // ranks_of(stage, config))


def hosts_of(stage: str, config: Config) -> int:
    """Pods that ``stage`` runs in on a cluster: one a host, or one."""
    return config.hardware.hosts if distributed(stage) else 1


def roles_of(stage: str, config: Config) -> dict[str, int]:
    """Hosts of ``stage`` by torchrun's role: the stage's name, and ``EMBEDDING`` where there are such hosts."""
    hosts = hosts_of(stage, config)
    apart = config.hardware.embedding_hosts if distributed(stage) else 0
    return {stage: hosts - apart, **({EMBEDDING: apart} if apart else {})}


def pods_app(stage: str, config: Config, config_url: str, name: str) -> AppDef:
    """The AppDef of one stage in pods of a cluster, a replica for each host; ``name``: of the job, where they meet."""
    from torchx.specs import AppDef, Role, macros

    roles = []
    for kind, hosts in roles_of(stage, config).items():
        command = pod_command(stage, config, config_url, name, kind)
        # TorchX substitutes ${macros}, so a dollar is written twice; it knows each replica's variable for the first
        # one.
        escaped = [argument.replace("$", "$$") for argument in command[1:]]
        arguments = [argument.replace("(FIRST_POD)", f"({macros.rank0_env})") for argument in escaped]
        roles.append(
            Role(
                name=kind,
                image=config.launch.pods.image,
                entrypoint=command[0],
                args=arguments,
                env=pod_environment(stage, config, kind),
                num_replicas=hosts,
                port_map={"c10d": config.launch.port},
            )
        )
    return AppDef(name=name, roles=roles)


def pod_command(stage: str, config: Config, config_url: str, name: str, role: str = "") -> list[str]:
    """The command of every pod of ``stage``; Kubernetes puts in the values of ``$(FIRST_POD)`` and ``$(POD_IP)``.

    ``role``: of the pod, where there are several (``roles_of``).
    """
    hosts = hosts_of(stage, config)
    ranks = ranks_of(stage, config) // hosts
    meeting = ALONE if hosts == 1 else _meeting(config, hosts, name, "$(FIRST_POD)", ["--local-addr", "$(POD_IP)"])
    quiet = ["--redirects", ",".join(f"{rank}:1" for rank in range(1, ranks))] if ranks > 1 else []
    return [
        "python",
        *meeting,
        "--max-restarts",
        "0",
        "--shutdown-timeout",
        str(seconds_to_end(stage, config)),
        "--nproc-per-node",
        str(ranks),
        *quiet,
        *_role(stage, config, role),
        "-m",
        "pipeline.cli",
        "worker",
        stage,
        config_url.replace("$", "$$"),
        *level_arguments(),
    ]


def _meeting(config: Config, hosts: int, name: str, first: str, more: list[str]) -> list[str]:
    """Torchrun and its arguments, ``more`` among them, by which ``hosts`` hosts meet at ``first`` as ``name``."""
    seconds = math.ceil(60 * config.launch.rendezvous_minutes)
    return [
        *MEETING,
        "--nnodes",
        str(hosts),
        "--rdzv-id",
        name,
        "--rdzv-backend",
        "c10d",
        *more,
        "--rdzv-endpoint",
        f"{first}:{config.launch.port}",
        "--rdzv-conf",
        f"join_timeout={seconds},read_timeout={seconds}",
    ]


def _role(stage: str, config: Config, role: str) -> list[str]:
    """Arguments of torchrun that name the ``role`` of a host, where hosts have several."""
    return ["--role", role] if len(roles_of(stage, config)) > 1 else []


def pod_environment(stage: str, config: Config, role: str = "") -> dict[str, str]:
    """Threads of the native libraries: the pod's cores shared among its ranks, or ``train.threads_per_rank``."""
    cores = int(resources_of(config.launch.pods, role or stage).cpu)
    return _threads(stage, config, cores // (ranks_of(stage, config) // hosts_of(stage, config)))


def resources_of(pods: PodConfig, stage: str) -> PodResources:
    """What a pod of ``stage``, or of role ``EMBEDDING``, asks for."""
    return pods.resources.get(stage) or PodResources()


def _threads(stage: str, config: Config, threads: int) -> dict[str, str]:
    """``threads`` of the native libraries in each rank, or what ``train.threads_per_rank`` says instead."""
    own = config.train.threads_per_rank if distributed(stage) else None
    return {"OMP_NUM_THREADS": str(own or max(1, threads))}


def seconds_to_end(stage: str, config: Config) -> int:
    """How long ranks that are told to end may take."""
    return math.ceil(STAGES.get(stage).seconds_to_end(config)) + MARGIN_SECONDS


def _app(name: str, role: str, args: list[str], env: dict[str, str]) -> AppDef:
    from torchx.specs import AppDef, Role

    # TorchX substitutes ${macros} in arguments; a literal dollar is written twice.
    arguments = [argument.replace("$", "$$") for argument in args]
    return AppDef(name=name, roles=[Role(name=role, image="", entrypoint=sys.executable, args=arguments, env=env)])


def _torchrun(stage: str, config: Config) -> list[str]:
    """Torchrun and its arguments on this machine. Errors of all ranks but 0 go to files; see ``stage_logs.py``."""
    ranks = ranks_of(stage, config)
    redirects = ["--redirects", ",".join(f"{rank}:2" for rank in range(1, ranks))] if ranks > 1 else []
    meeting = ALONE
    if config.launch.name == "hosts" and hosts_of(stage, config) > 1:
        # Only the first host may serve the rendezvous: torchrun looks at names, and a name may be all hosts' own.
        serves = f"is_host={'true' if config.launch.host_index == 0 else 'false'}"
        *most, conf = _meeting(config, hosts_of(stage, config), f"{config.run}-{stage}", config.launch.first_host, [])
        meeting = [*most, f"{conf},{serves}"]
        workers = config.hardware.hosts - config.hardware.embedding_hosts
        meeting += _role(stage, config, stage if config.launch.host_index < workers else EMBEDDING)
    return [
        *meeting,
        "--shutdown-timeout",
        str(seconds_to_end(stage, config)),
        "--nproc-per-node",
        str(ranks),
        *redirects,
    ]
