"""TorchX components: ``torchx run -s kubernetes components/nightjar.py:chain --image <image> -- <overrides>``.

``chain`` is the whole run, ``stage`` any registered stage by its name. The stages of Nightjar itself have a component
each, because TorchX reads names, arguments and help from the functions of this file. ``predict`` scores rows with what
they published. docs/torchx.md has examples.

Nothing is composed and no store is asked here: whoever submits has neither. The job says what is wrong or missing.
"""

import sys
from dataclasses import dataclass, field, replace
from functools import wraps
from inspect import Signature, signature
from typing import Any, Callable, Dict, List, Mapping, Optional, Sequence, TypeVar, cast

from torchx.specs import AppDef, Resource, Role, macros, named_resources, parse_mounts

from pipeline.config.kubernetes import EMBEDDING
from pipeline.config.launch import LaunchConfig, PodResources
from pipeline.core.errors import ConfigError, NightjarError
from pipeline.specs import STAGES

ARGUMENTS = {
    "overrides": "Hydra overrides, behind ``--``",
    "hosts": "replicas of the job, a host each; 0: one",
    "embedding_hosts": "of the hosts the last ones, which hold the tables, as a role of their own",
    "embedding_h": "a named resource for them, in place of embedding_cpu and embedding_memMB; none: as the others",
    "embedding_cpu": "their CPU cores; 0: as the others",
    "embedding_memMB": "their memory in MB; 0: as the others",
    "nproc": "ranks on a host; 0: what the hardware group says",
    "image": "image of the job; none where the scheduler runs this Python (local_cwd, slurm)",
    "h": "a named resource of TorchX, in place of cpu, gpu and memMB",
    "cpu": "CPU cores; 0: 2",
    "gpu": "GPUs",
    "memMB": "memory in MB; 0: 8192",
    "env": "environment variables, A=1,B=2",
    "mounts": "mounts of the container, type=volume,src=<claim>,dst=<path>[,readonly]",
    "max_retries": "how often the scheduler starts the job again; it continues where it stopped",
}
Component = TypeVar("Component", bound=Callable[..., AppDef])


def component(**meanings: str) -> Callable[[Component], Component]:
    """Make a component of a function: TorchX's help knows its arguments, and a mistake ends the process.

    ``meanings``: of arguments that others do not have. A mistake of the user ends with its message and exit code.
    """

    def make(function: Component) -> Component:
        @wraps(function)
        def build(*overrides: str, **arguments: Any) -> AppDef:
            try:
                return function(*overrides, **arguments)
            except NightjarError as error:
                sys.stderr.write(f"nightjar: {error}\n")
                sys.exit(error.exit_code)

        # The docstring is where TorchX looks for the help.
        known = ARGUMENTS | meanings
        lines = [f"    {name}: {known[name]}" for name in signature(function).parameters if name in known]
        build.__doc__ = "\n".join([f"{function.__doc__}\n", "Args:", *lines])
        return cast(Component, build)

    return make


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


@component(name="name of the TorchX app")
def chain(
    *overrides: str,
    name: str = "nightjar",
    image: str = "",
    nproc: int = 0,
    h: Optional[str] = None,
    cpu: int = 0,
    gpu: int = 0,
    memMB: int = 0,
    env: Optional[Dict[str, str]] = None,
    mounts: Optional[List[str]] = None,
    max_retries: int = 0,
) -> AppDef:
    """The whole run: the launcher, which starts the stages one after another."""
    place = RolePlacement(image, h, cpu, gpu, memMB, env or {}, mounts or [], max_retries)
    arguments = _ranks(nproc)
    launched = [text.partition("=")[2] for text in overrides if text.startswith("launch=")]
    # Pods of the launcher's own have its image.
    if place.image and any(launch != LaunchConfig().name for launch in launched):
        arguments.append(f"launch.pods.image={place.image}")
    return _app(name, "nightjar", "run", [*arguments, *overrides], 1, place)


@component(name="the stage")
def stage(
    *overrides: str,
    name: str,
    hosts: int = 0,
    nproc: int = 0,
    image: str = "",
    h: Optional[str] = None,
    cpu: int = 0,
    gpu: int = 0,
    memMB: int = 0,
    env: Optional[Dict[str, str]] = None,
    mounts: Optional[List[str]] = None,
    max_retries: int = 0,
    embedding_hosts: int = 0,
    embedding_h: Optional[str] = None,
    embedding_cpu: int = 0,
    embedding_memMB: int = 0,
) -> AppDef:
    """One stage of a run, whose input artifacts are committed."""
    place = RolePlacement(image, h, cpu, gpu, memMB, env or {}, mounts or [], max_retries)
    if name not in STAGES.names():
        raise ConfigError(f"there is no stage {name!r}", hint=f"--name with one of: {', '.join(STAGES.names())}")
    if hosts > 1 and not STAGES.get(name).distributed:
        raise ConfigError(f"the {name} stage runs on one host, but --hosts is {hosts}", hint="leave --hosts out")
    if embedding_hosts and embedding_hosts >= hosts:
        raise ConfigError(
            f"--embedding_hosts is {embedding_hosts} of --hosts {hosts}: no host is left to train",
            hint=f"--hosts {embedding_hosts + 1}, or more",
        )
    # 0 leaves the number of hosts to the hardware group, as in ``_ranks``.
    arguments = [f"hardware.hosts={hosts}"] if hosts else []
    arguments += _ranks(nproc)
    if embedding_hosts:
        arguments.append(f"hardware.embedding_hosts={embedding_hosts}")
    arguments += overrides
    app = _app(f"nightjar-{name}", name, name, arguments, hosts or 1, place)
    if embedding_hosts:
        if not embedding_h and not embedding_cpu and not embedding_memMB:
            embedding_h = h
        cpu, memory_mb = embedding_cpu or cpu, embedding_memMB or memMB
        # Hosts that only hold tables need no GPU.
        embedding_place = replace(place, h=embedding_h, cpu=cpu, gpu=0, memory_mb=memory_mb)
        workers = hosts - embedding_hosts
        app.roles[0].num_replicas = workers
        others = _app(app.name, EMBEDDING, name, arguments, hosts, embedding_place, before=workers)
        others.roles[0].num_replicas = embedding_hosts
        app.roles += others.roles
    return app


# What each stage of Nightjar takes. Those that run on one host have no arguments of hosts and ranks.
RANKS = ("hosts", "nproc", "embedding_hosts", "embedding_h", "embedding_cpu", "embedding_memMB")


def arguments_of_stage(*, without: Sequence[str] = ()) -> Callable[[Component], Component]:
    """Give a component the arguments of ``stage`` but its name, except those ``without``."""

    def give(function: Component) -> Component:
        left_out = {"name", *without}
        parameters = [each for each in signature(stage).parameters.values() if each.name not in left_out]
        # TorchX reads ``inspect.signature``, which looks here first, and rejects a ``**placement`` that it sees.
        function.__dict__["__signature__"] = Signature(parameters, return_annotation=AppDef)
        return component()(function)

    return give


@arguments_of_stage(without=RANKS)
def ingest(*overrides: str, **placement: Any) -> AppDef:
    """Raw click logs to a training dataset."""
    return stage(*overrides, name="ingest", **placement)


@arguments_of_stage(without=RANKS)
def plan(*overrides: str, **placement: Any) -> AppDef:
    """A sharding plan for a committed dataset on the hardware."""
    return stage(*overrides, name="plan", **placement)


@arguments_of_stage(without=RANKS)
def partition(*overrides: str, **placement: Any) -> AppDef:
    """Towers of features and the plan on their hosts."""
    return stage(*overrides, name="partition", **placement)


@arguments_of_stage()
def train(*overrides: str, **placement: Any) -> AppDef:
    """Trains the model on a committed dataset, by its committed plan."""
    return stage(*overrides, name="train", **placement)


@arguments_of_stage()
def evaluate(*overrides: str, **placement: Any) -> AppDef:
    """Figures of the trained model on held-out rows."""
    return stage(*overrides, name="evaluate", **placement)


@arguments_of_stage()
def publish(*overrides: str, **placement: Any) -> AppDef:
    """The gate's verdict, and the published version."""
    return stage(*overrides, name="publish", **placement)


@component(
    overrides="the store, store=<URL>, and further arguments of ``nightjar predict``, behind ``--``",
    path="raw rows: a file, a directory or a glob on any fsspec URL",
    out="URL or path of the scores, *.parquet, else CSV",
    model="the model's name; none: the store's only one",
    ranks="processes that score; 0: as many as pay",
)
def predict(
    *overrides: str,
    path: str,
    out: str,
    model: str = "",
    ranks: int = 0,
    image: str = "",
    h: Optional[str] = None,
    cpu: int = 0,
    gpu: int = 0,
    memMB: int = 0,
    env: Optional[Dict[str, str]] = None,
    mounts: Optional[List[str]] = None,
    max_retries: int = 0,
) -> AppDef:
    """Scores of raw rows by a published version."""
    place = RolePlacement(image, h, cpu, gpu, memMB, env or {}, mounts or [], max_retries)
    if place.image and not place.mounts and "://" not in out:
        raise ConfigError(
            f"--out {out} is in the container: it goes when the job ends",
            hint="--out s3://<bucket>/<path>, or --mounts type=volume,src=<claim>,dst=/mnt/scores and a path there",
        )
    command = [path, "--out", out]
    if model:
        command += ["--model", model]
    if ranks:
        command += ["--ranks", str(ranks)]
    return _app("nightjar-predict", "predict", "predict", [*command, *overrides], 1, place)


def _ranks(nproc: int) -> list[str]:
    # 0 leaves the number to the hardware group that the overrides choose, which is not composed here.
    return [f"hardware.ranks_per_host={nproc}"] if nproc else []


def _app(
    name: str, role: str, command: str, overrides: Sequence[str], hosts: int, place: RolePlacement, before: int = 0
) -> AppDef:
    """Build an app of one role, each replica one of ``hosts``; ``before``: how many are of roles before this one."""
    if place.image and not any(text.startswith("store=") for text in overrides):
        raise ConfigError(
            "no store is given: a folder in the container goes when the job ends",
            hint="store=s3://<bucket>/<path>, or --mounts type=volume,src=<claim>,dst=/mnt/nightjar and a folder there",
        )
    port = str(LaunchConfig().port)
    for text in overrides:
        if text.startswith("launch.port="):
            port = text.partition("=")[2]
    entrypoint = "python" if place.image else sys.executable
    # TorchX substitutes ${macros} in arguments; a literal dollar is written twice.
    arguments = ["-m", "pipeline.cli", command, *(text.replace("$", "$$") for text in overrides)]
    if hosts > 1:
        # Which host a replica is, and where the first one is, only the scheduler knows; TorchX's macros name its
        # variables. So ``sh`` puts them behind the arguments.
        first = f"$${{{macros.rank0_env}:-localhost}}"
        index = macros.replica_id
        if before:
            # TorchX numbers the replicas of each role from 0.
            index = f"$$(({before} + {macros.replica_id}))"
        line = f'exec "$$0" "$$@" launch=hosts "launch.host_index={index}" "launch.first_host={first}"'
        entrypoint, arguments = "sh", ["-c", line, entrypoint, *arguments]
    resource = _resource(place)
    try:
        mounts = parse_mounts(list(place.mounts))
    except (KeyError, ValueError) as error:
        raise ConfigError(
            f"--mounts {','.join(place.mounts)}: {error.args[0]}",
            hint="--mounts type=volume,src=<claim>,dst=<path>[,readonly]",
        ) from None
    return AppDef(
        name=name,
        roles=[
            Role(
                name=role,
                image=place.image,
                env=dict(place.env),
                entrypoint=entrypoint,
                args=arguments,
                num_replicas=hosts,
                max_retries=place.max_retries,
                resource=resource,
                port_map={"c10d": int(port)} if hosts > 1 else {},
                mounts=mounts,
            )
        ],
    )


def _resource(place: RolePlacement) -> Resource:
    if place.h:
        try:
            return named_resources[place.h]
        except KeyError as error:
            raise ConfigError(str(error.args[0]), hint="-h, or --cpu, --gpu and --memMB") from None
    # The defaults are those of a pod whose stage has no entry in ``launch.pods.resources``.
    usual = PodResources()
    memory = place.memory_mb or round(1024 * usual.memory_gib)
    return Resource(cpu=place.cpu or round(usual.cpu), gpu=place.gpu, memMB=memory)
