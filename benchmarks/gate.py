"""``make bench-gate``: the gate's paired bootstrap against drawing rows one by one, on made-up predictions.

The plain way draws a Poisson weight for every row and adds all rows up again for each replicate, for both models; a few
of its replicates are timed and the others counted alike. ``ratio``: its seconds over those of the gate's whole record
(figures, intervals, slices, shift). ``width``: of the interval of the change of NE, ours over the plain one's.
``figures_seconds``: processor time of the figures alone, of ten million rows.
"""

from __future__ import annotations

import time

import numpy as np

from benchmarks.harness import finish, options
from pipeline.config import GateConfig
from pipeline.evaluation import ScoredRows, SliceColumn, evaluate, measure
from pipeline.evaluation.bootstrap import Resampled, block_sums, ratio, resample

PLAIN_REPLICATES = 60
MANY_ROWS = 10_000_000
SLICES = 10


def main() -> None:
    rows = options(__doc__, rows=300_000).rows
    # Two models that see the truth through noise, the candidate a little better.
    rng = np.random.default_rng(0)
    truth = rng.normal(-1.2, 1.3, rows)
    labels = (rng.random(rows) < 1 / (1 + np.exp(-truth))).astype(np.float32)
    candidate, incumbent = ((truth + rng.normal(0, spread, rows)).astype(np.float32) for spread in (0.3, 0.32))
    slices = {"s": SliceColumn(codes=rng.integers(0, SLICES, rows))}
    scored = ScoredRows(labels=labels, candidate=candidate, incumbent=incumbent, slices=slices)
    settings = GateConfig()
    began = time.perf_counter()
    record = measure(scored, settings)
    seconds = time.perf_counter() - began
    a_replicate, change = draw_rows(labels, candidate, incumbent)
    low, high = record.change.ne[1:]
    interval = change.interval(settings.confidence)
    plain_seconds = a_replicate * settings.replicates
    rng = np.random.default_rng(3)
    logits = rng.standard_normal(MANY_ROWS, dtype=np.float32)
    many_labels = (rng.random(MANY_ROWS, dtype=np.float32) < 0.25).astype(np.float32)
    spent = time.process_time()
    evaluate(many_labels, logits)
    finish(
        "gate",
        plain_seconds / seconds,
        rows=rows,
        replicates=settings.replicates,
        slices=len(record.slices or ()),
        seconds=seconds,
        plain_seconds=plain_seconds,
        width=(high - low) / (interval.high - interval.low),
        figures_seconds=time.process_time() - spent,
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
