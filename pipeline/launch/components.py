"""What ``components/nightjar.py`` gives to TorchX: apps of one role, a launcher that runs where TorchX starts it.

Nothing is composed and no store is asked here: whoever submits has neither. The job says what is wrong or missing.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from pipeline.config.kubernetes import EMBEDDING
from pipeline.config.launch import LaunchConfig, PodResources
from pipeline.errors import ConfigError
from pipeline.specs import STAGES

if TYPE_CHECKING:
    from torchx.specs import AppDef, Resource


@dataclass(frozen=True)
class RolePlacement:
    """Where a role runs: arguments of every component.

    ``image``: empty for schedulers that use this machine's Python (``local_cwd``, ``slurm``); ``h``: a named resource
    of TorchX, else ``cpu`` cores, ``gpu`` GPUs and ``memMB`` megabytes, 0 for the default; ``mounts``: in TorchX's
    words, ``type=volume``, ``src=<claim>``, ``dst=<path>``.
    """

    image: str = ""
    h: str | None = None
    cpu: int = 0
    gpu: int = 0
    memory_mb: int = 0
    env: Mapping[str, str] = field(default_factory=dict)
    mounts: Sequence[str] = ()
    max_retries: int = 0


def chain_app(name: str, overrides: Sequence[str], nproc: int, place: RolePlacement) -> AppDef:
    """A launcher that runs all stages: in its own pod, or with ``launch=kubernetes`` among ``overrides`` in pods of its
    own, which have its image. ConfigError where the store would go with the pod.
    """
    added = _ranks(nproc)
    launched = [each.partition("=")[2] for each in overrides if each.startswith("launch=")]
    if place.image and any(each != LaunchConfig().name for each in launched):
        added.append(f"launch.pods.image={place.image}")
    return _app(name, "nightjar", "run", [*added, *overrides], 1, place)


def stage_app(
    stage: str,
    overrides: Sequence[str],
    hosts: int,
    nproc: int,
    place: RolePlacement,
    owners: int = 0,
    owners_place: RolePlacement | None = None,
) -> AppDef:
    """One stage on ``hosts`` replicas (0: one, on the hosts that the hardware group says), ``nproc`` ranks on each.

    ``owners``: of these the last ones, embedding hosts, are a role of their own, at ``owners_place``. ConfigError for a
    stage that is none, or that runs on one host only, and where no host would be left to train.
    """
    if stage not in STAGES.names():
        raise ConfigError(f"there is no stage {stage!r}", hint=f"--name with one of: {', '.join(STAGES.names())}")
    if hosts > 1 and not STAGES.get(stage).distributed:
        raise ConfigError(f"the {stage} stage runs on one host, but --hosts is {hosts}", hint="leave --hosts out")
    if owners and owners >= hosts:
        raise ConfigError(
            f"--embedding_hosts is {owners} of --hosts {hosts}: no host is left to train",
            hint=f"--hosts {owners + 1}, or more",
        )
    added = [*([f"hardware.hosts={hosts}"] if hosts else []), *_ranks(nproc)]
    added += [f"hardware.embedding_hosts={owners}"] if owners else []
    app = _app(f"nightjar-{stage}", stage, stage, [*added, *overrides], hosts or 1, place)
    if owners:
        (every,) = app.roles
        every.num_replicas = hosts - owners
        other = _app(app.name, EMBEDDING, stage, [*added, *overrides], hosts, owners_place or place, hosts - owners)
        other.roles[0].num_replicas = owners
        app.roles += other.roles
    return app


def predict_app(given: Sequence[str], path: str, out: str, model: str, ranks: int, place: RolePlacement) -> AppDef:
    """``nightjar predict`` of the rows at ``path``; ``given``: ``store=<URL>`` and further arguments of it.

    ConfigError where the scores would go with the container.
    """
    if place.image and not place.mounts and "://" not in out:
        raise ConfigError(
            f"--out {out} is in the container: it goes when the job ends",
            hint="--out s3://<bucket>/<path>, or --mounts type=volume,src=<claim>,dst=/mnt/scores and a path there",
        )
    own = [path, "--out", out, *(["--model", model] if model else []), *(["--ranks", str(ranks)] if ranks else [])]
    return _app("nightjar-predict", "predict", "predict", [*own, *given], 1, place)


def _ranks(nproc: int) -> list[str]:
    return [f"hardware.ranks_per_host={nproc}"] if nproc else []


def _host_line(before: int = 0) -> str:
    """A line for ``sh`` that runs its arguments as one host of several; ``before``: hosts of the role before.

    Which host a replica is and where the first one is only the scheduler knows; TorchX's macros name its variables.
    """
    from torchx.specs import macros

    first = f"$${{{macros.rank0_env}:-localhost}}"
    index = f"$$(({before} + {macros.replica_id}))" if before else macros.replica_id
    joined = f'launch=hosts "launch.host_index={index}" "launch.first_host={first}"'
    return f'exec "$$0" "$$@" {joined}'


def _app(
    name: str, role: str, command: str, overrides: Sequence[str], hosts: int, place: RolePlacement, before: int = 0
) -> AppDef:
    from torchx.specs import AppDef, Role

    if place.image and not any(each.startswith("store=") for each in overrides):
        raise ConfigError(
            "no store is given: a folder in the container goes when the job ends",
            hint="store=s3://<bucket>/<path>, or --mounts type=volume,src=<claim>,dst=/mnt/nightjar and a folder there",
        )
    port = next((each.partition("=")[2] for each in reversed(overrides) if each.startswith("launch.port=")), None)
    python = "python" if place.image else sys.executable
    # TorchX substitutes ${macros} in arguments; a literal dollar is written twice.
    words = ["-m", "pipeline.cli", command, *(each.replace("$", "$$") for each in overrides)]
    return AppDef(
        name=name,
        roles=[
            Role(
                name=role,
                image=place.image,
                env=dict(place.env),
                entrypoint=python if hosts == 1 else "sh",
                args=words if hosts == 1 else ["-c", _host_line(before), python, *words],
                num_replicas=hosts,
                max_retries=place.max_retries,
                resource=_resource(place),
                port_map={"c10d": int(port or LaunchConfig().port)} if hosts > 1 else {},
                mounts=_mounts(place),
            )
        ],
    )


def _mounts(place: RolePlacement) -> list[Any]:
    from torchx.specs import parse_mounts

    try:
        return list(parse_mounts(list(place.mounts)))
    except (KeyError, ValueError) as error:
        raise ConfigError(
            f"--mounts {','.join(place.mounts)}: {error.args[0]}",
            hint="--mounts type=volume,src=<claim>,dst=<path>[,readonly]",
        ) from None


def _resource(place: RolePlacement) -> Resource:
    from torchx.specs import Resource, named_resources

    if place.h:
        try:
            return named_resources[place.h]
        except KeyError as error:
            raise ConfigError(str(error.args[0]), hint="-h, or --cpu, --gpu and --memMB") from None
    usual = PodResources()
    memory = place.memory_mb or round(1024 * usual.memory_gib)
    return Resource(cpu=place.cpu or round(usual.cpu), gpu=place.gpu, memMB=memory)
