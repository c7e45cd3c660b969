"""What a command that hangs is doing: its processes, and the Python stacks of those that write them on SIGABRT."""

import contextlib
import faulthandler
import os
import signal
import time
from pathlib import Path

import psutil

TAIL = 6000  # characters of a stream that are shown


def write_stacks_on_abort() -> None:
    """Have this process, and Python processes that it starts, write all stacks before SIGABRT ends them."""
    os.environ["PYTHONFAULTHANDLER"] = "1"
    faulthandler.enable()


def end_with_stacks(pid: int) -> str:
    """End the process ``pid`` and what it started; returns each one's command, what it waited for, and its errors."""
    root = psutil.Process(pid)
    every = [root, *root.children(recursive=True)]
    found = [_described(each) for each in every]
    streams = dict.fromkeys(path for each in every if (path := _errors_of(each.pid)) is not None)
    for number in (signal.SIGSTOP, signal.SIGABRT):  # or the first one's end would end the others
        for each in reversed(every):
            _send(each, number)
    for each in reversed(every):  # in turn, or the stacks of those that share a stream would be mixed
        _send(each, signal.SIGCONT)
        _wait_for_end(each)
    psutil.wait_procs(every, timeout=20)
    for each in every:
        _send(each, signal.SIGKILL)
    return "\n".join([*found, *(f"--- {path}\n{path.read_text(errors='replace')[-TAIL:]}" for path in streams)])


def _described(process: psutil.Process) -> str:
    with contextlib.suppress(psutil.NoSuchProcess):
        return f"{process.pid} {process.status()} in {_waits_for(process.pid)}: {' '.join(process.cmdline())}"
    return f"{process.pid} has ended meanwhile"


def _wait_for_end(process: psutil.Process) -> None:
    """Wait until ``process`` has ended, for 20 seconds at most; a stopped parent leaves its children as zombies."""
    with contextlib.suppress(psutil.NoSuchProcess):
        for _ in range(2000):
            if process.status() == psutil.STATUS_ZOMBIE:
                return
            time.sleep(0.01)


def _waits_for(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/wchan").read_text() or "user space"
    except OSError:
        return "?"


def _errors_of(pid: int) -> Path | None:
    """The file that the process writes its standard error to; None where it is none."""
    try:
        path = Path(f"/proc/{pid}/fd/2").resolve()
    except OSError:
        return None
    return path if path.is_file() else None


def _send(process: psutil.Process, number: signal.Signals) -> None:
    with contextlib.suppress(psutil.NoSuchProcess):
        process.send_signal(number)
