"""``make bench-judge``: seconds and memory of ``nightjar judge`` on ten million made-up scores.

The Parquet file has a label, the probabilities of candidate and incumbent, and a slice column of 50 values; no key.
``ratio``: a minute over the seconds that the command takes, the start of its interpreter included. ``cpu_seconds``: its
processor time; ``peak_gib``: its largest resident set.
"""

from __future__ import annotations

import resource
import tempfile
from pathlib import Path

import numpy as np
import polars as pl

from benchmarks.harness import NIGHTJAR, finish, options, python, seconds_of
from pipeline.core.units import GIB
from pipeline.evaluation.metrics import sigmoid

SLICES = 50
MOST_SECONDS = 60.0


def main() -> None:
    rows = options(__doc__, rows=10_000_000).rows
    with tempfile.TemporaryDirectory() as folder:
        scores = str(Path(folder, "scores.parquet"))
        labels, candidate, incumbent, slices = made_up_scores(rows, SLICES)
        countries = pl.Series([f"country {number}" for number in range(SLICES)]).gather(slices)
        columns = {"candidate": sigmoid(candidate), "incumbent": sigmoid(incumbent), "country": countries}
        pl.DataFrame({"label": labels.astype(np.int8), **columns}).write_parquet(scores)
        command = [*NIGHTJAR, "judge", scores, "--score", "candidate", "--incumbent-score", "incumbent"]
        command += ["--slice", "country", "--json"]
        seconds = seconds_of(lambda: python(*command))
        used = resource.getrusage(resource.RUSAGE_CHILDREN)
    finish(
        "judge",
        MOST_SECONDS / seconds,
        rows=rows,
        slices=SLICES,
        seconds=seconds,
        cpu_seconds=used.ru_utime + used.ru_stime,
        peak_gib=used.ru_maxrss * 1024 / GIB,
    )


def made_up_scores(rows: int, slices: int) -> tuple[np.ndarray, ...]:
    """Labels, logits of two models that see the truth through noise, the first one a little better, and slices."""
    rng = np.random.default_rng(0)
    truth = rng.normal(-1.2, 1.3, rows)
    labels = rng.random(rows) < sigmoid(truth)
    candidate, incumbent = (truth + rng.normal(0, spread, rows) for spread in (0.3, 0.32))
    return labels, candidate, incumbent, rng.integers(0, slices, rows)


if __name__ == "__main__":
    main()
