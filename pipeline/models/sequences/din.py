"""DIN (Zhou et al., KDD'18, arXiv 1706.06978): each event weighs as much as it has to do with the target.

Section 4.3: an MLP looks at event and target; the weights are not normalised, so that their sum tells how strong the
interest is. With ``softmax`` they are shares of one, so that one event can take all of the weight.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pipeline.specs.sequence_block import BlockInputs, SequenceBlock

if TYPE_CHECKING:
    from torch import nn


@dataclass(frozen=True)
class Din(SequenceBlock):
    """``hidden``: widths of the MLP that weighs an event."""

    hidden: Sequence[int] = (32, 16)
    softmax: bool = False
    name = "din"
    doc = "attention of the target over the events, by an MLP."
    targeted = True

    def build(self, inputs: BlockInputs) -> nn.Module:
        """See ``SequenceBlock.build``."""
        from pipeline.models.blocks.din import TargetAttention

        return TargetAttention(inputs.dim, self.hidden, softmax=self.softmax)


SPEC = Din()
