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

from pipeline.embeddings.single_rank_lookup import separate_kernel
from pipeline.embeddings.sparse_optimizer import RowOptimizer, new_state, update_rows
from pipeline.embeddings.table_optimizer_config import TableRules, as_rules
from pipeline.embeddings.tables import Kernel, TableState, keep_state, kernels, table_group


def fuse_optimizer(collection: EmbeddingBagCollection, rules: TableRules, device: str) -> None:
    """Have the optimizer of every table of ``collection`` train it inside the backward pass, once it is sharded.

    The learning rate is 0 until ``set_sparse_lr``. Where FBGEMM has no kernel of an optimizer for ``device``, the
    kernel only looks up, and ``learn_by_rows`` does the rest.
    """
    by_kind: dict[str, list[str]] = {}
    for name in collection.embedding_bags:
        by_kind.setdefault(rules.kind(name), []).append(name)
    for kind, names in by_kind.items():
        optimizer = rules.of(names[0])
        optimizer_class: type[torch.optim.Optimizer] = torch.optim.SGD
        settings: dict[str, Any] = {}
        if optimizer.fused_on(device):
            optimizer_class, settings = optimizer.fused()
        parameters = [collection.embedding_bags[name].weight for name in names]
        for parameter in parameters:
            # As torch's _apply_optimizer_in_backward, but no optimizer is made for a parameter on the meta device,
            # whose first state has torch import its symbolic shapes for a quarter of a second.
            parameter._optimizer_classes = [optimizer_class]  # type: ignore[attr-defined]
            parameter._optimizer_kwargs = [{"lr": 0.0, **settings}]  # type: ignore[attr-defined]
        if kind:
            separate_kernel(parameters, kind)


def learn_by_rows(dmp: DistributedModelParallel, rules: TableRules, device: str, on_disk: Sequence[str]) -> None:
    """Have their optimizers train the tables in kernels that look up only. ``on_disk``: the tables on tier ssd."""
    for kernel in kernels(dmp):
        optimizer = rules.of(kernel.tables[0].name)
        if kernel.fused and not optimizer.fused_on(device):
            RowOptimizer(kernel, optimizer, on_disk)


def _row_optimizer(kernel: Kernel) -> RowOptimizer | None:
    optimizer: RowOptimizer | None = getattr(kernel.module, "row_optimizer", None)
    return optimizer


@dataclass(frozen=True)
class _ReplicaGroup:
    """The ``values`` of a kernel's flat ``weights`` that are rows of width ``dim``, and the ``state`` of these rows.

    ``table``: one of theirs; the others learn as it does.
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
        self._groups: list[_ReplicaGroup] = []
        for kernel in kernels:
            self._groups += self._group_tables(kernel)
        super().__init__([kernel.module.weights for kernel in kernels], {"lr": 0.0})

    def _group_tables(self, kernel: Kernel) -> list[_ReplicaGroup]:
        # Neighbours of one width and kind are updated together, as one table. The kernel keeps the state by table.
        module = kernel.module
        tables = list(zip(kernel.tables, module.embedding_specs, strict=True))

        def width_and_kind(table: tuple[Any, tuple[int, int]]) -> tuple[int, str]:
            return int(table[1][1]), self._rules.kind(table[0].name)

        groups: list[_ReplicaGroup] = []
        states: list[TableState] = []
        first = 0
        for (dim, _), members in itertools.groupby(tables, key=width_and_kind):
            names, rows = [], []
            for table, (table_rows, _) in members:
                names.append(table.name)
                rows.append(int(table_rows))
            values = slice(first, first + sum(rows) * dim)
            columns = self._rules.of(names[0]).columns
            state = new_state(module.weights.detach()[values].view(-1, dim), columns)
            pieces = {name: column.split(rows) for name, column in state.items()}
            for i in range(len(rows)):
                states.append({name: split[i] for name, split in pieces.items()})
            groups.append(_ReplicaGroup(module.weights, values, dim, state, names[0]))
            first = values.stop
        keep_state(module, states)
        return groups

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Apply the gradients of the last backward pass."""
        lr = self.param_groups[0]["lr"]
        self.steps += 1
        for group in self._groups:
            optimizer = self._rules.of(group.table)
            if group.weights.grad is None or optimizer.frozen:
                continue
            table_lr = self._rules.rate(group.table, lr, self.factor)
            weights = group.weights[group.values].view(-1, group.dim)
            gradient = group.weights.grad[group.values].view(-1, group.dim)
            if optimizer.lazy:
                touched = (gradient != 0).any(dim=1).nonzero().squeeze(1)
                update_rows(optimizer, weights, touched, gradient[touched], group.state, table_lr, self.steps)
            else:
                optimizer.update(weights, gradient, group.state, table_lr, self.steps)


def replica_optimizer(dmp: DistributedModelParallel) -> ReplicaOptimizer | None:
    """Return the optimizer of the data-parallel tables that ``shard_model`` made; None where there are none.

    The training loop calls its ``zero_grad`` and ``step`` with those of the dense part.
    """
    replicas: ReplicaOptimizer | None = getattr(dmp, "replicas", None)
    return replicas


def set_table_steps(dmp: DistributedModelParallel, steps: int) -> None:
    """Set how many steps the tables have taken, by which some optimizers correct a bias. Call it after a restore."""
    for kernel in kernels(dmp):
        row_optimizer = _row_optimizer(kernel)
        if row_optimizer is not None:
            row_optimizer.steps = steps
        elif kernel.fused:
            kernel.module.set_optimizer_step(steps)
    replicas = replica_optimizer(dmp)
    if replicas is not None:
        replicas.steps = steps


def anchors(dmp: DistributedModelParallel) -> list[Tensor]:
    """Return the leaves of autograd behind the lookups of fused kernels; they have no gradient.

    A backward pass that reaches them trains the tables.
    """
    leaves: list[Tensor] = []
    for kernel in kernels(dmp):
        leaves += [parameter for parameter in kernel.module.parameters(recurse=False) if parameter.requires_grad]
        for owner in (kernel.module.forward, _row_optimizer(kernel)):
            anchor = getattr(owner, "anchor", None)
            if anchor is not None:
                leaves.append(anchor)
    return leaves


@contextmanager
def keeping_steps(dmp: DistributedModelParallel) -> Iterator[None]:
    """Let lookups inside take no step and lock no row of a cache."""
    # FBGEMM's kernels count forward passes, by which some optimizers correct a bias. They also lock the rows of a
    # cache, and with ``train.pipeline=prefetch`` only a backward pass would unlock them.
    counters = []
    for kernel in kernels(dmp):
        for name in ("iter", "iter_cpu", "lxu_cache_locking_counter"):
            counter = getattr(kernel.module, name, None)
            if isinstance(counter, Tensor):
                counters.append(counter)
    before = [counter.clone() for counter in counters]
    yield
    for counter, value in zip(counters, before, strict=True):
        counter.copy_(value)


def set_sparse_lr(dmp: DistributedModelParallel, lr: float, factor: float = 1.0) -> None:
    """Set the learning rate of all tables, fused or not, from the next backward pass on.

    ``factor``: of the schedule; tables with a rate of their own get that rate times it.
    """
    rules = as_rules(dmp.table_rules)  # type: ignore[arg-type]
    for kernel in kernels(dmp):
        if not kernel.fused:
            continue
        # One rate a kernel: `fuse_optimizer` gave tables with settings of their own a kernel of their own.
        table_lr = rules.rate(kernel.tables[0].name, lr, factor)
        # The fused optimizer copies the rate in its ``param_groups`` to the kernel at its next ``zero_grad`` or
        # ``step``, so a rate that is set on one of the two alone comes late or is lost.
        for group in kernel.optimizer.param_groups:
            group["lr"] = table_lr
        row_optimizer = _row_optimizer(kernel)
        if row_optimizer is not None:
            row_optimizer.lr = table_lr
        else:
            kernel.module.set_learning_rate(table_lr)
    replicas = replica_optimizer(dmp)
    if replicas is not None:
        replicas.param_groups[0]["lr"], replicas.factor = lr, factor


def clip_table_gradients(dmp: DistributedModelParallel, limit: float) -> None:
    """Clamp every value of the gradient that a lookup adds to its rows to [-limit, limit].

    ``limit`` is for the gradient of the mean loss over the global batch. A row that a batch looks up n times can
    therefore move by n times the limit.
    """
    # FBGEMM's own ``gradient_clipping`` means the same, but it reaches fused kernels only, and not the data-parallel
    # tables, whose gradient is averaged over the ranks after the lookup.
    ranks = dist.get_world_size(table_group(dmp))
    for kernel in kernels(dmp):
        # The gradient that reaches a fused kernel is the mean already; a replica has the gradient of its own rank.
        kernel.module.register_forward_hook(partial(_clip, limit if kernel.fused else limit * ranks))


def _clip(limit: float, module: Any, args: tuple[Any, ...], output: Tensor) -> None:
    if output.requires_grad:
        output.register_hook(lambda gradient: gradient.clamp(-limit, limit))
