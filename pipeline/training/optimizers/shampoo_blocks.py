"""Shampoo's formulas for one block of a layer; factors and their roots are computed in float64.

With G the gradient of a block [m, n], of step t (Shi et al., arXiv 2309.06497, algorithm 1):

    M = beta1 M + (1 - beta1) G              its mean, corrected by 1 - beta1^t
    L += G G^T, R += G^T G                   or means with beta2 below 1
    S = (L + eps max(L) I)^-1/4 M (R + eps max(R) I)^-1/4     max: the largest eigenvalue
    direction = S |A| / |S|                  A: the step of Adagrad or Adam for M (grafting)

L and R take in every ``factor_every``th gradient, from the first on. Roots are those of every ``root_every``th step.
Before ``start_step``, and for vectors, the direction is A.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

State = dict[str, Tensor]
MEAN, SQUARES, LEFT, RIGHT = "mean", "squares", "left", "right"
LEFT_ROOT, RIGHT_ROOT = "left_root", "right_root"
ADAM = "adam"
# Of Adam's second moment, where it grafts.
ADAM_BETA2, GRAFT_EPS = 0.999, 1e-10


@dataclass(frozen=True)
class Formula:
    """Shampoo's settings, and what they make of a block's gradient."""

    beta1: float
    beta2: float
    eps: float
    factor_every: int
    root_every: int
    start_step: int
    grafting: str

    def new(self, gradient: Tensor) -> State:
        """The state before the first step of a block whose ``gradient`` is [m, n], or a vector [m]."""
        state = {MEAN: torch.zeros_like(gradient), SQUARES: torch.zeros_like(gradient)}
        if gradient.dim() > 1:
            for factor, root, size in zip((LEFT, RIGHT), (LEFT_ROOT, RIGHT_ROOT), gradient.shape, strict=True):
                state[factor] = torch.zeros(size, size, dtype=torch.float64, device=gradient.device)
                state[root] = torch.eye(size, dtype=gradient.dtype, device=gradient.device)
        return state

    def direction(self, gradient: Tensor, state: State, step: int) -> Tensor:
        """The direction of ``step`` (from 1) for ``gradient``, in its dtype; updates ``state``."""
        mean = state[MEAN].lerp_(gradient, 1 - self.beta1) / (1 - self.beta1**step)
        grafted = self._graft(mean, gradient, state[SQUARES], step)
        if gradient.dim() == 1:
            return grafted
        if (step - 1) % self.factor_every == 0:
            exact = gradient.double()
            self._accumulate(state[LEFT], exact @ exact.T)
            self._accumulate(state[RIGHT], exact.T @ exact)
        if step >= self.start_step and (step % self.root_every == 0 or step == self.start_step):
            state[LEFT_ROOT].copy_(inverse_fourth_root(state[LEFT], self.eps))
            state[RIGHT_ROOT].copy_(inverse_fourth_root(state[RIGHT], self.eps))
        if step < self.start_step:
            return grafted
        bent = state[LEFT_ROOT] @ mean @ state[RIGHT_ROOT]
        norm = torch.linalg.vector_norm(bent)
        return bent * torch.where(norm > 0, torch.linalg.vector_norm(grafted) / norm, 0.0)

    def _graft(self, mean: Tensor, gradient: Tensor, squares: Tensor, step: int) -> Tensor:
        if self.grafting == ADAM:
            squares.mul_(ADAM_BETA2).addcmul_(gradient, gradient, value=1 - ADAM_BETA2)
            return mean / (squares / (1 - ADAM_BETA2**step)).sqrt_().add_(GRAFT_EPS)
        squares.addcmul_(gradient, gradient)
        return mean / squares.sqrt().add_(GRAFT_EPS)

    def _accumulate(self, factor: Tensor, product: Tensor) -> None:
        if self.beta2 < 1:
            factor.lerp_(product, 1 - self.beta2)
        else:
            factor += product


def inverse_fourth_root(factor: Tensor, eps: float) -> Tensor:
    """(factor + eps * its largest eigenvalue * I)^-1/4 of a symmetric ``factor``; I where that is 0.

    It is divided by the -1/4th power of the largest eigenvalue: grafting makes the scale meaningless, and so float32
    holds it.
    """
    values, vectors = torch.linalg.eigh(factor)
    largest = values[-1]
    if float(largest) <= 0.0:
        return torch.eye(len(factor), dtype=factor.dtype, device=factor.device)
    root = values.clamp(min=0.0).div_(largest).add_(eps).pow_(-0.25)
    return (vectors * root) @ vectors.T
