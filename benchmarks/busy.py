"""``make bench-busy``: training on a part of a machine, and on a machine that is busy with other work.

Both trainings are the ``train`` stage of the demo through the command line, its ranks included:

- under a cgroup's quota of 2 CPUs, against the same run pinned to 2 CPUs (``ratio``, samples/s; the bar is 0.9);
- on 4 CPUs with four busy loops beside it, against the same run alone (``slowdown``; the bar is 3).

Runs alternate in rounds; each figure is the median over rounds. Where no cgroup can be made (root, and the CPU
controller) or the machine has too few CPUs, the part is left out and ``skipped`` says why. A setting of the environment
stays: ``GOMP_SPINCOUNT=300000 make bench-busy`` measures GNU's default.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from benchmarks.cgroup import cpu_quota
from benchmarks.common import finish
from pipeline.store import Store

PART, WHOLE = 2, 4
BUSY_LOOP = "while True: pass"


class Trainings:
    """Trainings on one dataset; ``speed`` runs one and gives its samples/s."""

    def __init__(self, folder: str, rows: int) -> None:
        self.store = Store(folder)
        self.settings = ["experiment=demo", f"store={folder}", f"data.synthetic.rows={rows}"]
        self._count = 0
        self._nightjar([*self.settings, "run=data", "stages=[ingest,plan,partition]"], None, None)

    def speed(self, cpus: list[int], procs: Path | None = None) -> float:
        """Samples/s of one training on ``cpus``, in the cgroup of ``procs``."""
        self._count += 1
        run = f"busy{self._count}"
        self._nightjar([*self.settings, f"run={run}", "stages=[ingest,plan,partition,train]"], cpus, procs)
        return float(self.store.read_json(f"runs/{run}/result.json")["train"]["samples_per_s"])

    def _nightjar(self, overrides: list[str], cpus: list[int] | None, procs: Path | None) -> None:
        def enter() -> None:
            if cpus is not None:
                os.sched_setaffinity(0, cpus)
            if procs is not None:
                procs.write_text(str(os.getpid()))

        command = [sys.executable, "-m", "pipeline.cli", "run", *overrides]
        done = subprocess.run(command, preexec_fn=enter, capture_output=True, text=True)
        if done.returncode:
            raise SystemExit(f"{' '.join(command)} ended with {done.returncode}:\n{done.stdout}{done.stderr}")


def main() -> None:
    """Run the benchmark and print its JSON line."""
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--rows", type=int, default=600_000, help="synthetic rows")
    options.add_argument("--rounds", type=int, default=3, help="runs of each kind")
    given = options.parse_args()
    cpus = sorted(os.sched_getaffinity(0))[:WHOLE]
    skipped: dict[str, str] = {}
    with tempfile.TemporaryDirectory(prefix="nightjar-busy-") as folder, cpu_quota(PART, "busy") as procs:
        if procs is None or len(cpus) <= PART:
            skipped["quota"] = "no CPU cgroup can be made here" if procs is None else f"{len(cpus)} CPUs, more wanted"
        trainings = Trainings(folder, given.rows)
        kinds = ["alone", "beside_busy_loops", *([] if skipped else ["pinned", "quota"])]
        speeds: dict[str, list[float]] = {kind: [] for kind in kinds}
        for number in range(given.rounds):
            for kind in kinds:
                loops = len(cpus) if kind == "beside_busy_loops" else 0
                with busy_loops(loops, cpus):
                    own = cpus[:PART] if kind == "pinned" else cpus
                    speeds[kind].append(trainings.speed(own, procs if kind == "quota" else None))
            said = "  ".join(f"{kind} {found[-1]:,.0f}/s" for kind, found in speeds.items())
            print(f"round {number + 1}/{given.rounds}: {said}", flush=True)
    _report(speeds, skipped, given.rounds, len(cpus))


@contextlib.contextmanager
def busy_loops(count: int, cpus: list[int]) -> Iterator[None]:
    """``count`` processes that never wait, on ``cpus``."""
    with contextlib.ExitStack() as stack:
        for _ in range(count):
            command = [sys.executable, "-c", BUSY_LOOP]
            loop = stack.enter_context(subprocess.Popen(command, preexec_fn=lambda: os.sched_setaffinity(0, cpus)))
            stack.callback(loop.kill)
        yield


def _report(speeds: dict[str, list[float]], skipped: dict[str, str], rounds: int, cpus: int) -> None:
    def median_of_pairs(above: str, below: str) -> float:
        return statistics.median(a / b for a, b in zip(speeds[above], speeds[below], strict=True))

    slowdown = median_of_pairs("alone", "beside_busy_loops")
    ratio = None if skipped else median_of_pairs("quota", "pinned")
    figures = {f"samples_per_s_{kind}": statistics.median(found) for kind, found in speeds.items()}
    finish(
        "busy",
        ratio,
        slowdown=slowdown,
        **figures,
        rounds=rounds,
        cpus=cpus,
        busy_loops=cpus,
        quota_cpus=PART,
        spins=os.environ.get("GOMP_SPINCOUNT", "nightjar's"),
        skipped=skipped,
    )


if __name__ == "__main__":
    main()
