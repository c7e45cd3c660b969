"""Optimizers: steps that Shampoo needs for Adagrad's NE and their time, and rows that lazy Adam updates a second.

    python -m benchmarks.optimizers [--parts steps,step_time,rows] [--rows 250000] [--seeds 5]

``steps``, ``step_time``: see ``benchmarks.shampoo``.
``rows``: ms of the backward pass of 26 tables with the update of their rows, lazy Adam against row-wise Adagrad in
FBGEMM's kernel, in turns, one thread.
The ratio of the JSON line: Adagrad's steps over Shampoo's to the same NE; without ``steps`` the speed of lazy Adam over
row-wise Adagrad's, the lesser of two distributions of ids.
"""

from __future__ import annotations

import argparse
import statistics
import time
from typing import Any

from benchmarks import shampoo
from benchmarks.common import finish

TABLES, TABLE_ROWS, BATCH, WIDTH = 26, 100_000, 4096, 16
TURNS = 12


def main() -> None:
    """Run the parts that are asked for and print the figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--parts", default="steps,step_time,rows")
    parser.add_argument("--rows", type=int, default=250_000)
    parser.add_argument("--seeds", type=int, default=5)
    args = parser.parse_args()
    figures: dict[str, Any] = {}
    for part in args.parts.split(","):
        figures |= PARTS[part](args)
    finish("optimizers", figures.pop("ratio", None), **figures)


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
    return figures if "steps" in args.parts.split(",") else {"ratio": min(speeds), **figures}


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

    from pipeline.embeddings.sparse_optimizer import RowOptimizer
    from pipeline.embeddings.tables import Kernel
    from pipeline.specs import TABLE_OPTIMIZERS

    spec = TABLE_OPTIMIZERS.get(optimizer)
    kinds = {"rowwise_adagrad": EmbOptimType.EXACT_ROWWISE_ADAGRAD, "adagrad": EmbOptimType.EXACT_ADAGRAD}
    module = SplitTableBatchedEmbeddingBagsCodegen(
        [(TABLE_ROWS, WIDTH, EmbeddingLocation.HOST, ComputeDevice.CPU)] * TABLES,
        optimizer=kinds.get(optimizer, EmbOptimType.EXACT_SGD),
        learning_rate=0.01,
    )
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


PARTS = {"steps": shampoo.steps, "step_time": shampoo.step_time, "rows": rows}


if __name__ == "__main__":
    main()
