"""Measures how strongly features interact, on their embeddings (DMT, MLSys'24, tower partitioner)."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from pipeline.towers.partitioner import Matrix

_PRODUCTS = 1 << 24  # cosines held at a time


class Interaction:
    """Adds up |cosine| of every pair of features' pooled embeddings over samples; ``matrix`` is the mean.

    Each feature's mean over the batch is subtracted first: it is the feature's own effect, and all features share its
    direction. The magnitude is taken before the mean, in which interactions of opposite signs would cancel: the paper's
    mean cosine, ``signed``, cannot distinguish planted blocks from chance. A sample
    counts for the pairs of which it has both features: the embedding of an empty multi-valued one is zero.
    """

    def __init__(self, features: int, *, signed: bool = False) -> None:
        self._signed = signed
        self._sum = torch.zeros(features, features, dtype=torch.float64)
        self._count = torch.zeros(features, features, dtype=torch.float64)

    @torch.no_grad()
    def add(self, embeddings: Tensor) -> None:
        """Add the samples of a batch, ``embeddings`` [B, F, D]."""
        present = (embeddings.abs().amax(2, keepdim=True) > 0).float()
        values = embeddings.float()
        if not self._signed:
            values = values - values.sum(0) / present.sum(0).clamp_min(1)
        unit = functional.normalize(values, dim=2) * present
        for part in unit.split(max(1, _PRODUCTS // embeddings.shape[1] ** 2)):
            cosines = torch.bmm(part, part.transpose(1, 2))
            self._sum += (cosines if self._signed else cosines.abs()).sum(0).double().cpu()
        both = present.squeeze(2)
        self._count += (both.T @ both).double().cpu()

    def matrix(self) -> Matrix:
        """Return the mean |cosine| [F, F] in [0, 1], symmetric, diagonal 1; 0 for features that never met.

        With ``signed``, it is |mean cosine| of unmodified embeddings, the paper's definition.
        """
        # Both halves of the matrix are sums of the same products, except for rounding, so the mean makes it symmetric.
        mean = (self._sum / self._count.clamp_min(1)).abs().numpy()
        matrix = np.clip((mean + mean.T) / 2, 0.0, 1.0)
        np.fill_diagonal(matrix, 1.0)
        return np.asarray(matrix)
