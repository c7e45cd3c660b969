"""The costs of a model's sequences for the planner, counted on the built modules. Importing this loads no torch."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass

from pipeline.config.model import ModelConfig
from pipeline.records.dataset import DatasetSchema, SequenceGroup, SequenceProfile

SAMPLES = 16  # of the pass that is counted; real ones, since the work depends on the lengths
NORMAL_P99 = 2.326  # standard deviations from the mean of a normal distribution to its 99th percentile


@dataclass(frozen=True, kw_only=True)
class BlockCosts:
    """The cost of a sequence's block: as ``ModelCosts``, and of ``flop`` those of the ``forward`` pass."""

    flop: float
    forward: float
    parameters: int
    activations: float


_COUNTED: dict[str, dict[str, BlockCosts]] = {}  # by what they depend on


def sequence_costs(
    model: ModelConfig, schema: DatasetSchema, measured: Mapping[str, SequenceProfile]
) -> dict[str, BlockCosts]:
    """What ``models.costs.model_costs`` counts, of the block of each sequence; per sample of lengths as ``measured``.

    A sequence that was not measured has the longest ones.
    """
    if not schema.sequences:
        return {}
    lengths = {each.name: lengths_like(each, measured.get(each.name)) for each in schema.sequences}
    settings = {each.name: asdict(model.sequence(each.name)) for each in schema.sequences}
    widths = [[model.dim_of(column.owner) for column in each.columns] for each in schema.sequences]
    longest = [each.max_length for each in schema.sequences]  # as many places have vectors
    key = json.dumps([model.embedding_dim, settings, widths, longest, lengths], sort_keys=True)
    if key not in _COUNTED:
        _COUNTED[key] = _counted(model, schema, lengths)
    return _COUNTED[key]


def lengths_like(sequence: SequenceGroup, measured: SequenceProfile | None) -> list[int]:
    """``SAMPLES`` lengths with the mean and the spread that were ``measured``: attention grows with their squares.

    Short and long ones, the spread that of a normal distribution with this 99th percentile.
    """
    if measured is None:
        return [sequence.max_length] * SAMPLES
    longest = float(sequence.max_length)
    mean = min(max(measured.looked_up, 1.0), longest)
    spread = max(measured.p99 - mean, 0.0) / NORMAL_P99
    low, high, total = max(mean - spread, 1.0), min(mean + spread, longest), round(SAMPLES * mean)
    if high - low < 1:
        return _shared(total, SAMPLES)
    long = min(max(round(SAMPLES * (mean - low) / (high - low)), 1), SAMPLES - 1)
    most = min(round(high), (total - (SAMPLES - long)) // long)  # the others have an event each at least
    return _shared(total - long * most, SAMPLES - long) + [most] * long


def _shared(total: int, parts: int) -> list[int]:
    """``total`` in whole ``parts`` that differ by one at most."""
    return [total // parts + (place < total % parts) for place in range(parts)]


def _counted(model: ModelConfig, schema: DatasetSchema, lengths: Mapping[str, list[int]]) -> dict[str, BlockCosts]:
    from pipeline.models.sequence_encoders import build_sequences

    modules = build_sequences(model, schema, 0)
    return {
        each.name: _block_costs(
            modules[each.name], [model.dim_of(column.owner) for column in each.columns], lengths[each.name]
        )
        for each in schema.sequences
    }


def _block_costs(module: object, widths: list[int], lengths: list[int]) -> BlockCosts:
    import torch
    from torch.utils.flop_counter import FlopCounterMode

    assert isinstance(module, torch.nn.Module)
    saved = dict[int, int]()
    kept: list[torch.Tensor] = []  # alive, so that no storage's address is used twice

    def save(value: torch.Tensor) -> torch.Tensor:
        saved[value.untyped_storage()._cdata] = value.numel()
        kept.append(value)
        return value

    with FlopCounterMode(display=False) as products:
        columns = [torch.zeros(sum(lengths), width, requires_grad=True) for width in widths]
        rows = torch.arange(SAMPLES).repeat_interleave(torch.tensor(lengths))
        candidates = [torch.zeros(SAMPLES, width) for width in widths]
        with torch.autograd.graph.saved_tensors_hooks(save, lambda value: value):
            vectors = module(columns, rows, candidates, SAMPLES)
        forward = products.get_total_flops()
        vectors.sum().backward()
    for parameter in module.parameters():
        saved.pop(parameter.untyped_storage()._cdata, None)
    return BlockCosts(
        flop=products.get_total_flops() / SAMPLES,
        forward=forward / SAMPLES,
        parameters=sum(parameter.numel() for parameter in module.parameters()),
        activations=sum(saved.values()) / SAMPLES,
    )


def events_of_batch(measured: SequenceProfile, samples: int) -> float:
    """Events of ``samples`` rows that 99 of 100 batches do not exceed.

    The distance from mean to 99th percentile grows with the root of the number of rows, as of any sum.
    """
    mean = max(measured.looked_up, 1.0)
    return samples * mean + math.sqrt(samples) * max(measured.p99 - mean, 0.0)
