"""Labels of two classes: log loss, and the figures of a click."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from pipeline.specs.label_kind import LabelKind, TaskSpec, TaskSums

if TYPE_CHECKING:
    import numpy as np
    import polars as pl
    from torch import Tensor


class Binary(LabelKind):
    """A logit is the log odds of the positive class."""

    name = "binary"
    doc = "two classes, log loss, a probability."
    title = "NE"
    classes = True

    def read(self, values: pl.Series, text: pl.Series | None, task: TaskSpec, spec: Any, rejected: Any) -> pl.Series:
        """See ``LabelKind.read``; numbers equal ``positive`` and ``negative`` by value."""
        import polars as pl

        from pipeline.ingest.rejects import shown
        from pipeline.ingest.values import absent_in, equals

        if text is None:
            text = values.cast(pl.List(pl.String)).list.join(",")
        words = (task.positive, task.negative)
        if values.dtype.is_numeric():
            positive, negative = (equals(values, word) for word in words)
        else:
            positive, negative = ((text == word).fill_null(False) for word in words)
        missing = absent_in(text, spec) & ~(positive | negative)
        rejected.add(
            (~(positive | negative | missing)).to_numpy(),
            f"{task.column} is neither {words[0]!r} nor {words[1]!r}",
            lambda i: f"{task.column} is {shown(text[i])}, expected {words[0]!r} or {words[1]!r}",
            task.column,
        )
        return pl.select(pl.when(~missing).then(positive.cast(pl.Float32))).to_series()

    def loss(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Log loss in nats."""
        from torch.nn import functional

        return functional.binary_cross_entropy_with_logits(logits, labels, reduction="none")

    def predicted(self, logits: Any) -> Any:
        """Probabilities."""
        from pipeline.evaluation.metrics import sigmoid

        return sigmoid(logits)

    def prediction(self, logits: Tensor) -> Tensor:
        """Probabilities."""
        return logits.sigmoid()

    def start(self, mean: float, rows: int) -> float:
        """The log odds, estimated as (positives + 1/2) / (rows + 1) (Krichevsky and Trofimov, 1981)."""
        positives = mean * rows
        return math.log((positives + 0.5) / (rows - positives + 0.5))

    def progress(self, sums: TaskSums) -> float | None:
        """NE; None for rows of one class."""
        from pipeline.evaluation.metrics import entropy_of_rate

        if not 0 < sums.label < sums.weight:
            return None
        return sums.loss / sums.weight / entropy_of_rate(sums.label / sums.weight, math.log, math.log1p)

    def figures(self, labels: np.ndarray, logits: np.ndarray, weights: np.ndarray | None = None) -> dict[str, float]:
        """NE, AUC, log loss and calibration."""
        from pipeline.evaluation.metrics import evaluate

        return evaluate(labels, logits, weights=weights)


BINARY = Binary()
