"""``make bench-hogwild``: asynchronous against synchronous training, each run five times with the same settings.

``ratio``: samples/s of hogwild over those of synchronous training, with as many threads and the same batches. The
spread of test log loss over the identical runs shows what it costs: that of synchronous training is exactly zero.
"""

from __future__ import annotations

import itertools
import tempfile
from typing import Any

import numpy as np

from benchmarks.harness import SET, apart, finish, in_turns, options, words
from pipeline.core.cpus import available_cpus

SETTINGS = words("""data=synthetic data.synthetic.days=1 model=dlrm_small train.global_batch=256 train.epochs=1
                train.guard.collapse=false train.log_every_steps=100""")


def main() -> None:
    given = options(__doc__, rows=250_000, runs=5, threads=available_cpus(), set=SET)
    modes = {
        "sync": [f"train.threads_per_rank={given.threads}"],
        "hogwild": ["train.mode=hogwild", f"train.hogwild.threads={given.threads}"],
    }
    numbers = itertools.count()
    with tempfile.TemporaryDirectory() as folder:
        world = [*SETTINGS, f"data.synthetic.rows={given.rows}", f"store={folder}"]

        def train(mode: str) -> tuple[float, float, float]:
            done = apart([*world, f"run={mode}{next(numbers)}", *modes[mode], *given.set])
            print(f"{mode}: {done['eval']['logloss']:.8g}, {done['train']['samples_per_s']:,.0f} samples/s", flush=True)
            return done["eval"]["logloss"], done["eval"]["ne"], done["train"]["samples_per_s"]

        runs = in_turns({mode: lambda mode=mode: train(mode) for mode in modes}, given.runs)
    figures: dict[str, Any] = {}
    for mode, found in runs.items():
        losses, nes, speeds = np.array(found).T
        spread = float(np.ptp(losses))
        figures |= {
            f"{mode}_log_loss": float(losses.mean()),
            f"{mode}_variance": f"{float(losses.var(ddof=1)) if spread else 0.0:.3g}",
            f"{mode}_range": spread,
            f"{mode}_ne": float(nes.mean()),
            f"{mode}_samples_per_s": float(np.median(speeds)),
        }
    ratio = figures["hogwild_samples_per_s"] / figures["sync_samples_per_s"]
    finish("hogwild", ratio, threads=given.threads, **figures)


if __name__ == "__main__":
    main()
