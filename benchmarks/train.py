"""``make bench-train``: samples per second of our training loop against plain ones, and their test AUC.

The plain loops are TorchRec's (``ratio``) and an eager one with ``nn.EmbeddingBag`` and Adam (``ratio_eager``). All
train on the same generated rows in the same order, from the same initial values, with the same learning rates and
threads, turn by turn in short rounds; a ratio is the median over rounds. 26 tables, D 16, batch 8192, MLPs 512-256-16
and 512-256-1, row-wise Adagrad. ``--compiled`` adds our loop with train.compile=true. ``--no-bf16`` leaves bf16 out
where the CPU has it (with ``ONEDNN_MAX_CPU_ISA=AVX512_CORE`` it stands in for one that lacks it). ``ceiling_share`` is
the FLOP/s of our step over what its matrix products reach alone, one after the other, in the same dtype.
``ratio_most`` and ``ratio_eager_most`` are the ratios of a step that takes no longer than these products alone.
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

import torch

from benchmarks.clicks import config_of, generate, plan_of
from benchmarks.common import finish
from benchmarks.reference import EagerLoop, PlainLoop
from pipeline.config import Config
from pipeline.evaluation.metrics import exact_auc, split_by_class
from pipeline.store import Store
from pipeline.training.batches import Batch, BatchReader
from pipeline.training.config_settings import select_model_settings
from pipeline.training.distributed import connect
from pipeline.training.parquet import SplitReader
from pipeline.training.sampler import Order
from pipeline.training.step import StepExecutor
from pipeline.training.train_metrics import MetricAccumulator

ROUND_STEPS, BATCH = 10, 8192
Loop = Callable[[Iterator[Batch]], object]


def main() -> None:
    """Run the benchmark and print its JSON line."""
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--rows", type=int, default=1_638_400, help="train rows; a fifth of them more to test on")
    options.add_argument("--compiled", action="store_true", help="our loop with train.compile=true too")
    options.add_argument("--threads", type=int, help="threads of every loop; all cores unless given")
    options.add_argument("--no-bf16", action="store_true", help="our loop with train.precision=fp32")
    given = options.parse_args()
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    config = config_of(given.threads)
    if given.no_bf16:
        config = replace(config, train=replace(config.train, precision="fp32"))
    device = connect(config.hardware, config.train.threads_per_rank)
    with tempfile.TemporaryDirectory() as folder:
        store = Store(folder)
        print(f"generating {given.rows * 6 // 5:,} rows ...", flush=True)
        dataset = generate(store, given.rows, given.rows // 5)
        split = SplitReader(store, dataset, "train")
        plan = plan_of(split.schema)
        ours = StepExecutor(select_model_settings(config), split.schema, plan, device)
        plain = PlainLoop(config, split.schema)
        plain.start_from(ours)
        eager = EagerLoop(config, split.schema)
        eager.start_from(ours)
        loops: dict[str, Loop] = {"ours": _with_meter(ours), "plain": plain.step, "eager": eager.step}
        models: dict[str, Callable[[], torch.nn.Module]] = {
            "ours": ours.finished,
            "plain": plain.model.eval,
            "eager": eager.model.eval,
        }
        if given.compiled:
            settings = select_model_settings(replace(config, train=replace(config.train, compile=True)))
            compiled = StepExecutor(settings, split.schema, plan, device)
            loops["compiled"], models["compiled"] = _with_meter(compiled), compiled.finished
        seconds = _race(loops, split, config)
        extra = _ceiling(ours, seconds)
        print("testing ...", flush=True)
        aucs = {name: _auc_of(model(), SplitReader(store, dataset, "test")) for name, model in models.items()}
    _report(seconds, aucs, extra)


def _ceiling(ours: StepExecutor, seconds: dict[str, list[float]]) -> dict[str, float]:
    """Our loop's rate of floating-point operations, its share of what its products reach alone, and what they allow."""
    speed = ours.measure_speed(BATCH)
    step = {name: statistics.median(rounds) / ROUND_STEPS for name, rounds in seconds.items()}
    return speed.figures(step["ours"]) | {
        "products_ms": 1000 * speed.least_seconds,
        "ratio_most": step["plain"] / speed.least_seconds,
        "ratio_eager_most": step["eager"] / speed.least_seconds,
    }


def _report(seconds: dict[str, list[float]], aucs: dict[str, float], extra: dict[str, float]) -> None:
    speed = {name: ROUND_STEPS * BATCH / statistics.median(rounds) for name, rounds in seconds.items()}
    ratios = {
        name: statistics.median(b / a for a, b in zip(rounds, seconds["plain"], strict=True))
        for name, rounds in seconds.items()
    }
    against_eager = statistics.median(b / a for a, b in zip(seconds["ours"], seconds["eager"], strict=True))
    if "compiled" in ratios:
        extra |= {
            "ratio_compiled": ratios["compiled"],
            "samples_per_s_compiled": speed["compiled"],
            "auc_compiled": aucs["compiled"],
        }
    finish(
        "train",
        ratios["ours"],
        samples_per_s=speed["ours"],
        baseline_samples_per_s=speed["plain"],
        auc=aucs["ours"],
        baseline_auc=aucs["plain"],
        auc_difference=aucs["ours"] - aucs["plain"],
        ratio_eager=against_eager,
        eager_samples_per_s=speed["eager"],
        eager_auc=aucs["eager"],
        rounds=len(seconds["ours"]),
        threads=torch.get_num_threads(),
        avx512_bf16=bool(torch.cpu._is_avx512_bf16_supported()),
        **extra,
    )


def _with_meter(trainer: StepExecutor) -> Loop:
    """Our loop's step, its metrics at the usual interval included."""
    meter = MetricAccumulator(window_steps=50)

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
        rates = "  ".join(f"{name} {ROUND_STEPS * BATCH / times[-1]:,.0f}/s" for name, times in seconds.items())
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
    return exact_auc(split_by_class(split.column("label") > 0, logits[: split.rows]))


if __name__ == "__main__":
    main()
