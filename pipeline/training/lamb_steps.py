"""LAMB as a PyTorch optimizer (You et al., ICLR'20, algorithm 2)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class LambSteps(torch.optim.Optimizer):
    """r = corrected m / (sqrt(corrected v) + eps) + decay * w; w -= lr * |w| / |r| * r, by parameter.

    The ratio is 1 where either norm is 0, as of a new bias. Vectors (biases, norms' scales) are layers too.
    """

    def __init__(self, groups: list[dict[str, Any]], betas: tuple[float, float], eps: float) -> None:
        super().__init__(groups, {"lr": 0.0, "betas": betas, "eps": eps, "weight_decay": 0.0})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Apply the gradients."""
        for group in self.param_groups:
            learning = [parameter for parameter in group["params"] if parameter.grad is not None]
            if learning:
                self._step(group, learning)

    def _step(self, group: dict[str, Any], parameters: list[Tensor]) -> None:
        for parameter in parameters:
            if "step" not in self.state[parameter]:
                zeros = (torch.zeros_like(parameter) for _ in range(2))
                self.state[parameter] = dict(zip(("exp_avg", "exp_avg_sq"), zeros, strict=True))
                self.state[parameter]["step"] = torch.zeros(())
        states = [self.state[parameter] for parameter in parameters]
        means, squares = ([state[name] for state in states] for name in ("exp_avg", "exp_avg_sq"))
        gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
        (beta1, beta2), lr, decay = group["betas"], group["lr"], group["weight_decay"]
        for state in states:
            state["step"] += 1
        steps = [state["step"].item() for state in states]
        torch._foreach_lerp_(means, gradients, 1 - beta1)
        torch._foreach_mul_(squares, beta2)
        torch._foreach_addcmul_(squares, gradients, gradients, 1 - beta2)
        spreads = torch._foreach_div(squares, [1 - beta2**step for step in steps])
        torch._foreach_sqrt_(spreads)
        torch._foreach_add_(spreads, group["eps"])
        moves = torch._foreach_div(means, [1 - beta1**step for step in steps])
        torch._foreach_div_(moves, spreads)
        if decay:
            torch._foreach_add_(moves, parameters, alpha=decay)
        norms = zip(torch._foreach_norm(parameters), torch._foreach_norm(moves), strict=True)
        ratios = [torch.where((weight > 0) & (move > 0), weight / move, 1.0) for weight, move in norms]
        torch._foreach_mul_(moves, ratios)
        torch._foreach_add_(parameters, moves, alpha=-lr)
