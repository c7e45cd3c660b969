"""The kinds of labels of further tasks: ``SPECS`` lists them. No torch, no Polars at import."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from pipeline.specs.label_kind import LabelKind, TaskSpec, TaskSums

if TYPE_CHECKING:
    import numpy as np
    import polars as pl
    from torch import Tensor


class Binary(LabelKind):
    """Labels of two classes: log loss, and the figures of a click.

    A logit is the log odds of the positive class.
    """

    name = "binary"
    doc = "two classes, log loss, a probability."
    title = "NE"
    classes = True

    def read(self, values: pl.Series, text: pl.Series | None, task: TaskSpec, spec: Any, rejected: Any) -> pl.Series:
        """See ``LabelKind.read``; numbers equal ``positive`` and ``negative`` by value."""
        import polars as pl

        from pipeline.ingest.values import absent_in, shown, two_classes

        positive, negative, text = two_classes(values, text, task.positive, task.negative)
        missing = absent_in(text, spec) & ~(positive | negative)
        rejected.add(
            (~(positive | negative | missing)).to_numpy(),
            f"{task.column} is neither {task.positive!r} nor {task.negative!r}",
            lambda i: f"{task.column} is {shown(text[i])}, expected {task.positive!r} or {task.negative!r}",
            task.column,
        )
        return pl.select(pl.when(~missing).then(positive.cast(pl.Float32))).to_series()

    def loss(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Return the log loss in nats."""
        from torch.nn import functional

        return functional.binary_cross_entropy_with_logits(logits, labels, reduction="none")

    def predicted(self, logits: Any) -> Any:
        from pipeline.evaluation.metrics import sigmoid

        return sigmoid(logits)

    def prediction(self, logits: Tensor) -> Tensor:
        return logits.sigmoid()

    def start(self, mean: float, rows: int) -> float:
        """Return the log odds, estimated as (positives + 1/2) / (rows + 1) (Krichevsky and Trofimov, 1981)."""
        positives = mean * rows
        return math.log((positives + 0.5) / (rows - positives + 0.5))

    def progress(self, sums: TaskSums) -> float | None:
        """Return NE; None for rows of one class."""
        from pipeline.evaluation.metrics import entropy_of_rate

        if not 0 < sums.label < sums.weight:
            return None
        return sums.loss / sums.weight / entropy_of_rate(sums.label / sums.weight, math.log, math.log1p)

    def figures(self, labels: np.ndarray, logits: np.ndarray, weights: np.ndarray | None = None) -> dict[str, float]:
        """Return NE, AUC, log loss and calibration."""
        from pipeline.evaluation.metrics import evaluate

        return evaluate(labels, logits, weights=weights)


BINARY = Binary()


class NumberKind(LabelKind):
    """What counts and values have in common: their columns are numbers, their figures are of errors.

    A label that is a number.
    """

    title = "RMSE"

    def read(self, values: pl.Series, text: pl.Series | None, task: TaskSpec, spec: Any, rejected: Any) -> pl.Series:
        import polars as pl

        from pipeline.ingest.values import number_of

        return number_of(values, text, task.column, spec, rejected).cast(pl.Float32)

    def progress(self, sums: TaskSums) -> float | None:
        """Return the root mean square error; None without labels."""
        return math.sqrt(sums.square / sums.weight) if sums.weight else None

    def figures(self, labels: np.ndarray, logits: np.ndarray, weights: np.ndarray | None = None) -> dict[str, float]:
        """Return RMSE, calibration, and the share of the variance that is left (1 - R^2)."""
        from pipeline.evaluation.metrics import evaluate_numbers

        return evaluate_numbers(labels, self.predicted(logits), weights)


# A larger logit is no count: exp(30) is 1e13. Beyond 88, exp is not finite in float32.
LARGEST_LOGIT = 30.0


class Count(NumberKind):
    """Labels that count: Poisson loss.

    A logit is the logarithm of the expected count.
    """

    name = "count"
    doc = "a whole number from 0 on, Poisson loss, the expected count."

    def read(self, values: pl.Series, text: pl.Series | None, task: TaskSpec, spec: Any, rejected: Any) -> pl.Series:
        """See ``LabelKind.read``; a number that is not a count is rejected."""
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
        """Return exp(logit) - label * logit: the negative log likelihood without what the label alone decides."""
        bounded = logits.clamp(max=LARGEST_LOGIT)
        return bounded.exp() - labels * bounded

    def predicted(self, logits: Any) -> Any:
        import numpy as np

        return np.exp(np.minimum(logits.astype(np.float64), LARGEST_LOGIT))

    def prediction(self, logits: Tensor) -> Tensor:
        return logits.clamp(max=LARGEST_LOGIT).exp()

    def start(self, mean: float, rows: int) -> float:
        """Return the logarithm of the mean, kept finite by half a count more."""
        return math.log((mean * rows + 0.5) / (rows + 0.5))


COUNT = Count()


class Value(NumberKind):
    """Labels that are any number: squared error.

    A logit is the expected value.
    """

    name = "value"
    doc = "a number, squared loss, the expected value."

    def loss(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Return half the squared error."""
        return 0.5 * (logits - labels).square()

    def predicted(self, logits: Any) -> Any:
        return logits.astype("float64")

    def prediction(self, logits: Tensor) -> Tensor:
        return logits

    def start(self, mean: float, rows: int) -> float:
        return mean


VALUE = Value()


SPECS = (BINARY, COUNT, VALUE)
