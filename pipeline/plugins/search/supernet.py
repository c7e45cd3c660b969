"""The super-net: a DLRM with every choice in it, on tables whose rows lie whole in one tensor.

Differentiable architecture search for click models (Krishna et al. 2021, arXiv 2110.14812) on DLRM's backbone. All
choices share weights: a narrow table is the first columns of the wide one. Parts act on the values at the net's places
by the gates of a draw.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import combinations, groupby, pairwise

import torch
from torch import Tensor, nn

from pipeline.config.model import ModelConfig
from pipeline.embeddings.table_optimizers import TableRules
from pipeline.models.settings import DlrmConfig
from pipeline.plugins.search.architecture import Gates
from pipeline.records.dataset import DatasetSchema


class SearchTables:
    """forward: ids of a batch -> embeddings [B, F, D]. A table narrower than D has zeros behind its width.

    Initial rows are uniform as in training, drawn from ``seed``. ``rows``: the rows of all tables, one after the other.
    """

    def __init__(self, schema: DatasetSchema, model: ModelConfig, rules: TableRules, seed: int) -> None:
        self.model, self.rules, self.dim = model, rules, model.embedding_dim
        self.tables = schema.tables
        first: dict[str, int] = {}
        self.ends: dict[str, int] = {}
        end = 0
        for table in self.tables:
            first[table.name] = end
            end += table.rows
            self.ends[table.name] = end
        self.owners = [column.owner for column in schema.sparse]
        self.first = torch.tensor([first[owner] for owner in self.owners])
        self.mean = torch.tensor([model.table(owner).pooling == "mean" for owner in self.owners])
        # Keep one tensor for all tables, so that a batch is one lookup and one sparse gradient.
        generator = torch.Generator().manual_seed(seed)
        self.rows = nn.Parameter(torch.rand(end, self.dim, generator=generator).mul_(2).sub_(1))
        columns: dict[str, bool] = {}
        for table in self.tables:
            bound = model.table(table.name).init_bound
            if bound is None:
                bound = 1 / math.sqrt(table.rows)
            own = self.rows.data[first[table.name] : self.ends[table.name]]
            own.mul_(bound)
            own[:, model.dim_of(table.name) :] = 0
            columns |= {column.name: column.per_value for column in rules.of(table.name).columns}
        # A column of state has a place for every row, whether or not the optimizer of its table uses it. Allocate it
        # once and not for each table: it is as large as ``rows``.
        self.state: dict[str, Tensor] = {}
        for name, per_value in columns.items():
            self.state[name] = torch.zeros(self.rows.shape if per_value else self.rows.shape[:1])

    def __call__(self, ids: Tensor, lengths: Tensor, weights: Tensor | None = None) -> Tensor:
        """Look up ``ids``, feature by feature, with ``lengths`` [F * B] and ``weights`` of the ids."""
        features = len(self.first)
        counts = lengths.view(features, -1)
        # Shift the ids of a feature to where its table begins in ``rows``.
        ids = ids.long() + self.first.repeat_interleave(counts.sum(1))
        offsets = torch.cat([lengths.new_zeros(1, dtype=torch.int64), lengths.long().cumsum(0)])
        pooled = nn.functional.embedding_bag(
            ids, self.rows, offsets, mode="sum", sparse=True, per_sample_weights=weights, include_last_offset=True
        ).view(features, -1, self.dim)
        if self.mean.any():
            # embedding_bag takes no weights with mode="mean". A bag without ids must not become 0 / 0.
            pooled = pooled / torch.where(self.mean[:, None], counts.clamp_min(1), 1)[:, :, None]
        return pooled.transpose(0, 1)

    @torch.no_grad()
    def step(self, lr: float, factor: float, number: int) -> None:
        """Update the rows of the last backward pass; ``number`` from 1, ``factor``: the schedule's."""
        assert self.rows.grad is not None
        gradient = self.rows.grad.coalesce()
        touched, values = gradient.indices()[0], gradient.values()
        self.rows.grad = None
        # Coalesced indices are sorted, so the touched rows of a table are contiguous, and so are those of neighbouring
        # tables with the same optimizer: one update serves them all.
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
        for name, high in self.ends.items():
            # Features that share a table have one projection each: the axes have to fit the vectors of all of them.
            mine = [place for place, owner in enumerate(self.owners) if owner == name]
            rows = self.rows.data[low:high]
            together = torch.cat([project[place] for place in mine], dim=1)  # [D, columns of the vectors]
            # Use the Gram matrix, which is only as large as the table is wide; there may be millions of rows.
            _, axes = torch.linalg.eigh((together.mT @ (rows.mT @ rows) @ together).double())
            axes = axes.flip(1)[:, : self.dim].to(rows.dtype)  # largest variance first
            self.rows.data[low:high] = rows @ (together @ axes)
            for place, back in zip(mine, axes.split(self.dim), strict=True):
                turned[place] = back.mT
            low = high
        return turned

    def _update(
        self, touched: Tensor, gradient: Tensor, names: Sequence[str], lr: float, factor: float, number: int
    ) -> None:
        """Update rows of tables that learn alike."""
        optimizer, rate = self.rules.of(names[0]), self.rules.lr(names[0], lr, factor)
        if not len(touched) or optimizer.frozen:
            return
        rows = self.rows.data[touched]
        state = {column.name: self.state[column.name][touched] for column in optimizer.columns}
        optimizer.update(rows, gradient, state, rate, number)
        self.rows.data[touched] = rows
        for name, values in state.items():
            self.state[name][touched] = values


Act = Callable[[Tensor, Gates], Tensor]


class SuperNet(nn.Module):
    """forward(dense [B, n], embeddings [B, F, D], gates) -> logits [B]; the tables are separate (``SearchTables``).

    Places, in the order of the forward pass: ``dense`` [B, n], ``embeddings`` [B, F, D] as looked up, ``vectors``
    [B, F, D] behind each feature's projection, ``bottom_mlp layer <i>`` [B, w], ``bottom_mlp depth`` [layers, B, D],
    ``pairs`` [B, P] (the features of each are in ``pairs``), ``top_mlp layer <i>`` [B, w], ``top_mlp depth``
    [layers, B, 1]: ends behind each number of layers, most layers first. The projections are drawn from ``seed``.
    ``dtype``: the type in which the layers multiply; None: float32.
    """

    places: Tensor

    def __init__(self, model: DlrmConfig, schema: DatasetSchema, seed: int, dtype: torch.dtype | None = None) -> None:
        super().__init__()
        self.schema, self.dim = schema, model.embedding_dim
        names = [column.name for column in schema.sparse]
        self.project = nn.Parameter(torch.empty(len(names), self.dim, self.dim))
        generator = torch.Generator().manual_seed(seed)
        for each in self.project.data:
            nn.init.orthogonal_(each, generator=generator)
        self.bottom = _Mlp(len(schema.dense), model.bottom_mlp, self.dim, dtype) if schema.dense else None
        # The vector of the numeric features comes first and shifts the categorical ones by ``shift``.
        shift = int(self.bottom is not None)
        vectors = len(names) + shift
        dropped = {frozenset(pair) for pair in model.drop_pairs}
        self.pairs = [pair for pair in combinations(names, 2) if frozenset(pair) not in dropped]
        self.fixed = shift * len(names)  # pairs with the numeric features' vector come first; parts see only the others
        # Places of the kept pairs in the matrix of all products, flattened row by row. Pairs with the numeric features'
        # vector are in the first row.
        places = list(range(1, self.fixed + 1))
        for one, other in self.pairs:
            places.append((names.index(one) + shift) * vectors + names.index(other) + shift)
        self.register_buffer("places", torch.tensor(places, dtype=torch.int64), persistent=False)
        self.top = _Mlp(self.dim + len(places), model.top_mlp, 1, dtype)
        self._acts: dict[str, list[Act]] = {}
        # Decisions whose choices are measured on the configured model instead of learnt.
        self.measured: set[str] = set()

    def at(self, place: str, act: Act) -> None:
        """Let ``act`` change the values at ``place``; acts of one place follow one another."""
        self._acts.setdefault(place, []).append(act)

    def forward(self, dense: Tensor, embeddings: Tensor, gates: Gates) -> Tensor:
        dense = self._act("dense", dense, gates)
        embeddings = self._act("embeddings", embeddings, gates)
        vectors = self._act("vectors", torch.einsum("bfd,fde->bfe", embeddings, self.project), gates)
        if self.bottom is not None:
            first = self.bottom(dense, lambda place, value: self._act(f"bottom_mlp {place}", value, gates)).relu()
            vectors = torch.cat([first[:, None], vectors], dim=1)
        products = torch.bmm(vectors, vectors.mT).flatten(1).index_select(1, self.places)
        pairs = self._act("pairs", products[:, self.fixed :], gates)
        inputs = torch.cat([vectors[:, 0], products[:, : self.fixed], pairs], dim=1)
        return self.top(inputs, lambda place, value: self._act(f"top_mlp {place}", value, gates)).squeeze(1)

    def start_at(self, logit: float) -> None:
        """Start an untrained net's logits near ``logit``."""
        for end in self.top.ends.parameters():
            if end.dim() == 1:  # the biases
                nn.init.constant_(end, logit)

    def _act(self, place: str, values: Tensor, gates: Gates) -> Tensor:
        for act in self._acts.get(place, ()):
            values = act(values, gates)
        return values


class _Mlp(nn.Module):
    """Layers with ReLU, and an end of ``width`` values after each; returns the deepest end, or what ``depth`` picks."""

    def __init__(self, inputs: int, widths: list[int], width: int, dtype: torch.dtype | None) -> None:
        super().__init__()
        self.dtype = dtype
        sizes = [inputs, *widths]
        self.layers = nn.ModuleList(nn.Linear(*pair) for pair in pairwise(sizes))
        # An MLP may end after each of its layers. An MLP without layers ends after its inputs.
        self.ends = nn.ModuleList(nn.Linear(size, width) for size in reversed(widths or sizes))

    def forward(self, values: Tensor, act: Callable[[str, Tensor], Tensor]) -> Tensor:
        hidden = [] if len(self.layers) else [values]
        for number, layer in enumerate(self.layers, 1):
            with torch.autocast("cpu", self.dtype, enabled=self.dtype is not None):
                values = layer(values).relu()
            # Parts and ends work in float32; autocast covers only the matrix products of the layers.
            values = act(f"layer {number}", values.float())
            hidden.append(values)
        ends = [end(each) for end, each in zip(self.ends, reversed(hidden), strict=True)]
        return act("depth", torch.stack(ends))[0]
