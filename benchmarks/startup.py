"""``make bench-startup``: seconds from a command to its end where little is trained, so that starting is what counts.

Adult from log to figures (``--adult``: the file), the demo's evaluate stage, and the first night of 60,000 rows with
nothing set but the logs. Every part runs twice on two CPUs: as it is, and with each stage under torchrun in a process
that imports everything itself, as all stages ran before. ``ratio``: the smallest of the quotients of the two; the
seconds are in ``now`` and ``before``. ``help_seconds``: of ``nightjar --help``, whose bar is half a second.
"""

from __future__ import annotations

import os
import tempfile

from benchmarks.harness import ADULT, finish, options, python, result_of, seconds_of

NOW = "from pipeline.cli import main"
BEFORE = f"from pipeline.launch.local import LocalStages; LocalStages.is_forked = lambda *_: False; {NOW}"
PARTS = ["adult", "demo_evaluate", "night"]


def main() -> None:
    given = options(__doc__, adult=(ADULT, "left out if missing"), parts=(PARTS, None, {"choices": PARTS}))
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[-2:])
    commands = {
        "adult": ["run", "experiment=adult", f"data.path={given.adult}", "run=adult"],
        "demo_evaluate": ["run", "experiment=demo", "run=demo"],
        "night": ["nightly", "date=2026-01-01", "data=synthetic", "data.synthetic.rows=60000"],
    }
    names = [name for name in given.parts if name != "adult" or given.adult.exists()]
    before, now = ({name: _seconds(program, name, commands[name]) for name in names} for program in (BEFORE, NOW))
    finish(
        "startup",
        min(before[name] / now[name] for name in names),
        now=now,
        before=before,
        help_seconds=_nightjar(NOW, "--help"),
    )


def _seconds(program: str, name: str, command: list[str]) -> float:
    with tempfile.TemporaryDirectory() as folder:
        seconds = _nightjar(program, *command, f"store={folder}")
        if name == "demo_evaluate":
            seconds = float(result_of(folder, "demo")["stages"]["evaluate"]["seconds"])
    return round(seconds, 2)


def _nightjar(program: str, *arguments: str) -> float:
    """Seconds of a ``nightjar`` command, its start included."""
    return seconds_of(lambda: python("-c", f"import sys; {program}; sys.exit(main())", *arguments))


if __name__ == "__main__":
    main()
