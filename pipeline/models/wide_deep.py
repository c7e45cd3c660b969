"""The module of Wide & Deep (Cheng et al. 2016, arXiv 1606.07792, section 3) with a sparse linear layer."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from pipeline.errors import ConfigError
from pipeline.models.layers.interaction import concat_vectors, with_own_weights
from pipeline.models.layers.mlp import HeadedRanker, Logit, MaxNorm, top_mlp
from pipeline.specs.model import ModelInputs

if TYPE_CHECKING:
    from pipeline.models.settings import WideDeepConfig


class SparseLinear(nn.Module):
    """forward(dense [B, n], weights [B, J]) -> [B, J]: N_j = sum_i W_ij norm(V_i) + B_j (Twitter Cortex, 2018).

    An id's value is 1 (or its weight in a list), so ``weights`` are the sums that pooling made of the ids' own rows of
    W. A numeric feature is divided by the largest magnitude seen of it, and gets a bias of its own (``MaxNorm``).
    """

    def __init__(self, dense: int, outputs: int) -> None:
        super().__init__()
        self.norm = MaxNorm(range(dense)) if dense else None
        self.linear = nn.Linear(dense, outputs, bias=False) if dense else None
        self.bias = nn.Parameter(torch.zeros(outputs))

    def forward(self, dense: Tensor, weights: Tensor) -> Tensor:
        if self.norm is not None and self.linear is not None:
            weights = weights + self.linear(self.norm(dense))
        return weights + self.bias


class WideDeep(HeadedRanker):
    """forward(dense [B, n], embeddings [B, V, D]) -> logits [B] in float32.

    The first ``wide`` values of each embedding are the id's weights in the sparse linear layer. One output of it is the
    wide part of the paper and is added to the logit; more feed the last layer through ReLU.
    """

    def __init__(self, config: WideDeepConfig, inputs: ModelInputs) -> None:
        super().__init__()
        dense, vectors = len(inputs.dense), len(inputs.vectors)
        if config.wide >= inputs.dim:
            raise ConfigError(
                f"model.wide is {config.wide}, expected less than the width {inputs.dim} of the vectors",
                hint="model.wide=1",
            )
        self.count = config.wide
        self.wide = SparseLinear(dense, config.wide)
        self.top, width = top_mlp(dense + vectors * (inputs.dim - config.wide), config)
        self.head = Logit(width if config.wide == 1 else width + config.wide)

    def forward(self, dense: Tensor, embeddings: Tensor) -> Tensor:
        deep, wide = self._parts(dense, embeddings)
        if self.count > 1:
            logits: Tensor = self.head(torch.cat([deep, torch.relu(wide)], dim=1))
            return logits
        return self.head(deep) + wide.squeeze(1)

    def _parts(self, dense: Tensor, embeddings: Tensor) -> tuple[Tensor, Tensor]:
        weights, rest = with_own_weights(embeddings, self.count)
        wide = self.wide(dense, weights)
        return self.top(concat_vectors(dense, rest)), wide

    def last_hidden(self, dense: Tensor, embeddings: Tensor) -> Tensor:
        """The deep part's last layer beside the wide part."""
        deep, wide = self._parts(dense, embeddings)
        return torch.cat([deep, (torch.relu(wide) if self.count > 1 else wide).to(deep.dtype)], dim=1)

    def drop_head(self) -> int:
        """See ``Ranker.drop_head``."""
        return super().drop_head() + (self.count == 1)
