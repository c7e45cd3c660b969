"""The module of DCN-V2 (Wang et al. 2021, arXiv 2008.13535, section 3): cross layers and an MLP."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from pipeline.models.layers.interaction import CrossNet, concat_vectors
from pipeline.models.layers.perceptron import HeadedRanker, Logit, mlp
from pipeline.specs.model import ModelInputs


class DcnV2(HeadedRanker):
    """forward(dense [B, n], embeddings [B, V, D]) -> logits [B] in float32."""

    def __init__(
        self,
        inputs: ModelInputs,
        *,
        cross: str,
        cross_layers: int,
        cross_rank: int,
        cross_experts: int,
        cross_structure: str,
        top_mlp: Sequence[int],
        norm: str = "none",
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        self.parallel = cross_structure == "parallel"
        self.cross = CrossNet(cross, cross_layers, inputs.width, cross_rank, cross_experts)
        widths = [inputs.width, *top_mlp]
        self.top = mlp(widths, last_activation=True, norm=norm, dropout=dropout)
        self.head = Logit(widths[-1] + inputs.width * self.parallel)

    def last_hidden(self, dense: Tensor, embeddings: Tensor) -> Tensor:
        """See ``Ranker.last_hidden``."""
        first = concat_vectors(dense, embeddings)
        crossed = self.cross(first)
        if self.parallel:
            # In figure 1b the MLP takes the inputs, and the last layer takes both.
            return torch.cat([crossed, self.top(first)], dim=1)
        # In figure 1a the MLP takes the output of the cross layers.
        hidden: Tensor = self.top(crossed)
        return hidden
