"""Labels that are any number: squared error."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pipeline.ingest.labels.numbers import NumberKind

if TYPE_CHECKING:
    from torch import Tensor


class Value(NumberKind):
    """A logit is the expected value."""

    name = "value"
    doc = "a number, squared loss, the expected value."

    def loss(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Half the squared error."""
        return 0.5 * (logits - labels).square()

    def predicted(self, logits: Any) -> Any:
        """The logits."""
        return logits.astype("float64")

    def prediction(self, logits: Tensor) -> Tensor:
        """The logits."""
        return logits

    def start(self, mean: float, rows: int) -> float:
        """The mean."""
        return mean


VALUE = Value()
