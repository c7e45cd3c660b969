"""Stages with one rank on this machine: forked from a process that has imported what they need."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from pipeline.launch.logs import Tail, account, collect, death
from pipeline.logs import level_arguments

POLL_SECONDS = 0.02


class ForkServer:
    """The process of ``forkserver.py``. ``modules``: what it imports; ``environment``: variables of its ranks."""

    def __init__(self, modules: Sequence[str], environment: Mapping[str, str], directory: Path) -> None:
        self.environment = dict(environment)
        command = [sys.executable, "-m", "pipeline.cli", "fork-server", *level_arguments(), *modules]
        directory.mkdir(parents=True, exist_ok=True)
        with (directory / "fork-server.log").open("wb") as log:
            self._process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log,
                env={**os.environ, **self.environment}, start_new_session=True,
            )  # fmt: skip
        assert self._process.stdin is not None and self._process.stdout is not None
        self._requests, self._answers = self._process.stdin, self._process.stdout
        os.set_blocking(self._answers.fileno(), False)
        self._heard = b""

    def lives(self) -> bool:
        """Whether it can fork."""
        return self._process.poll() is None

    def fork(self, arguments: Sequence[str], stdout: Path, stderr: Path) -> None:
        """Ask for a process that runs ``nightjar worker`` with ``arguments``; ``numbers`` tells how it goes."""
        self._heard = b""
        request = {"arguments": [*arguments], "stdout": str(stdout), "stderr": str(stderr)}
        with contextlib.suppress(BrokenPipeError):  # the server is gone, as ``numbers`` says
            self._requests.write(json.dumps(request).encode() + b"\n")
            self._requests.flush()

    def numbers(self) -> list[int]:
        """What the server has said of the last request: its process, then its exit code.

        Where the server itself was killed, so was the process: the exit code is that.
        """
        gone = not self.lives()  # before the read: what it said until then is read
        with contextlib.suppress(BlockingIOError):
            while not self._answers.closed and (data := os.read(self._answers.fileno(), 1 << 10)):
                self._heard += data
        numbers = [int(line) for line in self._heard.splitlines(keepends=True) if line.endswith(b"\n")]
        return [*numbers, *([0] if not numbers else []), -signal.SIGKILL] if gone and len(numbers) < 2 else numbers

    def close(self) -> None:
        """End it, and with it the process it waits for."""
        self._process.kill()
        self._process.wait()
        for pipe in (self._requests, self._answers):
            with contextlib.suppress(BrokenPipeError):
                pipe.close()


class ForkedJob:
    """A stage's only rank, forked by ``server``. ``directory``: of all logs; ``name``: of the app in it."""

    def __init__(self, server: ForkServer, arguments: Sequence[str], directory: Path, name: str) -> None:
        self.name, self._server, self._directory = name, server, directory
        folder = directory / "nightjar" / name / "0"
        folder.mkdir(parents=True, exist_ok=True)
        self._tail = Tail(folder / "stdout.log")
        server.fork(arguments, folder / "stdout.log", folder / "stderr.log")

    def state(self) -> str:
        """By the rank's exit code."""
        code = self._exit_code()
        return "running" if code is None else "succeeded" if code == 0 else "failed"

    def _exit_code(self) -> int | None:
        return numbers[1] if len(numbers := self._server.numbers()) > 1 else None

    def output(self) -> bytes:
        """What the rank wrote to its standard output since the last call."""
        return self._tail.read()

    def logs(self) -> str:
        """Both streams, and how the rank ended."""
        code = self._exit_code()
        return collect(self._directory, self.name) + ("" if code is None else account(code))

    def death(self, logs: str) -> str:
        """The signal that killed the rank."""
        return death(logs)

    def stop(self, seconds: float) -> None:
        """SIGTERM, and wait up to ``seconds``."""
        self._signal(signal.SIGTERM)
        last = time.monotonic() + seconds
        while self.state() == "running" and time.monotonic() < last:
            time.sleep(POLL_SECONDS)

    def cancel(self) -> None:
        """Kill the rank and what it started."""
        self._signal(signal.SIGKILL)
        while self.state() == "running":
            time.sleep(POLL_SECONDS)

    def _signal(self, number: int) -> None:
        """Send a signal to the rank's processes; one that is not there yet never comes."""
        numbers = self._server.numbers()
        if not numbers:
            self._server.close()
        elif len(numbers) == 1:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(numbers[0], number)
