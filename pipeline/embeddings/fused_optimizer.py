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
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.modules.embedding_modules import EmbeddingBagCollection

from pipeline.embeddings.sparse_optimizer import RowOptimizer, new_state, update_rows
from pipeline.embeddings.table_optimizer_config import TableRules, as_rules
from pipeline.embeddings.tables import Kernel, TableState, keep_state, kernels, table_group
from pipeline.embeddings.threaded_lookup import separate_kernel


def fuse_optimizer(collection: EmbeddingBagCollection, rules: TableRules, device: str) -> None:
    """Have the optimizer of every table of ``collection`` train it inside the backward pass, once it is sharded.

    The learning rate is 0 until ``set_sparse_lr``. Where FBGEMM has no kernel of it for ``device``, the kernel only
    looks up, and ``learn_by_rows`` does the rest.
    """
    names = list(collection.embedding_bags)
    for own in dict.fromkeys(rules.kind(name) for name in names):
        same = [name for name in names if rules.kind(name) == own]
        optimizer = rules.of(same[0])
        kind, settings = optimizer.fused() if optimizer.fused_on(device) else (torch.optim.SGD, {})
        parameters = [collection.embedding_bags[name].weight for name in same]
        for parameter in parameters:
            # As torch's _apply_optimizer_in_backward, but no optimizer is made for a parameter on the meta device,
            # whose first state has torch import its symbolic shapes for a quarter of a second.
            parameter._optimizer_classes = [kind]  # type: ignore[attr-defined]
            parameter._optimizer_kwargs = [{"lr": 0.0, **settings}]  # type: ignore[attr-defined]
        if own:
            separate_kernel(parameters, own)


def learn_by_rows(dmp: DistributedModelParallel, rules: TableRules, device: str, on_disk: Sequence[str]) -> None:
    """Have their optimizers train the tables in kernels that look up only. ``on_disk``: the tables on tier ssd."""
    for kernel in kernels(dmp):
        optimizer = rules.of(kernel.tables[0].name)
        if kernel.fused and not optimizer.fused_on(device):
            RowOptimizer(kernel, optimizer, on_disk)


def _row_optimizer(kernel: Kernel) -> RowOptimizer | None:
    learner: RowOptimizer | None = getattr(kernel.module, "row_optimizer", None)
    return learner


@dataclass(frozen=True)
class _Replicas:
    """The ``values`` of a kernel's flat ``weights`` that are rows of width ``dim``, and the ``state`` of these rows.

    ``table``: one of theirs, by which they learn.
    """

    weights: nn.Parameter
    values: slice
    dim: int
    state: TableState
    table: str


class ReplicaOptimizer(torch.optim.Optimizer):
    """The optimizers of the data-parallel tables in ``kernels``, by the same formulas as in fused kernels.

    Data-parallel tables are ordinary parameters to TorchRec: their gradient is dense and averaged over the ranks, so
    ``step`` costs O(rows * dim) and must be called after each backward pass. The kernel keeps the state, where
    ``kernel_states`` finds it; ``state_dict`` has none. ``steps``: the number of steps taken; ``factor``: of the
    schedule, for tables with a learning rate of their own.
    """

    def __init__(self, kernels: Sequence[Kernel], rules: TableRules) -> None:
        self._rules, self.steps, self.factor = rules, 0, 1.0
        self._parts = [part for kernel in kernels for part in self._parts_of(kernel)]
        super().__init__([kernel.module.weights for kernel in kernels], {"lr": 0.0})

    def _parts_of(self, kernel: Kernel) -> list[_Replicas]:
        """The tables of a kernel, neighbours of one width and kind together. The kernel keeps the state, by table."""
        parts, states, first, module = [], list[TableState](), 0, kernel.module
        tables = [(table.name, int(rows), int(dim)) for table, (rows, dim) in _specs(kernel)]
        for (dim, _), group in itertools.groupby(tables, key=lambda each: (each[2], self._rules.kind(each[0]))):
            names, rows, _ = zip(*group, strict=True)
            values = slice(first, first + sum(rows) * dim)
            columns = self._rules.of(names[0]).columns
            state = new_state(module.weights.detach()[values].view(-1, dim), columns)
            split = {name: each.split(rows) for name, each in state.items()}
            states += [{name: pieces[i] for name, pieces in split.items()} for i in range(len(rows))]
            parts.append(_Replicas(module.weights, values, dim, state, names[0]))
            first = values.stop
        keep_state(module, states)
        return parts

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Apply the gradients of the last backward pass."""
        lr = self.param_groups[0]["lr"]
        self.steps += 1
        for part in self._parts:
            optimizer = self._rules.of(part.table)
            if part.weights.grad is None or optimizer.frozen:
                continue
            rate = self._rules.rate(part.table, lr, self.factor)
            own, gradient = (each[part.values].view(-1, part.dim) for each in (part.weights, part.weights.grad))
            if optimizer.lazy:
                touched = (gradient != 0).any(dim=1).nonzero().squeeze(1)
                update_rows(optimizer, own, touched, gradient[touched], part.state, rate, self.steps)
            else:
                optimizer.update(own, gradient, part.state, rate, self.steps)


def _specs(kernel: Kernel) -> list[tuple[Any, tuple[int, int]]]:
    """The tables of a data-parallel ``kernel`` with their rows and widths."""
    return list(zip(kernel.tables, kernel.module.embedding_specs, strict=True))


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
    """Lookups within take no step: FBGEMM's kernels count forward passes, by which some optimizers correct a bias.

    They lock no row of a cache either: with ``train.pipeline=prefetch`` only a backward pass would unlock it.
    """
    counters = [
        counter
        for kernel in kernels(dmp)
        for name in ("iter", "iter_cpu", "lxu_cache_locking_counter")
        if isinstance(counter := getattr(kernel.module, name, None), Tensor)
    ]
    before = [counter.clone() for counter in counters]
    yield
    for counter, value in zip(counters, before, strict=True):
        counter.copy_(value)


def set_sparse_lr(dmp: DistributedModelParallel, lr: float, factor: float = 1.0) -> None:
    """Set the learning rate of all tables, fused or not, from the next backward pass on.

    ``factor``: of the schedule; tables with a rate of their own get that rate times it.

    The fused optimizer copies the rate in its ``param_groups`` to the kernel at its next ``zero_grad`` or ``step``, so
    a rate set on one of the two alone comes late or is lost.
    """
    rules = as_rules(dmp.table_rules)  # type: ignore[arg-type]
    for kernel in kernels(dmp):
        rate = rules.rate(kernel.tables[0].name, lr, factor)
        for group in kernel.optimizer.param_groups if kernel.fused else ():
            group["lr"] = rate
        by_rows = _row_optimizer(kernel)
        if by_rows is not None:
            by_rows.lr = rate
        elif kernel.fused:
            kernel.module.set_learning_rate(rate)
    replicas = replica_optimizer(dmp)
    if replicas is not None:
        replicas.param_groups[0]["lr"], replicas.factor = lr, factor


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
