"""The costs of a model's sequences for the planner, counted on the built modules. Importing this loads no torch."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict

from pipeline.config import ModelConfig
from pipeline.records import DatasetSchema
from pipeline.specs import ModelCosts

_COUNTED: dict[str, ModelCosts] = {}  # by what they depend on
SAMPLES = 16  # of the pass that is counted; real ones, since the work depends on the lengths


def sequence_costs(model: ModelConfig, schema: DatasetSchema, lengths: Mapping[str, float]) -> ModelCosts:
    """What ``models.costs.model_costs`` counts, of the blocks of all sequences; per sample of ``lengths`` events.

    ``lengths``: by sequence; one that is missing has its longest.
    """
    if not schema.sequences:
        return ModelCosts(flop=0.0, parameters=0, activations=0)
    events = tuple(max(1, round(lengths.get(each.name, each.max_length))) for each in schema.sequences)
    settings = {each.name: asdict(model.sequence(each.name)) for each in schema.sequences}
    widths = [[model.dim_of(column.owner) for column in each.columns] for each in schema.sequences]
    key = json.dumps([model.embedding_dim, settings, widths, events], sort_keys=True)
    if key not in _COUNTED:
        _COUNTED[key] = _counted(model, schema, events)
    return _COUNTED[key]


def _counted(model: ModelConfig, schema: DatasetSchema, events: tuple[int, ...]) -> ModelCosts:
    import torch
    from torch.utils.flop_counter import FlopCounterMode

    from pipeline.models.sequences.build import build_sequences

    modules, saved = build_sequences(model, schema, 0), dict[int, int]()
    kept: list[torch.Tensor] = []  # alive, so that no storage's address is used twice

    def save(value: torch.Tensor) -> torch.Tensor:
        saved[value.untyped_storage()._cdata] = value.numel()
        kept.append(value)
        return value

    with FlopCounterMode(display=False) as products:
        for sequence, length in zip(schema.sequences, events, strict=True):
            widths = [model.dim_of(column.owner) for column in sequence.columns]
            columns = [torch.zeros(SAMPLES * length, width, requires_grad=True) for width in widths]
            rows = torch.arange(SAMPLES).repeat_interleave(length)
            candidates = [torch.zeros(SAMPLES, width) for width in widths]
            with torch.autograd.graph.saved_tensors_hooks(save, lambda value: value):
                vectors = modules[sequence.name](columns, rows, candidates, SAMPLES)
            vectors.sum().backward()
    for parameter in modules.parameters():
        saved.pop(parameter.untyped_storage()._cdata, None)
    return ModelCosts(
        flop=products.get_total_flops() / SAMPLES,
        parameters=sum(parameter.numel() for parameter in modules.parameters()),
        activations=round(sum(saved.values()) / SAMPLES),
    )
