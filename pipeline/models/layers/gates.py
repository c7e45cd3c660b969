"""Gates: factors for the inputs that depend on a sample."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from pipeline.models.layers.mlp import mlp


class FeatureGate(nn.Module):
    """forward(inputs [B, w], context [B, c]) -> inputs * 2 sigmoid(MLP(context)) (FinalMLP, section 3.2).

    With ``context`` 0 the gate is learnt alone, the same for all samples: what the paper's MLP of a learnt constant
    amounts to.
    """

    def __init__(self, width: int, context: int, hidden: int) -> None:
        super().__init__()
        self.gate = mlp([context, hidden, width], last_activation=False) if context else Constant(width)

    def forward(self, inputs: Tensor, context: Tensor) -> Tensor:
        return inputs * (2 * torch.sigmoid(self.gate(context)))


class Constant(nn.Module):
    """forward(anything) -> ``width`` learnt values, at first 0."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.values = nn.Parameter(torch.zeros(width))

    def forward(self, anything: Tensor) -> Tensor:
        return self.values


class MaskBlock(nn.Module):
    """forward(values [B, w], whole [B, v]) -> ReLU(LN(W (mask * values))), mask = W2 ReLU(W1 whole): MaskNet, 3.2-3.4.

    ``whole``: the embeddings of all features, flattened, which guide the mask.
    """

    def __init__(self, width: int, whole: int, hidden: int, outputs: int) -> None:
        super().__init__()
        self.mask = mlp([whole, hidden, width], last_activation=False)
        self.linear = nn.Linear(width, outputs, bias=False)
        self.norm = nn.LayerNorm(outputs)

    def forward(self, values: Tensor, whole: Tensor) -> Tensor:
        return torch.relu(self.norm(self.linear(self.mask(whole) * values)))
