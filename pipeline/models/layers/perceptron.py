"""MLPs and what belongs to their layers: the base of rankers, logits, normalisation, and gates.

Normalisation is by sample, or by global batch with the statistics of all ranks.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from pipeline.core.errors import ConfigError

MOMENTUM = 0.1
EPS = 1e-5


class BatchNorm(nn.Module):
    """forward(values [B, width]) -> [B, width], by mean and variance over the rows of the global batch.

    Ioffe and Szegedy (2015, arXiv 1502.03167), algorithm 2 in evaluation. ``combine`` adds up the sums of all ranks,
    differentiably. ``rows`` [B, 1] is 1 for real rows and 0 for padding (None: all are real): without it the few rows
    of an epoch's last batch would be outweighed by copies of one.
    """

    def __init__(self, width: int, combine: Callable[[Tensor], Tensor] = lambda sums: sums) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.ones(width)), nn.Parameter(torch.zeros(width))
        # These are parameters without a gradient, so that checkpoints have them.
        self.mean = nn.Parameter(torch.zeros(width), requires_grad=False)
        self.variance = nn.Parameter(torch.ones(width), requires_grad=False)
        self.combine = combine
        self.rows: Tensor | None = None

    def forward(self, values: Tensor) -> Tensor:
        # Under autocast the values are bf16, which is not precise enough for sums over a batch.
        exact = values.to(self.weight.dtype)
        if self.training:
            mean, variance = self._statistics(exact)
        else:
            # A row's logit must not depend on the rows that it is scored with.
            mean, variance = self.mean, self.variance
        scale = self.weight * torch.rsqrt(variance + EPS)
        return ((exact - mean) * scale + self.bias).to(values.dtype)

    def _statistics(self, values: Tensor) -> tuple[Tensor, Tensor]:
        # Returns mean and variance over all ranks' rows, which the running ones follow.
        rows = self.rows.to(values.dtype) if self.rows is not None else torch.ones_like(values[:, :1])
        # Sum deviations from the running mean, since a variance beside a large mean would be lost.
        start = self.mean.detach().clone()
        deviations = (values - start) * rows
        counts = torch.stack([rows.sum(), torch.ones_like(rows).sum()])
        width = values.shape[1]
        # Put all sums into one vector, so that a layer needs one collective, not three.
        sums = self.combine(torch.cat([deviations.sum(0), deviations.square().sum(0), counts]))
        count = sums[-2]
        shift = sums[:width] / count
        variance = (sums[width : 2 * width] / count - shift.square()).clamp(min=0)
        with torch.no_grad():
            # A partly padded batch moves the running statistics by that much less.
            momentum = MOMENTUM * count / sums[-1]
            self.mean.add_(momentum * shift)
            # Bessel's correction applies to the running variance only, as in torch, since it is an estimate for other
            # rows.
            self.variance.add_(momentum * (variance * count / (count - 1).clamp(min=1) - self.variance))
        return start + shift, variance


def batch_norms(module: nn.Module) -> list[BatchNorm]:
    """Return the batch normalisations of ``module``."""
    return [layer for layer in module.modules() if isinstance(layer, BatchNorm)]


# Norms that remove a layer's bias again, so the bias is left out. Its gradient would be rounding noise, which Adam
# turns into steps: running means would lag behind, and evaluation would drift from training.
CENTRED = ("batch",)


class MaxNorm(nn.Module):
    """Online max-normalisation with a trainable bias, as in Twitter's sparse linear layer (2020).

    norm(V_i) = V_i / running max |V_i| + b_i, and 0 for a missing value, so that b_i separates it from a zero.

    forward(dense [B, n]) -> [B, n]: ``columns`` normalised, the others as they are; NaN is a missing value. ``combine``
    reduces the maxima of all ranks to one.
    """

    columns: Tensor

    def __init__(self, columns: Sequence[int], combine: Callable[[Tensor], Tensor] = lambda values: values) -> None:
        super().__init__()
        self.register_buffer("columns", torch.tensor(list(columns), dtype=torch.int64), persistent=False)
        # It is a parameter without a gradient, so that checkpoints have it; it grows only in training.
        self.largest = nn.Parameter(torch.zeros(len(columns)), requires_grad=False)
        self.bias = nn.Parameter(torch.zeros(len(columns)))
        self.combine = combine

    def forward(self, dense: Tensor) -> Tensor:
        picked = dense[:, self.columns]
        present = ~torch.isnan(picked)
        values = torch.where(present, picked, 0.0)
        if self.training:
            with torch.no_grad():
                # A rank without rows must still take part in the collective, and ``amax`` of no rows is an error.
                seen = values.abs().amax(0) if len(values) else torch.zeros_like(self.largest)
                self.largest.copy_(torch.maximum(self.largest, self.combine(seen)))
        # Clamp to the smallest normal float32 for columns of zeros, because 0 / tiny is 0, not NaN.
        scaled = values / self.largest.clamp(min=torch.finfo(torch.float32).tiny)
        return dense.index_copy(1, self.columns, torch.where(present, scaled + self.bias, 0.0))


R = TypeVar("R", bound=nn.Module)


class Ranker(nn.Module, ABC):
    """The result of a model's ``build``: forward(dense [B, n], embeddings [B, V, D]) -> logits [B] in float32."""

    @abstractmethod
    def start_at(self, logit: float) -> None:
        """Set the last bias, so that an untrained model's logits are near ``logit``."""

    def last_hidden(self, dense: Tensor, embeddings: Tensor) -> Tensor:
        """Return the input of the last layer, [B, w], on which the layers of several tasks build.

        Raises:
            ConfigError: The model has no hidden layer for several tasks.
        """
        raise ConfigError(
            f"model {type(self).__name__} has no hidden layer for several tasks (methods last_hidden and drop_head)",
            hint="model=dlrm, or data.tasks={}",
        )

    def drop_head(self) -> int:
        """Drop the layers after ``last_hidden``, and return its width; ``forward`` cannot be called any more.

        Raises:
            ConfigError: As ``last_hidden``.
        """
        raise ConfigError(
            f"model {type(self).__name__} has no hidden layer for several tasks (methods last_hidden and drop_head)",
            hint="model=dlrm, or data.tasks={}",
        )


class HeadedRanker(Ranker):
    """A ranker whose last layer, ``head``, takes the output of ``last_hidden``."""

    head: Logit

    def forward(self, dense: Tensor, embeddings: Tensor) -> Tensor:
        logits: Tensor = self.head(self.last_hidden(dense, embeddings))
        return logits

    def drop_head(self) -> int:
        """See ``Ranker.drop_head``."""
        width = self.head.in_features
        del self.head
        return width

    def start_at(self, logit: float) -> None:
        """See ``Ranker.start_at``."""
        self.head.start_at(logit)


class _Head(torch.autograd.Function):
    # Computes hidden @ weight + bias in float32 by the compiled kernels; hidden is [B, width], float32 or bf16.

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor, kernels: Any) -> Tensor:
        ctx.save_for_backward(hidden, weight)
        ctx.kernels = kernels
        logits = torch.empty(len(hidden))
        kernels.head(hidden, weight, float(bias), logits)
        return logits

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        hidden, weight = ctx.saved_tensors
        grad = grads[0].contiguous()
        grad_hidden = torch.empty_like(hidden)
        sums = torch.empty(hidden.shape[1] + 1)
        ctx.kernels.head_back(hidden, weight, grad, grad_hidden, sums)
        # The gradient has the strides of the weight, as DDP expects.
        return grad_hidden, sums[:-1].view(1, -1), sums[-1:], None


class Logit(nn.Linear):
    """forward(hidden [B, width]) -> logits [B], computed in float32 under autocast too.

    ``kernels`` is ``load_kernels("steps")``, which computes it on a CPU; None: PyTorch does.
    """

    kernels: Any = None

    def __init__(self, width: int) -> None:
        super().__init__(width, 1)

    def forward(self, hidden: Tensor) -> Tensor:
        if self.kernels is not None and not torch.compiler.is_compiling():
            # The kernel reads raw memory, so dtypes, device and layout must be the ones it expects.
            dtypes_fit = hidden.dtype in (torch.float32, torch.bfloat16) and self.weight.dtype == torch.float32
            if dtypes_fit and hidden.device.type == "cpu" and hidden.dim() == 2 and hidden.is_contiguous():
                return cast(Tensor, _Head.apply(hidden, self.weight, self.bias, self.kernels))
        kind = hidden.device.type
        if hidden.is_meta:
            # The meta device, on which a model's FLOP are counted, has no autocast.
            kind = "cpu"
        # Compute without autocast: between 2 and 4, bf16 has steps of 1/64, which losses and calibration would show.
        with torch.autocast(kind, enabled=False):
            return nn.functional.linear(hidden.to(self.weight.dtype), self.weight, self.bias).squeeze(1)

    @torch.no_grad()
    def start_at(self, logit: float) -> None:
        """Set the bias to ``logit``."""
        self.bias.fill_(logit)


def mlp(widths: Sequence[int], *, last_activation: bool, norm: str = "none", dropout: float = 0.0) -> nn.Sequential:
    """Build linear layers from ``widths[0]`` through ``widths[-1]`` with ReLU between them.

    Args:
        widths: The width of the input, then of each layer.
        last_activation: Whether the last layer is a hidden one too, with ReLU, norm and dropout.
        norm: The norm before each ReLU: ``batch``, ``layer`` or ``none``.
        dropout: The probability of dropout after each ReLU.
    """
    layers: list[nn.Module] = []
    for i in range(len(widths) - 1):
        hidden = last_activation or i < len(widths) - 2
        layers.append(nn.Linear(widths[i], widths[i + 1], bias=not (hidden and norm in CENTRED)))
        if not hidden:
            continue
        if norm == "batch":
            layers.append(BatchNorm(widths[i + 1]))
        elif norm == "layer":
            layers.append(nn.LayerNorm(widths[i + 1]))
        layers.append(nn.ReLU())
        # A layer that does nothing is left out, because names of parameters have their layers' numbers.
        if dropout:
            layers.append(nn.Dropout(dropout))
    return nn.Sequential(*layers)


def compute_dtype(like: Tensor) -> torch.dtype:
    """Return the dtype of products with ``like``: autocast's where it is enabled, else its own."""
    # The meta device has no autocast, and asking for its dtype is an error.
    if not like.is_meta and torch.is_autocast_enabled(like.device.type):
        return torch.get_autocast_dtype(like.device.type)
    return like.dtype


def log_odds(rate: float, rows: int) -> float:
    """Return the logit of ``rate``, a share of ``rows``; finite for 0 and 1, too."""
    # Estimate it as (clicks + 1/2) / (rows + 1), after Krichevsky and Trofimov (1981).
    clicks = rate * rows
    return math.log((clicks + 0.5) / (rows - clicks + 0.5))


def initialise(module: R, seed: int) -> R:
    """Draw every linear layer and convolution of ``module`` from ``seed`` alone, in module order, and return it.

    Weights N(0, 2 / (in + out)), biases N(0, 1 / out). The global random state is neither read nor changed.
    """
    # One CPU generator serves the whole module: weights depend on the seed and on the layers before, but not on the
    # device, whose own generator would draw other values.
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for layer in module.modules():
            # On the meta device there is nothing to draw.
            if not isinstance(layer, nn.Linear | nn.Conv2d) or layer.weight.is_meta:
                continue
            outputs, inputs = layer.weight.flatten(1).shape
            spread = math.sqrt(2.0 / (inputs + outputs))
            layer.weight.copy_(torch.randn(layer.weight.shape, generator=generator) * spread)
            if layer.bias is not None:
                layer.bias.copy_(torch.randn(layer.bias.shape, generator=generator) / math.sqrt(outputs))
    return module


class FeatureGate(nn.Module):
    """forward(inputs [B, w], context [B, c]) -> inputs * 2 sigmoid(MLP(context)) (FinalMLP, section 3.2)."""

    def __init__(self, width: int, context: int, hidden: int) -> None:
        super().__init__()
        # Without context the gate is learnt and the same for all samples, to which the paper's MLP of a learnt constant
        # is equivalent.
        self.gate = mlp([context, hidden, width], last_activation=False) if context else Constant(width)

    def forward(self, inputs: Tensor, context: Tensor) -> Tensor:
        return inputs * (2 * torch.sigmoid(self.gate(context)))


class Constant(nn.Module):
    """forward(anything) -> ``width`` learnt values, which start at 0."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.values = nn.Parameter(torch.zeros(width))

    def forward(self, anything: Tensor) -> Tensor:
        return self.values


class MaskBlock(nn.Module):
    """forward(values [B, w], whole [B, v]) -> ReLU(LN(W (mask * values))), mask = W2 ReLU(W1 whole): MaskNet, 3.2-3.4.

    ``whole`` has the embeddings of all features, flattened, which guide the mask.
    """

    def __init__(self, width: int, whole: int, hidden: int, outputs: int) -> None:
        super().__init__()
        self.mask = mlp([whole, hidden, width], last_activation=False)
        self.linear = nn.Linear(width, outputs, bias=False)
        self.norm = nn.LayerNorm(outputs)

    def forward(self, values: Tensor, whole: Tensor) -> Tensor:
        return torch.relu(self.norm(self.linear(self.mask(whole) * values)))
