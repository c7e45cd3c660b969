"""``make bench-pages``: lookups and updates of tables in memory pages of 2 MiB against pages of 4 KiB.

    python -m benchmarks.pages [--rows 100000] [--threads 1]

Twice the same 26 tables of width 16, batch 4,096, row-wise Adagrad by the compiled library, on ids of two
distributions; one kernel's tables are moved as a training moves them. Both take the same steps, in turns; the ratio is
the median over turns of small over large, forward and backward pass together, the lesser of the two distributions.
Both must end in the same bits.
"""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from fbgemm_gpu.split_table_batched_embeddings_ops_common import EmbeddingLocation
from fbgemm_gpu.split_table_batched_embeddings_ops_training import ComputeDevice, SplitTableBatchedEmbeddingBagsCodegen

from benchmarks.harness import finish, options, show
from benchmarks.models_and_rows import ZipfIds, config_of
from pipeline.core.kernels import load_kernels
from pipeline.core.units import MIB
from pipeline.embeddings.compiled_tables import CompiledTables
from pipeline.embeddings.huge_pages import use_large_pages
from pipeline.embeddings.row_access import LocalShard
from pipeline.embeddings.tables import Kernel
from pipeline.specs import TABLE_OPTIMIZERS
from pipeline.training.distributed import connect

TABLES, BATCH, WIDTH = 26, 4096, 16
TURNS, WARM = 42, 2
DISTRIBUTIONS = {"zipf": 1.05, "uniform": 0.0}


def main() -> None:
    given = options(__doc__, rows=(100_000, "of each table"), threads=1)
    connect(config_of(threads=given.threads).hardware, given.threads)  # memory is allocated as in a training
    figures: dict[str, Any] = {}
    for ids, exponent in DISTRIBUTIONS.items():
        found = compare(given.rows, exponent)
        show(ids, found, ".3f")
        figures |= {f"{name}_{ids}": value for name, value in found.items()}
    finish("pages", min(figures[f"ratio_{ids}"] for ids in DISTRIBUTIONS), threads=given.threads, **figures)


def compare(rows: int, exponent: float) -> dict[str, float]:
    """Medians of the passes in ms and of their ratios; ``moved_mib``: how much memory was moved."""
    modules = {"small": tables_of(rows), "large": tables_of(rows)}
    weights, states = modules["large"].split_embedding_weights(), modules["large"].split_optimizer_states()
    moved = use_large_pages(
        [
            LocalShard(f"t{i}", 0, rows, 0, WIDTH, True, each, {"sum": state[0]})
            for i, (each, state) in enumerate(zip(weights, states, strict=True))
        ]
    )
    drawn, rng = ZipfIds(rows, exponent), np.random.default_rng(0)
    offsets, gradient = torch.arange(TABLES * BATCH + 1), torch.full((BATCH, TABLES * WIDTH), 1e-4)
    times: dict[str, list[list[float]]] = {name: [] for name in modules}
    for turn in range(TURNS):
        ids = torch.from_numpy(drawn.draw(rng, TABLES * BATCH)).long()
        for name in ("small", "large") if turn % 2 else ("large", "small"):
            began = time.perf_counter()
            pooled = modules[name](ids, offsets)
            between = time.perf_counter()
            pooled.backward(gradient)
            times[name].append([between - began, time.perf_counter() - between])
    pairs = zip(*(module.split_embedding_weights() for module in modules.values()), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs), "tables in large pages ended in other bits"
    small, large = (np.array(each[WARM:]) for each in times.values())
    figures = {"ratio": float(np.median(small.sum(1) / large.sum(1))), "moved_mib": moved / MIB}
    for name, each in (("small", small), ("large", large)):
        forward, backward = 1000 * np.median(each, axis=0)
        figures |= {f"{name}_forward_ms": float(forward), f"{name}_backward_ms": float(backward)}
    return figures


def tables_of(rows: int) -> Any:
    """FBGEMM's kernel, whose passes the compiled library takes over."""
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
    kernels = load_kernels("steps")
    assert kernels is not None, "the compiled kernels are not installed"
    tables: list[Any] = [SimpleNamespace(name=f"t{i}", feature_names=[f"t{i}"]) for i in range(TABLES)]
    spec = TABLE_OPTIMIZERS.get("rowwise_adagrad")
    module.forward = CompiledTables(Kernel(module, tables), spec, kernels)
    return module


if __name__ == "__main__":
    main()
