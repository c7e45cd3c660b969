"""HSTU (Zhai et al., ICML'24, arXiv 2402.17152): pointwise attention with gates, the target as the last event.

The paper's bias is by place and time. Here the one by time is of an event's age: its time before the row's, which is
the target's. It is a product with the age's embedding, and so a number for each bin and head.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from pipeline.models.sequences.heads import check_heads
from pipeline.specs.sequence_block import BlockInputs, SequenceBlock

if TYPE_CHECKING:
    from torch import nn


@dataclass(frozen=True)
class HstuBlock(SequenceBlock):
    """``layers`` units of ``heads`` heads. ``ages``: with a bias by the events' ages."""

    layers: int = 1
    heads: int = 2
    ages: bool = False
    name = "hstu"
    doc = "pointwise attention with gates, the target as the last event."
    targeted = True

    def build(self, inputs: BlockInputs) -> nn.Module:
        """See ``SequenceBlock.build``; ConfigError where the heads do not divide the width."""
        from pipeline.models.blocks.hstu import Hstu

        check_heads(self.name, self.heads, inputs)
        return Hstu(inputs.dim, self.layers, self.heads, inputs.max_length, inputs.ages if self.ages else 0)


SPEC = HstuBlock()
