"""The sum of the events' vectors: what any other block is compared with."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from pipeline.specs.sequence_block import BlockInputs, SequenceBlock

if TYPE_CHECKING:
    from torch import nn


@dataclass(frozen=True)
class Pooled(SequenceBlock):
    """No options."""

    name = "sum"
    doc = "the sum of the events."
    targeted = False

    def build(self, inputs: BlockInputs) -> nn.Module:
        """See ``SequenceBlock.build``."""
        from pipeline.models.blocks.pooled import EventSum

        return EventSum()


SPEC = Pooled()
