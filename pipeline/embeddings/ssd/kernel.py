"""Puts our own memory under TorchRec's fused kernels, on a CPU and on a GPU.

FBGEMM's CPU kernel uses ``preallocated_host_buffers`` as its host memory. Three things are in the way: TorchRec puts a
kernel's arguments into a grouping key (``KernelBuffers``), its kernel fills every table with random numbers when built
(``kept_buffers``), and its sharded collection fills them once more by ``init_fn``.

GPU memory is taken before it is touched, so the kernel of tables on SSD has only as many rows as its cache has slots,
and lookups pass slot numbers. TorchRec compares the sizes of weights and optimizer states with its shards and puts them
into its ``state_dict``, so it gets stand-ins of the full size, one value repeated, which nothing reads.
``tables.storage_of`` returns the real ones.
"""

from __future__ import annotations

import inspect
import mmap
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from fbgemm_gpu.split_table_batched_embeddings_ops_training import SplitTableBatchedEmbeddingBagsCodegen
from torch import Tensor
from torchrec.distributed import batched_embedding_kernel
from torchrec.distributed.batched_embedding_kernel import BaseBatchedEmbeddingBag
from torchrec.modules.embedding_modules import EmbeddingBagCollection

from pipeline.core.errors import PlanError
from pipeline.embeddings.ssd.scratch_files import ScratchFile


class SlotKernel(SplitTableBatchedEmbeddingBagsCodegen):
    """FBGEMM's kernel; with ``KernelBuffers.slots`` its tables have that many rows, by table."""

    def __init__(
        self, embedding_specs: Sequence[tuple[Any, ...]], *args: Any, preallocated_host_buffers: Any = None, **rest: Any
    ) -> None:
        buffers = preallocated_host_buffers
        if isinstance(buffers, KernelBuffers) and buffers.slots:
            specs, whole_rows = [], []
            for name, (rows, *spec) in zip(rest["table_names"], embedding_specs, strict=True):
                specs.append((buffers.slots.get(name, 0), *spec))
                whole_rows.append(rows)
            super().__init__(specs, *args, **rest)
            # ``kept_buffers`` leaves such a kernel as it is.
            self._preallocated_host_buffers = buffers
            self._whole_rows = whole_rows
            return
        if buffers is not None:
            rest["preallocated_host_buffers"] = buffers
        super().__init__(list(embedding_specs), *args, **rest)

    def split_embedding_weights(self) -> list[Tensor]:
        """Return [rows, dim] by table, with stand-ins if the kernel has slots."""
        weights = super().split_embedding_weights()
        rows = self._table_rows
        if rows is None:
            return list(weights)
        return [_stand_in(tensor, count) for tensor, count in zip(weights, rows, strict=True)]

    def split_optimizer_states(self) -> list[list[Tensor]]:
        """Return [rows] by table and state, with stand-ins if the kernel has slots."""
        states = super().split_optimizer_states()
        rows = self._table_rows
        if rows is None:
            return states
        stand_ins = []
        for state, count in zip(states, rows, strict=False):
            stand_ins.append([_stand_in(tensor, count) for tensor in state])
        return stand_ins

    @property
    def _table_rows(self) -> list[int] | None:
        # Only a kernel with slots has the attribute.
        return self.__dict__.get("_whole_rows")


class _StandIn(Tensor):
    """One value repeated to any size. It claims to be contiguous, since TorchRec's ShardedTensor requires that."""

    def is_contiguous(self, *_: Any, **__: Any) -> bool:
        return True


def _stand_in(tensor: Tensor, rows: int) -> Tensor:
    return tensor.new_zeros(1).expand(rows, *tensor.shape[1:]).as_subclass(_StandIn)


@contextmanager
def kernels_on_ssd() -> Iterator[None]:
    """Give kernels of tables on SSD the memory of ``give_buffers`` when they are built inside the context."""
    with replaced(batched_embedding_kernel, "SplitTableBatchedEmbeddingBagsCodegen", SlotKernel), kept_buffers():
        yield


def mapped(file: ScratchFile, count: int) -> Tensor:
    """Return float32 [count] mapped from ``file``."""
    values = mmap.mmap(file.fd, file.size)
    # Without this, every fault reads 128 KiB ahead, which is two hundred times slower under a memory limit.
    values.madvise(mmap.MADV_RANDOM)
    return torch.frombuffer(values, dtype=torch.float32, count=count)


class KernelBuffers(dict[str, Tensor]):
    """Buffers of one kernel by FBGEMM's names. Equal only to itself, since TorchRec groups the tables that share it.

    ``slots`` replaces buffers by the rows of each table that the kernel has memory for (``kernel.SlotKernel``).
    """

    __hash__ = object.__hash__  # type: ignore[assignment]

    def __init__(self, slots: Mapping[str, int] | None = None, **buffers: Tensor) -> None:
        super().__init__(**buffers)
        self.slots = dict(slots or {})

    def __eq__(self, other: object) -> bool:
        return self is other


def give_buffers(collection: EmbeddingBagCollection, buffers: Mapping[str, KernelBuffers]) -> None:
    """Store each named table in its buffers; tables with the same ones share a kernel. Call after ``fuse_optimizer``.

    Every rank names the same tables, since TorchRec groups them alike. Raises PlanError if FBGEMM lacks the feature.
    """
    taken = inspect.signature(SplitTableBatchedEmbeddingBagsCodegen.__init__).parameters
    if any(buffers.values()) and "preallocated_host_buffers" not in taken:
        raise PlanError(
            "tier ssd needs an fbgemm-gpu whose kernels take preallocated_host_buffers; the installed one does not",
            hint="install fbgemm-gpu 1.8 and torchrec 1.8, or +plan.tables.<table>.tier=ddr",
        )
    for name, table in buffers.items():
        weight: Any = collection.embedding_bags[name].weight
        weight._optimizer_kwargs = [{**weight._optimizer_kwargs[0], "preallocated_host_buffers": table}]
    for config in collection.embedding_bag_configs():
        if config.name in buffers:
            config.init_fn = _keep_values


def _keep_values(weight: Tensor) -> Tensor:
    return weight


@contextmanager
def replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Set attribute ``name`` of ``owner`` to ``value`` while the context is open."""
    original = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, original)


def kept_buffers() -> AbstractContextManager[None]:
    """Keep the values of our buffers when kernels with them are built inside, instead of filling them anew."""
    original = BaseBatchedEmbeddingBag.init_parameters

    def init_parameters(kernel: Any) -> None:
        # Kernels of tables on other tiers are built inside the context as well.
        if getattr(kernel.emb_module, "_preallocated_host_buffers", None) is None:
            original(kernel)

    return replaced(BaseBatchedEmbeddingBag, "init_parameters", init_parameters)
