"""The cost model: ms of a shard, the dense part and a whole step, and the memory that the dense part reserves.

Every figure comes from ``HardwareConfig``; ``nightjar calibrate`` measures them all through the kernels used here. So
the terms are those that matter in measurements: bytes of distinct rows (duplicates are served by processor caches), a
fixed cost for every id, for every table and for every step, and links with latency and bandwidth. Only what counts the
model (``models.costs``) imports torch.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from pipeline.config.hardware import HardwareConfig
from pipeline.config.model import ModelConfig
from pipeline.models.costs import model_costs
from pipeline.models.sequence_costs import events_of_batch, sequence_costs
from pipeline.records.dataset import DatasetSchema, SequenceProfile
from pipeline.records.plan import PHASES
from pipeline.records.scratch import write_amplification
from pipeline.specs.model import ModelCosts, ModelInputs, task_inputs
from pipeline.specs.optimizers import TableOptimizer

FLOAT = 4
# Values that a step reads and writes for each parameter of the dense part: its gradient and the products' copy of it in
# 16 bits, then Adam's step, which reads four values and writes three.
PER_PARAMETER = 10
# Operations for the projections of one width: three products as ``models.operation_counter`` counts them, and stacks of
# weights, embeddings and vectors, forward and backward.
PROJECTION_CALLS = 3 * 5 + 6
# The smallest unit that memory moves: a processor's cache line, in bytes.
LINE = 64
# The smallest unit that a disk moves, in bytes.
PAGE = 4096
# The bytes that host memory moves for each byte that changes places with a GPU.
HOST_COPIES = 8
# The bytes that are moved in a millisecond at 1 GB/s.
BYTES_PER_MS = 1e6
DATA_PARALLEL, ROW_WISE, TABLE_ROW_WISE = "data_parallel", "row_wise", "table_row_wise"
# The phase that TorchRec's pipeline works on while the previous step runs.
OVERLAPPED = "input_exchange"


@dataclass(frozen=True)
class EventLengths:
    """Lengths of histories measured by ingestion: time follows a batch's mean, memory the 99th percentile.

    ``measured`` has the lengths by sequence. ``most`` is how many events a block takes at once (``train.max_events``).
    """

    measured: Mapping[str, SequenceProfile] = field(default_factory=dict)
    most: int | None = None

    def of_batch(self, sequence: str, longest: int, samples: int) -> float:
        """Return the events of ``samples`` rows that 99 of 100 batches do not exceed; the most if not measured."""
        known = self.measured.get(sequence)
        if known is None:
            return float(samples * longest)
        return events_of_batch(known, samples)

    def mean_length(self, sequence: str, longest: int) -> float:
        """Return the mean events of a row; at least 1 where they were measured."""
        known = self.measured.get(sequence)
        if known is None:
            return float(longest)
        return max(known.looked_up, 1.0)


NO_EVENTS = EventLengths()


def timed_costs(model: ModelConfig, schema: DatasetSchema, events: EventLengths, samples: int) -> ModelCosts:
    """Sum the costs of all sequence blocks by their time, per sample of a batch of ``samples``."""
    blocks = sequence_costs(model, schema, events.measured)
    factors, parts_of = {}, {}
    for sequence in schema.sequences:
        block = blocks[sequence.name]
        # A batch that is processed in parts runs the forward pass twice. In a block without products that is a third of
        # the work.
        forward = block.forward / block.flop if block.flop else 1 / 3
        parts = 1.0
        if events.most is not None:
            parts = samples * events.mean_length(sequence.name, sequence.max_length) / events.most
        factors[sequence.name] = 1.0 + forward * (parts > 1)
        # Every part calls all of the block's operations.
        parts_of[sequence.name] = factors[sequence.name] * math.ceil(parts)
    return ModelCosts(
        flop=sum(block.flop * factors[name] for name, block in blocks.items()),
        parameters=sum(block.parameters for block in blocks.values()),
        activations=round(sum(block.activations * factors[name] for name, block in blocks.items())),
        moved=sum(block.moved * factors[name] for name, block in blocks.items()),
        operations=sum(block.operations * parts_of[name] for name, block in blocks.items()),
    )


def kept_activations(model: ModelConfig, schema: DatasetSchema, events: EventLengths, samples: int) -> float:
    """Count the values that blocks keep for the backward pass of ``samples`` rows, in the batches with most events.

    In parts, they are those of one part, in which a single history may be longer than ``most``.
    """
    blocks, total = sequence_costs(model, schema, events.measured), 0.0
    for sequence in schema.sequences:
        batch = events.of_batch(sequence.name, sequence.max_length, samples)
        if events.most is not None:
            known = events.measured.get(sequence.name)
            longest = sequence.max_length if known is None else known.longest
            batch = min(batch, max(events.most, longest))
        mean = events.mean_length(sequence.name, sequence.max_length)
        total += blocks[sequence.name].activations * batch / mean
    return total


@dataclass(frozen=True, kw_only=True)
class ShardLoad:
    """The work of one shard in a step of the global batch.

    ``lookups`` counts ids, duplicates included, and ``distinct`` the distinct ones. ``pooled_rows`` is the number of
    output rows (samples x features) it produces for all ranks. ``hit_rate`` is the share of the lookups that the faster
    memory serves, and ``host_rate``, for tier ssd on a GPU, the share that host memory behind it serves. ``optimizer``
    is the tables'.
    """

    rows: int
    columns: int
    lookups: float
    distinct: float
    pooled_rows: float
    sharding: str
    tier: str
    hit_rate: float
    weighted: bool
    optimizer: TableOptimizer
    host_rate: float = 0.0


def shard_ms(hardware: HardwareConfig, load: ShardLoad, *, global_batch: int) -> dict[str, float]:
    """Predict the cost of a shard for the rank that holds it.

    ``input_exchange`` also holds the rows that tier ssd fetches for the next batch and takes back: both go on beside
    the step, as the exchange of ids does.

    Returns:
        Ms per step by phase (PHASES without dense and overhead).
    """
    pooled = load.pooled_rows * load.columns * FLOAT
    distinct = min(load.distinct, load.lookups)
    overhead = hardware.table_overhead_us / 1e3 / 2
    # Memory moves whole lines.
    row = -(-load.columns * FLOAT // LINE) * LINE
    state = -(-load.columns * load.optimizer.value_bytes // LINE) * LINE
    read = _rows_ms(hardware, load, distinct, row)
    output = pooled / _gb_per_s(hardware, "") / BYTES_PER_MS
    # The row and its optimizer state are read and written; ``update_ns`` covers a single state value.
    written = 2 * _rows_ms(hardware, load, distinct, row + state)
    phases = {
        "input_exchange": 0.0,
        "lookup": overhead + load.lookups * hardware.lookup_ns / 1e6 + read + output,
        "output_exchange": 0.0,
        "gradient_exchange": 0.0,
        "update": overhead + load.lookups * hardware.update_ns / 1e6 + written,
    }
    if load.sharding == DATA_PARALLEL:
        # A replica's whole gradient is reduced over the ranks and applied by dense passes.
        size = load.rows * load.columns * FLOAT
        passes = load.optimizer.replica_passes * size / _gb_per_s(hardware, "") / BYTES_PER_MS
        phases["gradient_exchange"] = all_reduce_ms(hardware, size)
        phases["update"] = hardware.table_overhead_us / 1e3 + passes
        return phases
    # The sending rank pays for an exchange, and what stays is free. Links work in both directions, and both at once.
    values = 2 if load.weighted else 1
    ids = load.lookups * FLOAT * values + min(load.pooled_rows, global_batch) * FLOAT
    host_ms, ssd_ms = _rows_ahead_ms(hardware, load)
    phases["input_exchange"] = max(links_ms(hardware, ids)) + host_ms + ssd_ms
    if load.sharding == TABLE_ROW_WISE and hardware.hosts > 1:
        # Partial sums are reduced within the host first; then each of its ranks sends its part to other hosts.
        local = hardware.ranks_per_host
        within = pooled * (local - 1) / local / hardware.intra_host_gb_per_s
        between = pooled / local * (hardware.hosts - 1) / hardware.hosts / hardware.inter_host_gb_per_s
        outputs_ms = (within + between) / BYTES_PER_MS
    else:
        outputs_ms = max(links_ms(hardware, pooled))
    # Gradients come back the same way that the outputs went.
    phases["output_exchange"] = phases["gradient_exchange"] = outputs_ms
    return phases


def fixed_ms(
    model: ModelConfig,
    schema: DatasetSchema,
    hardware: HardwareConfig,
    batch: int,
    events: EventLengths = NO_EVENTS,
    parts: int = 1,
) -> dict[str, float]:
    """Predict ms per step by phase whatever the tables' places: dense part, overhead, latency of each exchange.

    ``batch`` is the samples of a step on all ranks, ``parts`` is ``train.accumulate``. Ranks of embedding hosts have no
    dense part.
    """
    phases = dict.fromkeys(PHASES, 0.0)
    latency = latency_ms(hardware)
    # Ids need two exchanges, one for their numbers and one for themselves.
    phases["input_exchange"] = 2 * latency
    phases["output_exchange"] = phases["gradient_exchange"] = latency
    if not hardware.only_tables:
        costs = dense_costs(model, schema, events, local_batch(batch, hardware.world_size), parts)
        phases["dense"] = dense_ms(costs, hardware, batch)
    phases["overhead"] = hardware.step_overhead_ms
    return phases


def dense_ms(costs: ModelCosts, hardware: HardwareConfig, batch: int) -> float:
    """Predict the ms of the dense part on one rank: forward, backward, optimizer, all-reduce.

    Args:
        costs: FLOPs and activations of a sample, and the parameters.
        hardware: The ranks that share the batch and reduce the gradients.
        batch: Samples of a step on all ranks.
    """
    samples = local_batch(batch, hardware.world_size)
    # Compute by FLOPs and the rest by bytes add up, because they are different kernels, one after the other.
    compute = samples * costs.flop / hardware.dense_gflop_per_s / 1e6
    if hardware.moved_gb_per_s:
        memory = moved_bytes(costs, samples) / hardware.moved_gb_per_s / BYTES_PER_MS
    else:
        memory = samples * costs.activations * FLOAT / hardware.dense_gb_per_s / BYTES_PER_MS
    calls = calls_ms(costs, hardware)
    gradients = all_reduce_ms(hardware, costs.parameters * FLOAT)
    latency = latency_ms(hardware) if hardware.world_size > 1 else 0.0
    return compute + memory + calls + gradients + latency


def calls_ms(costs: ModelCosts, hardware: HardwareConfig) -> float:
    """Return what calling the dense part's operations takes in a step, whatever its samples."""
    return costs.operations * hardware.operation_us / 1e3


def moved_bytes(costs: ModelCosts, samples: int) -> float:
    """Count the bytes that the dense part reads and writes in a step of ``samples`` samples, products left out."""
    return FLOAT * (samples * costs.moved + PER_PARAMETER * costs.parameters)


def dense_costs(
    model: ModelConfig, schema: DatasetSchema, events: EventLengths = NO_EVENTS, samples: int = 1, parts: int = 1
) -> ModelCosts:
    """Count the costs of ``model`` without towers, with the blocks of its sequences in a batch of ``samples``.

    ``parts``: see ``vector_costs``.
    """
    costs = vector_costs(model, schema, parts)
    if not schema.sequences:
        return costs
    return costs.plus(timed_costs(model, schema, events, samples))


def repeat_operations(costs: ModelCosts, parts: int) -> ModelCosts:
    """Return the ``costs`` of a batch that is processed in ``parts``, each of which calls all operations."""
    return replace(costs, operations=costs.operations * parts)


def vector_costs(model: ModelConfig, schema: DatasetSchema, parts: int = 1) -> ModelCosts:
    """Count the costs of ``model`` given the dense features and a ready vector of each feature and sequence.

    ``parts``: the number of parts that the ranking model processes a batch in (``train.accumulate``).
    """
    dim = model.embedding_dim
    inputs = ModelInputs(dense=schema.dense, vectors=schema.vectors, dim=dim, tasks=task_inputs(schema.tasks))
    costs = repeat_operations(model_costs(model, inputs), parts)
    # Embeddings of another width are projected, which takes one product forward and two backward.
    weights = values = moved = 0
    others = set[int]()
    for column in schema.sparse:
        width = model.dim_of(column.owner)
        if width != dim:
            weights += width * dim
            values += dim
            # Embeddings of a width are stacked before the product, and vectors after it, forward and backward.
            moved += 4 * (width + dim)
            others.add(width)
    if not weights:
        return costs
    operations = PROJECTION_CALLS * len(others)
    projected = ModelCosts(flop=6 * weights, parameters=weights, activations=values, moved=moved, operations=operations)
    return costs.plus(projected)


def step_ms(phases: Mapping[str, float]) -> float:
    """Add up a step's ms from those of its phases, which follow each other, except for the exchange of ids."""
    # TorchRec's pipeline exchanges the next batch's ids during this one, so ``OVERLAPPED`` counts only as far as it
    # takes longer than all the rest. Nothing else overlaps: the step waits for pooled outputs and their gradients.
    return max(serial_ms(phases), phases.get(OVERLAPPED, 0.0))


def serial_ms(phases: Mapping[str, float]) -> float:
    """Add up the ms of the phases that follow each other."""
    return sum(ms for phase, ms in phases.items() if phase != OVERLAPPED)


def local_batch(batch: int, world_size: int) -> int:
    """Return the samples of a step on one rank, padding included; ``batch`` is that of all ranks."""
    return -(-batch // world_size)


def missing_rows(load: ShardLoad) -> float:
    """Return the distinct rows per step missing in the faster memory: cold ones, which hardly repeat in a batch."""
    if load.tier not in ("hbm_cached", "ssd"):
        return 0.0
    return min(load.distinct, load.lookups * (1.0 - load.hit_rate))


def _gb_per_s(hardware: HardwareConfig, tier: str) -> float:
    # An empty tier stands for the device's own memory.
    if hardware.device == "cpu":
        return hardware.ddr_gb_per_s
    if tier == "ddr":
        # FBGEMM's kernel reads rows of this tier over the link, by unified virtual memory.
        return hardware.hbm_to_ddr_gb_per_s
    return hardware.hbm_gb_per_s


def _rows_ms(hardware: HardwareConfig, load: ShardLoad, distinct: float, row: float) -> float:
    # Distinct rows move once; rows from SSD have been read ahead into memory by then.
    far = missing_rows(load) if load.tier == "hbm_cached" else 0.0
    ms = (distinct - far) * row / _gb_per_s(hardware, load.tier)
    if far:
        ms += far * row / hardware.hbm_to_ddr_gb_per_s
    return ms / BYTES_PER_MS


def _rows_ahead_ms(hardware: HardwareConfig, load: ShardLoad) -> tuple[float, float]:
    # Returns what tier ssd moves ahead of the next batch: ms of a GPU's link and host memory, and ms of the disk.
    host_ms = 0.0
    if load.tier != "ssd":
        return host_ms, 0.0
    missing = missing_rows(load)
    if hardware.device == "cuda":
        # A missing row comes over the GPU's link while another one goes back. Host memory reads and writes each of the
        # two twice: where it is kept, and where the link takes it from.
        moved = missing * (load.columns * FLOAT + load.optimizer.state_bytes(load.columns))
        host_ms = (moved / hardware.hbm_to_ddr_gb_per_s + HOST_COPIES * moved / hardware.ddr_gb_per_s) / BYTES_PER_MS
    # Rows in no memory are read page by page; rows that leave memory are written sequentially. Meanwhile the log makes
    # room for them: it reads as many bytes as it writes, from segments that it empties.
    rows = min(missing, load.lookups * max(0.0, 1.0 - load.hit_rate - load.host_rate))
    row = load.columns * FLOAT + load.columns * load.optimizer.value_bytes
    pages = rows * -(-row // PAGE)
    transfer = pages * PAGE / hardware.ssd_gb_per_s / BYTES_PER_MS
    moved = 2 * write_amplification(hardware.ssd_spare) * rows * row
    ssd_ms = max(pages / hardware.ssd_read_iops * 1e3, transfer) + moved / hardware.ssd_gb_per_s / BYTES_PER_MS
    return host_ms, ssd_ms


def links_ms(hardware: HardwareConfig, size: float) -> tuple[float, float]:
    """Return ms of the links within and between hosts while every rank spreads ``size`` bytes over all ranks."""
    if hardware.only_tables:
        # Embedding hosts send everything to other hosts, the workers.
        return 0.0, size / hardware.inter_host_gb_per_s / BYTES_PER_MS
    world, local = hardware.world_size, hardware.ranks_per_host
    within = between = 0.0
    if local > 1:
        within = size * (local - 1) / world / hardware.intra_host_gb_per_s
    if world > local:
        between = size * (world - local) / world / hardware.inter_host_gb_per_s
    return within / BYTES_PER_MS, between / BYTES_PER_MS


def all_reduce_ms(hardware: HardwareConfig, size: float) -> float:
    """Return ms to add up ``size`` bytes over all ranks in rings: a reduce-scatter, then an all-gather."""
    # Every rank sends to the next one; where that is on another host, the rings share the links of all the host's
    # ranks.
    world, local = hardware.world_size, hardware.ranks_per_host
    moved = 2 * size * (world - 1) / world
    within = between = 0.0
    if local > 1:
        within = moved / hardware.intra_host_gb_per_s
    if world > local:
        between = moved / (local * hardware.inter_host_gb_per_s)
    return max(within, between) / BYTES_PER_MS


def latency_ms(hardware: HardwareConfig) -> float:
    """Return ms of a small collective over all ranks."""
    if hardware.hosts > 1 or hardware.only_tables:
        return hardware.inter_host_latency_us / 1e3
    if hardware.ranks_per_host > 1:
        return hardware.intra_host_latency_us / 1e3
    return 0.0
