"""What choices cost, in the planner's units: predicted ms of a step and bytes by tier, as tables over the choices."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from pipeline.records import Price
from pipeline.specs.search_part import Decision


@dataclass(frozen=True, kw_only=True)
class Costs:
    """The cost term, linear in the probabilities: ``start + sum(table * probabilities)``."""

    start: float
    table: Tensor

    def expected(self, probabilities: Tensor) -> Tensor:
        """The expected cost of ``probabilities`` [decisions, most choices]."""
        return self.start + (self.table * probabilities).sum()


@dataclass(frozen=True, kw_only=True)
class LossWeights:
    """How much log loss the whole original model's predicted step (``ms``) and its tables' ``bytes`` weigh."""

    ms: float
    bytes: float

    def of(self, price: Price, original: Price) -> float:
        """The cost of ``price`` beside the ``original``."""
        return self.ms * price.step_ms / original.step_ms + self.bytes * price.total / max(original.total, 1)


def tabulate(
    decisions: Sequence[Decision],
    at: Mapping[str, Any],
    price: Callable[[Mapping[str, Any]], Price],
    weights: LossWeights,
    original: Price,
) -> Costs:
    """The costs around the choices ``at``: of each other choice, with all other decisions as they are.

    ``price``: of a configuration by its choices. Decisions that are priced alike are priced once.
    """
    most = max(len(each.choices) for each in decisions)
    around = weights.of(price(at), original)
    known: dict[Any, list[float]] = {}
    rows = []
    for each in decisions:
        key = (each.priced_as, at[each.name])
        if key not in known:
            others = [
                around if choice == at[each.name] else weights.of(price({**at, each.name: choice}), original)
                for choice in each.choices
            ]
            known[key] = [cost - around for cost in others]
        rows.append(known[key] + [0.0] * (most - len(each.choices)))
    return Costs(start=around, table=torch.tensor(rows))
