"""The modules of a model's sequences, drawn from a seed. Importing this loads torch."""

from __future__ import annotations

import hashlib

import torch
from torch import nn

from pipeline.config import ModelConfig
from pipeline.config.sequences import AGE, event_feature
from pipeline.models.layers import SequenceVector, initialise
from pipeline.records import DatasetSchema, SequenceGroup
from pipeline.specs import BlockInputs


def build_sequences(model: ModelConfig, schema: DatasetSchema, seed: int) -> nn.ModuleDict:
    """A ``SequenceVector`` for each sequence of ``schema``, by name.

    Initial weights depend on ``seed`` and the name alone. The global random state stays as it is.
    """
    vectors = nn.ModuleDict()
    for sequence in schema.sequences:
        settings = model.sequence(sequence.name)
        spec = settings.block_at(f"model.sequences.{sequence.name}")
        widths = [model.dim_of(column.owner) for column in sequence.columns]
        age = _age_of(sequence) if spec.ages else None
        ages = 0 if age is None else widths[age]
        with torch.random.fork_rng(devices=()):
            block = spec.build(BlockInputs(dim=model.embedding_dim, max_length=sequence.max_length, ages=ages))
            vector = SequenceVector(
                widths,
                model.embedding_dim,
                sequence.max_length,
                block,
                targeted=spec.targeted,
                places=settings.places,
                age=age,
            )
        digest = hashlib.blake2b(f"{seed}|{sequence.name}".encode(), digest_size=8).digest()
        own = int.from_bytes(digest, "little") >> 1
        initialise(vector, own)
        vector.start(own)
        vectors[sequence.name] = vector
    return vectors


def _age_of(sequence: SequenceGroup) -> int | None:
    """The column of the events' ages, by its place; None without."""
    names = [column.name for column in sequence.columns]
    age = event_feature(sequence.name, AGE)
    return names.index(age) if age in names else None
