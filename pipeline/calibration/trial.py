"""Synthetic models and their data, on which the training loop is timed."""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from typing import Any

import numpy as np

from pipeline.config import Config
from pipeline.config.data import DataConfig
from pipeline.config.features import SparseFeature
from pipeline.config.hardware import HardwareConfig
from pipeline.config.train import TrainConfig
from pipeline.records.dataset import DatasetSchema, FeatureProfile, Profile, SparseColumn
from pipeline.records.plan import Plan
from pipeline.specs.model import MODELS
from pipeline.store.artifacts import Store
from pipeline.store.manifest import Artifact

DENSE, GROUP, INTERVAL = 13, 65_536, 4


@dataclass(frozen=True, kw_only=True)
class Trial:
    """A model: ``rows`` of each table, ids by Zipf's law with exponent ``zipf``, ``batch`` samples over all ranks.

    ``ranker``: its name, with its default settings but for ``dim``, ``top`` and, where it has one, ``bottom``.
    """

    rows: tuple[int, ...]
    zipf: float
    dim: int
    bottom: tuple[int, ...]
    top: tuple[int, ...]
    batch: int
    ranker: str = "dlrm"

    def __str__(self) -> str:
        widths = f"{'-'.join(map(str, self.bottom))} / {'-'.join(map(str, self.top))}"
        return f"{len(self.rows)} tables, {sum(self.rows):,} rows, D {self.dim}, B {self.batch}, {self.ranker} {widths}"

    def config(self, hardware: HardwareConfig, steps: int, train: TrainConfig | None = None) -> Config:
        """Return the configuration that trains it for ``steps`` steps, with the precision and threads of ``train``."""
        like = train or TrainConfig()
        # The hottest rows come first.
        sparse = {f"C{i}": SparseFeature(mapping="vocab") for i in range(len(self.rows))}
        data = DataConfig(name="trial", format="synthetic", sparse=sparse)
        layers = {"embedding_dim": self.dim, "top_mlp": list(self.top)}
        if self.bottom:
            layers["bottom_mlp"] = list(self.bottom)
        model = MODELS.get(self.ranker).config(**layers)
        train = TrainConfig(
            global_batch=self.batch,
            max_steps=steps,
            epochs=steps,
            log_every_steps=INTERVAL,
            warmup_steps=0,
            lr=1e-4,
            sparse_lr=1e-3,
            shuffle=False,
            precision=like.precision,
            threads_per_rank=like.threads_per_rank,
        )
        return Config(run="trial", data=data, hardware=hardware, model=model, train=train)


def spread_rows(tables: int) -> tuple[int, ...]:
    """Return the rows of ``tables`` tables, from 1,000 to 1,000,000 in equal ratios."""
    return tuple(round(10 ** (3 + 3 * index / max(tables - 1, 1))) for index in range(tables))


@dataclass(frozen=True, kw_only=True)
class Drawn:
    """Rows of a trial: its schema, the profile that ingestion would measure, and the ids by column, int32 [rows]."""

    schema: DatasetSchema
    profile: Profile
    ids: dict[str, np.ndarray]


def draw(trial: Trial, batches: int, seed: int = 1) -> Drawn:
    """Draw ``batches`` batches of ``trial``, the hottest rows first."""
    from pipeline.specs.id_mapping import access_histogram

    rng, count = np.random.default_rng(seed), trial.batch * batches
    columns = []
    for number, rows in enumerate(trial.rows):
        columns.append(SparseColumn(name=f"C{number}", rows=rows))
    # Whole row groups and a last one with the rest, as in a Parquet file.
    groups = [GROUP] * (count // GROUP)
    if count % GROUP:
        groups.append(count % GROUP)
    schema = DatasetSchema(
        dense=tuple(f"I{i}" for i in range(DENSE)),
        sparse=tuple(columns),
        rows={"train": count, "test": 0},
        files={"train": ["train/part-00000.parquet"], "test": []},
        groups={"train": [groups], "test": []},
    )
    ids, profiles = {}, {}
    for column in schema.sparse:
        # Row r with probability proportional to 1 / (r + 1) ** zipf.
        mass = np.cumsum(1.0 / np.arange(1, column.rows + 1) ** trial.zipf)
        drawn = np.searchsorted(mass, rng.random(count) * mass[-1])
        ids[column.name] = np.minimum(drawn, column.rows - 1).astype(np.int32)
        counts = np.bincount(ids[column.name], minlength=column.rows)
        hot_rows, hot_share = access_histogram(counts)
        profiles[column.name] = FeatureProfile(
            rows=column.rows,
            distinct=int((counts > 0).sum()),
            missing_share=0.0,
            pooling=1.0,
            hot_rows=hot_rows,
            hot_share=hot_share,
        )
    profile = Profile(rows=schema.rows, label_rate={"train": 0.25}, dense={}, sparse=profiles)
    return Drawn(schema=schema, profile=profile, ids=ids)


def make_dataset(store: Store, trial: Trial, batches: int, seed: int = 1) -> tuple[DatasetSchema, Profile]:
    """Write ``batches`` batches of ``trial`` as artifact ``datasets/trial``; returns its schema and profile."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    drawn, rng = draw(trial, batches, seed), np.random.default_rng(seed)
    schema, count = drawn.schema, trial.batch * batches
    columns = {"label": (rng.random(count) < 0.25).astype(np.float32)}
    for name in schema.dense:
        columns[name] = rng.normal(size=count).astype(np.float32)
    with store.draft("datasets/trial", kind="dataset", key=f"{seed:032x}", config={}, inputs={}) as draft:
        with draft.open(schema.files["train"][0]) as sink:
            pq.write_table(pa.table(columns | drawn.ids), sink, row_group_size=GROUP, compression="lz4")
        draft.write_json("schema.json", schema.to_json())
        draft.commit({})
    return schema, drawn.profile


def measure_training(config: Config, folder: str, plan: Plan) -> dict[str, float]:
    """Train as a rank of a running group.

    Returns:
        ``step_ms``: the median; ``bytes``: peak resident memory above the imports', 0 without /proc.
    """
    from pipeline.training.config_settings import select_training_settings
    from pipeline.training.distributed import connect
    from pipeline.training.memory import status_bytes
    from pipeline.training.trainer import train

    connect(config.hardware, config.train.threads_per_rank, one_machine=config.launch.name == "local")
    before = status_bytes("VmRSS")
    store: Store = Store(folder)
    records: list[dict[str, Any]] = []
    dataset: Artifact = store.get("datasets/trial", "dataset")
    settings = select_training_settings(config)
    train(settings, store, dataset, plan, f"runs/{config.run}/checkpoints", config.run or "", records.append)
    # The first half of the intervals before the first checkpoint warms up.
    undisturbed = config.checkpoint.every_steps or config.train.max_steps or 0
    times = [record["step_ms"] for record in records if record["step"] <= undisturbed]
    times = times[len(times) // 2 :]
    step_ms = statistics.median(times) if times else 0.0
    return {"step_ms": step_ms, "bytes": status_bytes("VmHWM") - before}
