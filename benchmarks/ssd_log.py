"""What the log of a table on SSD writes for each byte of rows that leaves memory, by spare space and frequency of ids.

``python -m benchmarks.ssd_log``: the real log and cache policy, one table, no training: batches of Zipf ids are fetched
and released. The log turns over twice before bytes are counted, and twice under the count. ``ratio``: Zipf 1.2 at 20 %.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from threading import Event

import numpy as np
import torch

from benchmarks.harness import finish, options
from pipeline.embeddings.ssd.fetch import Fetcher
from pipeline.embeddings.ssd.shard import SsdShard
from pipeline.embeddings.tables import TableSpec
from pipeline.records import ShardPlan
from pipeline.records.scratch import write_amplification

BATCH = 512
PINNED = 0.05  # share of the rows that stays in memory
TURNS = 2  # of the log, before the count and under it


def main() -> None:
    given = options(__doc__, rows=100_000, dim=64, spares=[0.1, 0.2, 0.25, 0.3], zipf=[1.2, 1.05, 0.0])
    found: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as folder:
        for spare in given.spares:
            for zipf in given.zipf:
                one = written_a_byte(Path(folder), given.rows, given.dim, zipf, spare)
                found[f"spare{spare}_zipf{zipf}"] = one
                model = write_amplification(spare)
                print(f"spare {spare:<5} zipf {zipf:<5} {one:.2f} bytes a byte; even rows {model:.2f}", flush=True)
    finish("ssd_log", found.get("spare0.2_zipf1.2", next(iter(found.values()))), rows=given.rows, **found)


def written_a_byte(folder: Path, rows: int, dim: int, exponent: float, spare: float) -> float:
    """Bytes written for each byte that left memory, of one table."""
    plan, kept = ShardPlan(rank=0, row=0, rows=rows, column=0, columns=dim), int(PINNED * rows)
    shard, fetcher = SsdShard(folder, "t", plan, kept, dim + 1, spare), Fetcher()
    shard.live_in([torch.zeros(rows, dim), torch.zeros(rows)])
    shard.begin(TableSpec("t", rows, dim), 1)
    shard.put(np.arange(kept, rows), np.zeros((rows - kept, dim + 1), np.float32))
    shares = np.arange(kept + 1, rows + 1) ** -exponent
    bounds, generator = np.cumsum(shares / shares.sum()), np.random.default_rng(3)
    written, before = shard.log.written, (0, 0)
    for _ in ("before the count", "under it"):
        before, until = (written.left, written.logged), shard.log.added + TURNS * rows
        while shard.log.added < until:
            ids = np.searchsorted(bounds, generator.random(BATCH)).clip(max=rows - kept - 1) + kept
            part = shard.part(ids, Event())
            fetcher.fetch([(shard, part)])
            shard.release(part)
    fetcher.close()
    shard.log.file.close()
    return (written.logged - before[1]) / (written.left - before[0])


if __name__ == "__main__":
    main()
