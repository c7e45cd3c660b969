"""Bytes that training sends, by class of link, from the sizes of its collectives.

TorchRec calls ``torch.distributed`` from many places and offers no hook, so the functions are wrapped while a step
runs. The count is what a collective must move, whatever its backend's algorithm: the parts for other ranks in an
all-to-all and a reduce-scatter, and this rank's part once for every other rank in an all-gather. DDP reduces the dense
gradients out of reach, so the caller reports their size (``reduced``): a ring's 2 (W - 1) / W of the bytes to the next
rank.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import astuple, dataclass
from functools import wraps
from typing import Any

import torch.distributed as dist
from torch import Tensor

# The name prefix of a checkpoint's threads, which communicate while a step runs.
_CHECKPOINT_THREADS = "nightjar-"


@dataclass
class LinkBytes:
    """Bytes sent within and between hosts; ``dense_*`` are those of dense gradients, which the first two exclude."""

    intra_host: float = 0.0
    inter_host: float = 0.0
    dense_intra_host: float = 0.0
    dense_inter_host: float = 0.0

    def as_list(self) -> list[float]:
        """Return the figures in the order of the fields."""
        return list(astuple(self))


class Links:
    """Counts the bytes that this rank sends. Host h has the ranks from ``h * ranks_per_host`` on."""

    def __init__(self, ranks_per_host: int) -> None:
        self.ranks_per_host = ranks_per_host
        self.sent = LinkBytes()
        self._ranks: dict[Any, list[int]] = {}

    @contextmanager
    def counting(self) -> Iterator[None]:
        """Count the collectives that this thread and autograd's call inside."""
        former = {name: getattr(dist, name) for name in _PARTS}
        for name, function in former.items():
            setattr(dist, name, self._counted(function, _PARTS[name]))
        try:
            yield
        finally:
            for name, function in former.items():
                setattr(dist, name, function)

    def _counted(self, function: Callable[..., Any], parts: Callable[..., Sequence[int]]) -> Callable[..., Any]:
        @wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            # A checkpoint is not a part of the step, whenever it is written.
            if not threading.current_thread().name.startswith(_CHECKPOINT_THREADS):
                ranks = self._ranks_of(kwargs.get("group"))
                self._add(parts(len(ranks), *args, **kwargs), ranks)
            return function(*args, **kwargs)

        return call

    def exchanged(self, parts: Sequence[int], group: dist.ProcessGroup | None) -> None:
        """Count ``parts``, bytes for each rank of ``group``, that no function of ``torch.distributed`` sends."""
        self._add(parts, self._ranks_of(group))

    def _ranks_of(self, group: dist.ProcessGroup | None) -> list[int]:
        if group not in self._ranks:
            self._ranks[group] = dist.get_process_group_ranks(group)
        return self._ranks[group]

    def _add(self, parts: Sequence[int], ranks: list[int]) -> None:
        # ``parts`` has the bytes for each of the global ``ranks``.
        me = dist.get_rank()
        for rank, size in zip(ranks, parts, strict=True):
            if rank == me:
                continue
            if self._on_this_host(rank):
                self.sent.intra_host += size
            else:
                self.sent.inter_host += size

    def _on_this_host(self, rank: int) -> bool:
        return rank // self.ranks_per_host == dist.get_rank() // self.ranks_per_host

    def reduced(self, size: int, ranks: Sequence[int], *, dense: bool = True) -> None:
        """Count an all-reduce of ``size`` bytes over the global ``ranks``, which include this one."""
        count = len(ranks)
        # In a ring, a rank sends all parts but one to the next rank in the reduce-scatter, and again in the all-gather.
        following = ranks[(ranks.index(dist.get_rank()) + 1) % count]
        field = "inter_host"
        if self._on_this_host(following):
            field = "intra_host"
        if dense:
            field = f"dense_{field}"
        setattr(self.sent, field, getattr(self.sent, field) + 2 * (count - 1) / count * size)

    def take(self) -> LinkBytes:
        """Return the bytes sent since the last call."""
        sent, self.sent = self.sent, LinkBytes()
        return sent


def _all_to_all_single(
    ranks: int,
    output: Tensor,
    input: Tensor,
    output_split_sizes: list[int] | None = None,
    input_split_sizes: list[int] | None = None,
    *_: Any,
    **__: Any,
) -> list[int]:
    if not input_split_sizes:
        return [input.nbytes // ranks] * ranks
    row = input.nbytes // input.shape[0] if input.shape[0] else 0
    return [rows * row for rows in input_split_sizes]


def _reduce_scatter(ranks: int, output: Tensor, input_list: list[Tensor], *_: Any, **__: Any) -> list[int]:
    return [part.nbytes for part in input_list]


def _reduce_scatter_tensor(ranks: int, output: Tensor, input: Tensor, *_: Any, **__: Any) -> list[int]:
    return [input.nbytes // ranks] * ranks


def _all_gather(ranks: int, outputs: Any, tensor: Tensor, *_: Any, **__: Any) -> list[int]:
    return [tensor.nbytes] * ranks


_PARTS: dict[str, Callable[..., Sequence[int]]] = {
    "all_to_all_single": _all_to_all_single,
    "reduce_scatter": _reduce_scatter,
    "reduce_scatter_tensor": _reduce_scatter_tensor,
    "all_gather": _all_gather,
    "all_gather_into_tensor": _all_gather,
}
