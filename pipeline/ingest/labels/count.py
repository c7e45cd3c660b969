"""Labels that count: Poisson loss."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from pipeline.ingest.labels.numbers import NumberKind
from pipeline.specs.label_kind import TaskSpec

if TYPE_CHECKING:
    import polars as pl
    from torch import Tensor

LARGEST_LOGIT = 30.0  # exp of more is no count, and its loss not finite in float32


class Count(NumberKind):
    """A logit is the logarithm of the expected count."""

    name = "count"
    doc = "a whole number from 0 on, Poisson loss, the expected count."

    def read(self, values: pl.Series, text: pl.Series | None, task: TaskSpec, spec: Any, rejected: Any) -> pl.Series:
        """See ``LabelKind.read``; a number that counts nothing is rejected."""
        counts = super().read(values, text, task, spec, rejected)
        wrong = ((counts < 0) | (counts != counts.floor())).fill_null(False)
        rejected.add(
            wrong.to_numpy(),
            f"{task.column} is no count",
            lambda i: f"{task.column} is {counts[i]:g}, expected a whole number from 0 on",
            task.column,
        )
        return counts

    def loss(self, logits: Tensor, labels: Tensor) -> Tensor:
        """exp(logit) - label * logit: the negative log likelihood without what the label alone decides."""
        bounded = logits.clamp(max=LARGEST_LOGIT)
        return bounded.exp() - labels * bounded

    def predicted(self, logits: Any) -> Any:
        """Expected counts."""
        import numpy as np

        return np.exp(np.minimum(logits.astype(np.float64), LARGEST_LOGIT))

    def prediction(self, logits: Tensor) -> Tensor:
        """Expected counts."""
        return logits.clamp(max=LARGEST_LOGIT).exp()

    def start(self, mean: float, rows: int) -> float:
        """The logarithm of the mean, kept finite by half a count more."""
        return math.log((mean * rows + 0.5) / (rows + 0.5))


COUNT = Count()
