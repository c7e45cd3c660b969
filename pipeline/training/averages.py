"""Averages of the dense weights over the steps: a moving one, or the plain mean of stochastic weight averaging.

SWA: Izmailov et al., UAI'18. The average is part of the optimizer's state, so checkpoints keep it and a resumed
training goes on with the same bits, and so is the number of weights in a mean: a training that goes back to its best
weights has the average of then.

Running statistics of batch norms, parameters without a gradient, are averaged alike: the last step's would belong to
other weights. That is PyTorch's ``AveragedModel(use_buffers=True)``. The paper's further pass over the rows would have
to be made wherever averaged weights are looked at.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from pipeline.config.train import AverageConfig

AVERAGE, COUNT = "average", "averaged"


def steps_before(config: AverageConfig, total: int) -> int:
    """Steps of a training of ``total`` steps after which the average takes in weights for the first time."""
    return min(math.ceil(config.start * total), max(total - 1, 0))


class Average:
    """The average of ``parameters`` in the state of ``optimizer``; ``total``: steps planned."""

    def __init__(
        self, config: AverageConfig, optimizer: torch.optim.Optimizer, parameters: Sequence[Tensor], total: int
    ) -> None:
        self._config, self._optimizer, self._parameters = config, optimizer, list(parameters)
        self._first = steps_before(config, total)

    @property
    def first(self) -> int:
        """The training step (from 1) after which it takes in weights for the first time."""
        return self._first + 1

    @torch.no_grad()
    def take(self, step: int) -> None:
        """Take in the weights after training step ``step`` (from 0), where it is one of those that count."""
        past = step - self._first
        if past < 0 or past % self._config.every:
            return
        learning = [p for p in self._parameters if p.grad is not None or not p.requires_grad]
        states = [self._optimizer.state[parameter] for parameter in learning]
        for state, parameter in zip(states, learning, strict=True):
            # At the first step anew: a training that was planned shorter has begun its average too early.
            if AVERAGE not in state or not past:
                state[AVERAGE], state[COUNT] = parameter.detach().clone(), 0
            # Averages of older checkpoints have no number; it is that of a training that never went back.
            state[COUNT] = state.get(COUNT, past // self._config.every) + 1
        swa = self._config.kind == "swa"
        shares: dict[float, list[int]] = {}
        for place, state in enumerate(states):
            shares.setdefault(1.0 / state[COUNT] if swa else 1.0 - self._config.decay, []).append(place)
        for share, places in shares.items():
            kept, now = [states[i][AVERAGE] for i in places], [learning[i].detach() for i in places]
            torch._foreach_lerp_(kept, now, share)

    def restart(self, steps: int) -> None:
        """After ``steps`` steps of this training: without an average where it has not begun, whatever a former left."""
        if steps <= self._first:
            drop_averages(self._optimizer)

    @torch.no_grad()
    def swap(self) -> None:
        """Exchange the weights with their averages, where there are any; again, and all is as before."""
        for parameter in self._parameters:
            average = self._optimizer.state[parameter].get(AVERAGE)
            if average is not None:
                former = parameter.detach().clone()
                parameter.copy_(average)
                average.copy_(former)


def drop_averages(optimizer: torch.optim.Optimizer) -> None:
    """Forget the averages in the state of ``optimizer``, which belong to another training."""
    for state in optimizer.state.values():
        state.pop(AVERAGE, None)
        state.pop(COUNT, None)
