"""What a lookup of tables on SSD behind a cache costs the training thread: ``python -m benchmarks.cached_lookups``.

The hook before a kernel's lookup turns row numbers into slots. Batches are announced ahead and their rows are in slots
when their turn comes, as in a training that never waits for its disk. The cache is in tensors on the CPU. ``ratio``:
ms of the median batch.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from benchmarks.common import finish
from pipeline.embeddings.ssd import SsdStore
from pipeline.embeddings.ssd.store import _Redirect
from pipeline.embeddings.tables import TableSpec
from pipeline.records import Plan, ShardPlan, TablePlan

DIM = 16


def plan_of(tables: int, rows: int, slots: int) -> Plan:
    """Whole tables on SSD on one rank."""
    shard = ShardPlan(rank=0, row=0, rows=rows, column=0, columns=DIM)
    table = TablePlan(
        rows=rows,
        dim=DIM,
        pooling=1.0,
        tier="ssd",
        sharding="table_wise",
        kernel="fused",
        shards=(shard,),
        cost_ms=0.0,
        reason="",
        cache_rows=slots,
    )
    names = [f"t{number}" for number in range(tables)]
    return Plan(
        hardware="bench",
        device="cpu",
        world_size=1,
        ranks_per_host=1,
        global_batch=1,
        tables=dict.fromkeys(names, table),
    )


def main() -> None:
    """Time the hook and print the JSON line."""
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--tables", type=int, default=4)
    options.add_argument("--batch", type=int, default=65_536)
    options.add_argument("--pooling", type=int, default=1)
    options.add_argument("--rows", type=int, default=4_000_000, help="of a table")
    options.add_argument("--steps", type=int, default=8)
    given = options.parse_args()
    lookups = given.batch * given.pooling
    plan = plan_of(given.tables, given.rows, min(given.rows, 4 * lookups))
    random = np.random.default_rng(0)
    batches = [
        {name: (given.rows * random.random(lookups) ** 6).astype(np.int64) for name in plan.tables}
        for _ in range(given.steps)
    ]
    with tempfile.TemporaryDirectory() as folder:
        store = SsdStore(plan, [folder], 0, cached=True)
        for name in plan.tables:
            shard: Any = store.shard(name)
            shard.live_in([torch.zeros(shard.count, DIM), torch.zeros(shard.count)])
            store.begin(TableSpec(name, given.rows, DIM), 0)
        took = [_timed(store, batch, given.pooling) for batch in batches]
        store.close()
    middle = statistics.median(took[2:])
    finish("cached_lookups", middle, **vars(given), all_ms=[round(ms, 2) for ms in took])


def _timed(store: SsdStore, batch: dict[str, np.ndarray], pooling: int) -> float:
    """Ms of the hook for a batch whose rows are in slots."""
    store.prefetch(batch)
    store.read(next(iter(batch)), np.zeros(1, np.int64))  # returns behind what the worker thread does now
    while not all(waiting[-1].ready.is_set() for waiting in store._waiting.values()):
        time.sleep(0.01)
    counts = [len(ids) // pooling for ids in batch.values()]
    offsets = torch.arange(sum(counts) + 1) * pooling
    ids = torch.from_numpy(np.concatenate(list(batch.values())))
    hook = _Redirect(store, dict.fromkeys(batch, 1))
    start = time.perf_counter()
    hook(SimpleNamespace(), (), {"indices": ids, "offsets": offsets})
    taken = 1e3 * (time.perf_counter() - start)
    store.let_go(hook._held)
    return taken


if __name__ == "__main__":
    main()
