"""Table optimizers without a kernel of FBGEMM: the rows that a batch touched are taken out, updated and put back.

FBGEMM's kernel does the lookup alone. A node of autograd in its place takes the gradient of the pooled embeddings and
adds up what it means for each row; ``TableOptimizer.update`` gets these rows. So an update costs as much as the batch
has rows, whatever the size of the table, and its rows may be slots of tier ssd. On a CPU the compiled steps of
``native`` do both, where they are installed and have the optimizer's formula.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from fbgemm_gpu.split_table_batched_embeddings_ops_common import PoolingMode
from torch import Tensor

from pipeline.embeddings import native
from pipeline.embeddings.huge_pages import large_pages
from pipeline.embeddings.ssd.kernel import sparse_memory, storage_of
from pipeline.embeddings.tables import Kernel, TableState, keep_state
from pipeline.specs.optimizers import CompiledStep, StateColumn, TableOptimizer


@dataclass(frozen=True)
class Lookup:
    """The ids of a lookup: ``indices`` [n], ``offsets`` [features * b + 1], ``weights`` [n] of the ids or None."""

    indices: Tensor
    offsets: Tensor
    weights: Tensor | None


class RowOptimizer:
    """Trains the tables of ``kernel`` with ``optimizer``. ``steps``: the number taken; ``lr``: of the next one.

    ``on_disk``: tables whose memory takes room only where it is touched, as that of their state then does.
    """

    def __init__(self, kernel: Kernel, optimizer: TableOptimizer, on_disk: Sequence[str] = ()) -> None:
        self._optimizer, self.steps, self.lr = optimizer, 0, 0.0
        self._mean = kernel.module.pooling_mode == PoolingMode.MEAN
        self._features = [len(table.feature_names) for table in kernel.tables]
        self._tables = [weights.detach() for weights in storage_of(kernel.module)]
        self._states: list[TableState] = []
        for table, weights in zip(kernel.tables, self._tables, strict=True):
            sparse = table.name in on_disk and weights.device.type == "cpu"
            self._states.append(new_state(weights, optimizer.columns, sparse=sparse))
        # What the compiled steps get of each table; none where they cannot train all of them.
        self._compiled_tables: list[native.Table] = []
        if all(weights.device.type == "cpu" and weights.dtype == torch.float32 for weights in self._tables):
            for weights, state in zip(self._tables, self._states, strict=True):
                self._compiled_tables.append(self._compiled_table(weights, state))
        self.anchor = torch.zeros(0, device=self._tables[0].device, requires_grad=True)
        keep_state(kernel.module, self._states)
        kernel.module.row_optimizer = self
        kernel.module.register_forward_hook(self._replace_backward, with_kwargs=True)

    def _compiled_table(self, weights: Tensor, state: TableState) -> native.Table:
        width = weights.shape[1]
        table = native.Table(weights=weights.data_ptr(), width=width, mean=self._mean)
        for i, column in enumerate(self._optimizer.columns):
            table.states[i] = state[column.name].data_ptr()
            table.widths[i] = width if column.per_value else 1
            table.steps[i] = state[column.name].stride(0)
        return table

    def _replace_backward(self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Tensor) -> Any:
        # The hook behind a lookup: our node takes the place of FBGEMM's own backward pass.
        if not out.requires_grad:
            return None
        given = dict(zip(("indices", "offsets", "per_sample_weights"), args, strict=False)) | kwargs
        lookup = Lookup(given["indices"], given["offsets"], given.get("per_sample_weights"))
        return _Learn.apply(out.detach(), self.anchor, self, lookup)

    @torch.no_grad()
    def learn(self, lookup: Lookup, gradient: Tensor) -> None:
        """Update the rows of ``lookup`` by the ``gradient`` of its pooled embeddings [b, sum of dims]."""
        self.steps += 1
        if self._optimizer.frozen:
            return
        library = native.library()
        if library is not None and self._compiled_tables:
            step = self._optimizer.compiled_step(self.lr, self.steps)
            if step is not None:
                self._learn_compiled(library, step, lookup, gradient)
                return
        batch = len(gradient)
        column = feature = 0
        for weights, state, features in zip(self._tables, self._states, self._features, strict=True):
            width = weights.shape[1]
            part = gradient[:, column : column + features * width].reshape(batch * features, width)
            if len(weights) and batch:
                rows, sums = self._row_gradients(lookup, part, feature, features)
                update_rows(self._optimizer, weights, rows, sums, state, self.lr, self.steps)
            column += features * width
            feature += features

    def _learn_compiled(
        self, library: native.RowStepsLibrary, step: CompiledStep, lookup: Lookup, gradient: Tensor
    ) -> None:
        ids, offsets = lookup.indices.long().contiguous(), lookup.offsets.long().contiguous()
        weights = None if lookup.weights is None else lookup.weights.float().contiguous()
        gradient = gradient.float().contiguous()
        column = feature = 0
        # Copies: several threads may be here.
        tables = [native.Table.from_buffer_copy(table) for table in self._compiled_tables]
        for table, rows, features in zip(tables, self._tables, self._features, strict=True):
            table.ids, table.offsets = ids.data_ptr(), offsets[feature * len(gradient) :].data_ptr()
            table.shares = None if weights is None else weights.data_ptr()
            table.gradient, table.stride = gradient[:, column:].data_ptr(), gradient.stride(0)
            table.batch, table.features = len(gradient) if len(rows) else 0, features
            column += features * rows.shape[1]
            feature += features
        library.learn(tables, step, lazy=self._optimizer.lazy, threads=torch.get_num_threads())

    def _row_gradients(self, lookup: Lookup, gradient: Tensor, feature: int, features: int) -> tuple[Tensor, Tensor]:
        # The distinct rows [m] of one table's features, ascending, and the gradient [m, dim] of each. ``gradient``:
        # [b * features, dim], sample by sample.
        batch = len(gradient) // features
        offsets = lookup.offsets[feature * batch : (feature + features) * batch + 1]
        first, last = int(offsets[0]), int(offsets[-1])
        lengths = offsets.diff()
        bags = torch.arange(len(lengths), device=offsets.device)
        if last - first != len(lengths) or bool((lengths != 1).any()):
            bags = torch.repeat_interleave(bags, lengths.long(), output_size=last - first)
        weights = None if lookup.weights is None else lookup.weights[first:last].float()
        if self._mean:
            shares = lengths.float().reciprocal()[bags]
            weights = shares if weights is None else weights * shares
        if features > 1:
            # Bags are feature by feature, gradients sample by sample.
            bags = bags % batch * features + bags // batch
        ids, order = lookup.indices[first:last].sort(stable=True)
        rows, counts = torch.unique_consecutive(ids, return_counts=True)
        # A pooled lookup backwards: a row's gradient is the sum over the samples that it is in.
        starts = counts.cumsum(0) - counts
        if weights is not None:
            weights = weights[order]
        sums = torch.nn.functional.embedding_bag(bags[order], gradient, starts, mode="sum", per_sample_weights=weights)
        return rows.long(), sums


def update_rows(
    optimizer: TableOptimizer, weights: Tensor, rows: Tensor, gradient: Tensor, state: TableState, lr: float, step: int
) -> None:
    """Apply ``optimizer.update`` to the ``rows`` [n], each once, of the table ``weights``; ``gradient``: [n, dim]."""
    if optimizer.lazy:
        # Padding looks up rows whose gradient is 0, and how much of it there is depends on the number of ranks.
        nonzero = (gradient != 0).any(dim=1)
        if not bool(nonzero.all()):
            rows, gradient = rows[nonzero], gradient[nonzero]
    if not len(rows):
        return
    row_weights = weights.index_select(0, rows)
    row_state = {name: values.index_select(0, rows) for name, values in state.items()}
    optimizer.update(row_weights, gradient, row_state, lr, step)
    weights.index_copy_(0, rows, row_weights)
    for name, values in row_state.items():
        state[name].index_copy_(0, rows, values)


def new_state(weights: Tensor, columns: Sequence[StateColumn], *, sparse: bool = False) -> TableState:
    """Return zeros for the rows of ``weights`` by column, [rows] or [rows, dim].

    ``sparse``: they take memory only where they are touched.
    """
    rows, dim = weights.shape

    def zeros(*shape: int) -> Tensor:
        if weights.device.type != "cpu":
            return torch.zeros(shape, device=weights.device)
        allocate = sparse_memory if sparse else large_pages
        return allocate(math.prod(shape)).view(shape)

    wide = [column.name for column in columns if column.per_value]
    wide_state: TableState = {}
    if wide:
        # Values [rows, dim] of a row lie beside each other, so that a step finds them in one place of the memory.
        wide_state = dict(zip(wide, zeros(rows, len(wide), dim).unbind(1), strict=True))
    return {column.name: wide_state[column.name] if column.per_value else zeros(rows) for column in columns}


class _Learn(torch.autograd.Function):
    # The identity, whose backward pass trains the tables. Without ``anchor``, which requires a gradient, autograd would
    # not call it.

    @staticmethod
    def forward(ctx: Any, output: Tensor, anchor: Tensor, optimizer: RowOptimizer, lookup: Lookup) -> Tensor:
        ctx.optimizer, ctx.lookup = optimizer, lookup
        return output.view_as(output)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, None, None, None]:
        ctx.optimizer.learn(ctx.lookup, grads[0])
        return None, None, None, None
