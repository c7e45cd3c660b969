"""``make bench-sealed``: predictions that are sealed before their runs, and how far off they are.

Models by batches by threads, each sealed by ``nightjar price --seal`` and then run, one after the other, on one
dataset. ``ratio``: the median absolute error of the train stage's seconds; ``worst``: the largest one; ``whole``,
``whole_worst``: those of all stages; ``step``, ``memory``: medians; ``shortest_s``: the shortest training. All sealed
predictions are printed as the table for docs/measurements.md, none left out. Run nothing beside it.
"""

from __future__ import annotations

import itertools
import json
import statistics
import tempfile

from benchmarks.harness import NIGHTJAR, finish, options, python

MODELS = ("dlrm", "dcnv2", "deepfm", "masknet")
SHAPES = ((512, 1), (512, 2), (2048, 1), (2048, 2), (4096, 2))


def main() -> None:
    given = options(
        __doc__,
        rows=(300_000, "rows of the dataset"),
        epochs=(3, "of each training"),
        configurations=(len(MODELS) * len(SHAPES), "the first so many"),
    )
    with tempfile.TemporaryDirectory() as store:
        data = ["experiment=demo", f"data.synthetic.rows={given.rows}", "hardware=auto", f"store={store}"]
        python(*NIGHTJAR, "ingest", *data, "run=data")
        cases = itertools.islice(itertools.product(MODELS, SHAPES), given.configurations)
        for model, (batch, threads) in cases:
            settings = [*data, f"run={model}-{batch}-{threads}", f"model={model}", f"train.global_batch={batch}"]
            settings += [f"train.threads_per_rank={threads}", f"train.epochs={given.epochs}"]
            python(*NIGHTJAR, "price", "--seal", *settings)
            python(*NIGHTJAR, "run", *settings)
        sealed = (*NIGHTJAR, "price", "--sealed", f"store={store}")
        lines = json.loads(python(*sealed, "--json"))["sealed"]
        print(python(*sealed, "--markdown"))
    compared = [line for line in lines if line["state"] == "compared"]
    trains = [line["seconds"]["train"] for line in compared]
    errors = [abs(train["predicted_s"] / train["measured_s"] - 1) for train in trains]
    whole = [abs(line["error"]) for line in compared]
    steps = [abs(line["step"]["predicted_ms"] / line["step"]["measured_ms"] - 1) for line in compared]
    memory = [abs(line["memory"]["predicted_bytes"] / line["memory"]["measured_bytes"] - 1) for line in compared]
    finish(
        "sealed",
        statistics.median(errors),
        worst=max(errors),
        whole=statistics.median(whole),
        whole_worst=max(whole),
        step=statistics.median(steps),
        memory=statistics.median(memory),
        sealed=len(lines),
        compared=len(compared),
        shortest_s=min(train["measured_s"] for train in trains),
    )


if __name__ == "__main__":
    main()
