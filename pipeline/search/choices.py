"""The architecture's parameters: a distribution over the choices of each decision, and draws from it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from pipeline.specs.search_part import Decision

Gates = Mapping[str, Tensor]  # by decision, how much of each choice there is: [choices], of sum 1


class Choices(nn.Module):
    """Logits of every decision, all alike at first.

    A draw is a relaxed one-hot vector (Gumbel-softmax, Jang et al. 2017, arXiv 1611.01144): near one choice where
    ``temperature`` is low, and with gradients to the logits. ``seed`` decides the draws.
    """

    outside: Tensor

    def __init__(self, decisions: Sequence[Decision], seed: int) -> None:
        super().__init__()
        self.decisions = tuple(decisions)
        self.sizes = [len(each.choices) for each in decisions]
        self.logits = nn.Parameter(torch.zeros(len(decisions), max(self.sizes)))
        outside = torch.arange(max(self.sizes)) >= torch.tensor(self.sizes)[:, None]
        self.register_buffer("outside", outside, persistent=False)
        self.generator = torch.Generator().manual_seed(seed)

    def draw(self, temperature: float) -> Gates:
        """Gates of one architecture drawn from the distributions."""
        noise = -torch.empty(self.logits.shape).exponential_(generator=self.generator).log()
        return self._gates(self._masked((self.logits + noise) / temperature).softmax(1))

    def probabilities(self) -> Tensor:
        """[decisions, most choices]; 0 where a decision has fewer choices."""
        return self._masked(self.logits).softmax(1)

    def by_name(self) -> dict[str, list[float]]:
        """The probabilities of each decision's choices."""
        rows = self.probabilities().tolist()
        return {each.name: row[:n] for each, row, n in zip(self.decisions, rows, self.sizes, strict=True)}

    def best(self) -> dict[str, Any]:
        """The most probable choice of each decision."""
        places = self.probabilities().argmax(1).tolist()
        return {each.name: each.choices[place] for each, place in zip(self.decisions, places, strict=True)}

    def _masked(self, logits: Tensor) -> Tensor:
        return logits.masked_fill(self.outside, -torch.inf)

    def _gates(self, rows: Tensor) -> Gates:
        return {each.name: row[:n] for each, row, n in zip(self.decisions, rows, self.sizes, strict=True)}
