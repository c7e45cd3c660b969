"""``make bench-ranks``: ``nightjar predict`` and stage evaluate on 1, 2 and 4 ranks: time of the busiest, equal scores.

A small model is trained and published, then a log of ``--rows`` rows is scored; and one is evaluated on three quarters
of ``--evaluated`` rows. A rank has one thread, so on a CPU of its own it takes its CPU seconds; the busiest process
decides when all are done. That holds on a machine with fewer CPUs than ranks, or with others at work, too. Processes
are counted from when all are ready: the start of those of predict is told apart (``start_s``, CPU seconds of a rank).
``predict``, ``evaluate``: CPU seconds of the only process over those of the busiest of 4; ``ratio``: the smaller one;
``predict_2``, ``evaluate_2``: of 2. ``same``: the scores of all have the same bytes, and the figures the same digits.
"""

from __future__ import annotations

import argparse
import hashlib
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil

from benchmarks.common import finish
from benchmarks.evaluate_ranks import evaluated
from pipeline.compose import compose
from pipeline.ingest.engines import in_order
from pipeline.ingest.synthetic import write_tsv
from pipeline.publishing import promotion, versions
from pipeline.serving.predict import blocks_of, score_lines
from pipeline.serving.ranks import Ranks
from pipeline.serving.scorer import Scorer
from pipeline.serving.threads import one_thread
from pipeline.store import Store

MODEL, CACHE, RANKS = "ranks", 1 << 30, (1, 2, 4)
STAGES = "ingest,plan,partition,train,evaluate,publish"


def main() -> None:
    """Run the benchmark and print its JSON line."""
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--rows", type=int, default=600_000, help="rows that are scored")
    options.add_argument("--evaluated", type=int, default=2_400_000, help="rows, of which three quarters are evaluated")
    options.add_argument("--block-mib", type=int, default=4, help="ingest.block_mib")
    given = options.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        store, log = Store(f"{folder}/store"), f"{folder}/log.tsv"
        _publish(store, given.block_mib)
        world = compose(["experiment=demo", f"data.synthetic.rows={given.rows}"])
        write_tsv(world.data.synthetic, world.seed, log)
        found = {
            "predict": {ranks: _scored(store, log, ranks) for ranks in RANKS},
            "evaluate": evaluated(folder, given.evaluated, RANKS),
        }
    figures: dict[str, Any] = {}
    for what, by_ranks in found.items():
        for ranks, each in by_ranks.items():
            print(f"{what} on {ranks} ranks: busiest {each['busiest']:.2f} CPU s of {each['all']:.2f}", flush=True)
            figures[f"{what}_busiest_of_{ranks}_s"] = each["busiest"]
            figures[what if ranks == 4 else f"{what}_{ranks}"] = by_ranks[1]["busiest"] / each["busiest"]
    same = all(len({each["digest"] for each in by_ranks.values()}) == 1 for by_ranks in found.values())
    start = found["predict"][4]["start"]
    finish("ranks", min(figures["predict"], figures["evaluate"]), same=same, rows=given.rows, start_s=start, **figures)


def _publish(store: Store, block_mib: int) -> None:
    """A version of the demo's model."""
    command = [
        sys.executable, "-m", "pipeline.cli", "run", "experiment=demo", "run=r", f"store={store.url}",
        "data.synthetic.rows=100000", f"ingest.block_mib={block_mib}", f"publish.model={MODEL}",
        "gate.max_calibration_error=1", f"stages=[{STAGES}]",
    ]  # fmt: skip
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)


def _scored(store: Store, log: str, ranks: int) -> dict[str, Any]:
    """Score ``log`` on so many ranks: CPU seconds and a digest of the scores."""
    place = versions.version_path(MODEL, str(promotion.read_current(store, MODEL).version))
    folder, how = Path(store.full(place)), {"path": log, "memory": CACHE, "labelled": True, "ranks": ranks}
    with one_thread():
        scorer, digest = Scorer(store, place, folder, **how), hashlib.sha256()
        _, blocks = blocks_of(scorer.data, scorer.spec, scorer.block_mib)
        with Ranks(scorer, {"folder": str(folder), **how}) as side:
            side.start(ranks - 1)
            while side.up < ranks:
                time.sleep(0.05)
            before = _cpu()
            for scored in in_order(lambda each: side.score(each[0]), blocks, ranks):
                digest.update(score_lines(scored, scorer.description).write_csv().encode())
            after = _cpu()
    spent = [after[process] - before[process] for process in after]
    start = [seconds for process, seconds in before.items() if process != psutil.Process().pid]
    return {"busiest": max(spent), "all": sum(spent), "digest": digest.hexdigest(),
            "start": max(start, default=0.0)}  # fmt: skip


def _cpu() -> dict[int, float]:
    """CPU seconds of this process and of those that it started, by process."""
    own = psutil.Process()
    times = {each.pid: each.cpu_times() for each in [own, *own.children(recursive=True)]}
    return {pid: each.user + each.system for pid, each in times.items()}


if __name__ == "__main__":
    main()
