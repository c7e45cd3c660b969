"""The module of DLRM (Naumov et al. 2019, arXiv 1906.00091): bottom MLP, dot interaction, top MLP."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from pipeline.models.layers.interaction import DotInteraction
from pipeline.models.layers.mlp import Logit, Ranker, compute_dtype, mlp


class Dlrm(Ranker):
    """forward(dense [B, n], embeddings [B, V, D]) -> logits [B] in float32.

    With ``dense`` 0 there is no bottom MLP, and the first embedding replaces its output beside the dot products; the
    ``dense`` argument of forward is then [B, 0] and is not read.
    """

    def __init__(self, *, dense: int, vectors: int, dim: int, bottom: Sequence[int], top: Sequence[int]) -> None:
        super().__init__()
        self.bottom = mlp([dense, *bottom, dim], last_activation=True) if dense else None
        self.interaction = DotInteraction(vectors + (dense > 0), dim)
        widths = [self.interaction.width, *top]
        self.top = mlp(widths, last_activation=True)
        self.head = Logit(widths[-1])

    def forward(self, dense: Tensor, embeddings: Tensor) -> Tensor:
        if self.bottom is not None:
            first = self.bottom(dense)
            vectors = torch.cat([first[:, None], embeddings.to(first.dtype)], dim=1)
        else:
            vectors = embeddings.to(compute_dtype(embeddings))
        logits: Tensor = self.head(self.top(self.interaction(vectors)))
        return logits

    def start_at(self, logit: float) -> None:
        """See ``Ranker.start_at``."""
        self.head.start_at(logit)
