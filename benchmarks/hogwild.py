"""``make bench-hogwild``: asynchronous against synchronous training, each run five times with the same settings.

``ratio``: samples/s of hogwild over those of synchronous training, with as many threads and the same batches. The
spread of test log loss over the identical runs shows what it costs: that of synchronous training is exactly zero.
"""

from __future__ import annotations

import itertools
import tempfile
import time

import numpy as np

from benchmarks.harness import SET, finish, in_turns, options, processes, run, show, words
from pipeline.core.cpus import available_cpus

SETTINGS = words("""data=synthetic data.synthetic.days=1 model=dlrm_small train.global_batch=256 train.epochs=1
                train.guard.collapse=false train.log_every_steps=100""")


def main() -> None:
    given = options(__doc__, rows=250_000, runs=5, threads=available_cpus(), set=SET)
    began = time.monotonic()
    modes = {
        "sync": [f"train.threads_per_rank={given.threads}"],
        "hogwild": ["train.mode=hogwild", f"train.hogwild.threads={given.threads}"],
    }
    numbers = itertools.count()
    with tempfile.TemporaryDirectory() as folder:

        def train_apart(mode: str) -> tuple[float, float, float]:
            """One run in a process of its own: threads and allocator of the one before do not count."""
            world = [*SETTINGS, f"data.synthetic.rows={given.rows}", f"store={folder}", f"run={mode}{next(numbers)}"]
            with processes(1) as pool:
                found = pool.submit(train, [*world, *modes[mode], *given.set]).result()
            show(mode, dict(zip(("log loss", "NE", "samples/s"), found, strict=True)), ".8g")
            return found

        runs = in_turns({mode: lambda mode=mode: train_apart(mode) for mode in modes}, given.runs)
    figures = {}
    for mode, found in runs.items():
        losses, nes, speeds = np.array(found).T
        spread = float(losses.max() - losses.min())
        figures |= {
            f"{mode}_log_loss": float(losses.mean()),
            f"{mode}_variance": f"{float(losses.var(ddof=1)) if spread else 0.0:.3g}",
            f"{mode}_range": spread,
            f"{mode}_ne": float(nes.mean()),
            f"{mode}_samples_per_s": float(np.median(speeds)),
        }
    ratio = figures["hogwild_samples_per_s"] / figures["sync_samples_per_s"]
    finish("hogwild", ratio, threads=given.threads, seconds=time.monotonic() - began, **figures)


def train(settings: list[str]) -> tuple[float, float, float]:
    """Test log loss, test NE and samples/s."""
    made = run(settings)
    scores = made["evaluate"].summary
    return scores["logloss"], scores["ne"], made["train"].summary["train"]["samples_per_s"]


if __name__ == "__main__":
    main()
