"""The measurements in order (disk, kernels, links, training steps), and how they become hardware figures."""

from __future__ import annotations

import dataclasses
import logging
import statistics
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipeline.calibration.fit import KernelTime, LinkTime, StepTime, fit_kernels, fit_links, fit_steps, slower_kernels
from pipeline.calibration.measured_ranks import run_ranks
from pipeline.calibration.timing import time_copies, time_disk, time_kernels, time_links
from pipeline.calibration.trial import Trial, make_dataset, measure_training, spread_rows
from pipeline.config import Config
from pipeline.config.hardware import HardwareConfig
from pipeline.core.units import GIB
from pipeline.planning.cost import dense_costs, local_batch, moved_bytes
from pipeline.planning.inputs import PlanInputs
from pipeline.planning.step_prediction import predict
from pipeline.records.dataset import DatasetSchema, Profile
from pipeline.records.plan import Plan, ShardPlan, TablePlan
from pipeline.store.artifacts import Store

if TYPE_CHECKING:
    import torch

log = logging.getLogger(__name__)
STEPS = 20
# Tables have a thousand to a million rows, as in real models: small ones alone would leave the caches to the dense
# part. Small and large MLPs, few and many tables and different batch sizes give steps that are dominated by overhead,
# by matrix products or by activations.
TRIALS = (
    Trial(rows=spread_rows(4), zipf=1.1, dim=16, bottom=(16,), top=(16,), batch=512),
    Trial(rows=spread_rows(8), zipf=1.1, dim=32, bottom=(512, 256), top=(512, 256), batch=4096),
    Trial(rows=spread_rows(26), zipf=1.1, dim=16, bottom=(64,), top=(64,), batch=4096),
    Trial(rows=spread_rows(24), zipf=1.1, dim=64, bottom=(128,), top=(128,), batch=2048),
    Trial(rows=spread_rows(8), zipf=1.1, dim=16, bottom=(256, 128), top=(256,), batch=8192),
    Trial(rows=spread_rows(12), zipf=1.1, dim=64, bottom=(64, 64), top=(256, 128, 64), batch=8192),
    Trial(rows=spread_rows(16), zipf=1.1, dim=8, bottom=(256,), top=(256, 256), batch=1024),
    Trial(rows=spread_rows(6), zipf=1.1, dim=32, bottom=(64, 128, 64), top=(64, 32), batch=2048),
    Trial(rows=spread_rows(10), zipf=1.1, dim=16, bottom=(512, 64), top=(256,), batch=8192),
    Trial(rows=spread_rows(20), zipf=1.1, dim=64, bottom=(64,), top=(64, 32), batch=2048),
    Trial(rows=spread_rows(5), zipf=1.1, dim=32, bottom=(64, 256), top=(512, 64), batch=4096),
    # Models of many small operations, and of few, beside DLRM: otherwise the cost of a call
    # cannot be told from that of a step.
    Trial(rows=spread_rows(8), zipf=1.1, dim=16, bottom=(64,), top=(64,), batch=256, ranker="dhen"),
    Trial(rows=spread_rows(26), zipf=1.1, dim=16, bottom=(64,), top=(128, 64), batch=2048, ranker="masknet"),
    Trial(rows=spread_rows(16), zipf=1.1, dim=16, bottom=(), top=(256, 128), batch=4096, ranker="dcnv2"),
    Trial(rows=spread_rows(8), zipf=1.1, dim=16, bottom=(), top=(64,), batch=256, ranker="mlp"),
)


@dataclass(frozen=True, kw_only=True)
class Calibration:
    """``hardware`` with the fields ``measured`` replaced; ``error``: median relative error of whole steps."""

    hardware: HardwareConfig
    measured: tuple[str, ...]
    error: float

    def to_json(self) -> dict[str, Any]:
        """Return plain data for ``--json``."""
        return dataclasses.asdict(self)


def calibrate(config: Config, disk: Path | None) -> Calibration:
    """Measure this machine as one host of ``config.hardware``.

    Capacities and the links between hosts, which one machine cannot show, keep their figures.

    Args:
        config: The configuration with the preset's hardware.
        disk: A folder on the disk to read; None: no disk.

    Raises:
        ConfigError: The device or the ranks are missing.
        LaunchError: A rank died.
        OSError: The disk cannot be read.
    """
    hardware = replace(config.hardware, hosts=1, embedding_hosts=0, measured=[])
    world = hardware.ranks_per_host
    host = replace(config, hardware=hardware)
    log.info("kernels and links on %d %s rank(s) at the same time ...", world, hardware.device)
    timed = run_ranks(world, hardware.device, _time_rank, host)
    figures: dict[str, Any] = {}
    if disk is not None:
        log.info("disk of %s ...", disk)
        for name, value in time_disk(disk).items():
            # A host's ranks share its disk.
            figures[name] = value / world
    figures |= fit_alone(timed, hardware.device)
    steps = _time_steps(replace(host, hardware=replace(hardware, **figures)))
    rates, slowdown = fit_steps(steps)
    figures |= rates | slower_kernels(figures, slowdown)
    final = replace(config.hardware, **figures, measured=[])
    # The relative error of the fitted figures for each step that they were fitted to.
    errors = []
    for step in steps:
        dense = step.gflop / final.dense_gflop_per_s * 1e3 + step.megabytes / final.moved_gb_per_s
        dense += step.operations * final.operation_us / 1e3
        known = step.known_ms + (slowdown - 1) * step.kernels_ms
        errors.append(abs(known + dense + final.step_overhead_ms - step.ms) / step.ms)
    return Calibration(hardware=final, measured=tuple(figures), error=statistics.median(errors))


def fit_alone(timed: Sequence[Mapping[str, Any]], device: str, usual: HardwareConfig | None = None) -> dict[str, float]:
    """Fit figures of kernels, links, copies and memory to what each rank measured; ``usual``: as in ``fit_kernels``."""
    kernels = []
    for times in zip(*(rank["kernels"] for rank in timed), strict=True):
        # Merge the ranks' records of one shape: the counts of the first one, and median times.
        record = dict(times[0])
        for name in ("lookup_ms", "update_ms"):
            record[name] = statistics.median(time[name] for time in times)
        kernels.append(KernelTime(**record))
    figures = fit_kernels(kernels, device, usual)
    # An all-to-all ends on all ranks at about the same time, so one rank's times stand for theirs.
    links = [LinkTime(**time) for time in timed[0]["links"]]
    figures |= fit_links(links)
    process = max(rank["process_bytes"] for rank in timed) / GIB
    # Some kernels, such as gVisor's, do not report a process's memory.
    if process:
        figures["process_gib"] = process
    return figures | timed[0]["copies"]


def _time_rank(config: Config) -> dict[str, Any]:
    """Measure on one rank its memory before the timings, then kernel and link times; returns plain data."""
    import torch.distributed as dist

    from pipeline.embeddings.ssd.diagnostics import pss_bytes
    from pipeline.training.distributed import connect

    device = connect(config.hardware, config.train.threads_per_rank, one_machine=config.launch.name == "local")
    process = pss_bytes()
    kernels = list(map(dataclasses.asdict, time_kernels(device, dist.barrier)))
    links = list(map(dataclasses.asdict, time_links(device)))
    return {"process_bytes": process, "kernels": kernels, "links": links, "copies": copy_rate(device)}


def copy_rate(device: torch.device) -> dict[str, float]:
    """Return the rate of copies from host memory to a GPU, by its name in the hardware; {} on a CPU."""
    if device.type != "cuda":
        return {}
    return {"hbm_to_ddr_gb_per_s": time_copies(device)}


def _time_steps(config: Config) -> list[StepTime]:
    """Time whole steps of every trial in the training loop, with the part of them that the cost model knows."""
    jobs, datasets = [], []
    with tempfile.TemporaryDirectory() as folder:
        for number, trial in enumerate(TRIALS):
            trained = trial.config(config.hardware, STEPS, config.train)
            schema, profile = make_dataset(Store(f"{folder}/{number}"), trial, STEPS)
            jobs.append((trained, f"{folder}/{number}", whole_tables(trained, schema, profile)))
            datasets.append((schema, profile))
        world = config.hardware.ranks_per_host
        times = run_ranks(world, config.hardware.device, _train_all, jobs)[0]
    steps = []
    for (trained, _, _), (schema, profile), ms in zip(jobs, datasets, times, strict=True):
        steps.append(step_time(trained, schema, profile, ms))
    return steps


def _train_all(jobs: list[tuple[Config, str, Plan]]) -> list[float]:
    """Return the ms of a step of every job, measured on one rank."""
    times = []
    for number, (config, folder, plan) in enumerate(jobs, start=1):
        times.append(measure_training(config, folder, plan)["step_ms"])
        what = f"{len(plan.tables)} tables, batch {plan.global_batch}"
        log.info("training step %d/%d: %s: %.1f ms", number, len(jobs), what, times[-1])
    return times


def step_time(config: Config, schema: DatasetSchema, profile: Profile, ms: float) -> StepTime:
    """Return a trial's step of ``ms`` with whole tables, and what the cost model knows of it without the dense part."""
    fast = replace(config.hardware, dense_gflop_per_s=1e12, moved_gb_per_s=1e12)
    blind = replace(fast, operation_us=0.0, step_overhead_ms=0.0)
    inputs = PlanInputs.of(replace(config, hardware=blind), schema, profile)
    known, costs = predict(whole_tables(config, schema, profile), inputs), dense_costs(config.model, schema)
    batch = local_batch(config.train.batch, config.world_size)
    return StepTime(
        ms=ms,
        known_ms=known.step_ms,
        kernels_ms=max(phases["lookup"] + phases["update"] for phases in known.phases),
        gflop=batch * costs.flop / 1e9,
        megabytes=moved_bytes(costs, batch) / 1e6,
        operations=costs.operations,
    )


def whole_tables(config: Config, schema: DatasetSchema, profile: Profile) -> Plan:
    """Plan whole tables, dealt to the ranks in turn."""
    device, dim = config.hardware.device, config.model.embedding_dim
    tables = {}
    for number, column in enumerate(schema.sparse):
        shard = ShardPlan(rank=number % config.world_size, row=0, rows=column.rows, column=0, columns=dim)
        tables[column.name] = TablePlan(
            rows=column.rows,
            dim=dim,
            pooling=profile.sparse[column.name].pooling,
            tier="hbm" if device == "cuda" else "ddr",
            sharding="table_wise",
            kernel="fused",
            shards=(shard,),
            cost_ms=0.0,
            reason="dealt out in turn",
        )
    return Plan(
        hardware=config.hardware.name,
        device=device,
        world_size=config.world_size,
        ranks_per_host=config.hardware.ranks_per_host,
        global_batch=config.train.batch,
        tables=tables,
    )
