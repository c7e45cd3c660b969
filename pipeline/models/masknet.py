"""The module of MaskNet (Wang et al. 2021, arXiv 2102.07619, section 3): serial and parallel."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from pipeline.models.layers.interaction import Vectors
from pipeline.models.layers.perceptron import HeadedRanker, Logit, MaskBlock, mlp
from pipeline.specs.model import ModelInputs


class MaskNet(HeadedRanker):
    """forward(dense [B, n], embeddings [B, V, D]) -> logits [B] in float32."""

    def __init__(
        self,
        inputs: ModelInputs,
        *,
        block_structure: str,
        blocks: int,
        block_width: int,
        mask_width: int,
        bottom_mlp: Sequence[int],
        top_mlp: Sequence[int],
        norm: str = "none",
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        self.vectors = Vectors(len(inputs.dense), len(inputs.vectors), inputs.dim, bottom_mlp)
        self.norm = nn.LayerNorm(inputs.dim)
        self.parallel = block_structure == "parallel"
        whole = self.vectors.count * inputs.dim
        self.blocks = nn.ModuleList()
        for number in range(blocks):
            # In series, every block but the first takes the output of the previous one.
            width = whole if self.parallel or number == 0 else block_width
            self.blocks.append(MaskBlock(width, whole, mask_width, block_width))
        outputs = block_width * blocks if self.parallel else block_width
        widths = [outputs, *top_mlp]
        self.top = mlp(widths, last_activation=True, norm=norm, dropout=dropout)
        self.head = Logit(widths[-1])

    def last_hidden(self, dense: Tensor, embeddings: Tensor) -> Tensor:
        """See ``Ranker.last_hidden``."""
        vectors = self.vectors(dense, embeddings)
        whole = vectors.flatten(1)
        # Each vector is normalised by itself before the blocks.
        value = self.norm(vectors).flatten(1)
        if self.parallel:
            # In section 3.6 all blocks take the inputs, and the MLP takes all their outputs.
            value = torch.cat([block(value, whole) for block in self.blocks], dim=1)
        else:
            # In section 3.5 a block takes the output of the previous one, but its mask always depends on the inputs.
            for block in self.blocks:
                value = block(value, whole)
        hidden: Tensor = self.top(value)
        return hidden
