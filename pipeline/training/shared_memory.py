"""Collectives of ranks on one machine through shared memory.

gloo sends through the network stack even within a machine, which costs several times as much as the copies themselves.
Here every rank writes what it sends into memory that all ranks map, waits for the others, and reads what it receives.
"""

from __future__ import annotations

import logging
import mmap
import os
import platform
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from torchrec.distributed import dist_data
from torchrec.distributed.comm_ops import get_gradient_division
from torchrec.distributed.types import NoWait

from pipeline.core.cpus import available_cpus
from pipeline.training.distributed import failure_left

if TYPE_CHECKING:
    from pipeline.towers.transform import TowerEmbeddings
    from pipeline.training.settings import ModelSettings

log = logging.getLogger(__name__)

# Bytes of the largest message; pages that no message reaches take no memory.
SLOT = 256 << 20
# The number of values that are summed at a time, so that they stay in the cache.
CHUNK = 1 << 15
# The number of int64 values in a cache line; ranks write at this distance so that they do not share one.
LINE = 8
# SPINS and SHARED_SPINS: looks at the others before the first pause, fewer where ranks share CPUs and looking takes
# time from the rank that is waited for. PAUSE: seconds of a pause. CHECK: seconds between checks that the other
# processes run. LONGEST: seconds to wait for a rank that runs.
SPINS, SHARED_SPINS, PAUSE, CHECK, LONGEST = 2000, 20, 5e-5, 0.5, 1800.0


class SharedMemory:
    """Collectives over the ranks of ``group`` (None: all), which call the same ones in the same order.

    Use ``share_memory`` to make it.

    Each rank has two slots and writes into them alternately. A rank writes into a slot again only after the meeting
    that follows its reading by all others, so one meeting per collective is enough. This relies on x86 keeping the
    order of writes. ``memory`` is mapped by all ranks; ``pids`` are their processes. ``counted`` gets the bytes for
    each rank of pooled embeddings and their gradients, which no function of ``dist`` sees. ``dtype`` is the dtype of
    these values in transit and on arrival (None: they keep their own).
    """

    def __init__(self, memory: mmap.mmap, pids: list[int], group: dist.ProcessGroup | None = None) -> None:
        self._rank, self._world = dist.get_rank(group), dist.get_world_size(group)
        # The group of all ranks is known by either name.
        self._groups = (group,) if group is not None else (None, dist.group.WORLD)
        self._map, self._pids, self._group = memory, pids, group
        self.counted: Callable[[Sequence[int], dist.ProcessGroup | None], None] | None = None
        self.dtype: torch.dtype | None = None
        self._calls = 0
        self._spins = SPINS if available_cpus() >= self._world else SHARED_SPINS
        head, world = _head(self._world), self._world
        values = np.frombuffer(memory, np.int64, head // 8)[LINE:]
        self._arrived = values[: LINE * world : LINE]
        # For each slot, the bytes for each rank; the first is -1 where the message did not fit.
        sizes = values[LINE * world :][: 2 * world * world * LINE]
        self._sizes = sizes.reshape(2, world, -1)[:, :, :world]
        every = torch.frombuffer(memory, dtype=torch.uint8, offset=head)
        self._slots = every.view(2, world, SLOT)

    def all_to_all(self, output: Tensor, input: Tensor, receives: list[int], sends: list[int]) -> bool:
        """Exchange bytes: ``sends`` to each rank, ``receives`` from each. False if any rank's do not fit a slot."""
        turn = self._send(input, sends, own=slice(sum(sends[: self._rank]), sum(sends[: self._rank + 1])))
        sizes = self._sizes[turn]
        if (sizes[:, 0] < 0).any():
            return False
        target, at = _bytes(output), 0
        for source, count in enumerate(receives):
            if sizes[source, self._rank] != count:
                raise RuntimeError(f"rank {source} sent {sizes[source, self._rank]} bytes, expected {count}")
            start = int(sizes[source, : self._rank].sum())
            values = _bytes(input) if source == self._rank else self._slots[turn, source]
            target[at : at + count] = values[start : start + count]
            at += count
        return True

    def post(self, values: list[Tensor]) -> bool:
        """Write ``values`` for ``take_sums`` without waiting; False, without a write, if they do not fit a slot.

        No other collective of this memory may come between the two calls.
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
        """Replace ``values`` by the sums of what all ranks posted, in the order of ranks. Waits for those posts."""
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
        """Fill ``output`` with the ``input`` of all ranks, in their order; False if any does not fit a slot.

        ``input`` may be this rank's part of ``output``.
        """
        turn = self._send(input, [input.nbytes] * self._world)
        if (self._sizes[turn, :, 0] != input.nbytes).any():
            return False
        for part, slot in zip(_bytes(output).view(self._world, -1), self._slots[turn], strict=True):
            if part.data_ptr() != input.data_ptr():
                part.copy_(slot[: input.nbytes])
        return True

    def pooled(self, values: Tensor, batches: list[int], widths: list[int]) -> Tensor:
        """Exchange [sum of ``batches``, own width], rows by rank, for [own batch, sum of ``widths``], columns by rank.

        They must fit a slot, and become ``self.dtype`` on the way. Unlike after ``all_to_all``, the result needs no
        reordering.
        """
        parts = values.split(batches)
        result = values.new_empty(batches[self._rank], sum(widths), dtype=self.dtype or values.dtype)
        turn = self._put(parts, result.dtype)
        for source, columns in enumerate(result.split(widths, dim=1)):
            part = parts[source]
            if source != self._rank:
                part = self._part(turn, source, columns, columns.dtype)
            columns.copy_(part)
        return result

    def pooled_back(self, grad: Tensor, batches: list[int], widths: list[int], by: int, dtype: torch.dtype) -> Tensor:
        """Send gradients [own batch, sum of ``widths``] the way back of ``pooled``, as ``dtype``, divided by ``by``."""
        parts = grad.split(widths, dim=1)
        turn = self._put(parts, grad.dtype)
        result = grad.new_empty(sum(batches), widths[self._rank], dtype=dtype)
        for source, rows in enumerate(result.split(batches)):
            part = parts[source]
            if source != self._rank:
                part = self._part(turn, source, rows, grad.dtype)
            if part.dtype == dtype:
                torch.div(part, by, out=rows)
            else:
                rows.copy_(part).div_(by)
        return result

    def _put(self, parts: Sequence[Tensor], dtype: torch.dtype) -> int:
        # Writes the parts for the other ranks into this rank's slot and meets them; returns which of the two slots was
        # used.
        self._calls += 1
        # Alternate between two slots, because a rank may still be reading what the previous call left in the other one.
        turn, at = self._calls % 2, 0
        sizes = [part.numel() * dtype.itemsize for part in parts]
        if self.counted is not None:
            self.counted(sizes, self._group)
        for rank, (part, size) in enumerate(zip(parts, sizes, strict=True)):
            if rank != self._rank:
                self._slots[turn, self._rank, at : at + size].view(dtype).view(part.shape).copy_(part)
            at += size
        self._meet(turn, sizes)
        return turn

    def _part(self, turn: int, source: int, like: Tensor, dtype: torch.dtype) -> Tensor:
        # Returns what rank ``source`` wrote for this one, as ``dtype``, with the shape of ``like``.
        sizes = self._sizes[turn, source]
        start, count = int(sizes[: self._rank].sum()), int(sizes[self._rank])
        if count != like.numel() * dtype.itemsize:
            raise RuntimeError(f"rank {source} sent {count} bytes, expected {like.numel() * dtype.itemsize}")
        return self._slots[turn, source, start : start + count].view(dtype).view(like.shape)

    def _send(self, values: Tensor, sizes: list[int], own: slice = slice(0, 0)) -> int:
        # Writes values, except this rank's own bytes, into its slot and meets the others; returns which slot was used.
        self._calls += 1
        turn, fits = self._calls % 2, values.nbytes <= SLOT
        if fits:
            slot, given = self._slots[turn, self._rank], _bytes(values)
            slot[: own.start] = given[: own.start]
            slot[own.stop : values.nbytes] = given[own.stop :]
        self._meet(turn, sizes if fits else [-1] * self._world)
        return turn

    def _meet(self, turn: int, sizes: list[int]) -> None:
        # Announces the number of bytes for each rank, and waits until every rank has made this call. The mark is
        # written last: a rank that sees it may read what was written before it.
        self._sizes[turn, self._rank] = sizes
        self._arrived[self._rank] = self._calls
        self._wait()

    def _wait(self) -> None:
        looks, began = 0, time.monotonic()
        checked = began
        while self._arrived.min() < self._calls:
            looks += 1
            if looks < self._spins:
                os.sched_yield()
                continue
            time.sleep(PAUSE)
            if time.monotonic() - checked > CHECK:
                checked = time.monotonic()
                self._check_peers(checked - began)

    def _check_peers(self, waited: float) -> None:
        if failure_left() is not None:
            raise RuntimeError("another rank has failed")
        for rank, pid in enumerate(self._pids):
            if self._arrived[rank] >= self._calls:
                continue
            if not _runs(pid):
                raise RuntimeError(f"rank {rank} (process {pid}) has ended")
            if waited > LONGEST:
                raise RuntimeError(f"rank {rank} (process {pid}) has not come to a collective in {waited:.0f} s")

    @contextmanager
    def exchanging(self) -> Iterator[None]:
        """Route these ranks' ``dist.all_to_all_single`` and ``all_gather_into_tensor`` through shared memory."""
        former = dist.all_to_all_single, dist.all_gather_into_tensor
        thread = threading.get_ident()

        def here(group: Any) -> bool:
            # Calls of other threads are left alone, since they have an order of their own.
            return group in self._groups and threading.get_ident() == thread

        def part_bytes(values: Tensor, rows: list[int] | None) -> list[int]:
            if not rows:
                return [values.nbytes // self._world] * self._world
            row = values.nbytes // max(1, values.shape[0])
            return [row * count for count in rows]

        def all_to_all(
            output: Tensor,
            input: Tensor,
            output_split_sizes: list[int] | None = None,
            input_split_sizes: list[int] | None = None,
            group: Any = None,
            async_op: bool = False,
        ) -> Any:
            if here(group):
                receives, sends = part_bytes(output, output_split_sizes), part_bytes(input, input_split_sizes)
                if self.all_to_all(output, input.contiguous(), receives, sends):
                    return _Done() if async_op else None
            return former[0](output, input, output_split_sizes, input_split_sizes, group=group, async_op=async_op)

        def all_gather(output_tensor: Any, input_tensor: Any, group: Any = None, async_op: Any = False) -> Any:
            if here(group) and self.all_gather(output_tensor, input_tensor.contiguous()):
                return _Done() if async_op else None
            return former[1](output_tensor, input_tensor, group=group, async_op=async_op)

        theirs = dist_data.alltoall_pooled

        def pooled(a2a_pooled_embs_tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
            batches, widths = kwargs["batch_size_per_rank"], kwargs["dim_sum_per_rank"]
            most = max(sum(batches) * max(widths), max(batches) * sum(widths)) * a2a_pooled_embs_tensor.element_size()
            if here(kwargs["group"]) and kwargs["codecs"] is None and most <= SLOT:
                return NoWait(_Pooled.apply(a2a_pooled_embs_tensor, self, batches, widths))
            # Lookups may round to ``dtype`` already, which codecs of the exchange do not expect.
            return theirs(a2a_pooled_embs_tensor.float(), *args, **kwargs)

        dist.all_to_all_single, dist.all_gather_into_tensor = all_to_all, all_gather
        dist_data.alltoall_pooled = pooled
        try:
            yield
        finally:
            dist.all_to_all_single, dist.all_gather_into_tensor = former
            dist_data.alltoall_pooled = theirs


class _Pooled(torch.autograd.Function):
    """``SharedMemory.pooled``; gradients are divided by the number of ranks where TorchRec's own exchange does so."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, memory: SharedMemory, batches: list[int], widths: list[int]) -> Tensor:
        ctx.memory, ctx.sizes, ctx.dtype = memory, (batches, widths), values.dtype
        return memory.pooled(values, batches, widths)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        by = len(ctx.sizes[0]) if get_gradient_division() else 1
        return ctx.memory.pooled_back(grads[0], *ctx.sizes, by, ctx.dtype), None, None, None


class _Done:
    def wait(self, timeout: Any = None) -> bool:
        return True


def memory_between(
    device: torch.device, settings: ModelSettings, towers: TowerEmbeddings | None
) -> SharedMemory | None:
    """Share memory between the ranks of one host that exchange embeddings, as ``share_memory`` does. Collective.

    With ``towers``, these are the ranks that share a tower's tables.
    """
    if towers is not None:
        return share_memory(device, one_machine=len(towers.own_hosts) == 1, group=towers.groups.tower)
    return share_memory(device, one_machine=settings.one_machine and settings.hardware.hosts == 1)


def share_memory(
    device: torch.device, *, one_machine: bool, group: dist.ProcessGroup | None = None
) -> SharedMemory | None:
    """Map memory for all ranks of ``group`` (None: all); None where they exchange otherwise. Collective.

    It returns None for one rank, on CUDA, on several machines, and where a rank cannot map the memory.
    """
    # Other processors may show a rank's writes in another order than the one in which it made them.
    able = one_machine and device.type == "cpu" and platform.machine() in ("x86_64", "AMD64")
    if not able or dist.get_world_size(group) == 1 or not hasattr(os, "memfd_create"):
        return None
    world = dist.get_world_size(group)
    memory, pids = _mapped(_head(world) + 2 * world * SLOT, group)
    if memory is None:
        return None
    return SharedMemory(memory, pids, group)


def _head(world: int) -> int:
    # The bytes in front of the slots: a mark, the number of the call that each rank is in, and the sizes of messages.
    return -(-8 * LINE * (1 + world * (1 + 2 * world)) // mmap.PAGESIZE) * mmap.PAGESIZE


def _mapped(size: int, group: dist.ProcessGroup | None) -> tuple[mmap.mmap | None, list[int]]:
    # Returns memory without a file, made by the first rank and opened by the others through its process, and all
    # process ids. The memory is None where a rank cannot map it. The mark shows that all have the same memory, whatever
    # their view of processes.
    opened, handle = None, -1
    where: list[Any] = [None]
    rank, first = dist.get_rank(group), dist.get_process_group_ranks(group)[0]
    try:
        if rank == 0:
            handle, mark = os.memfd_create("nightjar-exchange"), int.from_bytes(os.urandom(7))
            os.ftruncate(handle, size)
            where = [(os.getpid(), handle, mark)]
            opened = mmap.mmap(handle, size)
            opened[:8] = mark.to_bytes(8, "little")
    except OSError as error:
        log.info("ranks exchange through the network stack: %s", error)
    dist.broadcast_object_list(where, src=first, group=group)
    if rank and where[0]:
        pid, first_handle, mark = where[0]
        try:
            own_handle = os.open(f"/proc/{pid}/fd/{first_handle}", os.O_RDWR)
            try:
                opened = mmap.mmap(own_handle, size)
            finally:
                os.close(own_handle)
        except (OSError, ValueError) as error:
            log.info("ranks exchange through the network stack: %s", error)
        if opened is not None and int.from_bytes(opened[:8], "little") != mark:
            opened = None
    everyone: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(everyone, (os.getpid(), opened is not None), group=group)
    # Every rank has opened the memory by now, or never will.
    if handle >= 0:
        os.close(handle)
    pids, able = zip(*everyone, strict=True)
    if not all(able):
        opened = None
    return opened, list(pids)


def _bytes(values: Tensor) -> Tensor:
    flat = values.detach().reshape(-1)
    # A tensor of at most one value counts as contiguous with any stride, even 0 from NumPy, which ``view`` rejects.
    return flat.as_strided(flat.shape, (1,), flat.storage_offset()).view(torch.uint8)


def _runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in ("Z", "X")
    except OSError:
        return False


class DenseReduction:
    """Takes over the gradient buckets of ``module``; ``finish`` replaces its gradients by their mean over the ranks.

    DDP averages a bucket in the middle of the backward pass, where every rank waits for the slowest. Here a rank writes
    its gradients into shared memory once the dense part's backward pass is done, and continues with the tables. Before
    the optimizers' step it reads those of the others, which wrote theirs before they exchanged the gradients of
    embeddings. ``memory`` belongs to this reduction alone.
    """

    def __init__(self, module: DistributedDataParallel, memory: SharedMemory) -> None:
        self._memory, self._world = memory, dist.get_world_size()
        self._buckets: list[Tensor] = []
        self._posted = False
        module.register_comm_hook(None, lambda _, bucket: self._take(bucket))

    def _take(self, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        # This is DDP's hook. It keeps the bucket, whose memory is that of the gradients. They are divided before they
        # are summed, as in DDP, which keeps the sums in range.
        values = bucket.buffer()
        self._buckets.append(values.div_(self._world))
        if bucket.is_last():
            self._posted = self._memory.post(self._buckets)
        done: torch.futures.Future[Tensor] = torch.futures.Future()
        done.set_result(values)
        return done

    def finish(self) -> None:
        """Wait for the gradients of all ranks and take their mean."""
        if self._posted:
            self._memory.take_sums(self._buckets)
        else:
            # The buckets do not fit a slot. All ranks have the same parameters, so no rank has posted.
            for values in self._buckets:
                dist.all_reduce(values)
        self._buckets, self._posted = [], False
