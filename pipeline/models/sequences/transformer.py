"""SASRec (Kang and McAuley, ICDM'18, arXiv 1808.09781) and BST (Chen et al. 2019, arXiv 1905.06874): transformers.

SASRec's newest event speaks for the history; BST puts the target behind it. Vectors of places, which both papers add,
come with every block (``places``).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from pipeline.models.sequences.heads import check_heads
from pipeline.specs.sequence_block import BlockInputs, SequenceBlock

if TYPE_CHECKING:
    from torch import nn


@dataclass(frozen=True)
class TransformerBlock(SequenceBlock):
    """``layers``: causal transformer layers of ``heads`` heads."""

    layers: int = 1
    heads: int = 2
    name = "sasrec"
    doc = "a causal transformer, of which the newest event speaks for all."
    targeted = False

    def build(self, inputs: BlockInputs) -> nn.Module:
        """See ``SequenceBlock.build``; ConfigError where the heads do not divide the width."""
        from pipeline.models.blocks.transformer import Transformer

        check_heads(self.name, self.heads, inputs)
        return Transformer(inputs.dim, self.layers, self.heads, inputs.max_length, targeted=self.targeted)


@dataclass(frozen=True)
class TargetTransformerBlock(TransformerBlock):
    """The same with the target as the last event."""

    name = "bst"
    doc = "a causal transformer with the target as the last event."
    targeted = True


SASREC, BST = TransformerBlock(), TargetTransformerBlock()
