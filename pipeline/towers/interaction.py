"""How strongly features interact, read off their embeddings (DMT, MLSys'24, the tower partitioner)."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from pipeline.towers.distances import Matrix

_PRODUCTS = 1 << 24  # cosines held at a time


class Interaction:
    """Adds up |cosine| of every pair of features' pooled embeddings over samples; ``matrix`` is the mean.

    A sample counts for the pairs of which it has both features: the embedding of an empty multi-valued one is zero.
    """

    def __init__(self, features: int) -> None:
        self._sum = torch.zeros(features, features, dtype=torch.float64)
        self._count = torch.zeros(features, features, dtype=torch.float64)

    @torch.no_grad()
    def add(self, embeddings: Tensor) -> None:
        """Take the samples of ``embeddings`` [B, F, D]."""
        for part in embeddings.split(max(1, _PRODUCTS // embeddings.shape[1] ** 2)):
            present = (part.abs().amax(2) > 0).float()
            unit = functional.normalize(part.float(), dim=2)
            self._sum += torch.bmm(unit, unit.transpose(1, 2)).abs().sum(0).double().cpu()
            self._count += (present.T @ present).double().cpu()

    def matrix(self) -> Matrix:
        """Mean |cosine| [F, F] in [0, 1], symmetric, diagonal 1; 0 for features that never met."""
        found = (self._sum / self._count.clamp_min(1)).numpy()
        found = np.clip((found + found.T) / 2, 0.0, 1.0)
        np.fill_diagonal(found, 1.0)
        return np.asarray(found)
