"""Optimizers: steps that Shampoo needs for Adagrad's NE and their time, and rows that lazy Adam updates a second.

    python -m benchmarks.optimizers [--parts steps,step_time,rows] [--rows 250000] [--seeds 5]

``steps``: Shampoo against Adagrad for the dense part, on the planted logs of ``benchmarks.models``, DLRM, two ranks.
The learning rates are chosen on seeds of their own, as many for both; Shampoo's in ``SHARE`` of Adagrad's steps. On the
seeds from ``FIRST_SEED`` on Adagrad then takes all steps, and Shampoo ever fewer of them, as long as its mean NE is no
worse.
``step_time``: both train in the same two processes and take turns.
``rows``: ms of the backward pass of 26 tables with the update of their rows, lazy Adam against row-wise Adagrad in
FBGEMM's kernel, in turns, one thread.
The ratio of the JSON line: Adagrad's steps over Shampoo's to the same NE; without ``steps`` the speed of lazy Adam over
row-wise Adagrad's, the lesser of two distributions of ids.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from benchmarks.harness import (
    PLAIN,
    be_rank,
    finish,
    free_port,
    in_turns,
    median_ratio,
    nightjar,
    options,
    result_of,
    run_config,
    show,
    silent,
    words,
)
from benchmarks.models import FIRST_SEED, settings_of
from pipeline.config.compose import compose
from pipeline.specs import TABLE_OPTIMIZERS
from pipeline.stages.stage_inputs import read_plan
from pipeline.store import Store
from pipeline.training.batches import BatchReader
from pipeline.training.config_settings import select_model_settings
from pipeline.training.distributed import connect
from pipeline.training.parquet import SplitReader
from pipeline.training.sampler import Order
from pipeline.training.step import StepExecutor

TUNING_SEEDS = (1, 2, 3)
RATES = {"adagrad": (0.01, 0.02, 0.03, 0.04), "shampoo": (0.01, 0.015, 0.02, 0.03)}
SHARE, FEWER = 0.8, (0.7, 0.6, 0.5)
RANKS, TURNS, STEPS, WARM_UP = 2, 12, 40, 40
# Of ``step_time``: DLRM of 57,000 and of 460,000 dense parameters.
LOGS = ("planted", "demo")
TABLES, TABLE_ROWS, BATCH, WIDTH = 26, 100_000, 4096, 16  # of ``rows``
DISTRIBUTIONS = {"zipf": 1.05, "uniform": 0.0}


def main() -> None:
    """Run the parts that are asked for and print the figures."""
    given = options(__doc__, parts="steps,step_time,rows", rows=250_000, seeds=5)
    figures: dict[str, Any] = {}
    for part in given.parts.split(","):
        figures |= PARTS[part](given)
    finish("optimizers", figures.pop("ratio", None), **figures)


def planted(seed: int, rows: int, store: str) -> list[str]:
    """The overrides of a training on the planted logs of ``seed``."""
    own = ["hardware=laptop2", f"store={store}", f"seed={seed}", *PLAIN]
    return ["model=dlrm_small", *settings_of("planted", store, seed, rows), *own]


def measure_steps(given: argparse.Namespace) -> dict[str, Any]:
    """Steps to the NE that Adagrad ends with."""
    seeds = range(FIRST_SEED, FIRST_SEED + given.seeds)
    with tempfile.TemporaryDirectory() as store:

        def nes(optimizer: str, rate: float, count: int | None, seeds: Sequence[int]) -> list[float]:
            return [trained(store, optimizer, rate, count, seed, given.rows)["ne"] for seed in seeds]

        whole = int(trained(store, "adagrad", RATES["adagrad"][0], None, TUNING_SEEDS[0], given.rows)["steps"])
        counts = {"adagrad": None, "shampoo": int(SHARE * whole)}
        tuned = {
            name: {rate: statistics.mean(nes(name, rate, counts[name], TUNING_SEEDS)) for rate in rates}
            for name, rates in RATES.items()
        }
        best = {name: min(found, key=found.__getitem__) for name, found in tuned.items()}
        wanted = nes("adagrad", best["adagrad"], None, seeds)
        got: dict[float, list[float]] = {}
        for share in (SHARE, *FEWER):
            got[share] = nes("shampoo", best["shampoo"], int(share * whole), seeds)
            if statistics.mean(got[share]) > statistics.mean(wanted):
                break
    reached = [share for share, found in got.items() if statistics.mean(found) <= statistics.mean(wanted)]
    return {
        "ratio": 1 / min(reached) if reached else 0.0,
        "steps": whole,
        "rates": best,
        "tuning_ne": {name: {f"{rate:g}": round(ne, 5) for rate, ne in found.items()} for name, found in tuned.items()},
        "adagrad_ne": [round(ne, 5) for ne in wanted],
        "adagrad_mean_ne": statistics.mean(wanted),
        "shampoo_ne": {f"{share:g}": [round(ne, 5) for ne in found] for share, found in got.items()},
        "shampoo_mean_ne": {f"{share:g}": round(statistics.mean(found), 5) for share, found in got.items()},
    }


def trained(store: str, optimizer: str, rate: float, count: int | None, seed: int, rows: int) -> dict[str, float]:
    """Test NE and steps of a training on two ranks; ``count``: steps, None: of two epochs."""
    name = f"{optimizer}-{rate:g}-{count or 'all'}-{seed}"  # a run cannot be made shorter
    if not Path(store, f"runs/{name}/result.json").exists():
        most = f"train.max_steps={'null' if count is None else count}"
        own = [f"run={name}", f"train.lr={rate}", f"train.dense_optimizer={optimizer}", most]
        nightjar("run", *planted(seed, rows, store), *own)
    result = result_of(store, name)
    figures = {"ne": result["eval"]["ne"], "steps": result["train"]["steps"]}
    show(f"{optimizer}, lr {rate:g}, seed {seed}", figures)
    return figures


def measure_step_time(given: argparse.Namespace) -> dict[str, Any]:
    """Time of Shampoo's steps over that of Adagrad's, medians over turns."""
    figures: dict[str, Any] = {}
    for log in LOGS:
        with tempfile.TemporaryDirectory() as folder:
            run_config(compose(_overrides(log, folder, "adagrad")), last="plan")
            mp.spawn(_rank, args=(log, folder, free_port()), nprocs=RANKS)
            times = json.loads(Path(folder, "times.json").read_text())
        found = {f"{log}_step_ratio": median_ratio(times["shampoo"], times["adagrad"])}
        found |= {f"{log}_{name}_ms": statistics.median(each) for name, each in times.items()}
        show(log, found, ".3f")
        figures |= found
    return figures


def _overrides(log: str, folder: str, optimizer: str) -> list[str]:
    demo = words(f"""experiment=demo data.synthetic.rows=200000 train.global_batch=2048 hardware=laptop2
        store={folder}""")
    world = planted(1, 60_000, folder) if log == "planted" else demo
    return [*world, "run=r", f"train.dense_optimizer={optimizer}", "train.epochs=1000"]


def _rank(number: int, log: str, folder: str, port: int) -> None:
    """Train as a rank; the first one writes ``times.json``: ms a step by optimizer and turn."""
    silent()
    be_rank(number, RANKS, port)
    store: Store = Store(folder)
    configs = {name: compose(_overrides(log, folder, name)) for name in ("adagrad", "shampoo")}
    config = configs["adagrad"]
    device = connect(config.hardware, 1)
    made = run_config(config, last="plan")
    split, plan = SplitReader(store, made["ingest"], "train"), read_plan(store, made["plan"])
    order = Order(key="shampoo", seed=1, global_batch=config.train.batch, rank=number, world_size=RANKS)
    trainers = {
        name: StepExecutor(select_model_settings(each), split.schema, plan, device, total=10**9)
        for name, each in configs.items()
    }
    times: dict[str, list[float]] = {name: [] for name in trainers}
    with contextlib.ExitStack() as open_readers:
        readers = {name: open_readers.enter_context(BatchReader(split, order, epochs=1000)) for name in trainers}
        for turn in range(-1, TURNS):
            for name, trainer in trainers.items():
                dist.barrier()
                began = time.perf_counter()
                for _ in range(WARM_UP if turn < 0 else STEPS):
                    trainer.step(readers[name])
                dist.barrier()
                if turn >= 0:
                    times[name].append(1000 * (time.perf_counter() - began) / STEPS)
    if number == 0:
        Path(folder, "times.json").write_text(json.dumps(times))


def measure_rows(given: argparse.Namespace) -> dict[str, Any]:
    """Speed of lazy Adam's row updates over that of fused row-wise Adagrad, on ids of two distributions."""
    torch.set_num_threads(1)
    figures: dict[str, Any] = {}
    names = ("rowwise_adagrad", "lazy_adam", "partial_rowwise_adam", "adagrad", "ftrl")
    for ids, exponent in DISTRIBUTIONS.items():
        times = in_turns({name: _updates(name, exponent) for name in names}, TURNS - 2, warm_up=2)
        medians = {name: statistics.median(values) for name, values in times.items()}
        show(f"{ids}, ms", medians, ".1f")
        figures |= {f"{name}_{ids}_ms": value for name, value in medians.items()}
        figures[f"lazy_adam_{ids}_speed"] = medians["rowwise_adagrad"] / medians["lazy_adam"]
    if "steps" not in given.parts.split(","):
        figures["ratio"] = min(figures[f"lazy_adam_{ids}_speed"] for ids in DISTRIBUTIONS)
    return figures


def _updates(optimizer: str, exponent: float) -> Callable[[], float]:
    """A function that does one backward pass and returns its ms."""
    from fbgemm_gpu.split_embedding_configs import EmbOptimType
    from fbgemm_gpu.split_table_batched_embeddings_ops_common import EmbeddingLocation
    from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
        ComputeDevice,
        SplitTableBatchedEmbeddingBagsCodegen,
    )

    from pipeline.embeddings.table_training import RowOptimizer
    from pipeline.embeddings.tables import Kernel

    spec = TABLE_OPTIMIZERS.get(optimizer)
    kinds = {"rowwise_adagrad": EmbOptimType.EXACT_ROWWISE_ADAGRAD, "adagrad": EmbOptimType.EXACT_ADAGRAD}
    module = SplitTableBatchedEmbeddingBagsCodegen(
        [(TABLE_ROWS, WIDTH, EmbeddingLocation.HOST, ComputeDevice.CPU)] * TABLES,
        optimizer=kinds.get(optimizer, EmbOptimType.EXACT_SGD),
        learning_rate=0.01,
    )
    if not spec.fused_on("cpu"):
        tables: list[Any] = [SimpleNamespace(name=f"t{i}", feature_names=[f"t{i}"]) for i in range(TABLES)]
        RowOptimizer(Kernel(module, tables), spec).lr = 0.01
    weights = np.arange(1, TABLE_ROWS + 1, dtype=np.float64) ** -exponent
    generator, offsets = np.random.default_rng(0), torch.arange(TABLES * BATCH + 1)
    gradient = 1e-4 * torch.randn(BATCH, TABLES * WIDTH)

    def update() -> float:
        drawn = generator.choice(TABLE_ROWS, TABLES * BATCH, p=weights / weights.sum())
        output = module(torch.from_numpy(drawn), offsets)
        start = time.perf_counter()
        output.backward(gradient)
        return 1000 * (time.perf_counter() - start)

    return update


PARTS = {"steps": measure_steps, "step_time": measure_step_time, "rows": measure_rows}


if __name__ == "__main__":
    main()
