"""TorchX components: ``torchx run -s kubernetes components/nightjar.py:chain --image <image> -- <overrides>``.

``chain`` is the whole run, ``stage`` any registered stage by its name. The stages of Nightjar itself have a component
each, because TorchX reads names, arguments and help from the source of this file. docs/torchx.md has examples.
"""

import sys
from typing import Callable, Dict, List, Optional

from torchx.specs import AppDef

from pipeline.errors import NightjarError
from pipeline.launch.components import Place, chain_app, stage_app


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
    """The whole run: the launcher, which starts the stages one after another.

    Args:
        overrides: Hydra overrides, behind ``--``
        name: name of the TorchX app
        image: image of the job; none where the scheduler runs this Python (local_cwd, slurm)
        nproc: ranks on a host; 0: what the hardware group says
        h: a named resource of TorchX, in place of cpu, gpu and memMB
        cpu: CPU cores; 0: 2
        gpu: GPUs
        memMB: memory in MB; 0: 8192
        env: environment variables, A=1,B=2
        mounts: mounts of the container, type=volume,src=<claim>,dst=<path>[,readonly]
        max_retries: how often the scheduler starts the job again; it continues where it stopped
    """
    place = Place(image, h, cpu, gpu, memMB, env or {}, mounts or [], max_retries)
    return _told(lambda: chain_app(name, list(overrides), nproc, place))


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
) -> AppDef:
    """One stage of a run, whose input artifacts are committed.

    Args:
        overrides: Hydra overrides, behind ``--``
        name: the stage
        hosts: replicas of the job, a host each; 0: one
        nproc: ranks on a host; 0: what the hardware group says
        image: image of the job; none where the scheduler runs this Python (local_cwd, slurm)
        h: a named resource of TorchX, in place of cpu, gpu and memMB
        cpu: CPU cores; 0: 2
        gpu: GPUs
        memMB: memory in MB; 0: 8192
        env: environment variables, A=1,B=2
        mounts: mounts of the container, type=volume,src=<claim>,dst=<path>[,readonly]
        max_retries: how often the scheduler starts the job again; it continues where it stopped
    """
    place = Place(image, h, cpu, gpu, memMB, env or {}, mounts or [], max_retries)
    return _told(lambda: stage_app(name, list(overrides), hosts, nproc, place))


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
    """Raw click logs to a training dataset.

    Args:
        overrides: Hydra overrides, behind ``--``
        image: image of the job; none where the scheduler runs this Python (local_cwd, slurm)
        h: a named resource of TorchX, in place of cpu, gpu and memMB
        cpu: CPU cores; 0: 2
        gpu: GPUs
        memMB: memory in MB; 0: 8192
        env: environment variables, A=1,B=2
        mounts: mounts of the container, type=volume,src=<claim>,dst=<path>[,readonly]
        max_retries: how often the scheduler starts the job again; it continues where it stopped
    """
    place = Place(image, h, cpu, gpu, memMB, env or {}, mounts or [], max_retries)
    return _told(lambda: stage_app("ingest", list(overrides), 0, 0, place))


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
    """A sharding plan for a committed dataset on the hardware.

    Args:
        overrides: Hydra overrides, behind ``--``
        image: image of the job; none where the scheduler runs this Python (local_cwd, slurm)
        h: a named resource of TorchX, in place of cpu, gpu and memMB
        cpu: CPU cores; 0: 2
        gpu: GPUs
        memMB: memory in MB; 0: 8192
        env: environment variables, A=1,B=2
        mounts: mounts of the container, type=volume,src=<claim>,dst=<path>[,readonly]
        max_retries: how often the scheduler starts the job again; it continues where it stopped
    """
    place = Place(image, h, cpu, gpu, memMB, env or {}, mounts or [], max_retries)
    return _told(lambda: stage_app("plan", list(overrides), 0, 0, place))


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
    """Towers of features and the plan on their hosts.

    Args:
        overrides: Hydra overrides, behind ``--``
        image: image of the job; none where the scheduler runs this Python (local_cwd, slurm)
        h: a named resource of TorchX, in place of cpu, gpu and memMB
        cpu: CPU cores; 0: 2
        gpu: GPUs
        memMB: memory in MB; 0: 8192
        env: environment variables, A=1,B=2
        mounts: mounts of the container, type=volume,src=<claim>,dst=<path>[,readonly]
        max_retries: how often the scheduler starts the job again; it continues where it stopped
    """
    place = Place(image, h, cpu, gpu, memMB, env or {}, mounts or [], max_retries)
    return _told(lambda: stage_app("partition", list(overrides), 0, 0, place))


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
) -> AppDef:
    """Trains the model on a committed dataset, by its committed plan.

    Args:
        overrides: Hydra overrides, behind ``--``
        hosts: replicas of the job, a host each; 0: one
        nproc: ranks on a host; 0: what the hardware group says
        image: image of the job; none where the scheduler runs this Python (local_cwd, slurm)
        h: a named resource of TorchX, in place of cpu, gpu and memMB
        cpu: CPU cores; 0: 2
        gpu: GPUs
        memMB: memory in MB; 0: 8192
        env: environment variables, A=1,B=2
        mounts: mounts of the container, type=volume,src=<claim>,dst=<path>[,readonly]
        max_retries: how often the scheduler starts the job again; it continues where it stopped
    """
    place = Place(image, h, cpu, gpu, memMB, env or {}, mounts or [], max_retries)
    return _told(lambda: stage_app("train", list(overrides), hosts, nproc, place))


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
) -> AppDef:
    """Figures of the trained model on held-out rows.

    Args:
        overrides: Hydra overrides, behind ``--``
        hosts: replicas of the job, a host each; 0: one
        nproc: ranks on a host; 0: what the hardware group says
        image: image of the job; none where the scheduler runs this Python (local_cwd, slurm)
        h: a named resource of TorchX, in place of cpu, gpu and memMB
        cpu: CPU cores; 0: 2
        gpu: GPUs
        memMB: memory in MB; 0: 8192
        env: environment variables, A=1,B=2
        mounts: mounts of the container, type=volume,src=<claim>,dst=<path>[,readonly]
        max_retries: how often the scheduler starts the job again; it continues where it stopped
    """
    place = Place(image, h, cpu, gpu, memMB, env or {}, mounts or [], max_retries)
    return _told(lambda: stage_app("evaluate", list(overrides), hosts, nproc, place))


def publish(
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
    """The gate's verdict, and the published version.

    Args:
        overrides: Hydra overrides, behind ``--``
        image: image of the job; none where the scheduler runs this Python (local_cwd, slurm)
        h: a named resource of TorchX, in place of cpu, gpu and memMB
        cpu: CPU cores; 0: 2
        gpu: GPUs
        memMB: memory in MB; 0: 8192
        env: environment variables, A=1,B=2
        mounts: mounts of the container, type=volume,src=<claim>,dst=<path>[,readonly]
        max_retries: how often the scheduler starts the job again; it continues where it stopped
    """
    place = Place(image, h, cpu, gpu, memMB, env or {}, mounts or [], max_retries)
    return _told(lambda: stage_app("publish", list(overrides), 0, 0, place))


def _told(make: Callable[[], AppDef]) -> AppDef:
    """What ``make`` gives; a mistake of the user ends this process with its message and exit code."""
    try:
        return make()
    except NightjarError as error:
        sys.stderr.write(f"nightjar: {error}\n")
        sys.exit(error.exit_code)
