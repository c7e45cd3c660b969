"""Blocks that make a vector of a sample's events: ``SPECS`` lists them. No torch at import."""

from __future__ import annotations

from pipeline.models.sequences import din, hstu, pooled, transformer
from pipeline.specs.sequence_block import SequenceBlock

SPECS: tuple[SequenceBlock, ...] = (
    din.SPEC,
    transformer.SASREC,
    transformer.BST,
    hstu.SPEC,
    pooled.SPEC,
)
