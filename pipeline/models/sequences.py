"""Blocks that make a vector of a sample's events, and their options: ``SPECS`` lists them. No torch at import."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pipeline.errors import ConfigError
from pipeline.specs.sequence_block import BlockInputs, SequenceBlock

if TYPE_CHECKING:
    from torch import nn


def check_heads(block: str, heads: int, inputs: BlockInputs) -> None:
    """ConfigError unless ``heads`` divide the width of the events."""
    if inputs.dim % heads:
        raise ConfigError(
            f"{block} has {heads} heads, expected a divisor of model.embedding_dim, {inputs.dim}",
            hint="model.sequences.<name>.options.heads=1",
        )


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
        from pipeline.models.sequence_encoders import TargetAttention

        return TargetAttention(inputs.dim, self.hidden, softmax=self.softmax)


DIN = Din()


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
        from pipeline.models.sequence_encoders import Transformer

        check_heads(self.name, self.heads, inputs)
        return Transformer(inputs.dim, self.layers, self.heads, inputs.max_length, targeted=self.targeted)


@dataclass(frozen=True)
class TargetTransformerBlock(TransformerBlock):
    """The same with the target as the last event."""

    name = "bst"
    doc = "a causal transformer with the target as the last event."
    targeted = True


SASREC, BST = TransformerBlock(), TargetTransformerBlock()


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
        from pipeline.models.sequence_encoders import Hstu

        check_heads(self.name, self.heads, inputs)
        return Hstu(inputs.dim, self.layers, self.heads, inputs.max_length, inputs.ages if self.ages else 0)


HSTU = HstuBlock()


@dataclass(frozen=True)
class Pooled(SequenceBlock):
    """No options."""

    name = "sum"
    doc = "the sum of the events."
    targeted = False

    def build(self, inputs: BlockInputs) -> nn.Module:
        """See ``SequenceBlock.build``."""
        from pipeline.models.sequence_encoders import EventSum

        return EventSum()


SUM = Pooled()


SPECS: tuple[SequenceBlock, ...] = (
    DIN,
    SASREC,
    BST,
    HSTU,
    SUM,
)
