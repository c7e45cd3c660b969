"""What a lookup of tables on SSD behind a cache costs the training thread: ``python -m benchmarks.cached_lookups``.

The hook before a kernel's lookup turns row numbers into slots. Batches are announced ahead and their rows are in slots
when their turn comes, as in a training that never waits for its disk. The cache is in tensors on the CPU. ``ratio``:
ms of the median batch.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from benchmarks.harness import finish, options, seconds_of
from benchmarks.models_and_rows import plan_with, table_plan
from pipeline.embeddings.ssd import SsdStore
from pipeline.embeddings.ssd.store import _Redirect
from pipeline.embeddings.tables import TableSpec

DIM = 16


def main() -> None:
    """Time the hook and print the JSON line."""
    given = options(__doc__, tables=4, batch=65_536, pooling=1, rows=(4_000_000, "of a table"), steps=8)
    lookups = given.batch * given.pooling
    table = table_plan(given.rows, DIM, tier="ssd", cache_rows=min(given.rows, 4 * lookups))
    names = [f"t{number}" for number in range(given.tables)]
    random, took = np.random.default_rng(0), []
    batches = [
        {name: (given.rows * random.random(lookups) ** 6).astype(np.int64) for name in names}
        for _ in range(given.steps)
    ]
    with tempfile.TemporaryDirectory() as folder:
        store = SsdStore(plan_with(dict.fromkeys(names, table), batch=1), [folder], 0, cached=True)
        for name in names:
            shard: Any = store.shard(name)
            shard.live_in([torch.zeros(shard.count, DIM), torch.zeros(shard.count)])
            store.begin(TableSpec(name, given.rows, DIM), 0)
        for batch in batches:
            store.prefetch(batch)
            store.read(names[0], np.zeros(1, np.int64))  # returns behind what the worker thread does now
            while not all(waiting[-1].ready.is_set() for waiting in store._waiting.values()):
                time.sleep(0.01)
            ids = torch.from_numpy(np.concatenate(list(batch.values())))
            lists = {"indices": ids, "offsets": torch.arange(len(ids) // given.pooling + 1) * given.pooling}
            hook = _Redirect(store, dict.fromkeys(batch, 1))
            took.append(1e3 * seconds_of(lambda hook=hook, lists=lists: hook(SimpleNamespace(), (), lists)))
            store.let_go(hook._held)
        store.close()
    finish("cached_lookups", statistics.median(took[2:]), **vars(given), all_ms=[round(ms, 2) for ms in took])


if __name__ == "__main__":
    main()
