"""``make bench-train``: samples per second of our training loop against a plain TorchRec loop, and their test AUC.

Both train on the same generated rows in the same order, from the same initial values, with the same learning
rates and threads, turn by turn in short rounds; the ratio is the median over rounds. 26 tables, D 16, batch 8192,
MLPs 512-256-16 and 512-256-1, row-wise Adagrad. ``--compiled`` adds our loop with train.compile=true.
"""

from __future__ import annotations

import argparse
import itertools
import logging
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch

from benchmarks.common import finish
from benchmarks.reference import PlainLoop
from pipeline.artifacts import Artifact, Store
from pipeline.config import Config, DataConfig, HardwareConfig, ModelConfig, TrainConfig
from pipeline.contracts import DatasetSchema, Plan, ShardPlan, SparseColumn, TablePlan
from pipeline.training import Batch, BatchReader, Order, SplitReader, Trainer
from pipeline.training.distributed import connect
from pipeline.training.metrics import Meter

TABLES, TABLE_ROWS, DENSE, GROUP = 26, 20_000, 13, 65_536
ROUND_STEPS = 10
Loop = Callable[[Iterator[Batch]], object]


def main() -> None:
    """Run the benchmark and print its JSON line."""
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--rows", type=int, default=1_638_400, help="train rows; a fifth of them more to test on")
    options.add_argument("--compiled", action="store_true", help="our loop with train.compile=true too")
    options.add_argument("--threads", type=int, help="threads of every loop; all cores unless given")
    given = options.parse_args()
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    config = _config(given.threads)
    device = connect(config)
    with tempfile.TemporaryDirectory() as folder:
        store = Store(folder)
        print(f"generating {given.rows * 6 // 5:,} rows ...", flush=True)
        dataset = _generate(store, given.rows, given.rows // 5)
        split = SplitReader(store, dataset, "train")
        plan = _plan(split.schema)
        ours = Trainer(config, split.schema, plan, device)
        plain = PlainLoop(config, split.schema)
        plain.start_from(ours)
        loops: dict[str, Loop] = {"ours": _with_meter(ours), "plain": plain.step}
        models: dict[str, Callable[[], torch.nn.Module]] = {"ours": ours.finished, "plain": plain.model.eval}
        if given.compiled:
            compiled = Trainer(replace(config, train=replace(config.train, compile=True)), split.schema, plan, device)
            loops["compiled"], models["compiled"] = _with_meter(compiled), compiled.finished
        seconds = _race(loops, split, config)
        print("testing ...", flush=True)
        aucs = {name: _auc_of(model(), SplitReader(store, dataset, "test")) for name, model in models.items()}
    _report(seconds, aucs)


def _report(seconds: dict[str, list[float]], aucs: dict[str, float]) -> None:
    speed = {name: ROUND_STEPS * 8192 / statistics.median(rounds) for name, rounds in seconds.items()}
    ratios = {
        name: statistics.median(b / a for a, b in zip(rounds, seconds["plain"], strict=True))
        for name, rounds in seconds.items()
    }
    extra = {}
    if "compiled" in ratios:
        extra = {"ratio_compiled": ratios["compiled"], "samples_per_s_compiled": speed["compiled"],
                 "auc_compiled": aucs["compiled"]}  # fmt: skip
    finish(
        "train", ratios["ours"], samples_per_s=speed["ours"], baseline_samples_per_s=speed["plain"], auc=aucs["ours"],
        baseline_auc=aucs["plain"], auc_difference=aucs["ours"] - aucs["plain"], rounds=len(seconds["ours"]),
        threads=torch.get_num_threads(), avx512_bf16=bool(torch.cpu._is_avx512_bf16_supported()), **extra,
    )  # fmt: skip


def _config(threads: int | None) -> Config:
    return Config(
        data=DataConfig(name="bench", format="synthetic"),
        hardware=HardwareConfig(name="bench"),
        model=ModelConfig(),
        train=TrainConfig(global_batch=8192, warmup_steps=20, threads_per_rank=threads),
    )


def _plan(schema: DatasetSchema) -> Plan:
    """Every table whole on the one rank."""
    tables = {
        column.name: TablePlan(
            rows=column.rows,
            dim=16,
            pooling=1.0,
            tier="ddr",
            sharding="table_wise",
            kernel="fused",
            cost_ms=0.0,
            shards=(ShardPlan(rank=0, row=0, rows=column.rows, column=0, columns=16),),
            reason="",
        )  # fmt: skip
        for column in schema.sparse
    }
    return Plan(hardware="bench", device="cpu", world_size=1, ranks_per_host=1, global_batch=8192, tables=tables)


def _with_meter(trainer: Trainer) -> Loop:
    """Our loop's step, its metrics at the usual interval included."""
    meter = Meter(window_steps=50)

    def step(batches: Iterator[Batch]) -> None:
        meter.add(trainer.step(batches))
        if meter.steps == 20:
            meter.close(0.0)

    return step


def _race(loops: dict[str, Loop], split: SplitReader, config: Config) -> dict[str, list[float]]:
    """Seconds of each loop's rounds, taken in turn; the first round of each warms up and is not counted."""
    order = Order(key=split.dataset.key, seed=1, global_batch=config.train.global_batch)
    rounds = split.rows // order.global_batch // ROUND_STEPS
    readers = {name: BatchReader(split, order) for name in loops}
    # Whole batches only: the plain loop knows no padding.
    batches = {name: itertools.islice(reader, rounds * ROUND_STEPS) for name, reader in readers.items()}
    seconds: dict[str, list[float]] = {name: [] for name in loops}
    for number in range(rounds):
        for name, loop in loops.items():
            began = time.perf_counter()
            for _ in range(ROUND_STEPS):
                loop(batches[name])
            seconds[name].append(time.perf_counter() - began)
        rates = "  ".join(f"{name} {ROUND_STEPS * 8192 / times[-1]:,.0f}/s" for name, times in seconds.items())
        print(f"round {number + 1}/{rounds}: {rates}", flush=True)
    for reader in readers.values():
        reader.close()
    return {name: times[1:] for name, times in seconds.items()}


@torch.no_grad()
def _auc_of(model: torch.nn.Module, split: SplitReader) -> float:
    with BatchReader(split, Order(key="test", seed=0, global_batch=8192, shuffle=False)) as reader:
        # The model's last output is (..., logits, labels, ...): ours starts with the logits, theirs with the loss.
        outputs = [model(batch)[1] for batch in reader]
    logits = torch.cat([output[1] if output[0].dim() == 0 else output[0] for output in outputs]).numpy()
    return _auc(split.column("label"), logits[: split.rows])


def _auc(labels: np.ndarray, scores: np.ndarray) -> float:
    _, places, counts = np.unique(scores, return_inverse=True, return_counts=True)
    ranks = (np.cumsum(counts) - (counts - 1) / 2)[places]
    positives = float(labels.sum())
    return float((ranks[labels > 0].sum() - positives * (positives + 1) / 2) / (positives * (len(labels) - positives)))


def _generate(store: Store, train: int, test: int) -> Artifact:
    """Zipf ids, normal dense values and a logistic truth with first-order and pairwise effects."""
    rng = np.random.default_rng(7)
    truth = {
        "first": rng.normal(0, 0.35, (TABLES, TABLE_ROWS)).astype(np.float32),
        "pair": rng.normal(0, 0.6, (TABLES, TABLE_ROWS)).astype(np.float32),
        "dense": rng.normal(0, 0.2, DENSE).astype(np.float32),
    }
    schema = DatasetSchema(
        dense=tuple(f"I{i + 1}" for i in range(DENSE)),
        sparse=tuple(SparseColumn(name=f"C{i + 1}", rows=TABLE_ROWS) for i in range(TABLES)),
        rows={"train": train, "test": test},
        files={name: [f"{name}/part-00000.parquet"] for name in ("train", "test")},
        groups={
            name: [[min(GROUP, rows - at) for at in range(0, rows, GROUP)]]
            for name, rows in (("train", train), ("test", test))
        },
    )
    with store.draft("data", kind="ingest", key="bench", config={}, inputs={}) as draft:
        for name, rows in schema.rows.items():
            with draft.open(schema.files[name][0]) as sink:
                _write(sink, schema, rows, truth, rng)
        draft.write_json("schema.json", schema.to_json())
        return draft.commit({})


def _write(
    sink: object, schema: DatasetSchema, rows: int, truth: dict[str, np.ndarray], rng: np.random.Generator
) -> None:
    names = ["label", *schema.dense, *(column.name for column in schema.sparse)]
    writer = None
    for start in range(0, rows, GROUP):
        count = min(GROUP, rows - start)
        dense = rng.normal(size=(DENSE, count)).astype(np.float32)
        ids = np.minimum((TABLE_ROWS ** rng.random((TABLES, count)) - 1).astype(np.int32), TABLE_ROWS - 1)
        logit = truth["dense"] @ dense - 1.0
        for table in range(TABLES):
            logit += truth["first"][table][ids[table]]
            if table % 2:
                logit += truth["pair"][table][ids[table]] * truth["pair"][table - 1][ids[table - 1]]
        label = (rng.random(count) < 1 / (1 + np.exp(-logit))).astype(np.float32)
        block = pa.table([label, *dense, *ids], names=names)
        writer = writer or pq.ParquetWriter(sink, block.schema, compression="zstd")
        writer.write_table(block, row_group_size=GROUP)
    if writer is not None:
        writer.close()


if __name__ == "__main__":
    main()
