"""How tables learn: their optimizer in fused kernels, by rows and over replicas, its learning rate and clipping."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.optim import _apply_optimizer_in_backward
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.modules.embedding_modules import EmbeddingBagCollection

from pipeline.embeddings.by_rows import RowOptimizer, new_state, update_rows
from pipeline.embeddings.state import TableState, keep_state
from pipeline.embeddings.tables import Kernel, kernels, table_group
from pipeline.specs.table_optimizer import TableOptimizer


def fuse_optimizer(collection: EmbeddingBagCollection, optimizer: TableOptimizer, device: str) -> None:
    """Have ``optimizer`` train every table of ``collection`` inside the backward pass, once it is sharded.

    The learning rate is 0 until ``set_sparse_lr``. Where FBGEMM has no kernel of it for ``device``, the kernel only
    looks up, and ``learn_by_rows`` does the rest.
    """
    kind, settings = optimizer.fused() if optimizer.fused_on(device) else (torch.optim.SGD, {})
    _apply_optimizer_in_backward(kind, collection.parameters(), optimizer_kwargs={"lr": 0.0, **settings})


def learn_by_rows(dmp: DistributedModelParallel, optimizer: TableOptimizer, on_disk: Sequence[str]) -> None:
    """Have ``optimizer`` train the tables in kernels that look up only. ``on_disk``: the tables on tier ssd."""
    for kernel in kernels(dmp):
        if kernel.fused:
            RowOptimizer(kernel, optimizer, on_disk)


def _row_optimizer(kernel: Kernel) -> RowOptimizer | None:
    learner: RowOptimizer | None = getattr(kernel.module, "row_optimizer", None)
    return learner


@dataclass(frozen=True)
class _Replicas:
    """The ``values`` of a kernel's flat ``weights`` that are rows of width ``dim``, and the ``state`` of these rows."""

    weights: nn.Parameter
    values: slice
    dim: int
    state: TableState


class ReplicaOptimizer(torch.optim.Optimizer):
    """``optimizer`` over the data-parallel tables of ``modules``, by the same formula as in a fused kernel.

    Data-parallel tables are ordinary parameters to TorchRec: their gradient is dense and averaged over the ranks, so
    ``step`` costs O(rows * dim) and must be called after each backward pass. The kernel keeps the state, where
    ``kernel_states`` finds it; ``state_dict`` has none. ``steps``: the number of steps taken.
    """

    def __init__(self, modules: Sequence[Any], optimizer: TableOptimizer) -> None:
        self._optimizer, self.steps = optimizer, 0
        self._parts = [part for module in modules for part in self._parts_of(module)]
        super().__init__([module.weights for module in modules], {"lr": 0.0})

    def _parts_of(self, module: Any) -> list[_Replicas]:
        """The tables of a kernel, neighbours of one width together. The kernel keeps the state, by table."""
        parts, states, first = [], list[TableState](), 0
        for dim, group in itertools.groupby(module.embedding_specs, key=lambda spec: int(spec[1])):
            rows = [count for count, _ in group]
            values = slice(first, first + sum(rows) * dim)
            state = new_state(module.weights.detach()[values].view(-1, dim), self._optimizer.columns)
            split = {name: each.split(rows) for name, each in state.items()}
            states += [{name: pieces[i] for name, pieces in split.items()} for i in range(len(rows))]
            parts.append(_Replicas(module.weights, values, dim, state))
            first = values.stop
        keep_state(module, states)
        return parts

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Apply the gradients of the last backward pass."""
        lr = self.param_groups[0]["lr"]
        self.steps += 1
        for part in self._parts:
            if part.weights.grad is None:
                continue
            own, gradient = (each[part.values].view(-1, part.dim) for each in (part.weights, part.weights.grad))
            if self._optimizer.lazy:
                touched = (gradient != 0).any(dim=1).nonzero().squeeze(1)
                update_rows(self._optimizer, own, touched, gradient[touched], part.state, lr, self.steps)
            else:
                self._optimizer.update(own, gradient, part.state, lr, self.steps)


def replica_optimizer(dmp: DistributedModelParallel) -> ReplicaOptimizer | None:
    """The optimizer of the data-parallel tables that ``shard_model`` made; None where there are none.

    The training loop calls its ``zero_grad`` and ``step`` beside those of the dense part.
    """
    replicas: ReplicaOptimizer | None = getattr(dmp, "replicas", None)
    return replicas


def set_table_steps(dmp: DistributedModelParallel, steps: int) -> None:
    """Set how many steps the tables have taken, by which some optimizers correct a bias. Call it after a restore."""
    for kernel in kernels(dmp):
        by_rows = _row_optimizer(kernel)
        if by_rows is not None:
            by_rows.steps = steps
        elif kernel.fused:
            kernel.module.set_optimizer_step(steps)
    replicas = replica_optimizer(dmp)
    if replicas is not None:
        replicas.steps = steps


def anchors(dmp: DistributedModelParallel) -> list[Tensor]:
    """The leaves of autograd behind the lookups of fused kernels: a backward pass that reaches them trains the tables.

    They have no gradient.
    """
    leaves: list[Tensor] = []
    for kernel in kernels(dmp):
        leaves += [parameter for parameter in kernel.module.parameters(recurse=False) if parameter.requires_grad]
        parts = (kernel.module.forward, _row_optimizer(kernel))
        leaves += [anchor for part in parts if (anchor := getattr(part, "anchor", None)) is not None]
    return leaves


@contextmanager
def keeping_steps(dmp: DistributedModelParallel) -> Iterator[None]:
    """Lookups within take no step: FBGEMM's kernels count forward passes, by which some optimizers correct a bias."""
    counters = [
        counter
        for kernel in kernels(dmp)
        for name in ("iter", "iter_cpu")
        if isinstance(counter := getattr(kernel.module, name, None), Tensor)
    ]
    before = [counter.clone() for counter in counters]
    yield
    for counter, value in zip(counters, before, strict=True):
        counter.copy_(value)


def set_sparse_lr(dmp: DistributedModelParallel, lr: float) -> None:
    """Set the learning rate of all tables, fused or not, from the next backward pass on.

    The fused optimizer copies the rate in its ``param_groups`` to the kernel at its next ``zero_grad`` or ``step``, so
    a rate set on one of the two alone comes late or is lost.
    """
    for group in dmp.fused_optimizer.param_groups:
        group["lr"] = lr
    for kernel in kernels(dmp):
        by_rows = _row_optimizer(kernel)
        if by_rows is not None:
            by_rows.lr = lr
        elif kernel.fused:
            kernel.module.set_learning_rate(lr)
    replicas = replica_optimizer(dmp)
    if replicas is not None:
        replicas.param_groups[0]["lr"] = lr


def clip_table_gradients(dmp: DistributedModelParallel, limit: float) -> None:
    """Clamp every value of the gradient that a lookup adds to its rows to [-limit, limit].

    ``limit`` is for the gradient of the mean loss over the global batch. A row that a batch looks up n times can
    therefore move by n times the limit: FBGEMM's own ``gradient_clipping`` means the same, but it reaches fused kernels
    only, and not the data-parallel tables, whose gradient is averaged over the ranks after the lookup.
    """
    ranks = dist.get_world_size(table_group(dmp))
    for kernel in kernels(dmp):
        # The gradient that reaches a fused kernel is the mean already; a replica has the gradient of its own rank.
        kernel.module.register_forward_hook(partial(_clip, limit if kernel.fused else limit * ranks))


def _clip(limit: float, module: Any, args: tuple[Any, ...], output: Tensor) -> None:
    """The hook: clamps the gradient of a kernel's output before the kernel sees it."""
    if output.requires_grad:
        output.register_hook(lambda gradient: gradient.clamp(-limit, limit))
