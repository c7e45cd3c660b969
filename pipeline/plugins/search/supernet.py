"""The super-net: a DLRM with every choice in it. Parts act on the values at its places by the gates of a draw.

Differentiable architecture search for click models (Krishna et al. 2021, arXiv 2110.14812) on DLRM's backbone. All
choices share weights: a narrow table is the first columns of the wide one.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import combinations

import torch
from torch import Tensor, nn

from pipeline.models.settings import DlrmConfig
from pipeline.plugins.search.architecture import Gates
from pipeline.records.dataset import DatasetSchema

Act = Callable[[Tensor, Gates], Tensor]


class SuperNet(nn.Module):
    """forward(dense [B, n], embeddings [B, F, D], gates) -> logits [B]; the tables are apart (``tables.SearchTables``).

    Places, in the order of the forward pass: ``dense`` [B, n], ``embeddings`` [B, F, D] as looked up, ``vectors``
    [B, F, D] behind each feature's projection, ``bottom_mlp layer <i>`` [B, w], ``bottom_mlp depth`` [layers, B, D],
    ``pairs`` [B, P] (the features of each are in ``pairs``), ``top_mlp layer <i>`` [B, w], ``top_mlp depth``
    [layers, B, 1]: ends behind each number of layers, most layers first. The projections are drawn from ``seed``.
    ``dtype``: in which the layers multiply; None: float32.
    """

    places: Tensor

    def __init__(self, model: DlrmConfig, schema: DatasetSchema, seed: int, dtype: torch.dtype | None = None) -> None:
        super().__init__()
        self.schema, self.dim = schema, model.embedding_dim
        names = [column.name for column in schema.sparse]
        self.project = nn.Parameter(torch.stack([torch.empty(self.dim, self.dim) for _ in names]))
        generator = torch.Generator().manual_seed(seed)
        for each in self.project.data:
            nn.init.orthogonal_(each, generator=generator)
        self.bottom = _Mlp(len(schema.dense), model.bottom_mlp, self.dim, dtype) if schema.dense else None
        vectors = len(names) + (self.bottom is not None)
        shift = vectors - len(names)
        dropped = {frozenset(pair) for pair in model.drop_pairs}
        self.pairs = [pair for pair in combinations(names, 2) if frozenset(pair) not in dropped]
        self.fixed = shift * len(names)  # pairs with the numeric features' vector come first; parts see the others
        places = [(0, place + 1) for place in range(self.fixed)]
        places += [(names.index(one) + shift, names.index(other) + shift) for one, other in self.pairs]
        flat = torch.tensor([one * vectors + other for one, other in places], dtype=torch.int64)
        self.register_buffer("places", flat, persistent=False)
        self.top = _Mlp(self.dim + len(places), model.top_mlp, 1, dtype)
        self._acts: dict[str, list[Act]] = {}
        self.measured: set[str] = set()  # decisions whose choices act on the configured model without being learnt

    def at(self, place: str, act: Act) -> None:
        """Have ``act`` change the values at ``place``; acts of one place follow one another."""
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
        """Have an untrained net's logits near ``logit``."""
        for end in self.top.ends.parameters():
            if end.dim() == 1:  # the biases
                nn.init.constant_(end, logit)

    def _act(self, place: str, values: Tensor, gates: Gates) -> Tensor:
        for act in self._acts.get(place, ()):
            values = act(values, gates)
        return values


class _Mlp(nn.Module):
    """Layers with ReLU and an end of ``width`` values behind each; the deepest comes out, or what ``depth`` makes."""

    def __init__(self, inputs: int, widths: list[int], width: int, dtype: torch.dtype | None) -> None:
        super().__init__()
        self.dtype = dtype
        sizes = [inputs, *widths]
        self.layers = nn.ModuleList(nn.Linear(a, b) for a, b in zip(sizes, sizes[1:], strict=False))
        self.ends = nn.ModuleList(nn.Linear(size, width) for size in reversed(widths or sizes))

    def forward(self, values: Tensor, act: Callable[[str, Tensor], Tensor]) -> Tensor:
        hidden = [] if len(self.layers) else [values]
        for number, layer in enumerate(self.layers, 1):
            with torch.autocast("cpu", self.dtype, enabled=self.dtype is not None):
                values = layer(values).relu()
            values = act(f"layer {number}", values.float())
            hidden.append(values)
        ends = [end(each) for end, each in zip(self.ends, reversed(hidden), strict=True)]
        return act("depth", torch.stack(ends))[0]
