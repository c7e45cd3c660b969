"""The memory that a rank needs beside its tables, by purpose: a plan's reservations, in bytes. No torch."""

from __future__ import annotations

from pipeline.config.train import fitting_lanes
from pipeline.embeddings.event_lookups import event_lookups
from pipeline.embeddings.table_optimizer_config import table_rules
from pipeline.planning.cost import FLOAT, dense_costs, kept_activations, local_batch, vector_costs
from pipeline.planning.inputs import PlanInputs
from pipeline.records.dataset import DatasetSchema, Profile
from pipeline.specs.optimizers import ORDINARY_STATE
from pipeline.units import GIB

# Thread stacks, allocator arenas, compiled kernels and decoder buffers of a training run, measured on a CPU.
RUNTIME = 56 << 20
# The offset at which the ids of a sample with several ids begin.
OFFSET = 8
# Pairs, buffers and threads' arenas of three process groups, where there are other ranks.
RUNTIME_LINKED = 48 << 20
# float32 values of a parameter beside optimizer state: the value, its gradient, a reduced copy, half of one for bf16.
PER_PARAMETER = 3.5
# float32 values of an activation: the one kept for the backward pass, and its gradient or a temporary copy.
PER_ACTIVATION = 2.0
# Batches of a rank beside the prefetched ones: one being built, one exchanged, one trained.
BATCHES_IN_WORK = 3


def dense_bytes(inputs: PlanInputs) -> dict[str, int]:
    """Count the bytes that one rank reserves in its fastest memory, by purpose; on a CPU they include ``host_bytes``.

    ``staging`` is a checkpoint's copy of the rank's rows, for tables spread evenly; on a CPU it takes at most half of
    the rest. The copy of rows on SSD lies on SSD, where ``candidates`` counts it.
    """
    hardware, model, schema, world = inputs.hardware, inputs.model, inputs.schema, inputs.world_size
    linked = world > 1 or hardware.only_tables
    batch, costs = local_batch(inputs.batch, world), dense_costs(model, schema, inputs.events)
    activations = float(batch * vector_costs(model, schema).activations)
    activations += kept_activations(model, schema, inputs.events, batch)
    pooled = batch * FLOAT * sum(len(table.features) * model.dim_of(table.name) for table in schema.tables)
    pooled += int(event_bytes(inputs, batch))
    per_parameter = PER_PARAMETER + max(ORDINARY_STATE, inputs.train.dense_state_values)
    reserved = {
        "dense": int(per_parameter * FLOAT * costs.parameters),
        "activations": int(PER_ACTIVATION * FLOAT * activations),
        "inputs": int(BATCHES_IN_WORK * batch * row_bytes(schema, inputs.profile)),
        "communication": pooled * (4 if linked else 2),
        "staging": 0,
        "runtime": RUNTIME + (RUNTIME_LINKED if linked else 0),
    }
    if hardware.only_tables:
        # The dense part is there, but it has no samples and learns nothing.
        reserved |= {"dense": FLOAT * int(costs.parameters), "activations": 0, "inputs": 0}
    if hardware.device == "cpu":
        host = host_bytes(inputs)
        if not hardware.only_tables:
            reserved["inputs"] += host["inputs"]
        reserved["process"] = host["process"]
        rest = hardware.ddr_gib * GIB - sum(reserved.values())
        reserved["staging"] = int(min(host["staging"], max(rest, 0) / 2))
    return reserved


def event_bytes(inputs: PlanInputs, samples: int) -> float:
    """Count the bytes of embeddings of the events of ``samples`` rows, in the batches that have most of them.

    Every table of sequences has a value for each row of events; rows are those of ``embeddings.event_lookups``.
    """
    lookups = event_lookups(inputs.schema)
    if lookups is None:
        return 0.0
    longest = {sequence.name: sequence.max_length for sequence in inputs.schema.sequences}
    rows = sum(inputs.events.of_batch(event.sequence, longest[event.sequence], samples) for event in lookups.events)
    return rows * FLOAT * sum(inputs.model.dim_of(table) for table in lookups.tables)


def host_bytes(inputs: PlanInputs) -> dict[str, int]:
    """Count the bytes that one rank needs in host memory on any device.

    They are the process (interpreter and libraries), rows read ahead, and a checkpoint's copy.
    """
    schema, train, world = inputs.schema, inputs.train, inputs.world_size
    row = row_bytes(schema, inputs.profile)
    batches = int(train.prefetch_batches * local_batch(train.batch, world) * row)
    rules = table_rules(inputs.model, train)
    staged = 0
    for table in schema.tables:
        dim = inputs.model.dim_of(table.name)
        staged += table.rows * staged_row(dim * FLOAT + rules.of(table.name).state_bytes(dim))
    return {
        "process": int(inputs.hardware.process_gib * GIB),
        "inputs": int(_decoded_rows(inputs) * row) + batches,
        "staging": staged // world,
    }


def _decoded_rows(inputs: PlanInputs) -> int:
    # Rows of decoded windows in memory: each lane's, and those ahead. A window is decoded into memory of its own, and
    # its rows are mixed into that of the lane (``training/shuffle_buffer.py``). Rows that are not shuffled need less.
    train = inputs.train
    groups = [rows for file in inputs.schema.groups.get("train", []) for rows in file]
    largest = max(groups, default=inputs.ingest.rows_per_group)
    lanes = fitting_lanes(train.lanes, train.batch, len(groups))
    groups_per_window = max(1, -(-train.shuffle_window_groups // lanes))
    lanes_per_rank = max(1, -(-lanes // inputs.world_size))
    ahead = max(1, min(lanes_per_rank, train.shuffle_window_groups // groups_per_window))
    window = min(groups_per_window * largest, max(inputs.schema.rows.get("train", 0), 1))
    return (lanes_per_rank + ahead + min(ahead, 2)) * window


def staged_row(size: int) -> int:
    """Bytes that a checkpoint stages for a row: its ``size`` with optimizer state, its number and its touched mark."""
    return size + 8 + 1


def row_bytes(schema: DatasetSchema, profile: Profile) -> float:
    """Count the mean bytes of a sample: label, dense values, and every feature's ids with their weights."""
    size = float(FLOAT * (1 + len(schema.dense)))
    for column in schema.sparse:
        if column.multi:
            per_id = FLOAT * (2 if column.weighted else 1)
            size += profile.sparse[column.name].pooling * per_id + OFFSET
        else:
            size += FLOAT
    for event in schema.event_columns:
        size += profile.sparse[event.name].pooling * (FLOAT + OFFSET) + OFFSET
    return size
