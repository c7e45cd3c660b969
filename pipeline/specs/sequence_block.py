"""The protocol of a block for sequences: what makes one vector a sample of its events.

A spec is a frozen dataclass, whose fields are the options of ``model.sequences.<name>.options`` that it uses. Its
module must not import torch at its top.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from torch import nn


@dataclass(frozen=True, kw_only=True)
class BlockInputs:
    """``dim``: width of the events' vectors, and of what comes out. ``max_length``: events of a sample at most.

    ``ages``: width of the embeddings of the events' ages; 0 where times are not known.
    """

    dim: int
    max_length: int
    ages: int = 0


class SequenceBlock(Protocol):
    """A block, of ``models/sequences.py``.

    ``doc``: one sentence. ``targeted``: it compares the events with the sequence's target. ``ages``: it wants the
    embeddings of the events' ages beside the events.
    """

    name: str
    doc: str
    targeted: bool
    ages: bool = False

    @abstractmethod
    def build(self, inputs: BlockInputs) -> nn.Module:
        """The module: forward(events [n, D], ``layers.Jagged``, target [B, D] or None) -> vectors [B, D].

        With ``ages`` it takes one more tensor: [n, ``inputs.ages``].

        Its values are float32 or, in products under autocast, bf16. It must run under ``torch.export``, where
        ``Jagged`` has the places of a padded grid. What goes through a ``layers.EventWeights`` of it, the report shows.
        """
