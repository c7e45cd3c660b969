"""Cross layers (DCN-V2, Wang et al. 2021, arXiv 2008.13535, section 3): x <- x0 * f(x) + x, element by element."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn


class Cross(nn.Linear):
    """forward(first [B, w], x [B, w]) -> [B, w]: f is a whole matrix (equation 1)."""

    def __init__(self, width: int) -> None:
        super().__init__(width, width)

    def forward(self, first: Tensor, value: Tensor) -> Tensor:  # type: ignore[override]
        return first * super().forward(value) + value


class LowRankCross(nn.Module):
    """forward(first [B, w], x [B, w]) -> [B, w]: f is U V^T of ``rank`` (equation 2)."""

    def __init__(self, width: int, rank: int) -> None:
        super().__init__()
        self.down, self.up = nn.Linear(width, rank, bias=False), nn.Linear(rank, width)

    def forward(self, first: Tensor, value: Tensor) -> Tensor:
        return first * self.up(self.down(value)) + value


class MixtureCross(nn.Module):
    """forward(first [B, w], x [B, w]) -> [B, w]: experts U_i g(C_i g(V_i^T x)), weighted by a softmax (equation 4).

    g is tanh. The gate's weights sum to 1, so one bias does for all experts.
    """

    def __init__(self, width: int, rank: int, experts: int) -> None:
        super().__init__()
        self.rank = rank
        self.gate = nn.Linear(width, experts)
        self.down = nn.Linear(width, experts * rank, bias=False)
        self.within = nn.ModuleList(nn.Linear(rank, rank, bias=False) for _ in range(experts))
        self.up = nn.Linear(experts * rank, width)

    def forward(self, first: Tensor, value: Tensor) -> Tensor:
        shares = self.gate(value).softmax(dim=1)
        parts = torch.tanh(self.down(value)).split(self.rank, dim=1)
        seen = [torch.tanh(expert(part)) for expert, part in zip(self.within, parts, strict=True)]
        return first * self.up(torch.cat([part * shares[:, i, None] for i, part in enumerate(seen)], dim=1)) + value


CROSSES: dict[str, Callable[[int, int, int], nn.Module]] = {
    "full": lambda width, rank, experts: Cross(width),
    "low_rank": lambda width, rank, experts: LowRankCross(width, rank),
    "mixture": MixtureCross,
}


class CrossNet(nn.Module):
    """forward(x0 [B, w]) -> [B, w]: ``layers`` cross layers of one ``kind`` (a key of ``CROSSES``)."""

    def __init__(self, kind: str, layers: int, width: int, rank: int, experts: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(CROSSES[kind](width, rank, experts) for _ in range(layers))

    def forward(self, first: Tensor) -> Tensor:
        value = first
        for layer in self.layers:
            value = layer(first, value)
        return value
