"""Collectives of ranks on one machine through shared memory.

gloo sends through the network stack even within a machine, which costs several times the copies themselves. Here every
rank writes what it sends into memory that all ranks map, meets the others, and reads what it receives.
"""

from __future__ import annotations

import mmap
import os
import platform
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

SLOT = 256 << 20  # bytes of a message; pages that no message reaches take no memory
LINE = 8  # int64 values of a cache line, so that ranks do not write into the same one
SPINS, PAUSE, CHECK = 2000, 5e-5, 0.5  # looks before the first pause; seconds of a pause, and between looks at peers


class SharedMemory:
    """Collectives over all ranks; every rank makes one, and calls the same ones in the same order. Collective.

    Two slots for each rank are written in turn. A rank writes into a slot again after the meeting that follows its
    reading by all others, so one meeting a collective is enough. x86 keeps the order of writes that this rests on.
    """

    def __init__(self) -> None:
        self._rank, self._world = dist.get_rank(), dist.get_world_size()
        self._calls = 0
        head = 8 * LINE * self._world * (1 + 2 * self._world)
        self._head = -(-head // mmap.PAGESIZE) * mmap.PAGESIZE
        self._map = self._open(self._head + 2 * self._world * SLOT)
        values = np.frombuffer(self._map, np.int64, self._head // 8)
        self._arrived = values[: LINE * self._world : LINE]
        # Of each slot: the bytes for each rank; -1 first where the message did not fit.
        self._sizes = values[LINE * self._world :][: 2 * self._world * self._world * LINE]
        self._sizes = self._sizes.reshape(2, self._world, -1)[:, :, : self._world]
        every = torch.frombuffer(self._map, dtype=torch.uint8, offset=self._head)
        self._slots = every.view(2, self._world, SLOT)

    def _open(self, size: int) -> mmap.mmap:
        """Memory without a file, by the first rank; the others open it through its process."""
        where: list[Any] = [None]
        handle = -1
        if self._rank == 0:
            handle = os.memfd_create("nightjar-exchange")
            os.ftruncate(handle, size)
            where = [(os.getpid(), handle)]
        dist.broadcast_object_list(where, src=0)
        if handle < 0:
            handle = os.open("/proc/{}/fd/{}".format(*where[0]), os.O_RDWR)
        opened = mmap.mmap(handle, size)
        pids: list[Any] = [None] * self._world
        dist.all_gather_object(pids, os.getpid())
        self._pids = pids
        os.close(handle)
        return opened

    def all_to_all(self, output: Tensor, input: Tensor, receives: list[int], sends: list[int]) -> bool:
        """Exchange bytes: ``sends`` to each rank, ``receives`` from each. False where any rank's do not fit a slot."""
        turn = self._send(input, sends)
        sizes = self._sizes[turn]
        if (sizes[:, 0] < 0).any():
            return False
        target, at = _bytes(output), 0
        for source, count in enumerate(receives):
            if sizes[source, self._rank] != count:
                raise RuntimeError(f"rank {source} sent {sizes[source, self._rank]} bytes, expected {count}")
            start = int(sizes[source, : self._rank].sum())
            target[at : at + count] = self._slots[turn, source, start : start + count]
            at += count
        return True

    def all_reduce(self, values: Tensor) -> bool:
        """Replace ``values`` by their sum over the ranks, in the order of ranks; False where they do not fit a slot."""
        turn = self._send(values, [values.nbytes] * self._world)
        if (self._sizes[turn, :, 0] != values.nbytes).any():
            return False
        parts = [_as(self._slots[turn, rank, : values.nbytes], values) for rank in range(self._world)]
        torch.add(parts[0], parts[1], out=values)
        for part in parts[2:]:
            values += part
        return True

    def _send(self, values: Tensor, sizes: list[int]) -> int:
        """Write ``values`` into this rank's slot and meet the others; returns the number of the slots."""
        self._calls += 1
        turn = self._calls % 2
        fits = values.nbytes <= SLOT
        self._sizes[turn, self._rank] = sizes if fits else -1
        if fits:
            self._slots[turn, self._rank, : values.nbytes] = _bytes(values)
        self._meet()
        return turn

    def _meet(self) -> None:
        """Wait until every rank has made this call."""
        self._arrived[self._rank] = self._calls
        looks, checked = 0, time.monotonic()
        while self._arrived.min() < self._calls:
            looks += 1
            if looks < SPINS:
                os.sched_yield()
                continue
            time.sleep(PAUSE)
            if time.monotonic() - checked > CHECK:
                checked = time.monotonic()
                self._check_peers()

    def _check_peers(self) -> None:
        """RuntimeError where a rank has ended that the others wait for."""
        for rank, pid in enumerate(self._pids):
            if self._arrived[rank] < self._calls and not _runs(pid):
                raise RuntimeError(f"rank {rank} (process {pid}) has ended")

    @contextmanager
    def exchanging(self) -> Iterator[None]:
        """Calls of ``dist.all_to_all_single`` over all ranks go through shared memory inside."""
        former = dist.all_to_all_single
        everyone = (None, dist.group.WORLD)

        def call(
            output: Tensor, input: Tensor, output_split_sizes: list[int] | None = None,
            input_split_sizes: list[int] | None = None, group: Any = None, async_op: bool = False,
        ) -> Any:  # fmt: skip
            given = (output_split_sizes, input_split_sizes)
            if group in everyone:
                receives, sends = self._parts(output, given[0]), self._parts(input, given[1])
                if self.all_to_all(output, input.contiguous(), receives, sends):
                    return _Done() if async_op else None
            return former(output, input, *given, group=group, async_op=async_op)

        dist.all_to_all_single = call
        try:
            yield
        finally:
            dist.all_to_all_single = former

    def _parts(self, values: Tensor, rows: list[int] | None) -> list[int]:
        """Bytes of each rank's part."""
        if not rows:
            return [values.nbytes // self._world] * self._world
        row = values.nbytes // values.shape[0] if values.shape[0] else 0
        return [row * count for count in rows]

    def mean(self, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        """The mean of a bucket of gradients over the ranks, for DDP."""
        values = bucket.buffer().div_(self._world)
        if not self.all_reduce(values):
            dist.all_reduce(values)
        done: torch.futures.Future[Tensor] = torch.futures.Future()
        done.set_result(values)
        return done


class _Done:
    """The handle of a collective that has ended."""

    def wait(self, timeout: Any = None) -> bool:
        """True."""
        return True

    def is_completed(self) -> bool:
        """True."""
        return True


def one_memory(device: torch.device, hosts: int) -> bool:
    """Whether the ranks of a running group can exchange through memory: several, on CPUs of this one machine."""
    return (
        device.type == "cpu" and hosts == 1 and dist.get_world_size() > 1
        and platform.machine() in ("x86_64", "AMD64") and hasattr(os, "memfd_create")
    )  # fmt: skip


def _bytes(values: Tensor) -> Tensor:
    return values.detach().reshape(-1).view(torch.uint8)


def _as(values: Tensor, like: Tensor) -> Tensor:
    return values.view(like.dtype).view(like.shape)


def _runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in ("Z", "X")
    except OSError:
        return False
