"""Collectives of ranks on one machine through shared memory.

gloo sends through the network stack even within a machine, which costs several times the copies themselves. Here every
rank writes what it sends into memory that all ranks map, meets the others, and reads what it receives.
"""

from __future__ import annotations

import logging
import mmap
import os
import platform
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

log = logging.getLogger(__name__)

SLOT = 256 << 20  # bytes of a message; pages that no message reaches take no memory
CHUNK = 1 << 15  # values of a sum at a time, so that they stay in the cache
LINE = 8  # int64 values of a cache line, so that ranks do not write into the same one
# Looks before the first pause; seconds of a pause, between looks at peers, and of waiting for a rank that runs.
SPINS, PAUSE, CHECK, LONGEST = 2000, 5e-5, 0.5, 1800.0


class SharedMemory:
    """Collectives over all ranks, which call the same ones in the same order; ``share_memory`` makes it.

    Two slots for each rank are written in turn. A rank writes into a slot again after the meeting that follows its
    reading by all others, so one meeting a collective is enough. x86 keeps the order of writes that this rests on.
    ``memory``: mapped by all ranks; ``pids``: their processes.
    """

    def __init__(self, memory: mmap.mmap, pids: list[int]) -> None:
        self._rank, self._world = dist.get_rank(), dist.get_world_size()
        self._map, self._pids = memory, pids
        self._calls = 0
        head, world = _head(self._world), self._world
        values = np.frombuffer(memory, np.int64, head // 8)[LINE:]
        self._arrived = values[: LINE * world : LINE]
        # Of each slot: the bytes for each rank; -1 first where the message did not fit.
        sizes = values[LINE * world :][: 2 * world * world * LINE]
        self._sizes = sizes.reshape(2, world, -1)[:, :, :world]
        every = torch.frombuffer(memory, dtype=torch.uint8, offset=head)
        self._slots = every.view(2, world, SLOT)

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

    def post(self, values: list[Tensor]) -> bool:
        """Write ``values`` for ``take_sums``, and wait for nobody; False, and nothing, where they do not fit a slot.

        No other collective of this memory may come between the two.
        """
        if sum(each.nbytes for each in values) > SLOT:
            return False
        self._calls += 1
        slot, at = self._slots[self._calls % 2, self._rank], 0
        for each in values:
            slot[at : at + each.nbytes] = _bytes(each)
            at += each.nbytes
        self._arrived[self._rank] = self._calls
        return True

    def take_sums(self, values: list[Tensor]) -> None:
        """Replace ``values`` by the sums of what all ranks post, in the order of ranks. Waits for those posts."""
        self._wait()
        slots, at = self._slots[self._calls % 2], 0
        for each in values:
            flat, parts = each.view(-1), slots[:, at : at + each.nbytes].view(each.dtype)
            for low in range(0, flat.numel(), CHUNK):
                into, (first, second, *others) = flat[low : low + CHUNK], parts[:, low : low + CHUNK]
                torch.add(first, second, out=into)
                for part in others:
                    into += part
            at += each.nbytes

    def all_gather(self, output: Tensor, input: Tensor) -> bool:
        """Fill ``output`` with the ``input`` of all ranks, in their order; False where any does not fit a slot.

        ``input`` may be this rank's part of ``output``.
        """
        turn = self._send(input, [input.nbytes] * self._world)
        if (self._sizes[turn, :, 0] != input.nbytes).any():
            return False
        for part, slot in zip(_bytes(output).view(self._world, -1), self._slots[turn], strict=True):
            if part.data_ptr() != input.data_ptr():
                part.copy_(slot[: input.nbytes])
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
        self._wait()

    def _wait(self) -> None:
        looks, began = 0, time.monotonic()
        checked = began
        while self._arrived.min() < self._calls:
            looks += 1
            if looks < SPINS:
                os.sched_yield()
                continue
            time.sleep(PAUSE)
            if time.monotonic() - checked > CHECK:
                checked = time.monotonic()
                self._check_peers(checked - began)

    def _check_peers(self, waited: float) -> None:
        """RuntimeError where a rank has ended that the others wait for, or keeps them waiting for too long."""
        for rank, pid in enumerate(self._pids):
            if self._arrived[rank] >= self._calls:
                continue
            if not _runs(pid):
                raise RuntimeError(f"rank {rank} (process {pid}) has ended")
            if waited > LONGEST:
                raise RuntimeError(f"rank {rank} (process {pid}) has not come to a collective in {waited:.0f} s")

    @contextmanager
    def exchanging(self) -> Iterator[None]:
        """``dist.all_to_all_single`` and ``all_gather_into_tensor`` over all ranks go through shared memory inside."""
        former = dist.all_to_all_single, dist.all_gather_into_tensor
        everyone, thread = (None, dist.group.WORLD), threading.get_ident()

        def here(group: Any) -> bool:
            return group in everyone and threading.get_ident() == thread  # other threads have their own order

        def all_to_all(
            output: Tensor, input: Tensor, output_split_sizes: list[int] | None = None,
            input_split_sizes: list[int] | None = None, group: Any = None, async_op: bool = False,
        ) -> Any:  # fmt: skip
            given = (output_split_sizes, input_split_sizes)
            if here(group):
                receives, sends = self._parts(output, given[0]), self._parts(input, given[1])
                if self.all_to_all(output, input.contiguous(), receives, sends):
                    return _Done() if async_op else None
            return former[0](output, input, *given, group=group, async_op=async_op)

        def all_gather(output_tensor: Any, input_tensor: Any, group: Any = None, async_op: Any = False) -> Any:
            if here(group) and self.all_gather(output_tensor, input_tensor.contiguous()):
                return _Done() if async_op else None
            return former[1](output_tensor, input_tensor, group=group, async_op=async_op)

        dist.all_to_all_single, dist.all_gather_into_tensor = all_to_all, all_gather
        try:
            yield
        finally:
            dist.all_to_all_single, dist.all_gather_into_tensor = former

    def _parts(self, values: Tensor, rows: list[int] | None) -> list[int]:
        """Bytes of each rank's part."""
        if not rows:
            return [values.nbytes // self._world] * self._world
        row = values.nbytes // values.shape[0] if values.shape[0] else 0
        return [row * count for count in rows]


class _Done:
    """The handle of a collective that has ended."""

    def wait(self, timeout: Any = None) -> bool:
        """True."""
        return True


def share_memory(device: torch.device, *, one_machine: bool) -> SharedMemory | None:
    """Memory of all ranks; None where they exchange otherwise. Collective.

    That is where there is one rank, on CUDA, on several machines, and where a rank cannot map the memory.
    """
    able = one_machine and device.type == "cpu" and platform.machine() in ("x86_64", "AMD64")
    if not able or dist.get_world_size() == 1 or not hasattr(os, "memfd_create"):
        return None
    memory, pids = _mapped(_head(dist.get_world_size()) + 2 * dist.get_world_size() * SLOT)
    return SharedMemory(memory, pids) if memory is not None else None


def _head(world: int) -> int:
    """Bytes in front of the slots: a mark, which rank is at which call, and the sizes of messages."""
    return -(-8 * LINE * (1 + world * (1 + 2 * world)) // mmap.PAGESIZE) * mmap.PAGESIZE


def _mapped(size: int) -> tuple[mmap.mmap | None, list[int]]:
    """Memory without a file, of the first rank, which the others open through its process; and all processes.

    None where one of them cannot. The mark shows that all have the same memory, whatever their view of processes.
    """
    opened, handle = None, -1
    where: list[Any] = [None]
    try:
        if dist.get_rank() == 0:
            handle, mark = os.memfd_create("nightjar-exchange"), int.from_bytes(os.urandom(7))
            os.ftruncate(handle, size)
            where = [(os.getpid(), handle, mark)]
            opened = mmap.mmap(handle, size)
            opened[:8] = mark.to_bytes(8, "little")
    except OSError as error:
        log.info("ranks exchange through the network stack: %s", error)
    dist.broadcast_object_list(where, src=0)
    if dist.get_rank() and where[0]:
        pid, theirs, mark = where[0]
        opened = _opened(pid, theirs, mark, size)
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, (os.getpid(), opened is not None))
    if handle >= 0:
        os.close(handle)
    return opened if all(able for _, able in everyone) else None, [pid for pid, _ in everyone]


def _opened(pid: int, handle: int, mark: int, size: int) -> mmap.mmap | None:
    try:
        own = os.open(f"/proc/{pid}/fd/{handle}", os.O_RDWR)
        try:
            opened = mmap.mmap(own, size)
        finally:
            os.close(own)
    except (OSError, ValueError) as error:
        log.info("ranks exchange through the network stack: %s", error)
        return None
    return opened if int.from_bytes(opened[:8], "little") == mark else None


def _bytes(values: Tensor) -> Tensor:
    flat = values.detach().reshape(-1)
    # One value, or none, counts as contiguous with any stride: 0 where NumPy gave it.
    return flat.as_strided(flat.shape, (1,), flat.storage_offset()).view(torch.uint8)


def _runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in ("Z", "X")
    except OSError:
        return False
