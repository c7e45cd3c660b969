"""The module of DCN-V2 (Wang et al. 2021, arXiv 2008.13535, section 3): cross layers and an MLP."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from pipeline.models.layers.interaction import CrossNet, concat_vectors
from pipeline.models.layers.mlp import HeadedRanker, Logit, top_mlp
from pipeline.specs.model import ModelInputs

if TYPE_CHECKING:
    from pipeline.models.settings import DcnV2Config


class DcnV2(HeadedRanker):
    """forward(dense [B, n], embeddings [B, V, D]) -> logits [B] in float32.

    Stacked: the MLP takes what the cross layers give (figure 1a). Parallel: it takes the inputs, and the last layer
    takes both (figure 1b).
    """

    def __init__(self, config: DcnV2Config, inputs: ModelInputs) -> None:
        super().__init__()
        self.parallel = config.cross_structure == "parallel"
        self.cross = CrossNet(config.cross, config.cross_layers, inputs.width, config.cross_rank, config.cross_experts)
        self.top, width = top_mlp(inputs.width, config)
        self.head = Logit(width + inputs.width * self.parallel)

    def last_hidden(self, dense: Tensor, embeddings: Tensor) -> Tensor:
        """See ``Ranker.last_hidden``."""
        first = concat_vectors(dense, embeddings)
        crossed = self.cross(first)
        hidden: Tensor = torch.cat([crossed, self.top(first)], dim=1) if self.parallel else self.top(crossed)
        return hidden
