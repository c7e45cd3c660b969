"""Run the suite again and again, on a quiet machine and on a busy one: ``make bench-luck``.

    python -m benchmarks.luck [--quiet 5] [--busy 5] [--folder FOLDER] [--json FILE]

The head of this checkout is cloned anew for each of the first ``--clones`` runs; the others use the last clone again.
Every run takes the tests in another random order, whose seed is printed. It repeats the order within each file; which
files shared a process, in which order, says the run's output. Busy runs share the machine with two processes that
never wait. In the runs of fresh clones the figures that tests compare are recorded (``tests/figures.py``), which takes
more than a minute, and must be the same in all of them; all runs must pass and skip as many tests. The last line is one
JSON object, which FILE has after every run. The exit code is 1 where a run failed, or runs are not alike.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.busy import busy_loops
from benchmarks.harness import options
from tests.figures import differing, read_figures

ROOT = Path(__file__).parents[1]
CLOSING = re.compile(r"^(?:=+ )?(?=.*\b(?:passed|failed|error))(.*) in [\d.]+s", re.MULTILINE)
WARNINGS = re.compile(r", \d+ warnings?")  # a library warns once a process, whichever tests that runs
LOOPS = 2


@dataclass
class Run:
    """One run of the suite: what it ran beside, the seed of its order, and how it ended."""

    number: int
    beside: str
    seed: int
    seconds: float = 0.0
    code: int = 0
    ended: str = ""
    figures: bool = False  # recorded


def main() -> int:
    given = options(
        __doc__,
        quiet=(5, "runs on a machine that does nothing else"),
        busy=(5, "runs beside two busy loops"),
        clones=(3, "fresh clones, for the first runs"),
        seed=(1, "of the first run's order"),
        folder=(str(ROOT.parent / "luck"), "new folder for clones, output and figures"),
        json=("", "a file to write the last line into, too"),
    )
    folder, beside = Path(given.folder), [""] * given.quiet + [f"{LOOPS} busy loops"] * given.busy
    if not beside or given.clones < 1:
        sys.exit("expected at least one run and one clone")
    if folder.exists():
        sys.exit(f"{folder} is there already; --folder=<a new folder>")
    runs = [Run(number, each, given.seed + number - 1) for number, each in enumerate(beside, 1)]
    print("| run | beside | seed | seconds | ended |\n|---|---|---|---|---|", flush=True)
    for run in runs:
        if run.number <= given.clones:
            place, run.figures = clone(folder / f"clone-{run.number}"), True
        run_suite(place, run, folder)
        beside_text = run.beside or "nothing"
        print(f"| {run.number} | {beside_text} | {run.seed} | {run.seconds:.0f} | {run.ended} |", flush=True)
        result = summarise(runs[: run.number], folder)
        if given.json:
            Path(given.json).write_text(json.dumps(result) + "\n")
    for where, recorded in different_figures(runs, folder).items():
        print(f"other figures: {where}: {recorded}"[:1000])
    print(json.dumps(result))
    alike = result["assertions"] and not result["assertions_that_differ"] and len(result["outcomes"]) == 1
    return 0 if alike and not result["failed"] else 1


def clone(folder: Path) -> Path:
    """Clone the head into ``folder``, beside what lies beside this checkout, and install it; return the clone."""
    folder.mkdir(parents=True)
    shared = ROOT.parent / "shared"
    if shared.exists():
        (folder / "shared").symlink_to(shared.resolve())
    place = folder / "checkout"
    subprocess.run(["git", "clone", "-q", str(ROOT), str(place)], check=True)
    subprocess.run(["make", "-s", "install"], cwd=place, check=True)
    return place


def run_suite(place: Path, run: Run, logs: Path) -> None:
    """Run ``make test`` of ``place`` in random order; fill in how it ended, and write its output and figures."""
    log, arguments = logs / f"run-{run.number}.log", f"-v --random-order --random-order-seed={run.seed}"
    if run.figures:
        arguments += f" -p tests.figures --figures={figures_of(run, logs)}"
    began = time.monotonic()
    with busy_loops(LOOPS if run.beside else 0), log.open("w") as sink:
        command = ["make", "-s", "test", f"OPTIONS={arguments}"]
        run.code = subprocess.run(command, cwd=place, stdout=sink, stderr=subprocess.STDOUT).returncode
    run.seconds = round(time.monotonic() - began, 1)
    closing = CLOSING.findall(log.read_text())
    run.ended = closing[-1].strip("= ") if closing else f"exit code {run.code}"


def figures_of(run: Run, logs: Path) -> Path:
    """The file of the figures that ``run`` recorded."""
    return logs / f"figures-{run.number}.jsonl"


def summarise(runs: list[Run], folder: Path) -> dict[str, Any]:
    """What the ``runs`` so far came to."""
    failed = sum(run.code != 0 for run in runs)
    return {
        "bench": "luck",
        "ratio": 1 - failed / len(runs),
        "failed": failed,
        "outcomes": sorted({WARNINGS.sub("", run.ended) for run in runs}),
        "compared_runs": sum(run.figures for run in runs),
        "assertions": len(read_figures(figures_of(runs[0], folder))),
        "assertions_that_differ": len(different_figures(runs, folder)),
        "cpus": len(os.sched_getaffinity(0)),
        "runs": [asdict(run) for run in runs],
    }


def different_figures(runs: list[Run], folder: Path) -> dict[str, list[Any]]:
    """What each run recorded at the places of tests where they are not alike."""
    found = [read_figures(figures_of(run, folder)) for run in runs if run.figures]
    return {f"{file}:{line}": [each.get((file, line)) for each in found] for file, line in differing(found)}


if __name__ == "__main__":
    sys.exit(main())
