"""The architecture's parameters: a distribution over the choices of each decision, draws from it, and their costs."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from pipeline.records.search import Price
from pipeline.specs.search_part import Decision

Gates = Mapping[str, Tensor]  # for each decision, 1 for the drawn choice and 0 for the others: [choices]
# Limit on the difference of measured choices' logits, so that a poor choice is still drawn at times, and learns.
FARTHEST = 5.0


def first_values(widths: Sequence[int], size: int) -> Tensor:
    """Return for each of ``widths`` a row of ``size`` values: that many ones, then 0 (FBNetV2, arXiv 2004.05565).

    These are masks of nested choices: narrower ones share the first values of wider ones.
    """
    return (torch.arange(size) < torch.tensor(widths)[:, None]).float()


class Choices(nn.Module):
    """Logits of every decision, all alike at first.

    A draw is one choice of each decision, with the gradients of a relaxed one (straight-through Gumbel-softmax, Jang
    et al. 2017, arXiv 1611.01144). ``seed`` decides the draws.
    """

    outside: Tensor

    def __init__(self, decisions: Sequence[Decision], seed: int) -> None:
        super().__init__()
        self.decisions = tuple(decisions)
        self.sizes = [len(decision.choices) for decision in decisions]
        # Keep one matrix for all decisions, so that a draw takes a few kernels rather than a few for each of hundreds
        # of pairs. Columns beyond a decision's own choices are masked before each softmax.
        self.logits = nn.Parameter(torch.zeros(len(decisions), max(self.sizes)))
        outside = torch.arange(max(self.sizes)) >= torch.tensor(self.sizes)[:, None]
        self.register_buffer("outside", outside, persistent=False)
        self.generator = torch.Generator().manual_seed(seed)

    def draw(self, temperature: float, whole: Collection[str] = ()) -> Gates:
        """Return the gates of one architecture drawn from the distributions: 1 for its choices, 0 for all others.

        Gradients are those of the relaxed draw at ``temperature``. Decisions in ``whole`` have their first choice.
        """
        # -log of a standard exponential is Gumbel noise: the largest noisy logit is a draw from the softmax.
        noise = -torch.empty(self.logits.shape).exponential_(generator=self.generator).log()
        noisy = ((self.logits + noise) / temperature).masked_fill(self.outside, -torch.inf)
        relaxed = noisy.softmax(1)
        # Draw one choice, since a mixture would not show how good each choice is by itself: weights make up for a value
        # that is scaled, but not for one that is missing.
        drawn = torch.zeros_like(relaxed).scatter_(1, relaxed.argmax(1, keepdim=True), 1.0)
        gates = self._gates(drawn + (relaxed - relaxed.detach()))
        # Replace gates after the draw, so that the generator advances by the same amount whatever is in ``whole``.
        first = self.whole()
        for name in gates.keys() & set(whole):
            gates[name] = first[name]
        return gates

    def whole(self) -> Gates:
        """Return the gates of the first choices, which are the configuration itself."""
        first = torch.zeros_like(self.logits)
        first[:, 0] = 1.0
        return self._gates(first)

    def likeliest(self) -> Gates:
        """Return the gates of the most probable choices."""
        places = self.probabilities().argmax(1, keepdim=True)
        return self._gates(torch.zeros_like(self.logits).scatter_(1, places, 1.0))

    @torch.no_grad()
    def measured(self, name: str, losses: Tensor, scale: float) -> None:
        """Make choices of one decision more likely the lower their ``losses`` [choices], which include their cost.

        ``scale``: log loss that makes a choice e times as likely as another.
        """
        place = [decision.name for decision in self.decisions].index(name)
        self.logits[place, : len(losses)] = ((losses - losses.min()) / -scale).clamp_min(-FARTHEST)

    def probabilities(self) -> Tensor:
        """Return probabilities [decisions, most choices]; 0 if a decision has fewer choices."""
        return self.logits.masked_fill(self.outside, -torch.inf).softmax(1)

    def by_name(self) -> dict[str, list[float]]:
        """Return the probabilities of each decision's choices."""
        return {name: row.tolist() for name, row in self._gates(self.probabilities()).items()}

    def best(self) -> dict[str, Any]:
        """Return the most probable choice of each decision."""
        best: dict[str, Any] = {}
        # argmax takes the first of equal probabilities, so an undecided decision stays as configured.
        for decision, place in zip(self.decisions, self.probabilities().argmax(1).tolist(), strict=True):
            best[decision.name] = decision.choices[place]
        return best

    def _gates(self, rows: Tensor) -> dict[str, Tensor]:
        """Return ``rows`` [decisions, most choices] by decision, cut to its choices."""
        gates = {}
        for decision, row, size in zip(self.decisions, rows, self.sizes, strict=True):
            gates[decision.name] = row[:size]
        return gates


@dataclass(frozen=True, kw_only=True)
class Costs:
    """The cost term, linear in the probabilities: ``start + sum(table * probabilities)``.

    In the planner's units: predicted ms of a step and bytes by tier.
    """

    start: float
    table: Tensor

    def expected(self, probabilities: Tensor) -> Tensor:
        """Return the expected cost of ``probabilities`` [decisions, most choices]."""
        return self.start + (self.table * probabilities).sum()


@dataclass(frozen=True, kw_only=True)
class LossWeights:
    """The log loss that weighs as much as the original model's predicted step (``ms``) and its tables' ``bytes``."""

    ms: float
    bytes: float

    def of(self, price: Price, original: Price) -> float:
        """Return the cost of ``price`` beside the ``original``."""
        return self.ms * price.step_ms / original.step_ms + self.bytes * price.total / max(original.total, 1)


def tabulate(
    decisions: Sequence[Decision],
    at: Mapping[str, Any],
    price: Callable[[Mapping[str, Any]], Price],
    weights: LossWeights,
    original: Price,
) -> Costs:
    """Tabulate the costs around the choices ``at``: of each other choice, with all other decisions unchanged.

    ``price`` takes a configuration's choices. Decisions that are priced alike are priced once.
    """
    start = weights.of(price(at), original)
    table = torch.zeros(len(decisions), max(len(decision.choices) for decision in decisions))
    # Each price is a prediction by the planner, and n features have n (n - 1) / 2 pairs. All pairs cost the same, so
    # only one of them is priced.
    known: dict[Any, list[float]] = {}
    for decision, row in zip(decisions, table, strict=True):
        current = at[decision.name]
        key = (decision.priced_as, current)
        if key not in known:
            known[key] = []
            for choice in decision.choices:
                cost = start
                if choice != current:
                    cost = weights.of(price({**at, decision.name: choice}), original)
                known[key].append(cost - start)
        row[: len(known[key])] = torch.tensor(known[key])
    return Costs(start=start, table=table)
