"""Embeddings of several widths brought to the width of the model."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping
from itertools import groupby

import torch
from torch import Tensor, nn


class Projections(nn.Module):
    """forward(embeddings side by side [B, sum of widths]) -> [B, F, ``dim``], float32.

    ``widths``: of the features' embeddings, in order. One of width ``dim`` stays as it is; any other is multiplied by a
    matrix of its feature's own, as in mixed dimension embeddings (Ginart et al. 2019, arXiv 1909.11810, section 3.1).
    Its initial values depend on ``seed`` and the feature's name alone.
    """

    def __init__(self, widths: Mapping[str, int], dim: int, seed: int) -> None:
        super().__init__()
        self.widths, self.dim = dict(widths), dim
        self.weights = nn.ParameterDict(
            {name: _drawn(seed, name, width, dim) for name, width in widths.items() if width != dim}
        )
        numbered = sorted(range(len(widths)), key=[*widths.values()].__getitem__)
        self._groups = [[*group] for _, group in groupby(numbered, key=[*widths.values()].__getitem__)]
        order = [place for group in self._groups for place in group]
        self._places = [order.index(place) for place in range(len(order))]

    def forward(self, embeddings: Tensor) -> Tensor:
        names = list(self.widths)
        parts = embeddings.split(list(self.widths.values()), dim=1)
        vectors: list[Tensor] = []
        for group in self._groups:
            if self.widths[names[group[0]]] == self.dim:
                vectors += [parts[place] for place in group]
                continue
            weights = torch.stack([self.weights[names[place]] for place in group])
            vectors += torch.bmm(torch.stack([parts[place] for place in group]), weights).unbind()
        return torch.stack([vectors[place] for place in self._places], dim=1)


def projections(widths: Mapping[str, int], dim: int, seed: int) -> Projections | None:
    """The projections to width ``dim``; None where all ``widths`` are that."""
    return None if set(widths.values()) <= {dim} else Projections(widths, dim, seed)


def _drawn(seed: int, name: str, width: int, dim: int) -> nn.Parameter:
    """A matrix [width, dim] that keeps the size of embeddings: uniform, of variance 1 / width."""
    digest = hashlib.blake2b(f"{seed}|{name}".encode(), digest_size=8).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest, "little") >> 1)
    bound = math.sqrt(3.0 / width)
    return nn.Parameter((torch.rand(width, dim, generator=generator) * 2 - 1) * bound)
