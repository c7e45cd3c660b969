"""What a rank needs in memory beside its tables, by purpose: the reservations of a plan, bytes. No torch."""

from __future__ import annotations

from pipeline.config import Config
from pipeline.planning.cost import FLOAT, dense_costs, local_batch
from pipeline.records import DatasetSchema, Profile
from pipeline.specs import DENSE_OPTIMIZERS, TABLE_OPTIMIZERS
from pipeline.units import GIB

# Thread stacks, allocator arenas, compiled kernels and decoder buffers that appear once training runs. Measured on CPU.
RUNTIME = 64 << 20
# Where the ids of a row begin that has several.
OFFSET = 8
# What a rank that talks to others has besides: pairs and buffers of three process groups, arenas of their threads.
RUNTIME_LINKED = 48 << 20
# float32 values for each parameter beside its optimizer's state: itself, gradient, reduced copy, half of one for bf16.
PER_PARAMETER = 3.5
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
    # The most that any dense optimizer takes: a plan does not depend on train.dense_optimizer.
    per_parameter = PER_PARAMETER + max(optimizer.state_values for optimizer in DENSE_OPTIMIZERS)
    found = {
        "dense": int(per_parameter * FLOAT * costs.parameters),
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
    dim, optimizer = config.model.embedding_dim, TABLE_OPTIMIZERS.get(train.sparse_optimizer)
    tables = sum(column.rows for column in schema.sparse) * staged_row(dim * FLOAT + optimizer.state_bytes(dim))
    process = int(config.hardware.process_gib * GIB)  # interpreter and libraries, which training does not take
    return {"process": process, "inputs": int(windows) + batches, "staging": tables // config.world_size}


def staged_row(size: int) -> int:
    """Bytes a checkpoint stages of a row: its ``size`` with the optimizer's state, row number; its touched mark."""
    return size + 8 + 1


def _row_bytes(schema: DatasetSchema, profile: Profile) -> float:
    """Bytes of one sample in the mean: label, dense values, one id a feature; of one with several all, with weights."""
    size = float(FLOAT * (1 + len(schema.dense)))
    for column in schema.sparse:
        each = FLOAT * (2 if column.weighted else 1)
        size += profile.sparse[column.name].pooling * each + OFFSET if column.multi else FLOAT
    return size
