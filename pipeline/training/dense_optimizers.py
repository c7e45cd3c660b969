"""The optimizers of the dense part: ``train.dense_optimizer``. A new one is a class here and an entry in ``SPECS``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pipeline.specs.optimizers import DenseOptimizer, ParameterGroup

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Adam(DenseOptimizer):
    """Adam (Kingma and Ba, ICLR'15), or AdamW (Loshchilov and Hutter, ICLR'19) with weight decay.

    Two moments for each parameter; weight decay is decoupled from the gradient.
    """

    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8
    name = "adam"
    classes = ("Adam", "AdamW")
    state_values = 2.0

    def build(self, groups: Sequence[ParameterGroup], own: Sequence[torch.nn.Parameter] = ()) -> torch.optim.Optimizer:
        import torch

        settings, betas = [group.settings() for group in groups], (self.beta1, self.beta2)
        # All groups share one class: with a decay of 0, AdamW takes the same steps as Adam.
        if any(group.weight_decay for group in groups):
            return torch.optim.AdamW(settings, betas=betas, eps=self.eps, fused=True)
        return torch.optim.Adam(settings, betas=betas, eps=self.eps, fused=True)


ADAM = Adam()


@dataclass(frozen=True)
class DenseAdagrad(DenseOptimizer):
    """Adagrad (Duchi et al., JMLR'11).

    A sum of squared gradients for each parameter; weight decay is added to the gradient.
    """

    eps: float = 1e-10
    name = "adagrad"
    classes = ("Adagrad",)
    state_values = 1.0

    def build(self, groups: Sequence[ParameterGroup], own: Sequence[torch.nn.Parameter] = ()) -> torch.optim.Optimizer:
        import torch

        # PyTorch's fused kernel exists for the CPU only.
        settings, fused = [], True
        for group in groups:
            settings.append(group.settings())
            fused &= all(parameter.device.type == "cpu" for parameter in group.parameters)
        return torch.optim.Adagrad(settings, eps=self.eps, fused=fused)


ADAGRAD = DenseAdagrad()


@dataclass(frozen=True)
class AdamW(DenseOptimizer):
    """AdamW (Loshchilov and Hutter, ICLR'19), whatever the weight decay.

    Adam with a weight decay that is decoupled from the gradient.
    """

    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8
    name = "adamw"
    classes = ("AdamW",)
    state_values = 2.0

    def build(self, groups: Sequence[ParameterGroup], own: Sequence[torch.nn.Parameter] = ()) -> torch.optim.Optimizer:
        import torch

        settings = [group.settings() for group in groups]
        return torch.optim.AdamW(settings, betas=(self.beta1, self.beta2), eps=self.eps, fused=True)


ADAMW = AdamW()


@dataclass(frozen=True)
class DenseSgd(DenseOptimizer):
    """Gradient descent with momentum (Sutskever et al., ICML'13).

    A velocity for each parameter; weight decay is added to the gradient. ``nesterov`` looks one step ahead.
    """

    momentum: float = 0.9
    nesterov: bool = False
    name = "sgd"
    classes = ("SGD",)
    state_values = 1.0

    def build(self, groups: Sequence[ParameterGroup], own: Sequence[torch.nn.Parameter] = ()) -> torch.optim.Optimizer:
        import torch

        settings = [group.settings() for group in groups]
        # PyTorch raises an error for Nesterov without momentum.
        nesterov = self.nesterov and self.momentum > 0
        return torch.optim.SGD(settings, momentum=self.momentum, nesterov=nesterov, fused=True)


SGD = DenseSgd()


@dataclass(frozen=True)
class Lamb(DenseOptimizer):
    """LAMB: Adam's step, scaled layer by layer to the norm of the weights (You et al., ICLR'20, algorithm 2).

    For large batches: every layer moves by the same share of its norm. Weight decay is part of the step.
    """

    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-6
    name = "lamb"
    classes = ("LambSteps",)
    state_values = 2.0

    def build(self, groups: Sequence[ParameterGroup], own: Sequence[torch.nn.Parameter] = ()) -> torch.optim.Optimizer:
        from pipeline.training.optimizer import LambSteps

        return LambSteps([group.settings() for group in groups], (self.beta1, self.beta2), self.eps)


LAMB = Lamb()


SPECS: tuple[DenseOptimizer, ...] = (ADAM, ADAGRAD, ADAMW, SGD, LAMB)
