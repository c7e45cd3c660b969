"""Projects embeddings of several widths to the width of the model."""

from __future__ import annotations

import hashlib
import itertools
import math
from collections.abc import Mapping

import torch
from torch import Tensor, nn


class Projections(nn.Module):
    """forward(concatenated embeddings [B, sum of widths]) -> [B, F, ``dim``], float32.

    ``widths`` are those of the features' embeddings, in order. An embedding of width ``dim`` stays as it is; any other
    is multiplied by its feature's own matrix, as in mixed dimension embeddings (Ginart et al. 2019, arXiv 1909.11810,
    section 3.1). The matrix's initial values depend on ``seed`` and the feature's name alone.
    """

    def __init__(self, widths: Mapping[str, int], dim: int, seed: int) -> None:
        super().__init__()
        self.widths, self.dim = dict(widths), dim
        weights = {}
        by_width: dict[int, list[int]] = {}
        for i, (name, width) in enumerate(widths.items()):
            by_width.setdefault(width, []).append(i)
            if width == dim:
                continue
            # Initial values are uniform with variance 1 / width, which keeps the size of the embeddings.
            digest = hashlib.blake2b(f"{seed}|{name}".encode(), digest_size=8).digest()
            generator = torch.Generator().manual_seed(int.from_bytes(digest, "little") >> 1)
            bound = math.sqrt(3.0 / width)
            weights[name] = nn.Parameter((torch.rand(width, dim, generator=generator) * 2 - 1) * bound)
        # ParameterDict sorts a dict by name, and the order of parameters is part of stored states.
        self.weights = nn.ParameterDict(weights)
        # Features of one width are multiplied together, so vectors come in the order of widths.
        self._groups = [by_width[width] for width in sorted(by_width)]
        order = list(itertools.chain(*self._groups))
        self._places = [order.index(i) for i in range(len(order))]

    def forward(self, embeddings: Tensor) -> Tensor:
        names = list(self.widths)
        parts = embeddings.split(list(self.widths.values()), dim=1)
        vectors: list[Tensor] = []
        for group in self._groups:
            if self.widths[names[group[0]]] == self.dim:
                vectors += [parts[i] for i in group]
                continue
            weights = torch.stack([self.weights[names[i]] for i in group])
            vectors += torch.bmm(torch.stack([parts[i] for i in group]), weights).unbind()
        return torch.stack([vectors[place] for place in self._places], dim=1)


def projections(widths: Mapping[str, int], dim: int, seed: int) -> Projections | None:
    """Return the projections to width ``dim``; None if all ``widths`` are equal to it."""
    if set(widths.values()) <= {dim}:
        return None
    return Projections(widths, dim, seed)
