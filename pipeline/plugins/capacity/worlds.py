"""Predicted trainings on many ranks: the planner's cost model, with what ranks read and write beside their steps."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from pipeline.calibration.hardware_cache import find_kept
from pipeline.config import Config
from pipeline.config.checkpoint import CheckpointConfig
from pipeline.config.hardware import HardwareConfig
from pipeline.core import units
from pipeline.core.errors import ConfigError, PlanError
from pipeline.core.units import GIB
from pipeline.planning.bipartite import predict_any
from pipeline.planning.cost import BYTES_PER_MS
from pipeline.planning.hardware import fast_memory, figures, memory_gib
from pipeline.planning.inputs import PlanInputs
from pipeline.planning.planner import make_plan
from pipeline.planning.step_prediction import BETWEEN, WITHIN, Prediction, step_parts
from pipeline.plugins.capacity.scale_record import Scale, ScaleFigure, Wall, World
from pipeline.training.sampler import decoded_share

BESIDE = ("reader", "store", "checkpoint")
MINUTE_MS = 60_000.0
# Ideally, samples/s grow in proportion to the ranks. Growth by less than this share of the ideal is a wall.
GROWS = 0.5
SETTINGS = {
    "compute": "a smaller dense part (model.*), or ranks of more cores",
    "overhead": "train.global_batch: more samples share what a step costs",
    WITHIN: "partition.exchange=fp16: half of the bytes",
    BETWEEN: "partition=dmt partition.exchange=fp16: less between hosts, half of the bytes",
    "all_reduce": "train.global_batch: fewer steps, and so fewer all-reduces",
    "reader": "ingest.rows_per_group: smaller, so that every rank has lanes of its own (train.lanes)",
    "checkpoint": "checkpoint.every_steps: fewer checkpoints; checkpoint.quantise: smaller ones",
    "store": "store=<one that serves more>",
    "memory": "hardware.ddr_gib",
}
# Settings with embedding hosts, which have no towers and share the work of the tables.
APART = {
    **SETTINGS,
    "compute": "hardware.embedding_hosts: more, where lookups take long; a smaller dense part (model.*)",
    BETWEEN: "partition.exchange=fp16: half of the bytes; hardware.embedding_hosts: more links",
    "memory": "hardware.embedding_ddr_gib",
}
# The speeds that a step's time depends on; capacities are settings.
SPEEDS = {
    "dense_gflop_per_s": "GFLOP/s",
    "dense_gb_per_s": "GB/s",
    "moved_gb_per_s": "GB/s",
    "operation_us": "us",
    "lookup_ns": "ns",
    "update_ns": "ns",
    "table_overhead_us": "us",
    "step_overhead_ms": "ms",
    "intra_host_gb_per_s": "GB/s",
    "intra_host_latency_us": "us",
    "inter_host_gb_per_s": "GB/s",
    "inter_host_latency_us": "us",
}
MEMORY = {"cpu": "ddr_gb_per_s", "cuda": "hbm_gb_per_s"}


def setting_of(bound: str, hardware: HardwareConfig) -> str:
    """Return what moves a ``bound`` on such a cluster."""
    return (APART if hardware.embedding_hosts else SETTINGS)[bound]


@dataclass(frozen=True, kw_only=True)
class Rates:
    """What one rank reads and writes beside its steps.

    ``rows_per_s``: decoded rows; ``row_bytes``: size of a train row in the store; ``read_gb_per_s``: what one rank
    reads from the store; ``checkpoint_gb_per_s``: float32 rows with their state, encoded and written;
    ``store_gb_per_s``: what the store serves all ranks together, 0: no limit is known.
    """

    rows_per_s: float
    row_bytes: float
    read_gb_per_s: float
    checkpoint_gb_per_s: float
    store_gb_per_s: float = 0.0


def worlds(
    inputs: PlanInputs,
    rates: Rates,
    checkpoint: CheckpointConfig,
    ranks: Iterable[int],
    per_rank: int | None = None,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> list[World]:
    """Return a prediction for every number of ``ranks``, rising; each is rounded up to whole hosts.

    ``per_rank``: samples of a step on every rank; None: the batch stays as it is, whatever the ranks. ``progress``:
    called with (worlds planned, worlds in all).
    """
    found: dict[int, World] = {}
    counts = sorted(set(ranks))
    for done, count in enumerate(counts):
        progress(done, len(counts))
        # Two counts may give the same world once they are rounded up to whole hosts.
        sized = resized(inputs, count, per_rank)
        if sized.world_size not in found:
            found[sized.world_size] = _predict(sized, rates, checkpoint)
    progress(len(counts), len(counts))
    # Efficiency is the samples/s per rank, relative to the smallest world that fits.
    alone: float | None = None
    records = []
    for world in found.values():
        if world.samples_per_s:
            a_rank = world.samples_per_s / world.ranks
            if alone is None:
                alone = a_rank
            world = replace(world, efficiency=round(a_rank / alone, 4))
        records.append(world)
    return records


def resized(inputs: PlanInputs, ranks: int, per_rank: int | None = None) -> PlanInputs:
    """Return ``inputs`` for at least ``ranks`` ranks on whole hosts, with ``per_rank`` samples a step (None: as is).

    Embedding hosts stay the same share of all hosts, at least one, beside at least one worker.
    """
    # With fewer ranks than a host has, assume a smaller host.
    local = min(inputs.hardware.ranks_per_host, ranks)
    hosts, owners = -(-ranks // local), inputs.hardware.embedding_hosts
    if owners:
        hosts = max(hosts, 2)
        owners = min(max(round(hosts * owners / inputs.hardware.hosts), 1), hosts - 1)
    sized = inputs.changed("hardware.ranks_per_host", local).changed("hardware.hosts", hosts)
    sized = sized.changed("hardware.embedding_hosts", owners)
    if per_rank is None:
        return sized
    return sized.changed("train.global_batch", per_rank * sized.hardware.workers)


def _predict(inputs: PlanInputs, rates: Rates, checkpoint: CheckpointConfig) -> World:
    hardware = inputs.hardware
    try:
        if inputs.batch < hardware.workers:
            raise ConfigError(
                f"train.global_batch is {inputs.batch}, fewer than {hardware.workers} ranks",
                hint=f"train.global_batch={64 * hardware.workers}",
            )
        plan = make_plan(inputs)
    except (ConfigError, PlanError) as error:
        bound = "memory" if isinstance(error, PlanError) else "overhead"
        return World(
            ranks=inputs.world_size,
            hosts=hardware.hosts,
            batch=inputs.batch,
            fits=False,
            bound=bound,
            setting=error.hint.split(", or ")[0] or setting_of(bound, hardware),
            problem=error.message,
            embedding_hosts=hardware.embedding_hosts,
        )
    predicted, device = predict_any(plan, inputs), hardware.device
    parts = step_parts(plan, inputs, predicted)
    step_ms = sum(parts.values())
    parts |= beside_ms(predicted, inputs, rates, checkpoint, step_ms)
    bound = longest(parts, device)
    memory = predicted.bytes + predicted.reserved[0].get("process", 0)
    room = memory_gib(hardware, fast_memory(hardware)) * GIB
    return World(
        ranks=plan.world_size,
        hosts=hardware.hosts,
        batch=inputs.batch,
        fits=True,
        bound=bound,
        then=longest({**parts, bound: 0.0}, device),
        setting=setting_of(bound, hardware),
        step_ms=round(step_ms, 4),
        embedding_hosts=hardware.embedding_hosts,
        samples_per_s=round(1e3 * inputs.batch / whole_ms(parts, device), 1),
        parts={name: round(ms, 4) for name, ms in parts.items()},
        memory=memory,
        filled=round(memory / room, 4),
    )


def beside_ms(
    predicted: Prediction, inputs: PlanInputs, rates: Rates, checkpoint: CheckpointConfig, step_ms: float
) -> dict[str, float]:
    """Return the ms per step of work beside the steps (BESIDE), on the rank that has most of it.

    A checkpoint counts as a baseline that is written until the next one begins.
    """
    groups = sum(map(len, inputs.schema.groups.get("train", [])))
    rows = inputs.batch * decoded_share(inputs.train, inputs.hardware.workers, groups)
    fetched = rows * rates.row_bytes
    store = fetched / rates.read_gb_per_s / BYTES_PER_MS
    if rates.store_gb_per_s:
        store = max(store, inputs.hardware.workers * fetched / rates.store_gb_per_s / BYTES_PER_MS)
    steps = steps_between(inputs, checkpoint, step_ms)
    written = 0.0
    if steps:
        # All ranks write at the same time, so the rank with the most bytes of tables decides.
        written = max(predicted.tables) / rates.checkpoint_gb_per_s / BYTES_PER_MS / steps
    return {"reader": 1e3 * rows / rates.rows_per_s, "store": store, "checkpoint": written}


def steps_between(inputs: PlanInputs, checkpoint: CheckpointConfig, step_ms: float) -> float:
    """Return the steps between two checkpoints, or those of the training if it takes none before its end.

    0 stands for an unknown number of steps.
    """
    rows, train = inputs.schema.rows.get("train", 0), inputs.train
    every = [float(train.max_steps or train.epochs * rows / inputs.batch)]
    if checkpoint.every_steps is not None:
        every.append(float(checkpoint.every_steps))
    if checkpoint.every_minutes is not None:
        every.append(checkpoint.every_minutes * MINUTE_MS / step_ms)
    # Take whichever comes first; 0 stands for an unknown number of steps.
    return min(filter(None, every), default=0.0)


def whole_ms(parts: Mapping[str, float], device: str) -> float:
    """Return the ms that a step takes with all that goes on beside it.

    On a GPU the longest counts. On a CPU the reader takes its time from the step, whose cores it works on.
    """
    inside = sum(ms for name, ms in parts.items() if name not in BESIDE)
    if device == "cpu":
        inside += parts["reader"]
    # All of these run at the same time, so the longest one counts and not their sum.
    return max(inside, *(parts[name] for name in BESIDE))


def longest(parts: Mapping[str, float], device: str) -> str:
    """Return the part that a step waits for: work beside it that takes longer, else the step's longest part."""
    whole = whole_ms(parts, device)
    beside = max(BESIDE, key=lambda name: parts[name])
    if parts[beside] >= whole:
        return beside
    # The step waits for nothing beside it. On a CPU, the reader is part of the step and may be its longest part.
    inside = [name for name in parts if name not in BESIDE or (name == "reader" and device == "cpu")]
    return max(inside, key=lambda name: parts[name])


def wall_of(found: list[World], device: str) -> Wall | None:
    """Return where growing stops paying off: the first world that no plan fits, or that gains less than GROWS.

    Its bound is the part of the step that exceeds its ideal share most: its time in the world before, divided by the
    growth of the ranks. None if all worlds pay off.
    """
    # The first world is compared with itself: it may not fit either, but has no predecessor.
    for before, each in pairwise([found[0], *found]):
        if not each.fits:
            return Wall(ranks=each.ranks, bound=each.bound, setting=each.setting)
        if before is each or before.samples_per_s is None or each.samples_per_s is None:
            continue
        more = each.ranks / before.ranks
        if each.samples_per_s / before.samples_per_s - 1 < GROWS * (more - 1):
            # With a fixed number of samples per rank, more ranks have a larger batch, so parts are scaled to the former
            # batch.
            own, former = each.parts or {}, before.parts or {}
            per_sample = before.batch / each.batch
            beyond = {name: max(ms * per_sample - former[name] / more, 0.0) for name, ms in own.items()}
            bound = longest(beyond, device)
            then = longest({**beyond, bound: 0.0}, device)
            settings = APART if each.embedding_hosts else SETTINGS
            return Wall(ranks=each.ranks, bound=bound, setting=settings[bound], then=then)
    return None


def predict_scale(
    config: Config,
    inputs: PlanInputs,
    rates: Rates,
    measured_rates: Mapping[str, ScaleFigure],
    ranks: Sequence[int],
    *,
    per_rank: int | None = None,
    served: float = 0.0,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Scale:
    """Predict the worlds of ``ranks`` ranks, the wall, and tell measured figures from assumed ones.

    Args:
        config: The training's configuration.
        inputs: The inputs of its plan.
        rates: What one rank reads and writes.
        measured_rates: ``rates`` as figures.
        ranks: See ``worlds``, as ``per_rank`` and ``progress``.
        served: GB/s that the store serves to all ranks; 0: as much as they ask for.
    """
    rates = replace(rates, store_gb_per_s=served)
    predictions = worlds(inputs, rates, config.checkpoint, ranks, per_rank, progress)
    largest = predictions[-1]
    # Hardware speeds were either measured on this machine by calibration or set by the user.
    cached = find_kept(config) if config.hardware.measured else None
    calibrated: set[str] = set()
    if cached is not None and cached.day:
        calibrated = set(cached.figures) & set(config.hardware.measured)
    values = figures(config.hardware)
    measured, assumed = dict[str, ScaleFigure](), dict[str, ScaleFigure]()
    for name, unit in {MEMORY[config.hardware.device]: "GB/s", **SPEEDS}.items():
        replaced = name == "dense_gb_per_s" and "moved_gb_per_s" in values
        if name not in values or replaced:
            continue
        if name in calibrated and cached is not None:
            measured[name] = ScaleFigure(value=values[name], unit=unit, source=f"calibration of {cached.day}")
        else:
            source = f"hardware.{name}, a default or setting of hardware={config.hardware.name}"
            assumed[name] = ScaleFigure(value=values[name], unit=unit, source=source)
    if served:
        assumed["store of all ranks"] = ScaleFigure(value=served, unit="GB/s", source="--store-gb-per-s")
    return Scale(
        hardware=config.hardware.name,
        data=config.data.name,
        model=str(config.model.name),
        worlds=tuple(predictions),
        wall=wall_of(predictions, config.hardware.device),
        measured={**measured, **measured_rates},
        assumed=assumed,
        # Ranks on embedding hosts have no samples.
        rules=_rules(inputs, largest.ranks * (largest.hosts - largest.embedding_hosts) // largest.hosts, per_rank),
    )


def _rules(inputs: PlanInputs, ranks: int, per_rank: int | None) -> tuple[str, ...]:
    """Say what the prediction assumes; ``ranks``: the number with samples in the largest world."""
    groups = sum(map(len, inputs.schema.groups.get("train", [])))
    share = decoded_share(inputs.train, ranks, groups)
    each = "worker" if inputs.hardware.embedding_hosts else "rank"
    batch = f"{inputs.batch:,} samples a step in all"
    if per_rank:
        batch = f"{per_rank:,} samples a step on each {each}"
    reading = "works beside the step"
    if inputs.hardware.device == "cpu":
        reading = "takes its time from the step, whose cores it works on"
    return (
        f"every host is like the one of hardware={inputs.hardware.name}; {batch}",
        f"each of {ranks:,} {each}s decodes {units.percent(share)} of the rows; its reader {reading}",
        "every checkpoint is a baseline of all rows, written behind the steps",
        "ranks are equally fast, and links carry nothing else",
    )
