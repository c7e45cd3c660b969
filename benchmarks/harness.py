"""What the benchmarks share: options, runs in this process and in others, timing in turns, and the JSON line."""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import logging
import multiprocessing
import os
import socket
import statistics
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from pipeline.config import Config
from pipeline.config.compose import compose
from pipeline.specs.stage import StageIO
from pipeline.stages.execution import run_stage
from pipeline.stages.steps import steps
from pipeline.store import Artifact, Store

ADULT = Path("../shared/data/adult.data")
NIGHTJAR = ("-m", "pipeline.cli")
SET: tuple[list[str], str] = ([], "overrides of every run's configuration")
# What most studies of quality have in common, so that runs are comparable and say little.
QUIET = ["train.threads_per_rank=1", "train.log_every_steps=1000", "train.guard.collapse=false"]
PLAIN = [*QUIET, "train.precision=fp32"]


def require_built(plugins: Path = Path("pipeline/plugins")) -> None:
    """End where a compiled library is older than a source beside it: its figures would be those of other code."""
    for library in sorted(plugins.glob("*/native/*.so")):
        built = library.stat().st_mtime
        for source in sorted(library.parent.glob("*.[ch]")):
            if source.stat().st_mtime > built:
                sys.exit(f"{library.name} is older than {source}; make install builds it anew")


def options(doc: str | None, words: str = "", **table: Any) -> argparse.Namespace:
    """Parse the command line, once the compiled kernels are known to be those of their sources.

    Args:
        doc: The benchmark's docstring.
        words: Name of the words without a dash, if there may be any: overrides.
        table: Of each option its default, or (default, help), or (default, help, more arguments of argparse). False is
            a switch, a list takes several values.
    """
    parser = argparse.ArgumentParser(
        description=doc, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    for name, entry in table.items():
        default, text, more = (*entry, {})[:3] if isinstance(entry, tuple) else (entry, None, {})
        how: dict[str, Any] = {"default": default, "help": text}
        if default is False:
            how["action"] = "store_true"
        elif isinstance(default, list):
            how |= {"nargs": "*", "type": type(default[0]) if default else str}
        elif default is not None:
            how["type"] = type(default)
        parser.add_argument(f"--{name.replace('_', '-')}", **(how | more))
    if words:
        parser.add_argument(words, nargs="*", help="overrides of every run's configuration")
    given = parser.parse_args()
    require_built()
    return given


def words(text: str) -> list[str]:
    """Overrides, written as on a command line."""
    return text.split()


def finish(bench: str, ratio: float | None, *, digits: int = 4, **figures: Any) -> None:
    """Print the result line: ``bench``, ``ratio`` (what it is judged by; None: not measured), ``figures`` by name."""
    rounded = {name: round(value, 6) if isinstance(value, float) else value for name, value in figures.items()}
    print(json.dumps({"bench": bench, "ratio": None if ratio is None else round(ratio, digits), **rounded}), flush=True)


def show(title: str, figures: Mapping[str, Any], form: str = ".5f") -> None:
    """Print a line of ``figures``."""
    shown = (
        f"{name} {value:{form}}" if isinstance(value, float) else f"{name} {value}" for name, value in figures.items()
    )
    print(f"{title}: {', '.join(shown)}", flush=True)


def silent() -> None:
    """Have this process say nothing but errors."""
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)


def run(overrides: Sequence[str], cpu: dict[str, float] | None = None) -> dict[str, Artifact]:
    """The artifacts by stage of a run with these ``overrides``; says nothing but errors."""
    silent()
    return run_config(compose(list(overrides)), cpu)


def run_config(config: Config, cpu: dict[str, float] | None = None, last: str | None = None) -> dict[str, Artifact]:
    """The artifacts by stage of a run of ``config`` up to ``last``; stages whose artifact exists are skipped.

    ``cpu`` receives the CPU seconds of this process by stage.
    """
    store, artifacts = Store(config.store), {}
    for step in steps(config, store, last=last) if last else steps(config, store):
        began = time.process_time()
        if store.find(step.path) is None:
            run_stage(step, config, store, StageIO())
        if cpu is not None:
            cpu[step.name] = time.process_time() - began
        artifacts[step.name] = store.get(step.path, step.name)
    return artifacts


def test_ne(overrides: Sequence[str]) -> float:
    """NE on the test rows of a run in this process."""
    return float(run(overrides)["evaluate"].summary["ne"])


def result(overrides: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Figures of a run in this process: ``eval`` on the test rows, ``train`` of its training."""
    made = run(overrides)
    return {"eval": made["evaluate"].summary, "train": made["train"].summary["train"]}


def apart(overrides: Sequence[str]) -> dict[str, dict[str, Any]]:
    """``result`` of a run in a process of its own: threads and allocator of the one before do not count."""
    with processes(1) as pool:
        return pool.submit(result, overrides).result()


def processes(jobs: int, runs_each: int | None = None) -> ProcessPoolExecutor:
    """``jobs`` fresh processes at a time, each of which ends after ``runs_each`` calls (None: never)."""
    return ProcessPoolExecutor(jobs, mp_context=multiprocessing.get_context("spawn"), max_tasks_per_child=runs_each)


def nightjar(*arguments: str, allowed: Sequence[int] = (0,)) -> int:
    """Do a command in this process, silently; its exit code, which ends the benchmark unless it is ``allowed``."""
    from pipeline import cli

    output = io.StringIO()
    with contextlib.redirect_stdout(output), contextlib.redirect_stderr(output):
        code = cli.main(list(arguments))
    if code not in allowed:
        raise SystemExit(f"nightjar {' '.join(arguments[:2])} ended with {code}:\n{output.getvalue()}")
    return code


def result_of(store: str | Path, run: str) -> dict[str, Any]:
    """``result.json`` of a run."""
    result: dict[str, Any] = json.loads(Path(store, f"runs/{run}/result.json").read_text())
    return result


def python(*arguments: str, enter: Callable[[], object] | None = None, **environment: str) -> str:
    """What a Python with these ``arguments`` prints; where it fails the benchmark ends with its message."""
    command = [sys.executable, *arguments]
    env = os.environ | environment
    done = subprocess.run(command, preexec_fn=enter, env=env, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{' '.join(arguments)} ended with {done.returncode}:\n{done.stdout}{done.stderr}")
    return done.stdout


def child(module: str, *arguments: str, **environment: str) -> dict[str, Any]:
    """The JSON object that ``python -m module`` prints last."""
    found: dict[str, Any] = json.loads(python("-m", module, *arguments, **environment).splitlines()[-1])
    return found


def peak_bytes() -> int:
    """Bytes: the largest resident set of this process since it was started."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM"))
    return int(line.split()[1]) * 1024


class Worker:
    """A process that answers each JSON object that it is asked with another, a line each."""

    def __init__(self, command: Sequence[str]) -> None:
        pipe = subprocess.PIPE
        self.process = subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, bufsize=1)

    def send(self, **what: Any) -> None:
        """Ask; a process that has died says nothing."""
        assert self.process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.write(json.dumps(what) + "\n")
            self.process.stdin.flush()

    def answer(self) -> dict[str, Any] | None:
        """The next answer; None of a process that has died."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith("{"):  # gloo greets on standard output
                found: dict[str, Any] = json.loads(line)
                return found
        return None

    def hang_up(self) -> None:
        """Have the process end, without waiting for it."""
        assert self.process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.close()

    def close(self, seconds: float) -> None:
        """Hang up, and kill the process if it has not ended after ``seconds``."""
        self.hang_up()
        try:
            self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


def serve(answer: Callable[..., dict[str, Any]]) -> None:
    """What a worker runs: ``answer(**question)`` for every line of standard input, until the parent hangs up."""
    for line in sys.stdin:
        print(json.dumps(answer(**json.loads(line))), flush=True)


def be_rank(rank: int, world: int, port: int) -> None:
    """Say in the environment what torchrun says to a rank of one host."""
    variables = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world, "MASTER_PORT": port}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", **{name: str(value) for name, value in variables.items()}}


def free_port() -> int:
    """A port that nobody listens on."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


def seconds_of(work: Callable[[], object]) -> float:
    """Seconds that ``work`` takes."""
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def in_turns(works: Mapping[str, Callable[[], Any]], rounds: int, warm_up: int = 0) -> dict[str, list[Any]]:
    """What each of ``works`` returns, round by round and in turn, so that other work on the machine meets all alike."""
    found: dict[str, list[Any]] = {name: [] for name in works}
    for number in range(-warm_up, rounds):
        for name, work in works.items():
            value = work()
            if number >= 0:
                found[name].append(value)
    return found


def median_ratio(above: Iterable[float], below: Iterable[float]) -> float:
    """The median over rounds of the quotients."""
    return statistics.median(a / b for a, b in zip(above, below, strict=True))


def means(records: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Means over ``records``, by name."""
    return {name: float(np.mean([each[name] for each in records])) for name in records[0]}


def standard_error(values: Sequence[float]) -> float | None:
    """Of the mean; None of one value."""
    return float(np.std(values, ddof=1) / len(values) ** 0.5) if len(values) > 1 else None


def p_lower(values: Sequence[float], base: Sequence[float]) -> float:
    """How likely ``values`` are as low against ``base`` by chance: a one-sided paired t-test."""
    from scipy.stats import ttest_rel

    return float(ttest_rel(values, base, alternative="less").pvalue)
