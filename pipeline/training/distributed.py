"""Ranks: the process group, what they agree on, and how a failure of one reaches the others."""

from __future__ import annotations

import atexit
import ctypes
import json
import mmap
import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from typing import Any, cast

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from pipeline.checkpoint.collectives import all_gather_records
from pipeline.config.hardware import HardwareConfig
from pipeline.core.cpus import available_cpus
from pipeline.core.errors import ConfigError, NightjarError
from pipeline.core.machine import stay_on_loopback
from pipeline.embeddings.huge_pages import LARGE_PAGE
from pipeline.embeddings.workers import Workers
from pipeline.models.layers.perceptron import BatchNorm, MaxNorm
from pipeline.training.faults import Fault

_FAILURE = "nightjar/failure/{}"
# The number of trainings that this process has begun. Each leaves its failure under its own key.
_trainings = 0
_PATIENCE = timedelta(minutes=30)
_BACKENDS = {"cpu": "gloo", "cuda": "nccl"}
# The group of all ranks, and the side group made for it (``side_group``).
_side: tuple[object, dist.ProcessGroup] | None = None
# mallopt parameters, with values in bytes: M_MMAP_THRESHOLD (-3), M_TRIM_THRESHOLD (-1) and M_TOP_PAD (-2).
_MALLOC = {-3: 1 << 30, -1: (1 << 31) - 1, -2: 64 << 20}
# Bytes of the heap that are requested in large pages; the tensors of a step lie there.
_STEP = 512 << 20


def connect(hardware: HardwareConfig, threads: int | None = None, *, one_machine: bool = True) -> torch.device:
    """Join the process group (gloo on CPU, NCCL on CUDA), set the threads and return this rank's device.

    Rank and world size come from torchrun; without it this process is the only rank. The group stays up until the
    process ends. ``threads`` is the number for this rank (None: its share of the CPUs); ``one_machine`` says that the
    ranks of all hosts run on this machine. Raises ConfigError where the running ranks or devices differ from
    ``hardware``.
    """
    ranks, role = hardware.hosts * hardware.ranks_per_host, hardware.device
    if hardware.embedding_hosts and int(os.environ.get("RANK", "0")) >= hardware.workers:
        role = hardware.table_device
    device = torch.device("cpu")
    if role != "cpu":
        if not torch.cuda.is_available():
            raise ConfigError("hardware.device is cuda, but this machine has no CUDA device", hint="hardware=laptop")
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count())
        torch.cuda.set_device(device)
    else:
        here = ranks if one_machine else hardware.ranks_per_host
        torch.set_num_threads(threads or max(1, available_cpus() // here))
        # Adam's moments decay into denormals, which cost a hundred cycles each.
        torch.set_flush_denormal(True)
        _keep_freed_memory()
    if not dist.is_initialized():
        # The default group exchanges embeddings, so its backend follows the device of the tables.
        backend = _BACKENDS[hardware.table_device]
        if "RANK" in os.environ:
            # torchrun has set the variables that ``init_process_group`` reads.
            dist.init_process_group(backend, timeout=_PATIENCE)
        else:
            # Even a single rank opens a listening socket, so keep it on the loopback interface.
            stay_on_loopback()
            dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
        atexit.register(_disconnect)
    if dist.get_world_size() != ranks:
        raise ConfigError(
            f"{dist.get_world_size()} ranks are running, but hardware.hosts * hardware.ranks_per_host is {ranks}",
            hint=f"hardware.hosts=1 hardware.ranks_per_host={dist.get_world_size()}",
        )
    workers_of(hardware)
    return device


_groups: dict[tuple[dist.ProcessGroup, int], dist.ProcessGroup] = {}


def workers_of(hardware: HardwareConfig) -> Workers:
    """Return the ranks that have samples. Collective at the first call, which ``connect`` makes."""
    if not hardware.embedding_hosts:
        return Workers(hardware.world_size, hardware.world_size)
    key = dist.distributed_c10d._get_default_group(), hardware.workers
    if key not in _groups:
        ranks = [*range(hardware.workers)]
        # This group reduces the dense part's gradients, so its backend follows the workers' device, not the tables'.
        _groups[key] = dist.new_group(ranks, backend=_BACKENDS[hardware.device], timeout=_PATIENCE)
    return Workers(hardware.workers, hardware.world_size, _groups[key])


def _keep_freed_memory() -> None:
    # Make glibc keep the memory that a step frees for the tensors of the next step. By default it returns large pieces
    # to the kernel, which clears every page again on its next use: up to half of the step time with large batches
    # (docs/measurements/planning.md). The peak stays the same, since steps need the same tensors.
    libc = ctypes.CDLL(None)
    if not hasattr(libc, "mallopt"):
        return
    for option, value in _MALLOC.items():
        libc.mallopt(option, value)
    # Request pages of 2 MiB for the next part of glibc's heap, where Linux has some. The tensors of a step lie there,
    # and parts that none of them uses take no memory.
    if not hasattr(mmap, "MADV_HUGEPAGE"):
        return
    libc.malloc.restype, libc.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
    libc.free.argtypes = [ctypes.c_void_p]
    libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    begin = libc.malloc(_STEP)
    if begin:
        aligned = -(-begin // LARGE_PAGE) * LARGE_PAGE
        libc.madvise(aligned, _STEP - LARGE_PAGE, mmap.MADV_HUGEPAGE)
        libc.free(begin)


def _disconnect() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()


def side_group() -> dist.ProcessGroup:
    """Return a group of all ranks, one per process, for CPU exchanges beside a step. Collective at the first call."""
    global _side
    world = dist.group.WORLD
    if _side is None or _side[0] is not world:
        _side = world, dist.new_group(backend="gloo")
    return _side[1]


def collective_device(device: torch.device) -> torch.device:
    """Return ``device`` if the group's backend reduces its tensors, else this rank's: NCCL reduces on CUDA only."""
    able = dist.distributed_c10d._get_default_group()._device_types
    if not able or any(each.type == device.type for each in able):
        return device
    # A device without an index is the current device of this rank.
    kind = able[0].type
    return torch.device(kind)


def add_up(values: torch.Tensor) -> torch.Tensor:
    """Sum ``values`` over all ranks in place, on any device, and return them."""
    return _reduced(values, dist.ReduceOp.SUM)


def largest(values: torch.Tensor) -> torch.Tensor:
    """Take the elementwise maximum of ``values`` over all ranks in place, on any device, and return them."""
    return _reduced(values, dist.ReduceOp.MAX)


def _reduced(values: torch.Tensor, op: dist.ReduceOp.RedOpType) -> torch.Tensor:
    if dist.get_world_size() == 1:
        return values
    device = collective_device(values.device)
    if device.type == values.device.type:
        dist.all_reduce(values, op=op)
        return values
    sent = torch.empty_like(values, device=device).copy_(values)
    dist.all_reduce(sent, op=op)
    return values.copy_(sent)


def first_fault(fault: Fault | None) -> Fault | None:
    """Return the smallest of the ranks' faults, the lowest rank's among equals; None without any. Collective."""
    faults = [Fault(*each) for each in all_gather_records(fault) if each]
    # Compare by pass and kind: the first value that was not finite caused all later ones.
    return min(faults, key=lambda each: each[:2], default=None)


@contextmanager
def shared_failure() -> Iterator[None]:
    """Raise on every rank the NightjarError that one of them raises, instead of the broken connections it causes."""
    global _trainings
    _trainings += 1
    try:
        yield
    except NightjarError as error:
        if dist.is_initialized() and dist.get_world_size() > 1:
            store = dist.distributed_c10d._get_default_store()
            store.set(_FAILURE.format(_trainings), json.dumps(error.to_json()))
        raise
    except RuntimeError as error:
        cause = failure_left()
        if cause is None:
            raise
        raise cause from error


def failure_left() -> NightjarError | None:
    """Return the error of another rank in this training; None where none failed, or the store cannot be reached."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return None
    store = dist.distributed_c10d._get_default_store()
    try:
        key = _FAILURE.format(_trainings)
        if not store.check([key]):
            return None
        return NightjarError.from_json(json.loads(store.get(key)))
    except RuntimeError:
        # The rank that serves the store has ended too.
        return None


class _SumOfRanks(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: Tensor, group: dist.ProcessGroup | None) -> Tensor:
        ctx.group, total = group, values.clone()
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        total = grads[0].clone()
        dist.all_reduce(total, group=ctx.group)
        return total, None


@torch.compiler.disable
def sum_of_ranks(values: Tensor, group: dist.ProcessGroup | None = None) -> Tensor:
    """Sum ``values`` over the ranks of ``group`` (None: all), differentiably.

    Collective, and in the backward pass too.
    """
    return cast(Tensor, _SumOfRanks.apply(values, group))


@torch.compiler.disable
def largest_of_ranks(values: Tensor, group: dist.ProcessGroup | None = None) -> Tensor:
    """Take the elementwise maximum over the ranks of ``group`` (None: all), in place. Collective for several ranks."""
    if dist.is_initialized() and dist.get_world_size(group) > 1:
        dist.all_reduce(values, dist.ReduceOp.MAX, group=group)
    return values


def synchronise(ranking: nn.Module, group: dist.ProcessGroup | None = None) -> None:
    """Make layers of ``ranking`` that look at a whole batch see the rows of all ranks of ``group`` (None: all)."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return
    # A layer that looked only at the rows of its own rank would make the model depend on the number of ranks.
    for layer in ranking.modules():
        if isinstance(layer, BatchNorm):
            layer.combine = partial(sum_of_ranks, group=group)
        elif isinstance(layer, MaxNorm):
            layer.combine = partial(largest_of_ranks, group=group)


def seed_step(seed: int, step: int) -> None:
    """Seed the random draws of this rank in ``step`` by (seed, rank, step), so that a resumed run repeats them.

    Sets the global random state of all devices that this process uses.
    """
    mixed = np.random.SeedSequence([seed, dist.get_rank(), step])
    number = int(mixed.generate_state(1, np.uint64)[0] >> 1)
    if torch.cuda.is_initialized():
        torch.manual_seed(number)
    else:
        # ``torch.manual_seed`` would spend a millisecond per step on recording its caller.
        torch.default_generator.manual_seed(number)


SAVE, STOP = 1, 2


class Agreement:
    """Lets every rank submit a wish (0, SAVE or STOP) in each step, and returns the largest wish of the step before.

    The exchange runs beside the step on its own process group, so no step waits for it; all ranks act after the same
    step. A SIGTERM becomes the wish STOP. This is a context manager, which restores the former handler.
    """

    def __init__(self) -> None:
        self._group = dist.new_group(backend="gloo") if dist.get_world_size() > 1 else None
        self._flag = torch.zeros(1, dtype=torch.int32)
        self._pending: Any = None
        self._answered = False
        self._terminated = threading.Event()
        self._former: Any = None

    def __enter__(self) -> Agreement:
        if threading.current_thread() is threading.main_thread():
            # The handler only sets an event: it may run between any two operations of the main thread.
            self._former = signal.signal(signal.SIGTERM, lambda *_: self._terminated.set())
        return self

    def __exit__(self, *_: object) -> None:
        if self._former is not None:
            signal.signal(signal.SIGTERM, self._former)

    def saved(self) -> None:
        """Record on every rank that a checkpoint was taken after this step, which grants the wishes in flight."""
        self._answered = True

    def step(self, save: bool) -> int:
        """Submit this rank's wish at the end of a step and return what all agree on: 0, SAVE or STOP."""
        wish = SAVE if save else 0
        if self._terminated.is_set():
            wish = STOP
        if self._group is None:
            return wish
        agreed = 0
        if self._pending is not None:
            self._pending.wait()
            agreed = int(self._flag.item())
            # This wish was submitted before the checkpoint that has just been taken.
            if self._answered and agreed == SAVE:
                agreed = 0
        self._answered = False
        self._flag = torch.tensor([wish], dtype=torch.int32)
        self._pending = dist.all_reduce(self._flag, op=dist.ReduceOp.MAX, group=self._group, async_op=True)
        return agreed
