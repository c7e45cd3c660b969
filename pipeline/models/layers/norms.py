"""Normalisation of hidden layers: by sample, or by global batch with statistics of all ranks."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

MOMENTUM = 0.1
EPS = 1e-5


class BatchNorm(nn.Module):
    """forward(values [B, width]) -> [B, width], by mean and variance over the rows of the global batch.

    Ioffe and Szegedy (2015, arXiv 1502.03167), algorithm 2 in evaluation. ``combine`` adds up the sums of all ranks,
    differentiably. ``rows`` [B, 1] is 1 for real rows and 0 for padding (None: all are real): without it the few rows
    of an epoch's last batch would drown in copies of one. ``mean`` and ``variance`` are parameters without a gradient,
    so that checkpoints have them; a batch that is padded in part moves them by that much less.
    """

    def __init__(self, width: int, combine: Callable[[Tensor], Tensor] = lambda sums: sums) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.ones(width)), nn.Parameter(torch.zeros(width))
        self.mean = nn.Parameter(torch.zeros(width), requires_grad=False)
        self.variance = nn.Parameter(torch.ones(width), requires_grad=False)
        self.combine = combine
        self.rows: Tensor | None = None

    def forward(self, values: Tensor) -> Tensor:
        exact = values.to(self.weight.dtype)
        mean, variance = self._statistics(exact) if self.training else (self.mean, self.variance)
        scale = self.weight * torch.rsqrt(variance + EPS)
        return ((exact - mean) * scale + self.bias).to(values.dtype)

    def _statistics(self, values: Tensor) -> tuple[Tensor, Tensor]:
        """Mean and variance over all ranks' rows; the running ones follow them."""
        rows = torch.ones_like(values[:, :1]) if self.rows is None else self.rows.to(values.dtype)
        start = self.mean.detach().clone()  # sums about the running mean, or a variance beside a large mean is lost
        apart = (values - start) * rows
        counts = torch.stack([rows.sum(), torch.ones_like(rows).sum()])
        width = values.shape[1]
        sums = self.combine(torch.cat([apart.sum(0), apart.square().sum(0), counts]))
        count = sums[-2]
        shift = sums[:width] / count
        variance = (sums[width : 2 * width] / count - shift.square()).clamp(min=0)
        with torch.no_grad():
            pace = MOMENTUM * count / sums[-1]
            self.mean.add_(pace * shift)
            self.variance.add_(pace * (variance * count / (count - 1).clamp(min=1) - self.variance))
        return start + shift, variance


def batch_norms(module: nn.Module) -> list[BatchNorm]:
    """The batch normalisations of ``module``."""
    return [layer for layer in module.modules() if isinstance(layer, BatchNorm)]


_NORMS: dict[str, Callable[[int], list[nn.Module]]] = {
    "none": lambda width: [],
    "batch": lambda width: [BatchNorm(width)],
    "layer": lambda width: [nn.LayerNorm(width)],
}

# Those that take a layer's bias out again. Its gradient would be rounding noise, which Adam makes steps of: running
# means lag behind these, and evaluation drifts from training.
CENTRED = ("batch",)


def normalised(norm: str, width: int) -> list[nn.Module]:
    """The layers that normalise ``width`` values as setting ``model.norm`` says."""
    return _NORMS[norm](width)
