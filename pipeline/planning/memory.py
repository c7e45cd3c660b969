"""What a rank needs in memory beside its tables, by purpose: the reservations of a plan, bytes. No torch."""

from __future__ import annotations

from pipeline.config import Config
from pipeline.planning.cost import FLOAT, dense_costs, local_batch, state_bytes
from pipeline.records import DatasetSchema, Profile

GIB = 2**30
# Thread stacks, allocator arenas, compiled kernels and decoder buffers that appear once training runs. Measured on CPU.
RUNTIME = 64 << 20
# Where the ids of a row begin that has several.
OFFSET = 8
# What a rank that talks to others has besides: pairs and buffers of three process groups, arenas of their threads.
RUNTIME_LINKED = 48 << 20
# float32 values for each parameter: itself, gradient, Adam's two moments, the reduced copy, half of one for bf16.
PER_PARAMETER = 5.5
# float32 values for each activation: kept for the backward pass, and its gradient or a temporary copy.
PER_ACTIVATION = 2.0
# Batches of a rank at a time beside the prefetched ones: being built, exchanged, worked on.
BATCHES_IN_WORK = 3


def dense_bytes(config: Config, schema: DatasetSchema, profile: Profile) -> dict[str, int]:
    """Bytes that one rank reserves in its fastest memory, by purpose; on a CPU that of ``host_bytes`` is among them.

    ``staging`` is the copy of a rank's rows that a checkpoint takes, for tables spread evenly: no more than
    half of the DDR can be tables and their copy. The copy of rows on SSD lies on SSD, where ``candidates`` counts it.
    """
    batch, world = local_batch(config), config.world_size
    costs = dense_costs(config, schema)
    pooled = batch * len(schema.sparse) * config.model.embedding_dim * FLOAT
    found = {
        "dense": int(PER_PARAMETER * FLOAT * costs.parameters),
        "activations": int(PER_ACTIVATION * FLOAT * batch * costs.activations),
        "inputs": int(BATCHES_IN_WORK * batch * _row_bytes(schema, profile)),
        "communication": pooled * (4 if world > 1 else 2),
        "staging": 0,
        "runtime": RUNTIME + (RUNTIME_LINKED if world > 1 else 0),
    }
    if config.hardware.device == "cpu":
        host = host_bytes(config, schema, profile)
        found["inputs"] += host["inputs"]
        found["process"] = host["process"]
        rest = config.hardware.ddr_gib * GIB - sum(found.values())
        found["staging"] = int(min(host["staging"], max(rest, 0) / 2))
    return found


def host_bytes(config: Config, schema: DatasetSchema, profile: Profile) -> dict[str, int]:
    """Bytes that one rank needs in host memory on any device: the process, rows read ahead, a checkpoint's copy."""
    ingest, train = config.ingest, config.train
    window = min(train.shuffle_window_groups * ingest.rows_per_group, max(schema.rows.get("train", 0), 1))
    # One window is cut into batches while the next is decoded; a rank's own part of the first is copied out.
    windows = (2 + 1 / config.world_size) * window * _row_bytes(schema, profile)
    batches = int(train.prefetch_batches * local_batch(config) * _row_bytes(schema, profile))
    tables = sum(column.rows for column in schema.sparse) * staged_row(config.model.embedding_dim, state_bytes(config))
    process = int(config.hardware.process_gib * GIB)  # interpreter and libraries, which training does not take
    return {"process": process, "inputs": int(windows) + batches, "staging": tables // config.world_size}


def staged_row(columns: int, state: int) -> int:
    """Bytes a checkpoint stages of a row: weights, ``state`` bytes of the optimizer, row number; its touched mark."""
    return columns * FLOAT + state + 8 + 1


def _row_bytes(schema: DatasetSchema, profile: Profile) -> float:
    """Bytes of one sample in the mean: label, dense values, one id a feature; of one with several all, with weights."""
    size = float(FLOAT * (1 + len(schema.dense)))
    for column in schema.sparse:
        each = FLOAT * (2 if column.weighted else 1)
        size += profile.sparse[column.name].pooling * each + OFFSET if column.multi else FLOAT
    return size
