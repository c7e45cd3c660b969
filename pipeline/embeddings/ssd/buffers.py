"""Our own memory under TorchRec's fused CPU kernels, and how a kernel gets it.

FBGEMM's kernel uses ``preallocated_host_buffers`` as its host memory. Three things are in the way:
TorchRec puts a kernel's arguments into a grouping key (``HostBuffers``), its kernel fills every table with random
numbers when built (``kept_buffers``), and its sharded collection fills them once more by ``init_fn``.
"""

from __future__ import annotations

import inspect
import mmap
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from fbgemm_gpu.split_table_batched_embeddings_ops_training import SplitTableBatchedEmbeddingBagsCodegen
from torch import Tensor
from torchrec.distributed.batched_embedding_kernel import BaseBatchedEmbeddingBag
from torchrec.modules.embedding_modules import EmbeddingBagCollection

from pipeline.embeddings.ssd.files import ScratchFile
from pipeline.errors import PlanError

_MAP_NORESERVE = 0x4000


def sparse_memory(count: int) -> Tensor:
    """float32 zeros [count] that take memory only where they are touched, however many they are."""
    if not count:
        return torch.empty(0)
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE
    return torch.frombuffer(mmap.mmap(-1, count * 4, flags=flags), dtype=torch.float32, count=count)


def mapped(file: ScratchFile, count: int) -> Tensor:
    """float32 [count] mapped from ``file``."""
    values = mmap.mmap(file.fd, file.size)
    # Without it every fault reads 128 KiB ahead: two hundred times slower under a memory limit.
    values.madvise(mmap.MADV_RANDOM)
    return torch.frombuffer(values, dtype=torch.float32, count=count)


class HostBuffers(dict[str, Tensor]):
    """Buffers of one kernel by FBGEMM's names; equal to itself only: TorchRec groups the tables that share it.

    ``slots``: instead of buffers, how many rows of each table the kernel has memory for (``kernel.SlotKernel``).
    """

    __hash__ = object.__hash__  # type: ignore[assignment]

    def __init__(self, slots: Mapping[str, int] | None = None, **buffers: Tensor) -> None:
        super().__init__(**buffers)
        self.slots = dict(slots or {})

    def __eq__(self, other: object) -> bool:
        return self is other


def give_buffers(collection: EmbeddingBagCollection, buffers: Mapping[str, HostBuffers]) -> None:
    """Store each named table in its buffers; tables with the same ones share a kernel. Call after ``fuse_optimizer``.

    Every rank names the same tables, since TorchRec groups them alike. PlanError where FBGEMM lacks the feature.
    """
    taken = inspect.signature(SplitTableBatchedEmbeddingBagsCodegen.__init__).parameters
    if any(buffers.values()) and "preallocated_host_buffers" not in taken:
        raise PlanError(
            "tier ssd needs an fbgemm-gpu whose kernels take preallocated_host_buffers; the installed one does not",
            hint="install fbgemm-gpu 1.8 and torchrec 1.8, or +plan.tables.<table>.tier=ddr",
        )
    for name, table in buffers.items():
        weight: Any = collection.embedding_bags[name].weight
        own = {"preallocated_host_buffers": table}
        weight._optimizer_kwargs = [{**weight._optimizer_kwargs[0], **own}]
    for config in collection.embedding_bag_configs():
        if config.name in buffers:
            config.init_fn = _keep


def _keep(weight: Tensor) -> Tensor:
    return weight


@contextmanager
def replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    """While it is entered, attribute ``name`` of ``owner`` is ``value``."""
    original = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, original)


def kept_buffers() -> AbstractContextManager[None]:
    """While kernels are built: those with our buffers keep the buffers' values instead of filling them anew."""
    original = BaseBatchedEmbeddingBag.init_parameters

    def init_parameters(kernel: Any) -> None:
        if getattr(kernel.emb_module, "_preallocated_host_buffers", None) is None:
            original(kernel)

    return replaced(BaseBatchedEmbeddingBag, "init_parameters", init_parameters)
