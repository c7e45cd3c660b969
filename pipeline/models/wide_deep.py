"""The module of Wide & Deep (Cheng et al. 2016, arXiv 1606.07792, section 3) with a sparse linear layer."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from pipeline.core.errors import ConfigError
from pipeline.models.layers.interaction import concat_vectors, with_own_weights
from pipeline.models.layers.perceptron import HeadedRanker, Logit, MaxNorm, mlp
from pipeline.specs.model import ModelInputs


class SparseLinear(nn.Module):
    """forward(dense [B, n], weights [B, J]) -> [B, J]: N_j = sum_i W_ij norm(V_i) + B_j (Twitter Cortex, 2018).

    An id's value is 1 (or its weight in a list), so ``weights`` are the sums by pooling of the ids' own rows of W. A
    numeric feature is divided by the largest magnitude seen so far, and gets its own bias (``MaxNorm``).
    """

    def __init__(self, dense: int, outputs: int) -> None:
        super().__init__()
        self.norm: MaxNorm | None = None
        self.linear: nn.Linear | None = None
        # Without numeric features these would be empty parameters in every checkpoint.
        if dense:
            self.norm = MaxNorm(range(dense))
            # The layer has no bias, because ``bias`` is there with or without numeric features.
            self.linear = nn.Linear(dense, outputs, bias=False)
        self.bias = nn.Parameter(torch.zeros(outputs))

    def forward(self, dense: Tensor, weights: Tensor) -> Tensor:
        if self.norm is not None and self.linear is not None:
            weights = weights + self.linear(self.norm(dense))
        return weights + self.bias


class WideDeep(HeadedRanker):
    """forward(dense [B, n], embeddings [B, V, D]) -> logits [B] in float32.

    The first ``wide`` values of each embedding are the id's weights in the sparse linear layer. A single output of that
    layer is the paper's wide part and is added to the logit; several feed the last layer through ReLU.
    """

    def __init__(
        self,
        inputs: ModelInputs,
        *,
        wide: int,
        top_mlp: Sequence[int],
        norm: str = "none",
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        dense, vectors = len(inputs.dense), len(inputs.vectors)
        # The settings check embedding_dim, but vectors of towers have another width.
        if wide >= inputs.dim:
            raise ConfigError(
                f"model.wide is {wide}, expected less than the width {inputs.dim} of the vectors", hint="model.wide=1"
            )
        self.count = wide
        self.wide = SparseLinear(dense, wide)
        widths = [dense + vectors * (inputs.dim - wide), *top_mlp]
        self.top = mlp(widths, last_activation=True, norm=norm, dropout=dropout)
        # A single wide value is added to the logit; several are inputs of the last layer.
        if wide > 1:
            self.head = Logit(widths[-1] + wide)
        else:
            self.head = Logit(widths[-1])

    def forward(self, dense: Tensor, embeddings: Tensor) -> Tensor:
        deep, wide = self.deep_and_wide(dense, embeddings)
        if self.count > 1:
            logits: Tensor = self.head(torch.cat([deep, torch.relu(wide)], dim=1))
            return logits
        return self.head(deep) + wide.squeeze(1)

    def deep_and_wide(self, dense: Tensor, embeddings: Tensor) -> tuple[Tensor, Tensor]:
        """Return the last hidden layer of the MLP, [B, w], and the output of the sparse linear layer, [B, J]."""
        weights, rest = with_own_weights(embeddings, self.count)
        wide = self.wide(dense, weights)
        return self.top(concat_vectors(dense, rest)), wide

    def last_hidden(self, dense: Tensor, embeddings: Tensor) -> Tensor:
        """Return the deep part's last layer and the wide part, concatenated."""
        deep, wide = self.deep_and_wide(dense, embeddings)
        if self.count > 1:
            wide = torch.relu(wide)
        return torch.cat([deep, wide.to(deep.dtype)], dim=1)

    def drop_head(self) -> int:
        """See ``Ranker.drop_head``."""
        # ``last_hidden`` always includes the wide part, but a single wide value is not an input of the head.
        return super().drop_head() + (self.count == 1)
