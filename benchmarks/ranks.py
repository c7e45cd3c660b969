"""``make bench-ranks``: ``nightjar predict`` on 1, 2 and 4 ranks: the time of the busiest process, and equal scores.

A small model is trained and published, then a log of ``--rows`` rows is scored. A rank has one thread, so on a CPU of
its own it takes its CPU seconds; the busiest process decides when all are done. That holds on a machine with fewer
CPUs than ranks, or with others at work, too. Processes are counted from when all are ready: their start is told apart
(``start_s``, CPU seconds of a rank). ``ratio``: CPU seconds of the only process over those of the busiest of 4;
``ratio_2``: of 2. ``same``: the scores of all have the same bytes.
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
from pipeline.compose import compose
from pipeline.ingest.engines import in_order
from pipeline.ingest.synthetic import write_tsv
from pipeline.publishing import promotion, versions
from pipeline.serving.predict import blocks_of, score_lines
from pipeline.serving.ranks import Ranks
from pipeline.serving.scorer import Scorer
from pipeline.serving.threads import one_thread
from pipeline.store import Store

MODEL, CACHE = "ranks", 1 << 30
STAGES = "ingest,plan,partition,train,evaluate,publish"


def main() -> None:
    """Run the benchmark and print its JSON line."""
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--rows", type=int, default=600_000, help="rows that are scored")
    options.add_argument("--block-mib", type=int, default=4, help="ingest.block_mib")
    given = options.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        store, log = Store(f"{folder}/store"), f"{folder}/log.tsv"
        _publish(store, given.block_mib)
        world = compose(["experiment=demo", f"data.synthetic.rows={given.rows}"])
        write_tsv(world.data.synthetic, world.seed, log)
        found = {ranks: _scored(store, log, ranks) for ranks in (1, 2, 4)}
    for ranks, each in found.items():
        print(
            f"{ranks} ranks: busiest {each['busiest']:.2f} CPU s of {each['all']:.2f}, {each['wall']:.2f} s", flush=True
        )
    alone = found[1]["busiest"]
    finish(
        "ranks", alone / found[4]["busiest"], ratio_2=alone / found[2]["busiest"], rows=given.rows,
        same=len({each["digest"] for each in found.values()}) == 1, start_s=found[4]["start"],
        alone_s=alone, busiest_of_2_s=found[2]["busiest"], busiest_of_4_s=found[4]["busiest"],
        wall={str(ranks): round(each["wall"], 2) for ranks, each in found.items()},
    )  # fmt: skip


def _publish(store: Store, block_mib: int) -> None:
    """A version of the demo's model."""
    command = [
        sys.executable, "-m", "pipeline.cli", "run", "experiment=demo", "run=r", f"store={store.url}",
        "data.synthetic.rows=100000", f"ingest.block_mib={block_mib}", f"publish.model={MODEL}",
        "gate.max_calibration_error=1", f"stages=[{STAGES}]",
    ]  # fmt: skip
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)


def _scored(store: Store, log: str, ranks: int) -> dict[str, Any]:
    """Score ``log`` on so many ranks: CPU seconds, wall time and a digest of the scores."""
    place = versions.version_path(MODEL, str(promotion.read_current(store, MODEL).version))
    folder, how = Path(store.full(place)), {"path": log, "memory": CACHE, "labelled": True, "ranks": ranks}
    with one_thread():
        scorer, digest = Scorer(store, place, folder, **how), hashlib.sha256()
        _, blocks = blocks_of(scorer.data, scorer.spec, scorer.block_mib)
        with Ranks(scorer, {"folder": str(folder), **how}) as side:
            side.start(ranks - 1)
            while side.up < ranks:
                time.sleep(0.05)
            before, began = _cpu(), time.monotonic()
            for scored in in_order(lambda each: side.score(each[0]), blocks, ranks):
                digest.update(score_lines(scored, scorer.description).write_csv().encode())
            wall, after = time.monotonic() - began, _cpu()
    spent = [after[process] - before[process] for process in after]
    start = [seconds for process, seconds in before.items() if process != psutil.Process().pid]
    return {"busiest": max(spent), "all": sum(spent), "wall": wall, "digest": digest.hexdigest(),
            "start": max(start, default=0.0)}  # fmt: skip


def _cpu() -> dict[int, float]:
    """CPU seconds of this process and of those that it started, by process."""
    own = psutil.Process()
    times = {each.pid: each.cpu_times() for each in [own, *own.children(recursive=True)]}
    return {pid: each.user + each.system for pid, each in times.items()}


if __name__ == "__main__":
    main()
