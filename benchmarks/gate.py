"""``make bench-gate``: the gate's paired bootstrap against drawing rows one by one, on made-up predictions.

The plain way draws a Poisson weight for every row and adds all rows up again for each replicate, for both models; a few
of its replicates are timed and the others counted alike. ``ratio``: its seconds over those of the gate's whole record
(figures, intervals, slices, shift). ``width``: of the interval of the change of NE, ours over the plain one's.
"""

from __future__ import annotations

import time

import numpy as np

from benchmarks.harness import finish, options
from benchmarks.judge import made_up_scores
from pipeline.config import GateConfig
from pipeline.evaluation import ScoredRows, SliceColumn, measure
from pipeline.evaluation.bootstrap import Resampled, block_sums, ratio, resample

PLAIN_REPLICATES = 60
SLICES = 10


def main() -> None:
    rows = options(__doc__, rows=300_000).rows
    *numbers, codes = made_up_scores(rows, SLICES)
    labels, candidate, incumbent = (each.astype(np.float32) for each in numbers)
    slices, settings = {"s": SliceColumn(codes=codes)}, GateConfig()
    scored = ScoredRows(labels=labels, candidate=candidate, incumbent=incumbent, slices=slices)
    began = time.perf_counter()
    record = measure(scored, settings)
    seconds = time.perf_counter() - began
    a_replicate, change = draw_rows(labels, candidate, incumbent)
    low, high = record.change.ne[1:]
    interval = change.interval(settings.confidence)
    plain_seconds = a_replicate * settings.replicates
    finish(
        "gate",
        plain_seconds / seconds,
        rows=rows,
        seconds=seconds,
        plain_seconds=plain_seconds,
        width=(high - low) / (interval.high - interval.low),
    )


def draw_rows(labels: np.ndarray, *models: np.ndarray) -> tuple[float, Resampled]:
    """Seconds of one replicate that draws rows, and the change of NE over a few of them."""
    rng, clicked, rows = np.random.default_rng(1), labels == 1, np.arange(len(labels), dtype=np.int64)
    sums = [block_sums(clicked, logits, rows, len(rows)) for logits in models]
    parts = []
    began = time.perf_counter()
    for _ in range(PLAIN_REPLICATES):
        weights = rng.poisson(1.0, (1, len(rows))).astype(np.float64)
        parts.append([resample(each, weights)["ne"].replicates for each in sums])
    seconds = (time.perf_counter() - began) / PLAIN_REPLICATES
    ours, theirs = (Resampled(1.0, np.concatenate(drawn)) for drawn in zip(*parts, strict=True))
    return seconds, ratio(ours, theirs)


if __name__ == "__main__":
    main()
