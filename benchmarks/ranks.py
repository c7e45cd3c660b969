"""``make bench-ranks``: ``nightjar predict``, evaluate and publish on 1, 2 and 4 ranks: busiest rank, equal bytes.

A small model is trained and published, then a log of ``--rows`` rows is scored; one is evaluated on three quarters of
``--evaluated`` rows; and one is published that half of ``--published`` rows are held out for. A rank has one thread.
On a machine with fewer than 4 CPUs, each process of predict and evaluate gets the same ``share`` of one, however many
there are, by a cgroup's quota: so 4 ranks are to one as on a machine of 4 CPUs that are as much slower; these are kept
``awake``. They are timed from when all are ready: the start of those of predict is told apart (``start_s``, CPU seconds
of a rank). ``predict``, ``evaluate``: seconds of one rank over those of 4; ``ratio``: the smaller one; ``predict_2``,
``evaluate_2``: of 2. ``predict_cpu``, ``evaluate_cpu``: by CPU seconds of the busiest process, as ``publish`` and
``publish_2``, which count what its ranks share; ``publish_alone_s``: what rank 0 does then. ``same``: the scores,
figures and versions of all are the same to the last digit.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import subprocess
import sys
import tempfile
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import psutil

from benchmarks.cgroup import awake, equal_share, shares
from benchmarks.common import finish
from benchmarks.evaluate_ranks import evaluated
from benchmarks.publish_ranks import published
from pipeline.config.compose import compose
from pipeline.ingest.engines import in_order
from pipeline.ingest.synthetic import write_tsv
from pipeline.publishing import promotion, versions
from pipeline.serving.prediction import blocks_of, score_lines
from pipeline.serving.scorer import Scorer, one_thread
from pipeline.serving.scoring_processes import Ranks
from pipeline.store import Store

MODEL, CACHE, RANKS = "ranks", 1 << 30, (1, 2, 4)
STAGES = "ingest,plan,partition,train,evaluate,publish"


def main() -> None:
    """Run the benchmark and print its JSON line."""
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--rows", type=int, default=600_000, help="rows that are scored")
    options.add_argument("--evaluated", type=int, default=2_400_000, help="rows, of which three quarters are evaluated")
    options.add_argument("--published", type=int, default=600_000, help="rows, of which half are scored for the gate")
    options.add_argument("--ids", type=int, default=50_000, help="of a feature of the published model")
    options.add_argument("--block-mib", type=int, default=4, help="ingest.block_mib")
    given = options.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        store, log = Store(f"{folder}/store"), f"{folder}/log.tsv"
        _publish(store, given.block_mib)
        world = compose(["experiment=demo", f"data.synthetic.rows={given.rows}"])
        write_tsv(world.data.synthetic, world.seed, log)
        with awake() if equal_share(max(RANKS)) < 1 else nullcontext():
            predicted = _shown("predict", {ranks: _scored(store, log, ranks) for ranks in RANKS})
            on_ranks = _shown("evaluate", evaluated(folder, given.evaluated, RANKS))
        written = _shown("publish", published(folder, given.published, given.ids, RANKS))
    found = {"predict": predicted, "evaluate": on_ranks, "publish": written}
    figures: dict[str, Any] = {}
    for what, by_ranks in found.items():
        for ranks, each in by_ranks.items():
            figures |= _against_one(what, ranks, each, by_ranks[1])
    same = all(len({each["digest"] for each in by_ranks.values()}) == 1 for by_ranks in found.values())
    figures |= {"start_s": found["predict"][4]["start"], "publish_alone_s": found["publish"][4]["alone"]}
    share = found["predict"][4]["share"]
    finish("ranks", min(figures["predict"], figures["evaluate"]), same=same, rows=given.rows, share=share, **figures)


def _shown(what: str, by_ranks: dict[int, dict[str, Any]]) -> dict[int, dict[str, Any]]:
    """``by_ranks``, printed."""
    for ranks, each in by_ranks.items():
        took = f"{each['wall']:.2f} s, " if "wall" in each else ""
        print(f"{what} on {ranks} ranks: {took}busiest {each['busiest']:.2f} CPU s of {each['all']:.2f}", flush=True)
    return by_ranks


def _against_one(what: str, ranks: int, each: dict[str, Any], one: dict[str, Any]) -> dict[str, float]:
    """Seconds on ``ranks`` ranks, and those of one rank over them; by the busiest process, and by time if it counts."""
    name = what if ranks == max(RANKS) else f"{what}_{ranks}"
    busiest, figures = one["busiest"] / each["busiest"], {f"{what}_busiest_of_{ranks}_s": each["busiest"]}
    if "wall" not in each:
        return {**figures, name: busiest}
    return {**figures, f"{what}_on_{ranks}_s": each["wall"], name: one["wall"] / each["wall"], f"{name}_cpu": busiest}


def _publish(store: Store, block_mib: int) -> None:
    """A version of the demo's model."""
    command = [
        sys.executable,
        "-m",
        "pipeline.cli",
        "run",
        "experiment=demo",
        "run=r",
        f"store={store.url}",
        "data.synthetic.rows=100000",
        f"ingest.block_mib={block_mib}",
        f"publish.model={MODEL}",
        "gate.max_calibration_error=1",
        f"stages=[{STAGES}]",
    ]
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
            with shares(before, equal_share(max(RANKS))) as share:
                began = time.perf_counter()
                for scored in in_order(lambda each: side.score(each[0]), blocks, ranks):
                    digest.update(score_lines(scored, scorer.description).write_csv().encode())
                wall = time.perf_counter() - began
            after = _cpu()
    spent = [after[process] - before[process] for process in after]
    start = [seconds for process, seconds in before.items() if process != psutil.Process().pid]
    return {
        "busiest": max(spent),
        "all": sum(spent),
        "digest": digest.hexdigest(),
        "start": max(start, default=0.0),
        "wall": wall,
        "share": share,
    }


def _cpu() -> dict[int, float]:
    """CPU seconds of this process and of those that it started, by process, without those that keep CPUs awake."""
    own = psutil.Process()
    every = [own, *own.children(recursive=True)]
    times = {each.pid: each.cpu_times() for each in every if os.sched_getscheduler(each.pid) != os.SCHED_IDLE}
    return {pid: each.user + each.system for pid, each in times.items()}


if __name__ == "__main__":
    main()
