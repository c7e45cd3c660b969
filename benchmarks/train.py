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

import itertools
import statistics
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import replace

import torch

from benchmarks.harness import finish, in_turns, median_ratio, options, seconds_of, silent
from benchmarks.models_and_rows import config_of, generate, plan_of
from benchmarks.reference import EagerLoop, PlainLoop
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


def main() -> None:
    given = options(
        __doc__,
        rows=(1_638_400, "train rows; a fifth of them more to test on"),
        compiled=(False, "our loop with train.compile=true too"),
        threads=(None, "threads of every loop; all cores unless given", {"type": int}),
        no_bf16=(False, "our loop with train.precision=fp32"),
    )
    silent()
    config = config_of(threads=given.threads, **({"precision": "fp32"} if given.no_bf16 else {}))
    device = connect(config.hardware, config.train.threads_per_rank)
    with tempfile.TemporaryDirectory() as folder:
        store = Store(folder)
        print(f"generating {given.rows * 6 // 5:,} rows ...", flush=True)
        dataset = generate(store, given.rows, given.rows // 5)
        split = SplitReader(store, dataset, "train")
        plan = plan_of(split.schema, config)
        ours = StepExecutor(select_model_settings(config), split.schema, plan, device)
        plain, eager = PlainLoop(config, split.schema), EagerLoop(config, split.schema)
        plain.start_from(ours)
        eager.start_from(ours)
        loops = {"ours": _with_metrics(ours), "plain": plain.step, "eager": eager.step}
        models = {"ours": ours.finished, "plain": plain.model.eval, "eager": eager.model.eval}
        if given.compiled:
            settings = select_model_settings(replace(config, train=replace(config.train, compile=True)))
            compiled = StepExecutor(settings, split.schema, plan, device)
            loops["compiled"], models["compiled"] = _with_metrics(compiled), compiled.finished
        seconds = race(loops, split, BATCH)
        step = {name: statistics.median(rounds) / ROUND_STEPS for name, rounds in seconds.items()}
        reached = ours.measure_speed(BATCH)
        print("testing ...", flush=True)
        aucs = {name: auc_of(model(), SplitReader(store, dataset, "test")) for name, model in models.items()}
    ratios = {name: median_ratio(seconds["plain"], rounds) for name, rounds in seconds.items()}
    speed = {name: BATCH / each for name, each in step.items()}
    with_compile = {}
    if given.compiled:
        named = {"ratio": ratios, "samples_per_s": speed, "auc": aucs}
        with_compile = {f"{name}_compiled": each["compiled"] for name, each in named.items()}
    finish(
        "train",
        ratios["ours"],
        samples_per_s=speed["ours"],
        baseline_samples_per_s=speed["plain"],
        auc=aucs["ours"],
        baseline_auc=aucs["plain"],
        auc_difference=aucs["ours"] - aucs["plain"],
        ratio_eager=median_ratio(seconds["eager"], seconds["ours"]),
        eager_samples_per_s=speed["eager"],
        eager_auc=aucs["eager"],
        rounds=len(seconds["ours"]),
        threads=torch.get_num_threads(),
        avx512_bf16=bool(torch.cpu._is_avx512_bf16_supported()),
        **reached.figures(step["ours"]),
        products_ms=1000 * reached.least_seconds,
        ratio_most=step["plain"] / reached.least_seconds,
        ratio_eager_most=step["eager"] / reached.least_seconds,
        **with_compile,
    )


def _with_metrics(trainer: StepExecutor) -> Callable[[Iterator[Batch]], None]:
    """Our loop's step, its metrics at the usual interval included."""
    metrics = MetricAccumulator(window_steps=50)

    def step(batches: Iterator[Batch]) -> None:
        metrics.add(trainer.step(batches))
        if metrics.steps == 20:
            metrics.close(0.0)

    return step


def race(
    loops: dict[str, Callable[[Iterator[Batch]], object]], split: SplitReader, batch: int
) -> dict[str, list[float]]:
    """Seconds of each loop's rounds, taken in turn; the first round of each warms up and is not counted."""
    order = Order(key=split.dataset.key, seed=1, global_batch=batch)
    rounds = split.rows // batch // ROUND_STEPS
    if rounds < 2:
        raise SystemExit(
            f"--rows={split.rows} makes {rounds} rounds, expected 2 or more: --rows={2 * ROUND_STEPS * batch}"
        )
    readers = {name: BatchReader(split, order) for name in loops}
    # Whole batches only: the plain loop knows no padding.
    batches = {name: itertools.islice(reader, rounds * ROUND_STEPS) for name, reader in readers.items()}

    def timed_round(name: str) -> float:
        def steps() -> None:
            for _ in range(ROUND_STEPS):
                loops[name](batches[name])

        seconds = seconds_of(steps)
        print(f"{name} {ROUND_STEPS * batch / seconds:,.0f} samples/s", flush=True)
        return seconds

    seconds = in_turns({name: lambda name=name: timed_round(name) for name in loops}, rounds - 1, warm_up=1)
    for reader in readers.values():
        reader.close()
    return seconds


@torch.no_grad()
def auc_of(model: torch.nn.Module, split: SplitReader) -> float:
    """AUC on the rows of ``split``."""
    with BatchReader(split, Order(key="test", seed=0, global_batch=BATCH, shuffle=False)) as reader:
        # The model's last output is (..., logits, labels, ...): ours starts with the logits, theirs with the loss.
        outputs = [model(batch)[1] for batch in reader]
    logits = torch.cat([output[1] if output[0].dim() == 0 else output[0] for output in outputs]).numpy()
    return exact_auc(split_by_class(split.column("label") > 0, logits[: split.rows]))


if __name__ == "__main__":
    main()
