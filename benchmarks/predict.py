"""``make bench-predict``: predicted step time and memory against measured ones, for random models on this machine.

The machine is calibrated first, for one rank and for two. Then every model (4 to 26 tables of 1,000 to a million rows,
Zipf ids, D 8 to 64, batch 1024 to 8192) is planned, predicted and trained by the real training loop in ranks of its
own. Step time: the median over intervals of ``train.log_every_steps``. Memory: the peak resident set of the largest
rank, above what it held after its imports. ``ratio``: share of the models whose step time is within 25 %.
"""

from __future__ import annotations

import argparse
import random
import statistics
import tempfile
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from benchmarks.common import finish
from benchmarks.ranks import run_ranks
from pipeline.artifacts import Artifact, Store
from pipeline.config import CheckpointConfig, Config, DataConfig, HardwareConfig, ModelConfig, TrainConfig
from pipeline.contracts import DatasetSchema, FeatureProfile, Plan, Profile, SparseColumn

DENSE, GROUP, INTERVAL = 13, 65_536, 5
STEP_BAR, MEMORY_BAR = 0.25, 0.15


@dataclass(frozen=True, kw_only=True)
class Case:
    """One random model. ``rows``: of its tables; ``zipf``: exponent of the ids' popularity."""

    ranks: int
    rows: tuple[int, ...]
    zipf: float
    dim: int
    bottom: tuple[int, ...]
    top: tuple[int, ...]
    batch: int

    def __str__(self) -> str:
        return f"{len(self.rows)} tables, {sum(self.rows):,} rows, D {self.dim}, B {self.batch}, {self.ranks} rank(s)"


def random_case(number: int, seed: int) -> Case:
    """Model ``number``: even ones run on one rank, odd ones on two."""
    draw = random.Random(f"{seed}/{number}")
    widths = (32, 64, 128, 256, 512)
    return Case(
        ranks=1 + number % 2,
        rows=tuple(int(10 ** draw.uniform(3, 6)) for _ in range(draw.randint(4, 26))),
        zipf=draw.uniform(1.01, 1.3),
        dim=draw.choice((8, 16, 32, 64)),
        bottom=tuple(draw.choice(widths) for _ in range(draw.randint(1, 3))),
        top=tuple(draw.choice(widths) for _ in range(draw.randint(1, 3))),
        batch=draw.choice((1024, 2048, 4096, 8192)),
    )


def config_of(case: Case, hardware: HardwareConfig, steps: int) -> Config:
    """What trains the model for ``steps`` steps on ``hardware``."""
    return Config(
        run="bench",
        data=DataConfig(name="bench", format="synthetic"),
        hardware=hardware,
        model=ModelConfig(embedding_dim=case.dim, bottom_mlp=list(case.bottom), top_mlp=list(case.top)),
        train=TrainConfig(global_batch=case.batch, max_steps=steps, log_every_steps=INTERVAL, warmup_steps=20),
        checkpoint=CheckpointConfig(keep_last=1),
    )


def make_dataset(store: Store, case: Case, steps: int, seed: int) -> tuple[Artifact, DatasetSchema, Profile]:
    """Rows for ``steps`` steps with Zipf ids (hottest row first), and the profile that ingestion would measure."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    from pipeline.ingest.profiling import access_histogram

    rng, count = np.random.default_rng(seed), case.batch * steps
    schema = DatasetSchema(
        dense=tuple(f"I{i}" for i in range(DENSE)),
        sparse=tuple(SparseColumn(name=f"C{i}", rows=rows) for i, rows in enumerate(case.rows)),
        rows={"train": count, "test": 0},
        files={"train": ["train/part-00000.parquet"], "test": []},
        groups={"train": [[min(GROUP, count - at) for at in range(0, count, GROUP)]], "test": []},
    )
    ids = {column.name: zipf_ids(rng, column.rows, case.zipf, count) for column in schema.sparse}
    columns = {"label": (rng.random(count) < 0.25).astype(np.float32)}
    columns |= {name: rng.normal(size=count).astype(np.float32) for name in schema.dense}
    with store.draft("datasets/bench", kind="dataset", key=f"{seed:032x}", config={}, inputs={}) as draft:
        with draft.open(schema.files["train"][0]) as sink:
            pq.write_table(pa.table(columns | ids), sink, row_group_size=GROUP, compression="lz4")
        draft.write_json("schema.json", schema.to_json())
        artifact = draft.commit({})
    sparse = {}
    for column in schema.sparse:
        counts = np.bincount(ids[column.name], minlength=column.rows)
        hot_rows, hot_share = access_histogram(counts)
        sparse[column.name] = FeatureProfile(
            rows=column.rows, distinct=int((counts > 0).sum()), missing_share=0.0, pooling=1.0,
            hot_rows=hot_rows, hot_share=hot_share,
        )  # fmt: skip
    return artifact, schema, Profile(rows=schema.rows, label_rate={"train": 0.25}, dense={}, sparse=sparse)


def zipf_ids(rng: np.random.Generator, rows: int, exponent: float, count: int) -> np.ndarray:
    """int32 [count]: row r with probability proportional to 1 / (r + 1) ** exponent."""
    reach = np.cumsum(1.0 / np.arange(1, rows + 1) ** exponent)
    return np.minimum(np.searchsorted(reach, rng.random(count) * reach[-1]), rows - 1).astype(np.int32)


def measure(rank: int, config: Config, folder: str, plan: dict[str, Any]) -> dict[str, Any]:
    """One rank's training: median ms of a step (first half of the intervals left out), peak bytes above the imports."""
    import resource

    from pipeline.training import train
    from pipeline.training.distributed import connect

    connect(config)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    store, records = Store(folder), []
    outcome = train(config, store, store.get("datasets/bench", "dataset"), Plan.from_json(plan), "runs/bench/ckpt",
                    "bench", records.append)  # fmt: skip
    times = [record["step_ms"] for record in records[len(records) // 2 :]]
    return {
        "step_ms": statistics.median(times) if times else 0.0,
        "bytes": outcome["train"]["peak_rss_bytes"] - before,
        "wait": outcome["train"]["data_wait_share"],
    }
