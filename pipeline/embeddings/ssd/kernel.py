"""A fused kernel with memory for some rows of its tables only, while TorchRec sees tables of full size.

GPU memory takes room before it is touched, so the kernel of tables on SSD has as many rows as its cache has slots, and
lookups pass slot numbers. TorchRec compares the sizes of weights and optimizer states with its shards and puts them
into its ``state_dict``: it gets stand-ins of the full size, one value repeated, which nothing reads. ``storage_of``
gives the real ones.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from fbgemm_gpu.split_table_batched_embeddings_ops_training import SplitTableBatchedEmbeddingBagsCodegen
from torch import Tensor
from torchrec.distributed import batched_embedding_kernel

from pipeline.embeddings.ssd.buffers import HostBuffers, kept_buffers, replaced


class SlotKernel(SplitTableBatchedEmbeddingBagsCodegen):
    """FBGEMM's kernel; with ``HostBuffers.slots`` its tables have that many rows, by table."""

    def __init__(
        self, embedding_specs: Sequence[tuple[Any, ...]], *args: Any, preallocated_host_buffers: Any = None, **rest: Any
    ) -> None:
        given = preallocated_host_buffers
        if not isinstance(given, HostBuffers) or not given.slots:
            more = {} if given is None else {"preallocated_host_buffers": given}
            super().__init__(list(embedding_specs), *args, **more, **rest)
            return
        rows = [given.slots.get(name, 0) for name in rest["table_names"]]
        specs = [(count, *spec[1:]) for count, spec in zip(rows, embedding_specs, strict=True)]
        super().__init__(specs, *args, **rest)
        self._preallocated_host_buffers = given  # ``kept_buffers`` leaves such a kernel as it is
        self._whole_rows = [spec[0] for spec in embedding_specs]

    def split_embedding_weights(self) -> list[Tensor]:
        """By table [rows, dim]; stand-ins where the kernel has slots."""
        return _stand_in(super().split_embedding_weights(), self._rows)

    def split_optimizer_states(self) -> list[list[Tensor]]:
        """By table and state [rows]; stand-ins where the kernel has slots."""
        states, rows = super().split_optimizer_states(), self._rows
        if rows is None:
            return states
        return [_stand_in(each, [count] * len(each)) for each, count in zip(states, rows, strict=False)]

    @property
    def _rows(self) -> list[int] | None:
        return self.__dict__.get("_whole_rows")


class _StandIn(Tensor):
    """One value repeated to any size. It claims to be contiguous, since TorchRec's ShardedTensor takes nothing else."""

    def is_contiguous(self, *_: Any, **__: Any) -> bool:
        """True."""
        return True


def _stand_in(tensors: Sequence[Tensor], rows: list[int] | None) -> list[Tensor]:
    if rows is None:
        return list(tensors)
    shapes = ((count, *tensor.shape[1:]) for tensor, count in zip(tensors, rows, strict=True))
    return [t.new_zeros(1).expand(shape).as_subclass(_StandIn) for t, shape in zip(tensors, shapes, strict=True)]


def storage_of(kernel: Any) -> list[Tensor]:
    """By table of FBGEMM's ``kernel`` the rows that it computes with: [rows or slots, dim]."""
    # Its own method, which gives no stand-ins.
    weights: list[Tensor] = SplitTableBatchedEmbeddingBagsCodegen.split_embedding_weights(kernel)
    return weights


def states_of(kernel: Any) -> list[list[Tensor]]:
    """By table of FBGEMM's ``kernel`` the states that it computes with: [rows or slots] or [rows or slots, dim]."""
    states: list[list[Tensor]] = SplitTableBatchedEmbeddingBagsCodegen.split_optimizer_states(kernel)
    return states or [[] for _ in storage_of(kernel)]


@contextmanager
def kernels_on_ssd() -> Iterator[None]:
    """While kernels are built: those of tables on SSD get the memory that ``give_buffers`` has for them."""
    with replaced(batched_embedding_kernel, "SplitTableBatchedEmbeddingBagsCodegen", SlotKernel), kept_buffers():
        yield
