"""The costs of a model's sequences for the planner, counted on the built modules. Importing this loads no torch."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

from pipeline.config.model import ModelConfig
from pipeline.records.dataset import DatasetSchema, SequenceGroup, SequenceProfile

if TYPE_CHECKING:
    from torch import Tensor, nn

# The samples of the counted pass. It runs on real tensors, since the work depends on the lengths.
SAMPLES = 16
# The standard deviations from the mean of a normal distribution to its 99th percentile.
NORMAL_P99 = 2.326


@dataclass(frozen=True, kw_only=True)
class BlockCosts:
    """The cost of a sequence's block, as in ``ModelCosts``; ``forward`` is the part of ``flop`` in the forward pass."""

    flop: float
    forward: float
    parameters: int
    activations: float
    moved: float
    operations: float


_COUNTED: dict[str, dict[str, BlockCosts]] = {}  # by the settings and lengths that they depend on


def sequence_costs(
    model: ModelConfig, schema: DatasetSchema, measured: Mapping[str, SequenceProfile]
) -> dict[str, BlockCosts]:
    """Return the costs of each sequence's block, as ``model_costs`` counts them, per sample of lengths as ``measured``.

    A sequence that was not measured gets the longest lengths.
    """
    if not schema.sequences:
        return {}
    lengths, settings, widths = {}, {}, {}
    for sequence in schema.sequences:
        lengths[sequence.name] = lengths_like(sequence, measured.get(sequence.name))
        settings[sequence.name] = asdict(model.sequence(sequence.name))
        widths[sequence.name] = [model.dim_of(column.owner) for column in sequence.columns]
    # The number of place vectors depends on the longest lengths.
    longest = [sequence.max_length for sequence in schema.sequences]
    key = json.dumps([model.embedding_dim, settings, list(widths.values()), longest, lengths], sort_keys=True)
    if key not in _COUNTED:
        from pipeline.models.sequence_encoders import build_sequences

        counted = {}
        # Costs do not depend on the weights, so any seed will do.
        for name, encoder in build_sequences(model, schema, 0).items():
            counted[name] = _block_costs(encoder, widths[name], lengths[name])
        _COUNTED[key] = counted
    return _COUNTED[key]


def lengths_like(sequence: SequenceGroup, measured: SequenceProfile | None) -> list[int]:
    """Return ``SAMPLES`` lengths, short and long ones, with the mean and the spread that were ``measured``."""
    # The spread matters, because attention grows with the squares of lengths.
    if measured is None:
        return [sequence.max_length] * SAMPLES
    longest = float(sequence.max_length)
    mean = min(max(measured.looked_up, 1.0), longest)
    spread = max(measured.p99 - mean, 0.0) / NORMAL_P99
    low = max(mean - spread, 1.0)
    high = min(mean + spread, longest)
    total = round(SAMPLES * mean)
    long = most = 0
    if high - low >= 1:
        # Use two lengths, one below and one above the mean by about the spread, in shares that keep the mean.
        long = min(max(round(SAMPLES * (mean - low) / (high - low)), 1), SAMPLES - 1)
        # The other samples need at least one event each.
        most = min(round(high), (total - (SAMPLES - long)) // long)
    # The other samples share the remaining events, in whole numbers.
    short = SAMPLES - long
    least, one_more = divmod(total - long * most, short)
    return [least + 1] * one_more + [least] * (short - one_more) + [most] * long


def _block_costs(module: nn.Module, widths: list[int], lengths: list[int]) -> BlockCosts:
    import torch
    from torch.utils.flop_counter import FlopCounterMode

    from pipeline.models.operation_counter import OperationCounter

    saved = dict[int, int]()
    # Keep tensors alive, so that no storage's address is used twice.
    kept: list[torch.Tensor] = []

    def save(value: torch.Tensor) -> torch.Tensor:
        saved[value.untyped_storage()._cdata] = value.numel()
        kept.append(value)
        return value

    with FlopCounterMode(display=False) as products:
        with torch.autograd.graph.saved_tensors_hooks(save, lambda value: value):
            vectors = _encode(module, widths, lengths)
        forward = products.get_total_flops()
        vectors.sum().backward()
    once, twice = OperationCounter(), OperationCounter()
    for counter, counted in ((once, lengths), (twice, lengths * 2)):
        # In 16 bits, which CPUs train with where they can: casts account for a third of the values moved.
        with counter:
            with torch.autocast("cpu", torch.bfloat16):
                vectors = _encode(module, widths, counted)
            vectors.sum().backward()
    # Parameters are saved for the backward pass as well, but they are not activations.
    for parameter in module.parameters():
        saved.pop(parameter.untyped_storage()._cdata, None)
    return BlockCosts(
        flop=products.get_total_flops() / SAMPLES,
        forward=forward / SAMPLES,
        parameters=sum(parameter.numel() for parameter in module.parameters()),
        activations=sum(saved.values()) / SAMPLES,
        # What is moved for each sample, without what parameters take.
        moved=(twice.moved - once.moved) / SAMPLES,
        operations=once.operations,
    )


def _encode(module: nn.Module, widths: list[int], lengths: list[int]) -> Tensor:
    # Returns the vectors of samples that have so many events.
    import torch

    columns = [torch.zeros(sum(lengths), width, requires_grad=True) for width in widths]
    rows = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths))
    candidates = [torch.zeros(len(lengths), width) for width in widths]
    vectors: Tensor = module(columns, rows, candidates, len(lengths))
    return vectors


def events_of_batch(measured: SequenceProfile, samples: int) -> float:
    """Return the events of ``samples`` rows that 99 of 100 batches do not exceed."""
    # The distance from mean to 99th percentile grows with the root of the number of rows, as for any sum.
    mean = max(measured.looked_up, 1.0)
    return samples * mean + math.sqrt(samples) * max(measured.p99 - mean, 0.0)
