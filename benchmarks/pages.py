"""``make bench-pages``: lookups and updates of tables in memory pages of 2 MiB against pages of 4 KiB.

    python -m benchmarks.pages [--rows 100000] [--threads 1]

Twice the same 26 tables of width 16, batch 4,096, row-wise Adagrad by the compiled library, on ids of two
distributions; one kernel's tables are moved as a training moves them. Both take the same steps, in turns; the ratio is
the median over turns of small over large, forward and backward pass together, the lesser of the two distributions.
Both must end in the same bits.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from fbgemm_gpu.split_table_batched_embeddings_ops_common import EmbeddingLocation
from fbgemm_gpu.split_table_batched_embeddings_ops_training import ComputeDevice, SplitTableBatchedEmbeddingBagsCodegen

from benchmarks.clicks import config_of
from benchmarks.common import finish
from pipeline.core.units import MIB
from pipeline.embeddings.compiled_tables import CompiledTables
from pipeline.embeddings.huge_pages import use_large_pages
from pipeline.embeddings.row_access import LocalShard
from pipeline.embeddings.tables import Kernel
from pipeline.native import library
from pipeline.specs import TABLE_OPTIMIZERS
from pipeline.training.distributed import connect

TABLES, BATCH, WIDTH = 26, 4096, 16
TURNS, WARM = 42, 2


def main() -> None:
    """Run the benchmark and print its JSON line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=100_000, help="of each table")
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()
    connect(config_of(args.threads).hardware, args.threads)  # memory is allocated as in a training
    figures: dict[str, Any] = {}
    for ids, exponent in (("zipf", 1.05), ("uniform", 0.0)):
        figures |= {f"{name}_{ids}": value for name, value in compare(args.rows, exponent).items()}
        print(f"{ids:<9}" + "  ".join(f"{k} {v:.3f}" for k, v in figures.items() if k.endswith(ids)), flush=True)
    finish("pages", min(figures["ratio_zipf"], figures["ratio_uniform"]), threads=args.threads, **figures)


def compare(rows: int, exponent: float) -> dict[str, Any]:
    """Medians of the passes in ms and of their ratios; ``moved_mib``: how much memory was moved."""
    small, large = _tables(rows), _tables(rows)
    moved = use_large_pages(_shards(large))
    drawn, times = _ids(rows, exponent), {"small": [[0.0, 0.0]], "large": [[0.0, 0.0]]}
    for turn in range(TURNS):
        ids, pair = drawn(), [("small", small), ("large", large)]
        for name, module in pair if turn % 2 else pair[::-1]:
            times[name].append(_pass(module, ids))
    _check_equal(small, large)
    measured = {name: np.array(each[1 + WARM :]) for name, each in times.items()}
    figures = {"ratio": float(np.median(measured["small"].sum(1) / measured["large"].sum(1))), "moved_mib": moved / MIB}
    for name, each in measured.items():
        for part, label in ((0, "forward"), (1, "backward")):
            figures[f"{name}_{label}_ms"] = 1000 * statistics.median(each[:, part])
    return figures


def _tables(rows: int) -> Any:
    torch.manual_seed(1)
    module = SplitTableBatchedEmbeddingBagsCodegen(
        [(rows, WIDTH, EmbeddingLocation.HOST, ComputeDevice.CPU)] * TABLES,
        optimizer=EmbOptimType.EXACT_ROWWISE_ADAGRAD,
        learning_rate=0.01,
        eps=1e-8,
    )
    for weights in module.split_embedding_weights():
        weights.uniform_(-0.1, 0.1)
    for states in module.split_optimizer_states():
        states[0].zero_()
    kernels = library()
    assert kernels is not None, "the compiled library is not installed"
    tables = [_Table(f"t{i}") for i in range(TABLES)]
    spec = TABLE_OPTIMIZERS.get("rowwise_adagrad")
    module.forward = CompiledTables(Kernel(module, tables, fused=True), spec, kernels)
    return module


class _Table:
    """What ``CompiledTables`` reads of a table of a kernel."""

    def __init__(self, name: str) -> None:
        self.name, self.feature_names = name, [name]


def _shards(module: Any) -> list[LocalShard]:
    weights, states = module.split_embedding_weights(), module.split_optimizer_states()
    return [
        LocalShard(f"t{i}", 0, len(each), 0, WIDTH, True, each, {"sum": states[i][0]}) for i, each in enumerate(weights)
    ]


def _ids(rows: int, exponent: float) -> Callable[[], torch.Tensor]:
    """Draws ids for a batch: frequent ones have low rows, as ingestion numbers them."""
    weights = np.arange(1, rows + 1, dtype=np.float64) ** -exponent
    edges, generator = np.cumsum(weights / weights.sum()), np.random.default_rng(0)
    return lambda: torch.from_numpy(np.minimum(np.searchsorted(edges, generator.random(TABLES * BATCH)), rows - 1))


def _pass(module: Any, ids: torch.Tensor) -> list[float]:
    offsets, gradient = torch.arange(TABLES * BATCH + 1), torch.full((BATCH, TABLES * WIDTH), 1e-4)
    began = time.perf_counter()
    pooled = module(ids, offsets)
    between = time.perf_counter()
    pooled.backward(gradient)
    return [between - began, time.perf_counter() - between]


def _check_equal(one: Any, other: Any) -> None:
    pairs = zip(one.split_embedding_weights(), other.split_embedding_weights(), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs), "tables in large pages ended in other bits"


if __name__ == "__main__":
    main()
