"""Blocks that make a vector of a sample's events, and their options: ``SPECS`` lists them. No torch at import."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pipeline.core.errors import ConfigError
from pipeline.specs.model import BlockInputs, SequenceBlock

if TYPE_CHECKING:
    from torch import nn


def check_heads(block: str, heads: int, inputs: BlockInputs) -> None:
    """Check that ``heads`` divide the width of the events.

    Raises:
        ConfigError: They do not divide it.
    """
    if inputs.dim % heads:
        raise ConfigError(
            f"{block} has {heads} heads, expected a divisor of model.embedding_dim, {inputs.dim}",
            hint="model.sequences.<name>.options.heads=1",
        )


@dataclass(frozen=True)
class Din(SequenceBlock):
    """DIN (Zhou et al., KDD'18, arXiv 1706.06978): each event weighs as much as it has to do with the target.

    Section 4.3: an MLP looks at event and target; the weights are not normalised, so that their sum tells how strong
    the interest is. With ``softmax`` they are shares of one, so that one event can take all of the weight.

    ``hidden``: widths of the MLP that weighs an event.
    """

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
    """SASRec (Kang and McAuley, ICDM'18, arXiv 1808.09781): a transformer whose newest event speaks for the history.

    Vectors of places, which the paper adds, come with every block (``places``).

    ``layers``: causal transformer layers of ``heads`` heads.
    """

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
    """BST (Chen et al. 2019, arXiv 1905.06874): a transformer with the target behind the history.

    The same with the target as the last event.
    """

    name = "bst"
    doc = "a causal transformer with the target as the last event."
    targeted = True


SASREC, BST = TransformerBlock(), TargetTransformerBlock()


@dataclass(frozen=True)
class HstuBlock(SequenceBlock):
    """HSTU (Zhai et al., ICML'24, arXiv 2402.17152): pointwise attention with gates, the target as the last event.

    The paper's bias is by place and time. Here the one by time is of an event's age: its time before the row's, which
    is the target's. It is a product with the age's embedding, and so a number for each bin and head.

    ``layers`` units of ``heads`` heads. ``ages``: with a bias by the events' ages.
    """

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
        # Without the option there is no layer for ages, even if the sequence has times.
        ages = inputs.ages if self.ages else 0
        return Hstu(inputs.dim, self.layers, self.heads, inputs.max_length, ages)


HSTU = HstuBlock()


@dataclass(frozen=True)
class Pooled(SequenceBlock):
    """The sum of the events' vectors: what any other block is compared with.

    No options.
    """

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
