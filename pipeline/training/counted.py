"""What a row counts for in the loss and in figures: its own weight, and the rows without a click that were left out."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from pipeline.records import BY_WEIGHTS, DatasetSchema


@dataclass(frozen=True)
class RowCounts:
    """Reads the last columns of ``Batch.extra``: row weights, then shares of kept rows, where the dataset has them.

    ``sampled``: of the schema. With shares w the loss is either of logit - log w, the logit of the kept rows, so that
    the model's own logit is that of all rows; or rows without a click have weight 1 / w.
    """

    row_weights: bool
    sampled: str

    @classmethod
    def of(cls, schema: DatasetSchema) -> RowCounts:
        """Of the rows of a dataset."""
        return cls(schema.row_weights, schema.sampled)

    def in_loss(self, labels: Tensor, extra: Tensor | None) -> Tensor | None:
        """Factors [b] of the main task's loss; None where they are 1."""
        if self.sampled == BY_WEIGHTS:
            return self.in_figures(labels, extra)
        return self._own(extra)

    def in_figures(self, labels: Tensor, extra: Tensor | None) -> Tensor | None:
        """How many rows of the whole log each row [b] stands for; None where it is one."""
        own, others = self._own(extra), self.left_out(labels, extra)
        return own if others is None else others if own is None else own * others

    def left_out(self, labels: Tensor, extra: Tensor | None) -> Tensor | None:
        """1 / w for rows without a click, 1 for the others; None where all rows are there. ``labels``: main ones."""
        if not self.sampled or extra is None:
            return None
        return torch.where(labels > 0, 1.0, extra[:, -1].reciprocal())

    def offset(self, extra: Tensor | None) -> Tensor | None:
        """What the logits [b] of the kept rows have on top of those of all rows; None where it is nothing."""
        if not self.sampled or self.sampled == BY_WEIGHTS or extra is None:
            return None
        return -extra[:, -1].log()

    def _own(self, extra: Tensor | None) -> Tensor | None:
        return extra[:, -2 if self.sampled else -1] if self.row_weights and extra is not None else None
