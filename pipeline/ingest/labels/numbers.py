"""What counts and values have in common: their columns are numbers, their figures are of errors."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from pipeline.specs.label_kind import LabelKind, TaskSpec, TaskSums

if TYPE_CHECKING:
    import numpy as np
    import polars as pl


class NumberKind(LabelKind):
    """A label that is a number."""

    title = "RMSE"

    def read(self, values: pl.Series, text: pl.Series | None, task: TaskSpec, spec: Any, rejected: Any) -> pl.Series:
        """See ``LabelKind.read``."""
        import polars as pl

        from pipeline.ingest.values import number_of

        return number_of(values, text, task.column, spec, rejected).cast(pl.Float32)

    def progress(self, sums: TaskSums) -> float | None:
        """The root mean square error; None without labels."""
        return math.sqrt(sums.square / sums.weight) if sums.weight else None

    def figures(self, labels: np.ndarray, logits: np.ndarray, weights: np.ndarray | None = None) -> dict[str, float]:
        """RMSE, calibration, and the share of the variance that is left (1 - R^2)."""
        from pipeline.evaluation.numbers import evaluate_numbers

        return evaluate_numbers(labels, self.predicted(logits), weights)
