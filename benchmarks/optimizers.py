"""Optimizers: steps that Shampoo needs for Adagrad's NE, and rows that lazy Adam updates a second.

    python -m benchmarks.optimizers [--parts shampoo,rows] [--rows 600000] [--seeds 3]

``shampoo``: on the demo's synthetic logs, two ranks train with dense Adagrad for one epoch; then with Shampoo for ever
fewer steps, as long as its test NE is no worse. Both have the best of a few learning rates. NE is the mean over
``--seeds`` logs, as one training's moves by 0.004 with the slightest change; the time of a step is that of trainings
in turns.
``rows``: ms of the backward pass of 26 tables with the update of their rows, lazy Adam against row-wise Adagrad in
FBGEMM's kernel, in turns, one thread.
The ratio of the JSON line: Adagrad's steps over Shampoo's to the same NE; of ``rows`` alone: the speed of lazy Adam
over row-wise Adagrad's, the lesser of two distributions of ids.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.common import finish
from pipeline.cli import main as nightjar

FIRST_SEED = 11
SHARES = (0.9, 0.8, 0.7, 0.6, 0.5, 0.4)
RATES = {"adagrad": (0.01, 0.02, 0.04), "shampoo": (0.005, 0.01, 0.02)}
TABLES, TABLE_ROWS, BATCH, WIDTH = 26, 100_000, 4096, 16
TURNS = 12


def main() -> None:
    """Run the parts that are asked for and print the figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--parts", default="shampoo,rows")
    parser.add_argument("--rows", type=int, default=600_000)
    parser.add_argument("--seeds", type=int, default=3)
    args = parser.parse_args()
    figures: dict[str, Any] = {}
    for part in args.parts.split(","):
        figures |= PARTS[part](args)
    finish("optimizers", figures.pop("ratio", None), **figures)


def shampoo(args: argparse.Namespace) -> dict[str, Any]:
    """Steps to the NE that Adagrad ends with, and the time of a step."""
    with tempfile.TemporaryDirectory() as store:
        base = [f"data.synthetic.rows={args.rows}"]
        runs, whole = {}, {}
        for slow, fast in zip(RATES["adagrad"], RATES["shampoo"], strict=True):
            runs[slow] = over_seeds(args.seeds, store, "adagrad", slow, None, base)
            whole[fast] = over_seeds(args.seeds, store, "shampoo", fast, None, base)
        best = min(runs.values(), key=lambda run: run["ne"])
        rate = min(whole, key=lambda each: whole[each]["ne"])
        reached = whole[rate] if whole[rate]["ne"] <= best["ne"] else None
        for share in SHARES if reached else ():
            run = over_seeds(args.seeds, store, "shampoo", rate, int(share * best["steps"]), base)
            if run["ne"] > best["ne"]:
                break
            reached = run
    times = {
        name: statistics.mean(run["step_ms"] for run in each.values())
        for name, each in (("adagrad", runs), ("shampoo", whole))
    }
    return {
        "ratio": best["steps"] / reached["steps"] if reached else 0.0,
        "adagrad_ne": best["ne"], "adagrad_steps": best["steps"], "adagrad_step_ms": times["adagrad"],
        "shampoo_ne": reached["ne"] if reached else whole[rate]["ne"],
        "shampoo_steps": reached["steps"] if reached else None,
        "shampoo_ne_of_all_steps": whole[rate]["ne"], "shampoo_step_ms": times["shampoo"],
        "shampoo_step_time_ratio": times["shampoo"] / times["adagrad"],
    }  # fmt: skip


def over_seeds(
    seeds: int, store: str, optimizer: str, rate: float, steps: int | None, base: list[str]
) -> dict[str, float]:
    """The mean of ``trained`` over the seeds from ``FIRST_SEED`` on."""
    drawn = range(FIRST_SEED, FIRST_SEED + seeds)
    runs = [trained(store, optimizer, rate, steps, seed, [*base, f"seed={seed}"]) for seed in drawn]
    return {name: statistics.mean(run[name] for run in runs) for name in runs[0]}


def trained(store: str, optimizer: str, rate: float, steps: int | None, seed: int, base: list[str]) -> dict[str, float]:
    """Test NE, steps and ms a step of a training on two ranks."""
    name = f"{optimizer}-{rate:g}-{steps or 'all'}-{seed}"  # a run cannot be made shorter
    overrides = [
        "experiment=demo", "hardware=laptop2", f"run={name}", f"store={store}", f"train.lr={rate}", *base,
        f"train.dense_optimizer={optimizer}", f"train.max_steps={'null' if steps is None else steps}",
        "train.log_every_steps=1000",
    ]  # fmt: skip
    with contextlib.redirect_stdout(io.StringIO()):
        code = nightjar(["run", *overrides])
    result = json.loads(Path(store, f"runs/{name}/result.json").read_text())
    if code:
        raise SystemExit(f"{optimizer}: {result['error']['message']}")
    train = result["train"]
    run = {"ne": result["eval"]["ne"], "steps": train["steps"], "step_ms": 1000 * train["seconds"] / train["steps"]}
    took = f"{run['steps']:>6.0f} steps of {run['step_ms']:.1f} ms"
    print(f"{optimizer:<9} lr {rate:<6g} seed {seed} {took}  NE {run['ne']:.5f}", flush=True)
    return run


def rows(args: argparse.Namespace) -> dict[str, Any]:
    """Speed of lazy Adam's row updates over that of fused row-wise Adagrad, on ids of two distributions."""
    import torch

    torch.set_num_threads(1)
    figures: dict[str, Any] = {}
    for ids, exponent in (("zipf", 1.05), ("uniform", 0.0)):
        updates = {
            name: _updates(name, exponent)
            for name in ("rowwise_adagrad", "lazy_adam", "partial_rowwise_adam", "adagrad", "ftrl")
        }
        times: dict[str, list[float]] = {name: [] for name in updates}
        for _ in range(TURNS):
            for name, update in updates.items():
                times[name].append(update())
        medians = {name: statistics.median(values[2:]) for name, values in times.items()}
        figures |= {f"{name}_{ids}_ms": value for name, value in medians.items()}
        figures[f"lazy_adam_{ids}_speed"] = medians["rowwise_adagrad"] / medians["lazy_adam"]
        print(f"{ids:<9}" + "  ".join(f"{name} {value:.1f} ms" for name, value in medians.items()), flush=True)
    speeds = [figures[f"lazy_adam_{ids}_speed"] for ids in ("zipf", "uniform")]
    return {"ratio": min(speeds), **figures} if args.parts == "rows" else figures


def _updates(optimizer: str, exponent: float) -> Any:
    """A function that does one backward pass and returns its ms."""
    import numpy as np
    import torch
    from fbgemm_gpu.split_embedding_configs import EmbOptimType
    from fbgemm_gpu.split_table_batched_embeddings_ops_common import EmbeddingLocation
    from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
        ComputeDevice,
        SplitTableBatchedEmbeddingBagsCodegen,
    )

    from pipeline.embeddings.by_rows import RowOptimizer
    from pipeline.embeddings.tables import Kernel
    from pipeline.specs import TABLE_OPTIMIZERS

    spec = TABLE_OPTIMIZERS.get(optimizer)
    kinds = {"rowwise_adagrad": EmbOptimType.EXACT_ROWWISE_ADAGRAD, "adagrad": EmbOptimType.EXACT_ADAGRAD}
    module = SplitTableBatchedEmbeddingBagsCodegen(
        [(TABLE_ROWS, WIDTH, EmbeddingLocation.HOST, ComputeDevice.CPU)] * TABLES,
        optimizer=kinds.get(optimizer, EmbOptimType.EXACT_SGD), learning_rate=0.01,
    )  # fmt: skip
    if not spec.fused_on("cpu"):
        RowOptimizer(Kernel(module, [_Table(f"t{i}") for i in range(TABLES)], fused=True), spec).lr = 0.01
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


class _Table:
    """What ``RowOptimizer`` reads of a table of a kernel."""

    def __init__(self, name: str) -> None:
        self.name, self.feature_names = name, [name]


PARTS = {"shampoo": shampoo, "rows": rows}


if __name__ == "__main__":
    main()
