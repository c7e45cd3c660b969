"""Shampoo against Adagrad for the dense part, two ranks: steps to the same test NE, and the time of a step.

``steps``: on the planted logs of ``benchmarks.models``, DLRM. The learning rates are chosen on seeds of their own, as
many for both; Shampoo's in ``SHARE`` of Adagrad's steps. On the seeds from ``FIRST_SEED`` on Adagrad then takes all
steps, and Shampoo ever fewer of them, as long as its mean NE is no worse.
``step_time``: both train in the same two processes and take turns.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import logging
import os
import socket
import statistics
import tempfile
import time
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch.distributed as dist
import torch.multiprocessing as mp

from benchmarks.models import FIRST_SEED, settings_of
from pipeline.cli import main as nightjar
from pipeline.config.compose import compose
from pipeline.specs.stage import StageIO
from pipeline.stages.execution import run_stage
from pipeline.stages.stage_inputs import read_plan
from pipeline.stages.steps import steps as steps_of
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


def planted(seed: int, rows: int, store: str) -> list[str]:
    """The overrides of a training on the planted logs of ``seed``."""
    return [
        "model=dlrm_small",
        *settings_of("planted", store, seed, rows),
        "hardware=laptop2",
        f"store={store}",
        f"seed={seed}",
        "train.precision=fp32",
        "train.threads_per_rank=1",
        "train.log_every_steps=1000",
        "train.guard.collapse=false",
    ]


def steps(args: argparse.Namespace) -> dict[str, Any]:
    """Steps to the NE that Adagrad ends with."""
    drawn = range(FIRST_SEED, FIRST_SEED + args.seeds)
    with tempfile.TemporaryDirectory() as store:

        def nes(optimizer: str, rate: float, count: int | None, seeds: Sequence[int]) -> list[float]:
            return [trained(store, optimizer, rate, count, seed, args.rows)["ne"] for seed in seeds]

        whole = int(trained(store, "adagrad", RATES["adagrad"][0], None, TUNING_SEEDS[0], args.rows)["steps"])
        counts = {"adagrad": None, "shampoo": int(SHARE * whole)}
        tuned = {
            name: {rate: statistics.mean(nes(name, rate, counts[name], TUNING_SEEDS)) for rate in rates}
            for name, rates in RATES.items()
        }
        best = {name: min(means, key=means.__getitem__) for name, means in tuned.items()}
        wanted = nes("adagrad", best["adagrad"], None, drawn)
        got: dict[float, list[float]] = {}
        for share in (SHARE, *FEWER):
            got[share] = nes("shampoo", best["shampoo"], int(share * whole), drawn)
            if statistics.mean(got[share]) > statistics.mean(wanted):
                break
    reached = [share for share, each in got.items() if statistics.mean(each) <= statistics.mean(wanted)]
    return {
        "ratio": 1 / min(reached) if reached else 0.0,
        "steps": whole,
        "rates": best,
        "tuning_ne": {name: {f"{rate:g}": round(ne, 5) for rate, ne in means.items()} for name, means in tuned.items()},
        "adagrad_ne": _rounded(wanted),
        "adagrad_mean_ne": statistics.mean(wanted),
        "shampoo_ne": {f"{share:g}": _rounded(each) for share, each in got.items()},
        "shampoo_mean_ne": {f"{share:g}": round(statistics.mean(each), 5) for share, each in got.items()},
    }


def _rounded(values: Sequence[float]) -> list[float]:
    return [round(value, 5) for value in values]


def trained(store: str, optimizer: str, rate: float, count: int | None, seed: int, rows: int) -> dict[str, float]:
    """Test NE and steps of a training on two ranks; ``count``: steps, None: of two epochs."""
    name = f"{optimizer}-{rate:g}-{count or 'all'}-{seed}"  # a run cannot be made shorter
    path = Path(store, f"runs/{name}/result.json")
    if not path.exists():
        overrides = [
            *planted(seed, rows, store),
            f"run={name}",
            f"train.lr={rate}",
            f"train.dense_optimizer={optimizer}",
            f"train.max_steps={'null' if count is None else count}",
        ]
        with contextlib.redirect_stdout(io.StringIO()):
            code = nightjar(["run", *overrides])
        if code:
            raise SystemExit(f"{name}: {json.loads(path.read_text())['error']['message']}")
    result = json.loads(path.read_text())
    run = {"ne": result["eval"]["ne"], "steps": result["train"]["steps"]}
    print(f"{optimizer:<9} lr {rate:<6g} seed {seed} {run['steps']:>6.0f} steps  NE {run['ne']:.5f}", flush=True)
    return run


def step_time(args: argparse.Namespace) -> dict[str, Any]:
    """Time of Shampoo's steps over that of Adagrad's, medians over turns."""
    figures: dict[str, Any] = {}
    for log in LOGS:
        with tempfile.TemporaryDirectory() as folder, socket.socket() as free:
            prepare(log, folder)
            free.bind(("127.0.0.1", 0))
            port = int(free.getsockname()[1])
            free.close()
            mp.spawn(_rank, args=(log, folder, port), nprocs=RANKS)
            times = json.loads(Path(folder, "times.json").read_text())
        pairs = list(zip(times["adagrad"], times["shampoo"], strict=True))
        figures[f"{log}_step_ratio"] = statistics.median(b / a for a, b in pairs)
        figures |= {f"{log}_{name}_ms": statistics.median(each) for name, each in times.items()}
        told = {name: round(value, 3) for name, value in figures.items() if name.startswith(log)}
        print(told, flush=True)
    return figures


def _overrides(log: str, folder: str, optimizer: str) -> list[str]:
    if log == "planted":
        own = planted(1, 60_000, folder)
    else:
        own = [
            "experiment=demo",
            "data.synthetic.rows=200000",
            "train.global_batch=2048",
            "hardware=laptop2",
            f"store={folder}",
        ]
    return [*own, "run=r", f"train.dense_optimizer={optimizer}", "train.epochs=1000"]


def prepare(log: str, folder: str) -> None:
    """Ingest the rows of ``log`` and plan its tables."""
    config, store = compose(_overrides(log, folder, "adagrad")), Store(folder)
    for step in steps_of(config, store):
        if step.name in ("ingest", "plan"):
            run_stage(step, config, store, StageIO())


def _rank(number: int, log: str, folder: str, port: int) -> None:
    """Train as a rank; the first one writes ``times.json``: ms a step by optimizer and turn."""
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    os.environ |= {
        "RANK": str(number),
        "LOCAL_RANK": str(number),
        "WORLD_SIZE": str(RANKS),
        "LOCAL_WORLD_SIZE": str(RANKS),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }
    store: Store = Store(folder)
    configs = {name: compose(_overrides(log, folder, name)) for name in ("adagrad", "shampoo")}
    config = configs["adagrad"]
    device = connect(config.hardware, 1)
    made = {step.name: step for step in steps_of(config, store)}
    dataset = store.get(made["ingest"].path, "ingest")
    split, plan = SplitReader(store, dataset, "train"), read_plan(store, store.get(made["plan"].path, "plan"))
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
