"""What ``nightjar scale`` answers: worlds, the wall, and which figures were measured and which assumed."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from pipeline.calibration.hardware_cache import find_kept
from pipeline.config import Config
from pipeline.core import units
from pipeline.planning.hardware import figures as hardware_figures
from pipeline.planning.inputs import PlanInputs
from pipeline.plugins.capacity.scale_record import Scale, ScaleFigure, World
from pipeline.plugins.capacity.worlds import Rates, wall_of, worlds
from pipeline.training.sampler import decoded_share

# What a step's time depends on; capacities are settings.
SPEEDS = {
    "dense_gflop_per_s": "GFLOP/s",
    "dense_gb_per_s": "GB/s",
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


def predicted(
    config: Config,
    inputs: PlanInputs,
    rates: Rates,
    figures: Mapping[str, ScaleFigure],
    ranks: Sequence[int],
    *,
    per_rank: int | None = None,
    served: float = 0.0,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Scale:
    """The worlds of ``ranks`` ranks; ``figures``: those of ``rates``, measured.

    ``per_rank``: see ``worlds``; ``served``: GB/s of the store to all ranks, 0: as much as they ask for.
    """
    rates = replace(rates, store_gb_per_s=served)
    found = worlds(inputs, rates, config.checkpoint, ranks, per_rank, progress)
    measured, assumed = speeds(config)
    if served:
        assumed["store of all ranks"] = ScaleFigure(value=served, unit="GB/s", source="--store-gb-per-s")
    return Scale(
        hardware=config.hardware.name,
        data=config.data.name,
        model=str(config.model.name),
        worlds=tuple(found),
        wall=wall_of(found, config.hardware.device),
        measured={**measured, **figures},
        assumed=assumed,
        rules=rules(inputs, _with_samples(found[-1]), per_rank),
    )


def speeds(config: Config) -> tuple[dict[str, ScaleFigure], dict[str, ScaleFigure]]:
    """The hardware's speeds by name: those that calibration measured on this machine, and those that settings say."""
    kept = find_kept(config) if config.hardware.measured else None
    known = set(kept.figures) & set(config.hardware.measured) if kept is not None and kept.day else set()
    names = {MEMORY[config.hardware.device]: "GB/s", **SPEEDS}
    values = hardware_figures(config.hardware)
    measured, assumed = dict[str, ScaleFigure](), dict[str, ScaleFigure]()
    for name, unit in names.items():
        if name in known and kept is not None:
            measured[name] = ScaleFigure(value=values[name], unit=unit, source=f"calibration of {kept.day}")
        else:
            source = f"hardware.{name}, a default or setting of hardware={config.hardware.name}"
            assumed[name] = ScaleFigure(value=values[name], unit=unit, source=source)
    return measured, assumed


def _with_samples(world: World) -> int:
    """The ranks of ``world`` that are not on embedding hosts."""
    return world.ranks * (world.hosts - world.embedding_hosts) // world.hosts


def rules(inputs: PlanInputs, ranks: int, per_rank: int | None) -> tuple[str, ...]:
    """What the prediction assumes, in sentences; ``ranks``: those with samples in the largest world."""
    groups = sum(len(file) for file in inputs.schema.groups.get("train", []))
    share = decoded_share(inputs.train, ranks, groups)
    each = "worker" if inputs.hardware.embedding_hosts else "rank"
    batch = f"{per_rank:,} samples a step on each {each}" if per_rank else f"{inputs.batch:,} samples a step in all"
    reading = (
        "takes its time from the step, whose cores it works on"
        if inputs.hardware.device == "cpu"
        else ("works beside the step")
    )
    return (
        f"every host is like the one of hardware={inputs.hardware.name}; {batch}",
        f"each of {ranks:,} {each}s decodes {units.percent(share)} of the rows; its reader {reading}",
        "every checkpoint is a baseline of all rows, written behind the steps",
        "ranks are equally fast, and links carry nothing else",
    )
