"""``make bench-large-batches``: NE and samples/s of batches of 4,096 to 131,072 rows by rule of the learning rate.

After Snap's report on large synchronous batches: one epoch of the demo's synthetic log, the same rows for all. A rate
grows with the batch by nothing (``constant``), by the root of the factor (``sqrt``) or by the factor (``linear``), of
the dense part and of the tables alike, with a warm-up of a tenth of the steps. The first batch is trained with the
settings that the demo's auto batch has. Trainings take turns on all cores.

``ratio``: the largest batch whose best rule costs at most ``--worse`` of NE, over the first. ``ne``: by rule and batch;
``samples_per_s`` by batch, and per unit of currency by ``--prices``, whose ``--offer`` is this machine.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import numpy as np
import yaml

from benchmarks.harness import SET, apart, finish, options, show, words
from pipeline.core.cpus import available_cpus

FIRST = 4_096
RULES = {"constant": 0.0, "sqrt": 0.5, "linear": 1.0}
SETTINGS = words("""experiment=demo data.synthetic.days=1 train.epochs=1 train.log_every_steps=1000
                train.guard.collapse=false""")
RATE, SPARSE_RATE = 0.002, 0.05


def main() -> None:
    given = options(
        __doc__,
        rows=4_000_000,
        batches=[FIRST << power for power in range(6)],
        rules=(list(RULES), None, {"choices": RULES, "nargs": "+"}),
        seeds=1,
        worse=(0.001, "share of NE"),
        prices=("examples/prices.yaml", "a price list"),
        offer=("laptop", "the entry of the price list that this machine is like"),
        set=SET,
    )
    nes: dict[str, dict[int, float]] = {rule: {} for rule in given.rules}
    speeds = {}
    with tempfile.TemporaryDirectory() as folder:
        world = [*SETTINGS, f"data.synthetic.rows={given.rows}", f"store={folder}", *given.set]
        for batch in given.batches:
            rates = []
            for rule in given.rules:
                done = [apart([*world, *of_run(seed, batch, rule)]) for seed in range(given.seeds)]
                nes[rule][batch] = float(np.mean([each["eval"]["ne"] for each in done]))
                rates += [each["train"]["samples_per_s"] for each in done]
                show(f"{batch:,} rows, {rule}", {"NE": nes[rule][batch], "samples/s": float(np.median(rates))}, ",.5f")
            speeds[batch] = float(np.median(rates))
    best = {batch: min(nes[rule][batch] for rule in given.rules) for batch in given.batches}
    first = given.batches[0]
    good = [batch for batch in given.batches if best[batch] <= best[first] * (1 + given.worse)]
    hour = yaml.safe_load(Path(given.prices).read_text())["hardware"][given.offer]["on_demand"]
    bought = {batch: round(3600 * rate / hour) for batch, rate in speeds.items()}
    finish("large_batches", max(good) / first, ne=nes, samples_per_s=speeds, samples_bought=bought)


def of_run(seed: int, batch: int, rule: str) -> list[str]:
    """Settings of the training with this ``batch``, whose rates grow by ``rule``."""
    factor = (batch / FIRST) ** RULES[rule]
    rates = f"train.lr={RATE * factor:g} train.sparse_lr={SPARSE_RATE * factor:g} train.global_batch={batch}"
    return words(f"{rates} seed={seed} run=s{seed}-b{batch}-{rule} train.threads_per_rank={available_cpus()}")


if __name__ == "__main__":
    main()
