"""The module of MaskNet (Wang et al. 2021, arXiv 2102.07619, section 3): serial and parallel."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from pipeline.models.layers.interaction import Vectors
from pipeline.models.layers.mlp import HeadedRanker, Logit, MaskBlock, top_mlp
from pipeline.specs.model import ModelInputs

if TYPE_CHECKING:
    from pipeline.models.settings import MaskNetConfig


class MaskNet(HeadedRanker):
    """forward(dense [B, n], embeddings [B, V, D]) -> logits [B] in float32.

    Each vector is normalised by itself before the blocks. Serial: a block takes what the one before it gives; its mask
    is always of the inputs (section 3.5). Parallel: all take the inputs, and the MLP takes what all give (3.6).
    """

    def __init__(self, config: MaskNetConfig, inputs: ModelInputs) -> None:
        super().__init__()
        self.vectors = Vectors(len(inputs.dense), len(inputs.vectors), inputs.dim, config.bottom_mlp)
        self.norm = nn.LayerNorm(inputs.dim)
        self.parallel = config.block_structure == "parallel"
        whole, width = self.vectors.count * inputs.dim, config.block_width
        given = [whole] * config.blocks if self.parallel else [whole, *[width] * (config.blocks - 1)]
        self.blocks = nn.ModuleList(MaskBlock(each, whole, config.mask_width, width) for each in given)
        self.top, last = top_mlp(width * (config.blocks if self.parallel else 1), config)
        self.head = Logit(last)

    def last_hidden(self, dense: Tensor, embeddings: Tensor) -> Tensor:
        """See ``Ranker.last_hidden``."""
        vectors = self.vectors(dense, embeddings)
        whole, value = vectors.flatten(1), self.norm(vectors).flatten(1)
        if self.parallel:
            value = torch.cat([block(value, whole) for block in self.blocks], dim=1)
        else:
            for block in self.blocks:
                value = block(value, whole)
        hidden: Tensor = self.top(value)
        return hidden
