"""The fork server of a run, itself forked from a process that has imported torch: a test does not pay for it again.

What it does is what ``nightjar fork-server`` does; only its imports are there already. Where the first folder of
``PYTHONPATH`` has a ``sitecustomize.py``, it does that first, as every new Python process does. Tests of how it starts,
and of what a killed launcher leaves behind, start the real one (tests/launch/test_forked.py, test_signals.py).
"""

import contextlib
import multiprocessing
import os
import sys
from collections.abc import Iterator, Mapping
from multiprocessing import forkserver, resource_tracker
from multiprocessing.connection import wait
from multiprocessing.reduction import DupFd
from pathlib import Path
from typing import Any, BinaryIO
from unittest import mock

import tests.embeddings.ranks  # noqa: F401 (it says what the fork server imports)

OPTIONS = ["-m", "pipeline.cli"]  # what ``python`` is given before the arguments of ``nightjar``


class WarmServer:
    """As much of ``subprocess.Popen`` as ``ForkServer`` uses."""

    def __init__(self, command: list[str], environment: Mapping[str, str], log: BinaryIO) -> None:
        assert command[1:3] == OPTIONS, f"not a command of nightjar: {command}"
        (asks, asked), (answers, answered) = os.pipe(), os.pipe()
        context = multiprocessing.get_context("forkserver")
        self._process = context.Process(
            target=_serve,
            args=(
                command[3:],
                dict(environment),
                str(Path.cwd()),
                [_Handed(fd) for fd in (asks, answered, log.fileno())],
            ),
        )
        self._process.start()
        os.close(asks)
        os.close(answered)
        self.stdin, self.stdout = os.fdopen(asked, "wb"), os.fdopen(answers, "rb")

    def poll(self) -> int | None:
        """None while it lives."""
        return self.wait() if wait([self._process.sentinel], 0) else None

    def kill(self) -> None:
        """SIGKILL."""
        self._process.kill()

    def wait(self) -> int:
        """Its exit code, once it has ended."""
        self._process.join()
        return int(self._process.exitcode or 0)


class _Handed:
    """A file descriptor that the started process has, too."""

    def __init__(self, number: int) -> None:
        self.number = number

    def __reduce__(self) -> tuple[Any, ...]:
        return _detached, (DupFd(self.number),)


def _detached(handed: Any) -> int:
    return int(handed.detach())


def _serve(arguments: list[str], environment: dict[str, str], folder: str, handed: list[int]) -> None:
    from pipeline.cli import main

    os.setsid()
    os.chdir(folder)
    for number, file in enumerate(handed):
        os.dup2(file, number)
        os.close(file)
    os.environ.clear()
    os.environ.update(environment)
    sys.argv, sys.orig_argv = ["nightjar", *arguments], [sys.executable, *OPTIONS, *arguments]
    site = Path(environment.get("PYTHONPATH", "").split(os.pathsep)[0], "sitecustomize.py").absolute()
    if "PYTHONPATH" in environment and site.is_file():
        exec(compile(site.read_text(), site, "exec"), {"__name__": "sitecustomize"})
    os._exit(main())


def fork_server() -> str:
    """The address of this process's fork server, which is started where there is none."""
    forkserver.ensure_running()
    return str(forkserver._forkserver._forkserver_address)


def share_fork_server(address: str) -> None:
    """Fork from the server at ``address``, which this process was forked from.

    A child of a fork server would start another one, with all its imports, and not go on with its parent's.
    """
    forkserver._forkserver._forkserver_address = address
    forkserver._forkserver.ensure_running = resource_tracker.ensure_running


@contextlib.contextmanager
def warm_servers() -> Iterator[None]:
    """Runs that this process launches fork their ranks from a ``WarmServer``."""
    with mock.patch("pipeline.launch.forked.start_server", WarmServer):
        yield
