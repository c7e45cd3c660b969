"""The tables of the super-net: whole rows in one tensor, updated by the optimizers that training has for them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import accumulate, groupby

import torch
from torch import Tensor, nn

from pipeline.config.model import ModelConfig
from pipeline.embeddings.table_optimizer_config import TableRules
from pipeline.records.dataset import DatasetSchema


class SearchTables:
    """forward: ids of a batch -> embeddings [B, F, D]. A table narrower than D has zeros behind its width.

    Initial rows are uniform as in training, drawn from ``seed``. ``rows``: of all tables, one after the other.
    """

    def __init__(self, schema: DatasetSchema, model: ModelConfig, rules: TableRules, seed: int) -> None:
        self.model, self.rules, self.dim = model, rules, model.embedding_dim
        self.tables = schema.tables
        firsts = [0, *accumulate(table.rows for table in self.tables)]
        self.ends = dict(zip((table.name for table in self.tables), firsts[1:], strict=True))
        first = dict(zip((table.name for table in self.tables), firsts, strict=False))
        self.first = torch.tensor([first[column.owner] for column in schema.sparse])
        self.owners = [column.owner for column in schema.sparse]
        self.mean = torch.tensor([model.table(column.owner).pooling == "mean" for column in schema.sparse])
        generator = torch.Generator().manual_seed(seed)
        self.rows = nn.Parameter(torch.rand(firsts[-1], self.dim, generator=generator).mul_(2).sub_(1))
        for table in self.tables:
            low, width = first[table.name], model.dim_of(table.name)
            bound = model.table(table.name).init_bound
            own = self.rows.data[low : low + table.rows]
            own.mul_(1 / math.sqrt(table.rows) if bound is None else bound)
            own[:, width:] = 0
        self.state = {name: self._state(column) for name, column in self._columns().items()}

    def __call__(self, ids: Tensor, lengths: Tensor, weights: Tensor | None = None) -> Tensor:
        """Of ``ids`` feature by feature; ``lengths`` [F * B]; ``weights``: of the ids."""
        features = len(self.first)
        counts = lengths.view(features, -1)
        ids = ids.long() + self.first.repeat_interleave(counts.sum(1))
        offsets = torch.cat([lengths.new_zeros(1, dtype=torch.int64), lengths.long().cumsum(0)])
        pooled = nn.functional.embedding_bag(
            ids, self.rows, offsets, mode="sum", sparse=True, per_sample_weights=weights, include_last_offset=True
        ).view(features, -1, self.dim)
        if self.mean.any():
            pooled = pooled / torch.where(self.mean[:, None], counts.clamp_min(1), 1)[:, :, None]
        return pooled.transpose(0, 1)

    @torch.no_grad()
    def step(self, lr: float, factor: float, number: int) -> None:
        """Update the rows of the last backward pass; ``number`` from 1, ``factor``: the schedule's."""
        assert self.rows.grad is not None
        gradient = self.rows.grad.coalesce()
        touched, values = gradient.indices()[0], gradient.values()
        self.rows.grad = None
        ends = torch.searchsorted(touched, torch.tensor(list(self.ends.values()))).tolist()
        low = 0
        for _, group in groupby(zip(self.ends, ends, strict=True), lambda item: self.rules.kind(item[0])):
            names, stops = zip(*group, strict=True)
            self._update(touched[low : stops[-1]], values[low : stops[-1]], names, lr, factor, number)
            low = stops[-1]

    @torch.no_grad()
    def turn(self, project: Tensor) -> Tensor:
        """Turn every table to the principal axes of the vectors that ``project`` [F, D, D] makes of its rows.

        Returns the projections that make the same vectors of the turned rows: the first columns of a table and the
        first rows of its projections make the best approximation by so many columns (Eckart and Young 1936).
        """
        turned, low = project.clone(), 0
        for table, high in zip(self.tables, self.ends.values(), strict=True):
            mine = [place for place, owner in enumerate(self.owners) if owner == table.name]
            rows = self.rows.data[low:high]
            together = torch.cat([project[place] for place in mine], dim=1)  # [D, columns of the vectors]
            _, axes = torch.linalg.eigh((together.mT @ (rows.mT @ rows) @ together).double())
            axes = axes.flip(1)[:, : self.dim].to(rows.dtype)  # of the largest variance first
            self.rows.data[low:high] = rows @ (together @ axes)
            for place, back in zip(mine, axes.split(self.dim), strict=True):
                turned[place] = back.mT
            low = high
        return turned

    def _update(
        self, touched: Tensor, gradient: Tensor, names: Sequence[str], lr: float, factor: float, number: int
    ) -> None:
        """Update rows of tables that learn alike."""
        optimizer, rate = self.rules.of(names[0]), self.rules.rate(names[0], lr, factor)
        if not len(touched) or optimizer.frozen:
            return
        rows = self.rows.data[touched]
        state = {column.name: self.state[column.name][touched] for column in optimizer.columns}
        optimizer.update(rows, gradient, state, rate, number)
        self.rows.data[touched] = rows
        for name, values in state.items():
            self.state[name][touched] = values

    def _columns(self) -> dict[str, bool]:
        """Whether a column of the optimizers' state has a value per weight, by name."""
        every = [self.rules.of(table.name) for table in self.tables]
        return {column.name: column.per_value for optimizer in every for column in optimizer.columns}

    def _state(self, per_value: bool) -> Tensor:
        return torch.zeros(self.rows.shape if per_value else self.rows.shape[:1])
