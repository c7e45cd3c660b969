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
        self._tables = [weights.detach() for weights in storage_of(kernel.module)]
        self._states = [
            new_state(weights, optimizer.columns, sparse=table.name in on_disk and weights.device.type == "cpu")
            for table, weights in zip(kernel.tables, self._tables, strict=True)
        ]
        self._features = [len(table.feature_names) for table in kernel.tables]
        self._mean = kernel.module.pooling_mode == PoolingMode.MEAN
        self.anchor = torch.zeros(0, device=self._tables[0].device, requires_grad=True)
        plain = all(one.device.type == "cpu" and one.dtype == torch.float32 for one in self._tables)
        self._places = [self._place(number) for number in range(len(self._tables))] if plain else []
        keep_state(kernel.module, self._states)
        kernel.module.row_optimizer = self
        kernel.module.register_forward_hook(self._looked_up, with_kwargs=True)

    def _looked_up(self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any], output: Tensor) -> Tensor | None:
        """The hook behind a lookup: takes the place of FBGEMM's own backward pass."""
        if not output.requires_grad:
            return None
        given = dict(zip(("indices", "offsets", "per_sample_weights"), args, strict=False)) | kwargs
        lookup = Lookup(given["indices"], given["offsets"], given.get("per_sample_weights"))
        learnt: Tensor = _Learn.apply(output.detach(), self.anchor, self, lookup)
        return learnt

    @torch.no_grad()
    def learn(self, lookup: Lookup, gradient: Tensor) -> None:
        """Update the rows of ``lookup`` by the ``gradient`` of its pooled embeddings [b, sum of dims]."""
        self.steps += 1
        if self._optimizer.frozen:
            return
        batch, library = len(gradient), native.library()
        step = self._optimizer.compiled_step(self.lr, self.steps) if library is not None and self._places else None
        if library is not None and step is not None:
            self._learn_compiled(library, step, lookup, gradient)
            return
        column = feature = 0
        for weights, state, features in zip(self._tables, self._states, self._features, strict=True):
            width = weights.shape[1]
            part = gradient[:, column : column + features * width].reshape(batch * features, width)
            if len(weights) and batch:
                rows, sums = self._row_gradients(lookup, part, feature, features)
                update_rows(self._optimizer, weights, rows, sums, state, self.lr, self.steps)
            column, feature = column + features * width, feature + features

    def _place(self, number: int) -> native.Table:
        """Where the compiled steps find the memory of a table."""
        weights, state = self._tables[number], self._states[number]
        place = native.Table(weights=weights.data_ptr(), width=weights.shape[1], mean=self._mean)
        for i, column in enumerate(self._optimizer.columns):
            place.states[i] = state[column.name].data_ptr()
            place.widths[i] = weights.shape[1] if column.per_value else 1
            place.steps[i] = state[column.name].stride(0)
        return place

    def _learn_compiled(
        self, library: native.RowStepsLibrary, step: CompiledStep, lookup: Lookup, gradient: Tensor
    ) -> None:
        """``learn`` by the compiled ``step``, as many tables at a time as torch uses threads."""
        ids, offsets = lookup.indices.long().contiguous(), lookup.offsets.long().contiguous()
        shares = None if lookup.weights is None else lookup.weights.float().contiguous()
        gradient = gradient.float().contiguous()
        column = feature = 0
        places = [native.Table.from_buffer_copy(place) for place in self._places]  # several threads may be here
        for place, weights, features in zip(places, self._tables, self._features, strict=True):
            place.ids, place.offsets = ids.data_ptr(), offsets[feature * len(gradient) :].data_ptr()
            place.shares = None if shares is None else shares.data_ptr()
            place.gradient, place.stride = gradient[:, column:].data_ptr(), gradient.stride(0)
            place.batch, place.features = len(gradient) if len(weights) else 0, features
            column, feature = column + features * weights.shape[1], feature + features
        library.learn(places, step, lazy=self._optimizer.lazy, threads=torch.get_num_threads())

    def _row_gradients(self, lookup: Lookup, gradient: Tensor, feature: int, features: int) -> tuple[Tensor, Tensor]:
        """The distinct rows of one table's features, ascending, and the gradient of each: [m], [m, dim].

        ``gradient``: [b * features, dim], sample by sample.
        """
        batch = len(gradient) // features
        offsets = lookup.offsets[feature * batch : (feature + features) * batch + 1]
        first, last = int(offsets[0]), int(offsets[-1])
        lengths = offsets.diff()
        bags = torch.arange(len(lengths), device=offsets.device)
        if last - first != len(lengths) or bool((lengths != 1).any()):
            bags = torch.repeat_interleave(bags, lengths.long(), output_size=last - first)
        shares = None if lookup.weights is None else lookup.weights[first:last].float()
        if self._mean:
            each = lengths.float().reciprocal()[bags]
            shares = each if shares is None else shares * each
        bags = bags % batch * features + bags // batch if features > 1 else bags
        ids, order = lookup.indices[first:last].sort(stable=True)
        rows, counts = torch.unique_consecutive(ids, return_counts=True)
        # A pooled lookup backwards: a row's gradient is the sum over the samples that it is in.
        starts = counts.cumsum(0) - counts
        shares = None if shares is None else shares[order]
        sums = torch.nn.functional.embedding_bag(bags[order], gradient, starts, mode="sum", per_sample_weights=shares)
        return rows.long(), sums


def update_rows(
    optimizer: TableOptimizer, weights: Tensor, rows: Tensor, gradient: Tensor, state: TableState, lr: float, step: int
) -> None:
    """``optimizer.update`` of the ``rows`` [n], each once, of a table with ``weights``; ``gradient``: [n, dim].

    A lazy optimizer leaves rows alone whose gradient is 0: padding looks up such rows, and how much of it there is
    depends on the number of ranks.
    """
    if optimizer.lazy:
        alive = (gradient != 0).any(dim=1)
        if not bool(alive.all()):
            rows, gradient = rows[alive], gradient[alive]
    if not len(rows):
        return
    own = weights.index_select(0, rows)
    states = {name: values.index_select(0, rows) for name, values in state.items()}
    optimizer.update(own, gradient, states, lr, step)
    weights.index_copy_(0, rows, own)
    for name, values in states.items():
        state[name].index_copy_(0, rows, values)


def new_state(weights: Tensor, columns: Sequence[StateColumn], *, sparse: bool = False) -> TableState:
    """Zeros for the rows of ``weights`` by column, [rows] or [rows, dim]; ``sparse``: they take room when touched.

    Values [rows, dim] of a row lie beside each other, so that a step finds them in one place of the memory.
    """
    rows, dim = weights.shape
    wide = [column.name for column in columns if column.per_value]

    def zeros(*shape: int) -> Tensor:
        if weights.device.type == "cpu":
            return (sparse_memory if sparse else large_pages)(math.prod(shape)).view(shape)
        return torch.zeros(shape, device=weights.device)

    beside = dict(zip(wide, zeros(rows, len(wide), dim).unbind(1), strict=True)) if wide else {}
    return {each.name: beside[each.name] if each.per_value else zeros(rows) for each in columns}


class _Learn(torch.autograd.Function):
    """The identity, whose backward pass trains the tables. ``anchor``: makes autograd call it."""

    @staticmethod
    def forward(ctx: Any, output: Tensor, anchor: Tensor, optimizer: RowOptimizer, lookup: Lookup) -> Tensor:
        ctx.optimizer, ctx.lookup = optimizer, lookup
        return output.view_as(output)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, None, None, None]:
        ctx.optimizer.learn(ctx.lookup, grads[0])
        return None, None, None, None
