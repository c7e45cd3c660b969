"""Stages as TorchX AppDefs: torchrun around ``nightjar worker``; their hosts, ranks and roles.

On one host torchrun is ``pipeline.launch.agent``, which listens on the loopback alone; several hosts meet by its c10d
rendezvous. On a bipartite cluster a stage has two roles, workers and embedding hosts.
"""

from __future__ import annotations

import math
import os
import sys
from typing import TYPE_CHECKING

from pipeline.config import Config
from pipeline.config.kubernetes import EMBEDDING
from pipeline.config.launch import PodConfig, PodResources
from pipeline.core.cpus import available_cpus
from pipeline.core.errors import LaunchError
from pipeline.core.logs import level_arguments
from pipeline.specs import STAGES

if TYPE_CHECKING:
    from torchx.specs import AppDef

    from pipeline.config.hardware import HardwareConfig

# Extra time for ranks to end, beyond what the stage needs for it.
MARGIN_SECONDS = 5
_ONE_HOST, _SEVERAL_HOSTS = ["-m", "pipeline.launch.agent"], ["-m", "torch.distributed.run"]
# Torchrun's variable, and its value without ``--role``.
_ROLE_NAME, _DEFAULT_ROLE = "ROLE_NAME", "default"


def distributed(name: str) -> bool:
    """Return whether the stage or pod ``name`` runs on all ranks: some stages do, the launcher's pod does not."""
    return any(stage.distributed for stage in STAGES if stage.name == name)


def ranks_of(stage: str, config: Config) -> int:
    """Return the number of ranks that run ``stage`` here: all of this machine's, or one."""
    return config.machine_ranks if distributed(stage) else 1


def stage_app(stage: str, config: Config, config_url: str, *, columns: int = 0, launcher: int = 0) -> AppDef:
    """Build the AppDef of one stage on this machine.

    Args:
        config_url: Where the run's resolved configuration lies.
        columns: Width of the launcher's terminal, 0 if its output is not one.
        launcher: The process whose end ends the ranks, 0 for none.
    """
    from torchx.specs import AppDef, Role

    hosts, ranks = hosts_of(stage, config), ranks_of(stage, config)
    arguments = _ONE_HOST
    if config.launch.name == "hosts" and hosts > 1:
        arguments = _rendezvous(config, hosts, f"{config.run}-{stage}", config.launch.first_host, [])
        # Only the first host may serve the rendezvous. Torchrun would decide by the first host's name, but every
        # host may take that name for its own.
        is_host = config.launch.host_index == 0
        arguments[-1] += f",is_host={str(is_host).lower()}"
        workers = config.hardware.hosts - config.hardware.embedding_hosts
        arguments += _role(stage, config, stage if config.launch.host_index < workers else EMBEDDING)
    timeout = str(seconds_to_end(stage, config))
    arguments = [*arguments, "--shutdown-timeout", timeout, "--nproc-per-node", str(ranks)]
    if ranks > 1:
        # Redirect the errors of all ranks but 0 to files; see ``stage_logs.py``.
        arguments += ["--redirects", ",".join(f"{rank}:2" for rank in range(1, ranks))]
    worker = worker_arguments(stage, config_url, columns=columns, launcher=launcher)
    arguments += ["-m", "pipeline.cli", "worker", *worker]
    role = Role(
        name=stage,
        image="",
        entrypoint=sys.executable,
        # TorchX substitutes ${macros} in arguments, so a literal dollar is written twice.
        args=[argument.replace("$", "$$") for argument in arguments],
        env=rank_environment(stage, config),
    )
    return AppDef(name=f"{config.run}-{stage}", roles=[role])


def worker_arguments(stage: str, config_url: str, *, columns: int = 0, launcher: int = 0) -> list[str]:
    """Return the arguments of ``nightjar worker`` for a rank on this machine; as ``stage_app``."""
    shown = ["--to-launcher", "--columns", str(columns), "--launcher", str(launcher)]
    return [stage, config_url, *shown, *level_arguments()]


def rank_environment(stage: str, config: Config) -> dict[str, str]:
    """Return the threads of native libraries for a rank on this machine: its share of the cores."""
    return _threads(stage, config, available_cpus() // ranks_of(stage, config))


def hosts_of(stage: str, config: Config) -> int:
    """Return the number of pods that run ``stage`` on a cluster: one per host, or one."""
    return config.hardware.hosts if distributed(stage) else 1


def roles_of(stage: str, config: Config) -> dict[str, int]:
    """Return hosts of ``stage`` by torchrun's role: the stage's name, and ``EMBEDDING`` if there are such hosts."""
    hosts = hosts_of(stage, config)
    embedding_hosts = config.hardware.embedding_hosts
    if not embedding_hosts or not distributed(stage):
        return {stage: hosts}
    # The order matters: ``place_of_role`` numbers the workers' ranks first.
    return {stage: hosts - embedding_hosts, EMBEDDING: embedding_hosts}


def place_of_role(hardware: HardwareConfig, rank: int) -> int:
    """Return the rank that this process has from now on, in its environment too, for its ``rank`` of torchrun.

    Workers come first, whichever order torchrun's agents met in. Collective where hosts were started as workers and as
    embedding hosts.

    Raises:
        LaunchError: The number of embedding hosts differs from ``hardware.embedding_hosts``.
    """
    role = os.environ.get(_ROLE_NAME, _DEFAULT_ROLE)
    if not hardware.embedding_hosts or role == _DEFAULT_ROLE:
        return rank
    from torch.distributed import PrefixStore
    from torch.distributed.rendezvous import rendezvous

    # The store of torchrun's agents exists before the ranks have a process group.
    agents_store, _, world = next(rendezvous("env://"))
    store = PrefixStore("nightjar/roles", agents_store)
    store.set(str(rank), role)
    # ``get`` waits until the other rank has set its role.
    roles = [store.get(str(other)).decode() for other in range(world)]
    started = roles.count(EMBEDDING) // hardware.ranks_per_host
    if started != hardware.embedding_hosts:
        raise LaunchError(
            f"{started} of {world // hardware.ranks_per_host} hosts started as embedding hosts, but "
            f"hardware.embedding_hosts is {hardware.embedding_hosts}",
            hint=f"hardware.embedding_hosts={started}, or start as many hosts with torchrun --role {EMBEDDING}",
        )
    # The sort is stable: within a role, ranks keep torchrun's order, in which those of a host are adjacent.
    place = sorted(range(world), key=lambda other: roles[other] == EMBEDDING).index(rank)
    os.environ["RANK"] = str(place)
    return place


def pods_app(stage: str, config: Config, config_url: str, name: str) -> AppDef:
    """Build the AppDef of one stage in pods of a cluster, a replica for each host.

    Args:
        name: The job's name, under which the pods meet.
    """
    from torchx.specs import AppDef, Role, macros

    roles = []
    for role, hosts in roles_of(stage, config).items():
        entrypoint, *arguments = pod_command(stage, config, config_url, name, role)
        # TorchX substitutes ${macros}, so a dollar is written twice. It knows the variable of the first replica.
        escaped = [argument.replace("$", "$$") for argument in arguments]
        roles.append(
            Role(
                name=role,
                image=config.launch.pods.image,
                entrypoint=entrypoint,
                args=[argument.replace("(FIRST_POD)", f"({macros.rank0_env})") for argument in escaped],
                env=pod_environment(stage, config, role),
                num_replicas=hosts,
                port_map={"c10d": config.launch.port},
            )
        )
    return AppDef(name=name, roles=roles)


def pod_command(stage: str, config: Config, config_url: str, name: str, role: str = "") -> list[str]:
    """Return the command of every pod of ``stage``; Kubernetes fills in ``$(FIRST_POD)`` and ``$(POD_IP)``.

    Args:
        role: The pod's role, if there are several (``roles_of``).
    """
    hosts = hosts_of(stage, config)
    ranks = ranks_of(stage, config) // hosts
    arguments = _ONE_HOST
    if hosts > 1:
        arguments = _rendezvous(config, hosts, name, "$(FIRST_POD)", ["--local-addr", "$(POD_IP)"])
    # Let torchrun restart nothing, since it would restart after any error: the chain decides which errors are worth a
    # retry.
    timeout = str(seconds_to_end(stage, config))
    arguments = [*arguments, "--max-restarts", "0", "--shutdown-timeout", timeout, "--nproc-per-node", str(ranks)]
    if ranks > 1:
        # The pod's log shows rank 0's output and all ranks' errors; the other ranks' standard output goes to files.
        arguments += ["--redirects", ",".join(f"{rank}:1" for rank in range(1, ranks))]
    arguments += _role(stage, config, role)
    worker = ["-m", "pipeline.cli", "worker", stage, config_url.replace("$", "$$"), *level_arguments()]
    return ["python", *arguments, *worker]


def _rendezvous(config: Config, hosts: int, name: str, first_host: str, options: list[str]) -> list[str]:
    # Round to whole seconds, because torchrun parses integers.
    seconds = math.ceil(60 * config.launch.rendezvous_minutes)
    arguments = ["--nnodes", str(hosts), "--rdzv-id", name, "--rdzv-backend", "c10d", *options]
    endpoint = ["--rdzv-endpoint", f"{first_host}:{config.launch.port}"]
    # The timeouts come last: ``stage_app`` adds to them.
    return [*_SEVERAL_HOSTS, *arguments, *endpoint, "--rdzv-conf", f"join_timeout={seconds},read_timeout={seconds}"]


def _role(stage: str, config: Config, role: str) -> list[str]:
    return ["--role", role] if len(roles_of(stage, config)) > 1 else []


def pod_environment(stage: str, config: Config, role: str = "") -> dict[str, str]:
    """Return the threads of native libraries: the pod's cores shared among its ranks."""
    cores = int(resources_of(config.launch.pods, role or stage).cpu)
    return _threads(stage, config, cores // (ranks_of(stage, config) // hosts_of(stage, config)))


def resources_of(pods: PodConfig, stage: str) -> PodResources:
    """Return what a pod of ``stage``, or of role ``EMBEDDING``, asks for."""
    return pods.resources.get(stage) or PodResources()


def _threads(stage: str, config: Config, threads: int) -> dict[str, str]:
    if distributed(stage) and config.train.threads_per_rank:
        threads = config.train.threads_per_rank
    return {"OMP_NUM_THREADS": str(max(1, threads))}


def seconds_to_end(stage: str, config: Config) -> int:
    """Return how long ranks may take to end after a signal."""
    return math.ceil(STAGES.get(stage).seconds_to_end(config)) + MARGIN_SECONDS
