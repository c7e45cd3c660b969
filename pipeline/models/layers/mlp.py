"""Parts that most rankers share: the MLP, the layer that gives the logit, and initial values drawn from a seed."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, TypeVar, cast

import torch
from torch import Tensor, nn

from pipeline.errors import ConfigError
from pipeline.models.layers.norms import CENTRED, normalised
from pipeline.native import Head, StepsLibrary

if TYPE_CHECKING:
    from pipeline.models.settings import RankerConfig

R = TypeVar("R", bound=nn.Module)


class Ranker(nn.Module, ABC):
    """What a model's ``build`` returns: forward(dense [B, n], embeddings [B, V, D]) -> logits [B] in float32."""

    @abstractmethod
    def start_at(self, logit: float) -> None:
        """Set the last bias, so that an untrained model's logits are near ``logit``."""

    def last_hidden(self, dense: Tensor, embeddings: Tensor) -> Tensor:
        """What the last layer takes: [B, w], from which the layers of several tasks go on."""
        raise ConfigError(
            f"model {type(self).__name__} has no hidden layer for several tasks (methods last_hidden and drop_head)",
            hint="model=dlrm, or data.tasks={}",
        )

    def drop_head(self) -> int:
        """Drop the layers behind ``last_hidden``, and return its width; ``forward`` cannot be called any more."""
        raise ConfigError(
            f"model {type(self).__name__} has no hidden layer for several tasks (methods last_hidden and drop_head)",
            hint="model=dlrm, or data.tasks={}",
        )


class HeadedRanker(Ranker):
    """A ranker whose last layer is ``head``, on what ``last_hidden`` gives."""

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
    """hidden @ weight + bias in float32, by the compiled library; ``hidden``: [B, width], float32 or bf16."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor, kernels: StepsLibrary) -> Tensor:
        ctx.save_for_backward(hidden, weight)
        ctx.kernels = kernels
        logits = torch.empty(len(hidden))
        kernels.head(_head(hidden, weight, logits=logits.data_ptr(), bias=float(bias)))
        return logits

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        hidden, weight = ctx.saved_tensors
        grad, back, sums = grads[0].contiguous(), torch.empty_like(hidden), torch.empty(hidden.shape[1] + 1)
        places = {"grad": grad.data_ptr(), "grad_hidden": back.data_ptr(), "sums": sums.data_ptr()}
        ctx.kernels.head_back(_head(hidden, weight, **places))
        return back, sums[:-1].view(1, -1), sums[-1:], None  # strides of the weight, as DDP expects


def _head(hidden: Tensor, weight: Tensor, **others: float) -> Head:
    return Head(
        hidden=hidden.data_ptr(),
        weight=weight.data_ptr(),
        n=len(hidden),
        width=hidden.shape[1],
        bf16=hidden.dtype == torch.bfloat16,
        threads=torch.get_num_threads(),
        **others,
    )


class Logit(nn.Linear):
    """forward(hidden [B, width]) -> logits [B], computed in float32 under autocast too.

    ``kernels``: the compiled library that does it on a CPU; None: PyTorch does.
    """

    kernels: StepsLibrary | None = None

    def __init__(self, width: int) -> None:
        super().__init__(width, 1)

    def forward(self, hidden: Tensor) -> Tensor:
        if self.kernels is not None and not torch.compiler.is_compiling() and self._fits(hidden):
            return cast(Tensor, _Head.apply(hidden, self.weight, self.bias, self.kernels))
        # The meta device, on which a model's FLOP are counted, has no autocast.
        with torch.autocast("cpu" if hidden.is_meta else hidden.device.type, enabled=False):
            return nn.functional.linear(hidden.to(self.weight.dtype), self.weight, self.bias).squeeze(1)

    def _fits(self, hidden: Tensor) -> bool:
        able = hidden.dtype in (torch.float32, torch.bfloat16) and self.weight.dtype == torch.float32
        return able and hidden.device.type == "cpu" and hidden.dim() == 2 and hidden.is_contiguous()

    @torch.no_grad()
    def start_at(self, logit: float) -> None:
        """Set the bias to ``logit``."""
        self.bias.fill_(logit)


def mlp(widths: Sequence[int], *, last_activation: bool, norm: str = "none", dropout: float = 0.0) -> nn.Sequential:
    """Linear layers from ``widths[0]`` through ``widths[-1]`` with ReLU between them.

    ``norm`` (one of ``NORMS``) comes before each ReLU, ``dropout`` behind it.
    """
    layers: list[nn.Module] = []
    for i in range(len(widths) - 1):
        hidden = last_activation or i < len(widths) - 2
        layers.append(nn.Linear(widths[i], widths[i + 1], bias=not (hidden and norm in CENTRED)))
        if hidden:
            layers += [*normalised(norm, widths[i + 1]), nn.ReLU(), *([nn.Dropout(dropout)] if dropout else [])]
    return nn.Sequential(*layers)


def top_mlp(width: int, config: RankerConfig) -> tuple[nn.Sequential, int]:
    """The hidden layers that lead from ``width`` values to the logit, by the settings, and the width they end with."""
    widths = [width, *config.top_mlp]
    return mlp(widths, last_activation=True, norm=config.norm, dropout=config.dropout), widths[-1]


def compute_dtype(like: Tensor) -> torch.dtype:
    """The dtype of products with ``like``: autocast's where it is enabled, else its own."""
    if like.is_meta:
        return like.dtype
    kind = like.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else like.dtype


def log_odds(rate: float, rows: int) -> float:
    """The logit of ``rate``, a share of ``rows``, estimated as (clicks + 1/2) / (rows + 1), so that 0 and 1 are finite.

    Krichevsky and Trofimov (1981).
    """
    clicks = rate * rows
    return math.log((clicks + 0.5) / (rows - clicks + 0.5))


def initialise(module: R, seed: int) -> R:
    """``module`` with every linear layer and convolution drawn from ``seed`` alone, in module order.

    Weights N(0, 2 / (in + out)), biases N(0, 1 / out). The global random state is neither read nor changed. On the meta
    device there is nothing to draw.
    """
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for layer in module.modules():
            if isinstance(layer, nn.Linear | nn.Conv2d) and not layer.weight.is_meta:
                outputs, inputs = layer.weight.flatten(1).shape
                spread = math.sqrt(2.0 / (inputs + outputs))
                layer.weight.copy_(torch.randn(layer.weight.shape, generator=generator) * spread)
                if layer.bias is not None:
                    layer.bias.copy_(torch.randn(layer.bias.shape, generator=generator) / math.sqrt(outputs))
    return module
