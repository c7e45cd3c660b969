"""``make bench-hogwild``: asynchronous against synchronous training, each run five times with the same settings.

``ratio``: samples/s of hogwild over those of synchronous training, with as many threads and the same batches. The
spread of test log loss over the identical runs shows what it costs: that of synchronous training is exactly zero.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Sequence

import numpy as np

from benchmarks.common import finish
from benchmarks.runs import processes, run
from pipeline.core.cpus import available_cpus

Run = tuple[float, float, float]  # test log loss, test NE, samples/s


def main() -> None:
    """Run the benchmark and print its JSON line."""
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--rows", type=int, default=250_000)
    options.add_argument("--runs", type=int, default=5)
    options.add_argument("--threads", type=int, default=available_cpus())
    options.add_argument("--set", nargs="*", default=[], help="overrides of every run's configuration")
    given = options.parse_args()
    began = time.monotonic()
    modes = {
        "sync": [f"train.threads_per_rank={given.threads}"],
        "hogwild": ["train.mode=hogwild", f"train.hogwild.threads={given.threads}"],
    }
    runs: dict[str, list[Run]] = {mode: [] for mode in modes}
    with tempfile.TemporaryDirectory() as folder:
        for number in range(given.runs):  # in turns, so that other work on the machine meets both
            for mode, own in modes.items():
                settings = [*base(given.rows), f"store={folder}", f"run={mode}{number}", *own, *given.set]
                runs[mode].append(_apart(settings))
                print(
                    f"{mode} {number}: log loss {runs[mode][-1][0]:.8f}, {runs[mode][-1][2]:,.0f} samples/s", flush=True
                )
    speeds = {mode: float(np.median([run[2] for run in each])) for mode, each in runs.items()}
    finish(
        "hogwild",
        speeds["hogwild"] / speeds["sync"],
        threads=given.threads,
        seconds=time.monotonic() - began,
        **{f"{mode}_{name}": value for mode, each in runs.items() for name, value in figures(each).items()},
    )


def figures(runs: Sequence[Run]) -> dict[str, float | str]:
    """Of identical ``runs``: mean, variance and range of test log loss, mean NE, median samples/s."""
    losses = np.array([run[0] for run in runs])
    spread = float(losses.max() - losses.min())
    return {
        "log_loss": float(losses.mean()),
        "variance": f"{float(losses.var(ddof=1)) if spread else 0.0:.3g}",
        "range": spread,
        "ne": float(np.mean([run[1] for run in runs])),
        "samples_per_s": float(np.median([run[2] for run in runs])),
    }


def base(rows: int) -> list[str]:
    """The log and the model of every run."""
    return [
        "data=synthetic",
        f"data.synthetic.rows={rows}",
        "data.synthetic.days=1",
        "model=dlrm_small",
        "train.global_batch=256",
        "train.epochs=1",
        "train.guard.collapse=false",
        "train.log_every_steps=100",
    ]


def _apart(settings: list[str]) -> Run:
    """One run in a process of its own: threads and allocator of the one before do not count."""
    with processes(1) as pool:
        return pool.submit(_train, settings).result()


def _train(settings: list[str]) -> Run:
    made = run(settings)
    scores = made["evaluate"].summary
    return scores["logloss"], scores["ne"], made["train"].summary["train"]["samples_per_s"]


if __name__ == "__main__":
    main()
