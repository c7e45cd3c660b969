"""File-backed storage under TorchRec's fused CPU kernels: mappings, the pinned prefix, and how a kernel gets them.

FBGEMM's kernel takes its host memory from ``preallocated_host_buffers`` where it is given. Three things are in the way:
TorchRec puts a kernel's arguments into a grouping key (``HostBuffers``), its kernel fills every table with random
numbers when built (``kept_buffers``), and its sharded collection fills them once more by ``init_fn``.
"""

from __future__ import annotations

import ctypes
import inspect
import mmap
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from fbgemm_gpu.split_table_batched_embeddings_ops_training import SplitTableBatchedEmbeddingBagsCodegen
from torch import Tensor
from torchrec.distributed.batched_embedding_kernel import BaseBatchedEmbeddingBag
from torchrec.modules.embedding_modules import EmbeddingBagCollection

from pipeline.embeddings.ssd.files import PAGE, ScratchFile
from pipeline.errors import PlanError

_MAP_FIXED = 0x10
_LIBC = ctypes.CDLL(None, use_errno=True)
_LIBC.mmap.restype = ctypes.c_void_p


class Buffer:
    """float32 ``values`` [n] mapped from ``file``; the whole pages of its first ``pinned`` bytes are plain memory.

    Memory over the prefix is the pin: it is never written to the disk nor evicted, and needs no right to lock pages.
    """

    def __init__(self, file: ScratchFile, count: int, pinned: int = 0) -> None:
        self.file, self.pinned = file, min(pinned, file.size) // PAGE * PAGE
        self._map = mmap.mmap(file.fd, file.size)
        # Without it every fault reads 128 KiB ahead: two hundred times slower under a memory limit.
        self._map.madvise(mmap.MADV_RANDOM)
        self.values: Tensor = torch.frombuffer(self._map, dtype=torch.float32, count=count)
        self.address = self.values.data_ptr()
        if self.pinned:
            _cover(self.address, self.pinned)

    def write(self, first: int, values: Tensor) -> None:
        """Put ``values`` [n] at ``first``; call it from low to high. What lies beyond the pin goes to the disk at once.

        Through the mapping every page would fault, and dirty pages would fill a limited memory before they are written:
        eight times slower.
        """
        pinned = max(0, min(self.pinned // 4 - first, len(values)))
        self.values[first : first + pinned] = values[:pinned]
        place, data = (first + pinned) * 4, values[pinned:].numpy().data.cast("B")
        self.file.write(place, data)

    def write_back(self, low: int, high: int) -> None:
        """Have bytes [low, high), whole pages, on the disk; waits for it."""
        self._map.flush(low, high - low)


def _cover(address: int, size: int) -> None:
    """Put anonymous memory over [address, address + size); whole pages of a mapping of ours."""
    found = _LIBC.mmap(
        ctypes.c_void_p(address), ctypes.c_size_t(size), mmap.PROT_READ | mmap.PROT_WRITE,
        mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_FIXED, -1, ctypes.c_long(0),
    )  # fmt: skip
    if found != address:
        raise OSError(
            ctypes.get_errno(), f"no memory for {size} bytes of pinned rows: {os.strerror(ctypes.get_errno())}"
        )


class HostBuffers(dict[str, Tensor]):
    """Buffers of one table by FBGEMM's names; equal to itself only, so that it can be part of a grouping key."""

    __hash__ = object.__hash__  # type: ignore[assignment]

    def __eq__(self, other: object) -> bool:
        return self is other


def give_buffers(collection: EmbeddingBagCollection, buffers: Mapping[str, HostBuffers]) -> None:
    """Tell each named table to live in its buffers, in a kernel of its own. Call after ``apply_fused_optimizer``.

    Every rank names the same tables, for TorchRec's groups must be alike; PlanError where FBGEMM cannot do it.
    """
    if "preallocated_host_buffers" not in inspect.signature(SplitTableBatchedEmbeddingBagsCodegen.__init__).parameters:
        raise PlanError(
            "tier ssd needs an fbgemm-gpu whose kernels take preallocated_host_buffers; this one does not",
            hint="install fbgemm-gpu 1.8 and torchrec 1.8, or plan.tables.<table>=ddr",
        )
    for name, table in buffers.items():
        weight: Any = collection.embedding_bags[name].weight
        own = {"use_one_tbe_per_table": True, "preallocated_host_buffers": table}
        weight._optimizer_kwargs = [{**weight._optimizer_kwargs[0], **own}]
    for config in collection.embedding_bag_configs():
        if config.name in buffers:
            config.init_fn = _keep


def _keep(weight: Tensor) -> Tensor:
    return weight


@contextmanager
def kept_buffers() -> Iterator[None]:
    """While kernels are built: those with buffers of ours keep what lies there instead of filling it anew."""
    original = BaseBatchedEmbeddingBag.init_parameters

    def init_parameters(kernel: Any) -> None:
        if getattr(kernel.emb_module, "_preallocated_host_buffers", None) is None:
            original(kernel)

    BaseBatchedEmbeddingBag.init_parameters = init_parameters  # type: ignore[method-assign]
    try:
        yield
    finally:
        BaseBatchedEmbeddingBag.init_parameters = original  # type: ignore[method-assign]
