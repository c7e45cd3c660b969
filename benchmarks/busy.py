"""``make bench-busy``: training on a part of a machine, and on a machine that is busy with other work.

Both trainings are the ``train`` stage of the demo through the command line, its ranks included:

- under a cgroup's quota of 2 CPUs, against the same run pinned to 2 CPUs (``ratio``, samples/s; the bar is 0.9);
- on 4 CPUs with four busy loops beside it, against the same run alone (``slowdown``; the bar is 3).

Runs alternate in rounds; each figure is the median over rounds. Where no cgroup can be made (root, and the CPU
controller) or the machine has too few CPUs, the part is left out and ``skipped`` says why. A setting of the environment
stays: ``GOMP_SPINCOUNT=300000 make bench-busy`` measures GNU's default.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator

from benchmarks.cgroup import cpu_quota
from benchmarks.harness import NIGHTJAR, finish, in_turns, median_ratio, options, python, result_of

PART, WHOLE = 2, 4


def main() -> None:
    given = options(__doc__, rows=(600_000, "synthetic rows"), rounds=(3, "runs of each kind"))
    cpus = sorted(os.sched_getaffinity(0))[:WHOLE]
    skipped: dict[str, str] = {}
    numbers = itertools.count(1)
    with tempfile.TemporaryDirectory(prefix="nightjar-busy-") as folder, cpu_quota(PART, "busy") as procs:
        if procs is None or len(cpus) <= PART:
            skipped["quota"] = "no CPU cgroup can be made here" if procs is None else f"{len(cpus)} CPUs, more wanted"
        world = ["experiment=demo", f"store={folder}", f"data.synthetic.rows={given.rows}"]
        python(*NIGHTJAR, "run", *world, "run=data", "stages=[ingest,plan,partition]")

        def speed(kind: str) -> float:
            """Samples/s of one training."""

            def enter() -> None:
                os.sched_setaffinity(0, cpus[:PART] if kind == "pinned" else cpus)
                if kind == "quota" and procs is not None:
                    procs.write_text(str(os.getpid()))

            run = f"busy{next(numbers)}"
            with busy_loops(len(cpus) if kind == "beside_busy_loops" else 0, cpus):
                python(*NIGHTJAR, "run", *world, f"run={run}", "stages=[ingest,plan,partition,train]", enter=enter)
            found = float(result_of(folder, run)["train"]["samples_per_s"])
            print(f"{kind} {found:,.0f} samples/s", flush=True)
            return found

        kinds = ["alone", "beside_busy_loops", *([] if skipped else ["pinned", "quota"])]
        speeds = in_turns({kind: lambda kind=kind: speed(kind) for kind in kinds}, given.rounds)
    finish(
        "busy",
        None if skipped else median_ratio(speeds["quota"], speeds["pinned"]),
        slowdown=median_ratio(speeds["alone"], speeds["beside_busy_loops"]),
        **{f"samples_per_s_{kind}": statistics.median(found) for kind, found in speeds.items()},
        cpus=len(cpus),
        skipped=skipped,
    )


@contextlib.contextmanager
def busy_loops(count: int, cpus: list[int] | None = None) -> Iterator[None]:
    """``count`` processes that never wait, on ``cpus`` (None: all)."""
    with contextlib.ExitStack() as stack:
        for _ in range(count):
            loop = stack.enter_context(subprocess.Popen([sys.executable, "-c", "while True: pass"]))
            stack.callback(loop.kill)
            if cpus is not None:
                os.sched_setaffinity(loop.pid, cpus)
        yield


if __name__ == "__main__":
    main()
