"""TorchX components: ``torchx run -s kubernetes components/nightjar.py:chain --image <image> -- <overrides>``.

``chain`` is the whole run, ``stage`` any registered stage by its name. The stages of Nightjar itself have a component
each, because TorchX reads names, arguments and help from the functions of this file. ``predict`` scores rows with what
they published. docs/torchx.md has examples.
"""

import sys
from typing import Callable, Dict, List, Optional, TypeVar

from torchx.specs import AppDef

from pipeline.errors import NightjarError
from pipeline.launch.components import RolePlacement, chain_app, predict_app, stage_app

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


def described(**more: str) -> Callable[[Component], Component]:
    """A decorator that puts the meaning of each argument into the docstring, where TorchX looks for its help.

    The function stays as it is. ``more``: the meaning of arguments that others do not have.
    """

    def describe(function: Component) -> Component:
        meanings = ARGUMENTS | more
        names = [name for name in function.__annotations__ if name in meanings]
        lines = [f"    {name}: {meanings[name]}" for name in names]
        function.__doc__ = "\n".join([f"{function.__doc__}\n", "Args:", *lines])
        return function

    return describe


@described(name="name of the TorchX app")
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
    return _told(lambda: chain_app(name, list(overrides), nproc, place))


@described(name="the stage")
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
    own = embedding_h or (None if embedding_cpu or embedding_memMB else h)
    owners = RolePlacement(
        image, own, embedding_cpu or cpu, 0, embedding_memMB or memMB, env or {}, mounts or [], max_retries
    )
    return _told(lambda: stage_app(name, list(overrides), hosts, nproc, place, embedding_hosts, owners))


@described()
def ingest(
    *overrides: str,
    image: str = "",
    h: Optional[str] = None,
    cpu: int = 0,
    gpu: int = 0,
    memMB: int = 0,
    env: Optional[Dict[str, str]] = None,
    mounts: Optional[List[str]] = None,
    max_retries: int = 0,
) -> AppDef:
    """Raw click logs to a training dataset."""
    return stage(
        *overrides,
        name="ingest",
        image=image,
        h=h,
        cpu=cpu,
        gpu=gpu,
        memMB=memMB,
        env=env,
        mounts=mounts,
        max_retries=max_retries,
    )


@described()
def plan(
    *overrides: str,
    image: str = "",
    h: Optional[str] = None,
    cpu: int = 0,
    gpu: int = 0,
    memMB: int = 0,
    env: Optional[Dict[str, str]] = None,
    mounts: Optional[List[str]] = None,
    max_retries: int = 0,
) -> AppDef:
    """A sharding plan for a committed dataset on the hardware."""
    return stage(
        *overrides,
        name="plan",
        image=image,
        h=h,
        cpu=cpu,
        gpu=gpu,
        memMB=memMB,
        env=env,
        mounts=mounts,
        max_retries=max_retries,
    )


@described()
def partition(
    *overrides: str,
    image: str = "",
    h: Optional[str] = None,
    cpu: int = 0,
    gpu: int = 0,
    memMB: int = 0,
    env: Optional[Dict[str, str]] = None,
    mounts: Optional[List[str]] = None,
    max_retries: int = 0,
) -> AppDef:
    """Towers of features and the plan on their hosts."""
    return stage(
        *overrides,
        name="partition",
        image=image,
        h=h,
        cpu=cpu,
        gpu=gpu,
        memMB=memMB,
        env=env,
        mounts=mounts,
        max_retries=max_retries,
    )


@described()
def train(
    *overrides: str,
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
    """Trains the model on a committed dataset, by its committed plan."""
    return stage(
        *overrides,
        name="train",
        hosts=hosts,
        nproc=nproc,
        image=image,
        h=h,
        cpu=cpu,
        gpu=gpu,
        memMB=memMB,
        env=env,
        mounts=mounts,
        max_retries=max_retries,
        embedding_hosts=embedding_hosts,
        embedding_h=embedding_h,
        embedding_cpu=embedding_cpu,
        embedding_memMB=embedding_memMB,
    )


@described()
def evaluate(
    *overrides: str,
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
    """Figures of the trained model on held-out rows."""
    return stage(
        *overrides,
        name="evaluate",
        hosts=hosts,
        nproc=nproc,
        image=image,
        h=h,
        cpu=cpu,
        gpu=gpu,
        memMB=memMB,
        env=env,
        mounts=mounts,
        max_retries=max_retries,
        embedding_hosts=embedding_hosts,
        embedding_h=embedding_h,
        embedding_cpu=embedding_cpu,
        embedding_memMB=embedding_memMB,
    )


@described()
def publish(
    *overrides: str,
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
    """The gate's verdict, and the published version."""
    return stage(
        *overrides,
        name="publish",
        hosts=hosts,
        nproc=nproc,
        image=image,
        h=h,
        cpu=cpu,
        gpu=gpu,
        memMB=memMB,
        env=env,
        mounts=mounts,
        max_retries=max_retries,
        embedding_hosts=embedding_hosts,
        embedding_h=embedding_h,
        embedding_cpu=embedding_cpu,
        embedding_memMB=embedding_memMB,
    )


@described(
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
    return _told(lambda: predict_app(list(overrides), path, out, model, ranks, place))


def _told(make: Callable[[], AppDef]) -> AppDef:
    """What ``make`` gives; a mistake of the user ends this process with its message and exit code."""
    try:
        return make()
    except NightjarError as error:
        sys.stderr.write(f"nightjar: {error}\n")
        sys.exit(error.exit_code)
