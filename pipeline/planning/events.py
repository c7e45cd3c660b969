"""What the blocks of sequences ask of a rank, by the lengths that ingestion measured. No torch.

Time goes by the mean of a batch; memory has to do for nearly all of them, so it goes by the 99th percentile.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from pipeline.config import ModelConfig
from pipeline.models.sequence_costs import BlockCosts, events_of_batch, sequence_costs
from pipeline.records import DatasetSchema, SequenceProfile
from pipeline.specs import ModelCosts


@dataclass(frozen=True)
class EventLengths:
    """``measured``: the lengths, by sequence. ``most``: events that a block takes at once (``train.max_events``)."""

    measured: Mapping[str, SequenceProfile] = field(default_factory=dict)
    most: int | None = None

    def of_batch(self, sequence: str, longest: int, samples: int) -> float:
        """Events of ``samples`` rows that 99 of 100 batches do not exceed; not measured, all rows have the longest."""
        known = self.measured.get(sequence)
        return float(samples * longest) if known is None else events_of_batch(known, samples)


NO_EVENTS = EventLengths()


def timed_costs(model: ModelConfig, schema: DatasetSchema, events: EventLengths, samples: int) -> ModelCosts:
    """The costs of all blocks by their time, per sample of a batch of ``samples``.

    Where a batch is worked on in parts, the forward pass runs twice.
    """
    blocks = sequence_costs(model, schema, events.measured)
    again = {
        each.name: 1.0 + _forward_share(blocks[each.name]) * (_parts(events, each.name, each.max_length, samples) > 1)
        for each in schema.sequences
    }
    return ModelCosts(
        flop=sum(each.flop * again[name] for name, each in blocks.items()),
        parameters=sum(each.parameters for each in blocks.values()),
        activations=round(sum(each.activations * again[name] for name, each in blocks.items())),
    )


def kept_activations(model: ModelConfig, schema: DatasetSchema, events: EventLengths, samples: int) -> float:
    """Values that the blocks keep for the backward pass of ``samples`` rows, in the batches with most events.

    In parts, those of one part, of which one history may be longer than ``most``.
    """
    blocks, total = sequence_costs(model, schema, events.measured), 0.0
    for each in schema.sequences:
        known = events.measured.get(each.name)
        mean = float(each.max_length) if known is None else max(known.looked_up, 1.0)
        batch = events.of_batch(each.name, each.max_length, samples)
        if events.most is not None:
            batch = min(batch, max(events.most, each.max_length if known is None else known.longest))
        total += blocks[each.name].activations * batch / mean
    return total


def _parts(events: EventLengths, sequence: str, longest: int, samples: int) -> float:
    """How many parts a mean batch of ``samples`` rows is worked on in; at most 1: all at once."""
    known = events.measured.get(sequence)
    mean = float(longest) if known is None else max(known.looked_up, 1.0)
    return 1.0 if events.most is None else samples * mean / events.most


def _forward_share(block: BlockCosts) -> float:
    """The share of the forward pass in the cost of a block; a third, where it has no products."""
    return block.forward / block.flop if block.flop else 1 / 3
