"""``make bench-predict``: predicted steps and memory of every ranker and sequence block, with ``hardware=auto``.

The nine rankers on the demo's log, the census and the flights, each at the batch that suits the log, and the four
blocks on the log of users; all with their default settings, with 1 and with 2 threads. The machine is calibrated anew
for each log and number of threads, for a machine's speed changes; then every case is planned and trained by ``nightjar
run``, whose ``result.json`` has both figures. ``ratio``: the share of cases whose step is within 25 %; ``step``,
``memory``: the largest errors. Run nothing beside it.
"""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.harness import NIGHTJAR, finish, options, python, result_of, show
from benchmarks.models import settings_of

RANKERS = ("dlrm", "dcnv2", "mlp", "dhen", "wukong", "finalmlp", "masknet", "deepfm", "wide_deep")
BLOCKS = ("din", "sasrec", "bst", "hstu")
LOGS = ("demo", "adult", "flights", "users")
CLOSE, FAR = 0.25, 0.35
# A whole log once at least: a training of fewer steps is mostly its own start.
TRAIN = ["train.epochs=1", "train.max_steps=100", "train.log_every_steps=10", "train.guard.collapse=false"]


def main() -> None:
    several = {"nargs": "+"}
    given = options(
        __doc__,
        threads=([1, 2], None, several),
        logs=(list(LOGS), None, {"choices": LOGS, **several}),
        models=([*RANKERS, *BLOCKS], None, {"choices": (*RANKERS, *BLOCKS), **several}),
        rows=(300_000, "rows of the synthetic logs"),
        keep=("", "write all figures to this file"),
    )
    cases: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        for log in given.logs:
            data = log_settings(log, folder, given.rows)
            choice, known = ("model.sequences.history.block", BLOCKS) if log == "users" else ("model", RANKERS)
            for threads in given.threads:
                # A store of its own, since a run of the same name must not go on where one with other threads ended.
                store = f"{folder}/{log}-{threads}"
                for name in (each for each in given.models if each in known):
                    found = predict_and_train(store, name, [*data, f"{choice}={name}"], threads)
                    cases.append({"log": log, "model": name, "threads": threads, **found})
                    show(f"{log}, {name}, {threads} thread(s)", found, ".2f")
    if given.keep:
        Path(given.keep).write_text(json.dumps(cases, indent=1))
    steps, memory = ([abs(case[what]) for case in cases] for what in ("step", "memory"))
    finish(
        "predict",
        sum(error <= CLOSE for error in steps) / len(cases),
        cases=len(cases),
        within_35=sum(error <= FAR for error in steps),
        step=max(steps),
        memory=max(memory),
        memory_within_25=sum(error <= CLOSE for error in memory),
        worst=cases[steps.index(max(steps))],
    )


def log_settings(log: str, folder: str, rows: int) -> list[str]:
    """The settings of a log: its data, in ``folder`` where it is written anew, and its batch."""
    if log in ("demo", "users"):
        return ["data=synthetic" if log == "demo" else "experiment=histories", f"data.synthetic.rows={rows}", *TRAIN]
    plain = [each for each in settings_of(log, folder, 1, rows) if not each.startswith(("train.", "hardware="))]
    return [*plain, f"train.global_batch={256 if log == 'adult' else 1024}", *TRAIN]


def predict_and_train(store: str, run: str, settings: list[str], threads: int) -> dict[str, float]:
    """Plan and train on so many cores; what was predicted and measured, and how far off that is.

    The machine's calibration lies in ``store``, too.
    """
    cores = sorted(os.sched_getaffinity(0))[:threads]
    python(
        *(*NIGHTJAR, "run", *settings, "hardware=auto", f"run={run}", "stages=[ingest,plan,partition,train]"),
        *(f"train.threads_per_rank={threads}", f"store={store}"),
        enter=lambda: os.sched_setaffinity(0, cores),
        XDG_CACHE_HOME=f"{store}/cache",
        XDG_CONFIG_HOME=f"{store}/config",
    )
    trained = result_of(store, run)["train"]
    step, memory = trained["step"], trained["memory"]
    return {
        "predicted_ms": step["predicted_ms"],
        "measured_ms": step["measured_ms"],
        "step": step["predicted_ms"] / step["measured_ms"] - 1,
        "predicted_mib": memory["predicted_bytes"] / 2**20,
        "measured_mib": memory["measured_bytes"] / 2**20,
        "memory": memory["predicted_bytes"] / memory["measured_bytes"] - 1,
    }


if __name__ == "__main__":
    main()
