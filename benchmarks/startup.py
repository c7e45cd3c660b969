"""``make bench-startup``: seconds from a command to its end where little is trained, so that starting is what counts.

Adult from log to figures (``--adult``: the file), the demo's evaluate stage, and the first night of 60,000 rows with
nothing set but the logs. Every part runs twice on ``--cpus`` CPUs: as it is, and with each stage under torchrun in a
process that imports everything itself, as all stages ran before. ``ratio``: the smallest of the quotients of the two;
the seconds are in ``now`` and ``before``, the bars for ``now`` in ``bars``. ``help_seconds``: of ``nightjar --help``,
whose bar is half a second.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from benchmarks.common import finish
from pipeline.core.cpus import available_cpus
from pipeline.store import Store

NOW = "from pipeline.cli import main"
BEFORE = f"from pipeline.launch.local import LocalStages; LocalStages.is_forked = lambda *_: False; {NOW}"
BARS = {"adult": 12.0, "demo_evaluate": 4.0, "night": 15.0}


def main() -> None:
    """Run every part both ways and print a table and the JSON line."""
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--adult", type=Path, default=Path("../shared/data/adult.data"), help="left out if missing")
    options.add_argument("--cpus", type=int, default=2)
    options.add_argument("--parts", nargs="*", choices=[*BARS], default=[*BARS])
    given = options.parse_args()
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[-given.cpus :])
    parts: dict[str, Callable[[str, str], float]] = {
        "adult": lambda program, folder: _adult(program, folder, given.adult),
        "demo_evaluate": _demo,
        "night": _night,
    }
    left_out = [] if given.adult.exists() else ["adult"]
    names = [name for name in given.parts if name not in left_out]
    before = {name: _measured(parts[name], BEFORE) for name in names}
    now = {name: _measured(parts[name], NOW) for name in names}
    for name in names:
        print(f"{name:<14} {before[name]:6.1f} s before, {now[name]:6.1f} s now (bar {BARS[name]:g} s)", flush=True)
    quotients = {name: round(before[name] / now[name], 3) for name in names}
    finish(
        "startup",
        min(quotients.values()),
        now=now,
        before=before,
        quotients=quotients,
        bars={name: BARS[name] for name in names},
        cpus=available_cpus(),
        left_out=left_out,
        help_seconds=_nightjar(NOW, "--help"),
    )


def _measured(part: Callable[[str, str], float], program: str) -> float:
    with tempfile.TemporaryDirectory() as folder:
        return round(part(program, folder), 2)


def _adult(program: str, folder: str, log: Path) -> float:
    return _nightjar(program, "run", "experiment=adult", f"data.path={log}", "run=adult", f"store={folder}")


def _demo(program: str, folder: str) -> float:
    _nightjar(program, "run", "experiment=demo", "run=demo", f"store={folder}")
    return float(Store(folder).read_json("runs/demo/result.json")["stages"]["evaluate"]["seconds"])


def _night(program: str, folder: str) -> float:
    day = "date=2026-01-01"
    return _nightjar(program, "nightly", day, "data=synthetic", "data.synthetic.rows=60000", f"store={folder}")


def _nightjar(program: str, *arguments: str) -> float:
    """Seconds of a ``nightjar`` command, its start included."""
    began = time.perf_counter()
    command = [sys.executable, "-c", f"import sys; {program}; sys.exit(main())", *arguments]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"nightjar {' '.join(arguments)} ended with {done.returncode}:\n{done.stdout}{done.stderr}")
    return time.perf_counter() - began


if __name__ == "__main__":
    main()
