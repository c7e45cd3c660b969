"""A calibration of a few seconds, for ``hardware=auto``: few shapes, and steps of small models on batches in memory."""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections import deque
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from pipeline.calibration.fit import fit_steps, slower_kernels
from pipeline.calibration.machine_figures import copy_rate, fit_alone, step_time, whole_tables
from pipeline.calibration.measured_ranks import run_ranks
from pipeline.calibration.timing import product_rate, time_kernels, time_links
from pipeline.calibration.trial import DENSE, Drawn, Trial, draw
from pipeline.config import Config
from pipeline.config.hardware import HardwareConfig

if TYPE_CHECKING:
    import torch

    from pipeline.training.batches import Batch

# (tables, rows, columns, ids a table), as in timing.KERNEL_SHAPES: all overhead, all ids, tables in the cache and
# beyond.
SHAPES = ((4, 1_000, 16, 256), (26, 1_000, 16, 4_096), (8, 100_000, 32, 8_192), (8, 200_000, 64, 2_048))
LINKS = (1 << 10, 1 << 16, 1 << 20, 1 << 22)
# Models whose steps are dominated by overhead, by activations and by matrix products.
TRIALS = (
    Trial(rows=(100,) * 8, zipf=1.1, dim=8, bottom=(64,), top=(64, 32), batch=256),
    Trial(rows=(1_000, 100_000) * 8, zipf=1.1, dim=16, bottom=(64,), top=(64,), batch=4_096),
    Trial(rows=(1_000, 10_000) * 4, zipf=1.1, dim=16, bottom=(512, 256), top=(512, 256), batch=2_048),
    Trial(rows=(1_000, 10_000) * 13, zipf=1.1, dim=16, bottom=(512, 256, 64), top=(512, 256), batch=1_024),
    # Of many operations, large and small, and of few.
    Trial(rows=(1_000,) * 8, zipf=1.1, dim=16, bottom=(64,), top=(64,), batch=256, ranker="dhen"),
    Trial(rows=(1_000,) * 16, zipf=1.1, dim=16, bottom=(64,), top=(128, 64), batch=1_024, ranker="masknet"),
    Trial(rows=(1_000,) * 26, zipf=1.1, dim=16, bottom=(), top=(256, 128), batch=2_048, ranker="dcnv2"),
    Trial(rows=(1_000,) * 8, zipf=1.1, dim=16, bottom=(), top=(64,), batch=256, ranker="mlp"),
    # One whose values exceed the caches.
    Trial(rows=(10_000,) * 26, zipf=1.1, dim=16, bottom=(), top=(64,), batch=8_192, ranker="deepfm"),
)
# Usual figures of a CPU, whose proportions guide a fit to few times. The rate of products differs tenfold between CPUs
# with and without AMX, float32 and bf16, so it is measured.
USUAL = HardwareConfig(name="usual", moved_gb_per_s=6.0, operation_us=20.0, step_overhead_ms=0.5)
# Numbers of batches. With several ranks, the pipeline reads ahead of its steps. The reader must not come to its end.
WARM_UP, STEPS, AHEAD = 2, 5, 3
BATCHES = WARM_UP + STEPS + 2 * AHEAD + 1


def quick_figures(config: Config) -> dict[str, float]:
    """Measure speeds of a rank of ``config`` on this machine, and its process's memory, by their names in the hardware.

    All ranks that share the machine are measured at once.

    Raises:
        ConfigError: Devices are missing.
        LaunchError: A rank died.
    """
    hardware = replace(config.hardware, hosts=1, embedding_hosts=0, ranks_per_host=config.machine_ranks, measured=[])
    host = replace(config, hardware=hardware)
    timed = run_ranks(config.machine_ranks, hardware.device, _measure, host)
    # A few times tell the terms of a CPU apart only roughly, so its figures are the usual ones, scaled.
    usual = None
    if hardware.device == "cpu":
        usual = replace(USUAL, dense_gflop_per_s=statistics.median(rank["product_rate"] for rank in timed))
    figures: dict[str, Any] = fit_alone(timed, hardware.device, usual)
    hardware = replace(hardware, **figures)
    steps = []
    for trial, ms in zip(TRIALS, timed[0]["steps"], strict=True):
        drawn = draw(trial, BATCHES)
        steps.append(step_time(trial.config(hardware, STEPS, config.train), drawn.schema, drawn.profile, ms))
    rates, slowdown = fit_steps(steps, usual)
    figures = figures | rates | slower_kernels(figures, slowdown)
    return {name: float(value) for name, value in figures.items()}


def _measure(config: Config) -> dict[str, Any]:
    """Measure kernels, links and steps on one rank; returns plain data."""
    import torch.distributed as dist

    from pipeline.embeddings.ssd.diagnostics import pss_bytes
    from pipeline.training.distributed import connect

    device = connect(config.hardware, config.train.threads_per_rank, one_machine=True)
    process = pss_bytes()
    kernels = list(map(dataclasses.asdict, time_kernels(device, dist.barrier, SHAPES)))
    links = list(map(dataclasses.asdict, time_links(device, LINKS, STEPS)))
    dist.barrier()
    rate = product_rate(device, config.train.precision)
    steps = [_step_ms(config, trial, device) for trial in TRIALS]
    measured = {"process_bytes": process, "kernels": kernels, "links": links, "copies": copy_rate(device)}
    return measured | {"product_rate": rate, "steps": steps}


def _step_ms(config: Config, trial: Trial, device: torch.device) -> float:
    from pipeline.training.config_settings import select_model_settings
    from pipeline.training.step import StepExecutor

    trained, drawn = trial.config(config.hardware, STEPS, config.train), draw(trial, BATCHES)
    plan = whole_tables(trained, drawn.schema, drawn.profile)
    trainer = StepExecutor(select_model_settings(trained), drawn.schema, plan, device, total=STEPS)
    batches = _made_ahead(_batches_of_rank(drawn, trial.batch, device))
    spent = []
    for _ in range(WARM_UP + STEPS):
        began = time.perf_counter()
        trainer.step(batches)
        spent.append(1e3 * (time.perf_counter() - began))
    trainer.close()
    return statistics.median(spent[WARM_UP:])


def _made_ahead(batches: Iterator[Batch]) -> Iterator[Batch]:
    # Another thread makes a batch for each that is taken, as in a training, and takes its share of the CPUs.
    with ThreadPoolExecutor(1) as reader:
        made = deque(reader.submit(next, batches, None) for _ in range(AHEAD))
        while (batch := made.popleft().result()) is not None:
            made.append(reader.submit(next, batches, None))
            yield batch


def _batches_of_rank(drawn: Drawn, batch: int, device: torch.device) -> Iterator[Batch]:
    import torch
    import torch.distributed as dist
    from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

    from pipeline.training.batches import Batch

    rank = dist.get_rank()
    count, rng = batch // dist.get_world_size(), np.random.default_rng(rank)
    for at in range(rank * count, drawn.schema.rows["train"], batch):
        values = np.concatenate([ids[at : at + count] for ids in drawn.ids.values()])
        dense = torch.from_numpy(rng.normal(size=(count, DENSE)).astype(np.float32))
        sparse = KeyedJaggedTensor(
            keys=list(drawn.ids),
            values=torch.from_numpy(values),
            lengths=torch.ones(len(values), dtype=torch.int32),
            stride=count,
        )
        labels = torch.from_numpy((rng.random(count) < 0.25).astype(np.float32))
        yield Batch(dense, sparse, labels, torch.full((count,), 1 / count)).to(device)
