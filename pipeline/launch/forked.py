"""Stages on this machine: their ranks are forked from a process that has imported what they need."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import BinaryIO

from pipeline.clock import CLOCK, Clock
from pipeline.errors import LaunchError
from pipeline.launch.forkserver import REFUSED, Request
from pipeline.launch.stage_logs import Tail, account, collect, death
from pipeline.logs import level_arguments

POLL_SECONDS = 0.02


def start_server(command: list[str], environment: Mapping[str, str], log: BinaryIO) -> subprocess.Popen[bytes]:
    """Start ``command`` in a session of its own: pipes at its standard input and output, errors in ``log``."""
    return subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, env=environment, start_new_session=True
    )


class ForkServer:
    """The process of ``forkserver.py``. ``modules``: what it imports; ``environment``: variables while it does.

    ``command``: the internal command that its ranks run.
    """

    def __init__(
        self, modules: Sequence[str], environment: Mapping[str, str], directory: Path, command: str = "worker"
    ) -> None:
        words = [sys.executable, "-m", "pipeline.cli", "fork-server", "--ranks", command, *level_arguments(), *modules]
        directory.mkdir(parents=True, exist_ok=True)
        with (directory / "fork-server.log").open("wb") as log:
            self._process = start_server(words, {**os.environ, **environment}, log)
        assert self._process.stdin is not None and self._process.stdout is not None
        self._requests, self._answers = self._process.stdin, self._process.stdout
        os.set_blocking(self._answers.fileno(), False)
        self._heard, self._ranks = b"", 0

    def lives(self) -> bool:
        """Whether it can fork."""
        return self._process.poll() is None

    def fork(self, request: Request) -> None:
        """Ask for the processes of ``request``; ``processes`` and ``codes`` tell how they go."""
        self._heard, self._ranks = b"", len(request.stderr)
        with contextlib.suppress(BrokenPipeError):  # the server is gone, as ``codes`` says
            self._requests.write(request.line().encode())
            self._requests.flush()

    def processes(self) -> list[int]:
        """The ranks' processes, rank 0 first; empty until all of them are forked.

        LaunchError where the machine refuses one.
        """
        lines = self._lines()[: self._ranks]
        return [int(line) for line in lines] if len(lines) == self._ranks else []

    def codes(self) -> dict[int, int]:
        """Exit codes of the ranks that have ended, in the order of their ends; LaunchError as ``processes``.

        Where the server itself was killed, so were the ranks: the exit code is that.
        """
        gone = not self.lives()  # before the read: what it said until then is read
        ended = [line.split() for line in self._lines()[self._ranks :]]
        codes = {int(rank): int(code) for rank, code in ended}
        if gone:
            codes |= {rank: -signal.SIGKILL for rank in range(self._ranks) if rank not in codes}
        return codes

    def _lines(self) -> list[str]:
        with contextlib.suppress(BlockingIOError):
            while not self._answers.closed and (data := os.read(self._answers.fileno(), 1 << 10)):
                self._heard += data
        lines = [line.decode() for line in self._heard.splitlines(keepends=True) if line.endswith(b"\n")]
        if lines and lines[0].startswith(REFUSED):
            raise LaunchError(
                f"this machine does not start {self._ranks} more processes: {lines[0].removeprefix(REFUSED).strip()}",
                hint="free memory, raise the limit of processes (ulimit -u), or hardware.ranks_per_host=1",
            )
        return lines

    def close(self) -> None:
        """End it, and with it the processes it waits for."""
        self._process.kill()
        self._process.wait()
        for pipe in (self._requests, self._answers):
            with contextlib.suppress(BrokenPipeError):
                pipe.close()


class ForkedJob:
    """A stage's ranks, forked by ``server``. ``directory``: of all logs; ``name``: of the app in it.

    ``ranks``: how many; ``seconds``: how long the others may take to end once one has failed.
    """

    def __init__(
        self,
        server: ForkServer,
        arguments: Sequence[str],
        environment: Mapping[str, str],
        directory: Path,
        name: str,
        ranks: int,
        seconds: float,
        clock: Clock = CLOCK,
    ) -> None:
        self.name, self._server, self._directory, self._ranks, self._seconds = name, server, directory, ranks, seconds
        self._failed_at: float | None = None
        self._clock = clock
        folders = [directory / "nightjar" / name / str(rank) for rank in range(ranks)]
        for folder in folders:
            folder.mkdir(parents=True, exist_ok=True)
        stdout = folders[0] / "stdout.log"
        self._tail = Tail(stdout)
        stderr = [str(folder / "stderr.log") for folder in folders]
        server.fork(Request([*arguments], str(stdout), stderr, dict(environment)))

    def state(self) -> str:
        """By the ranks' exit codes. Where one has failed, the others are told to end, and killed when they do not."""
        codes = self._server.codes()
        if len(codes) == self._ranks:
            return "failed" if any(codes.values()) else "succeeded"
        if any(codes.values()):
            self._end_others()
        return "running"

    def _end_others(self) -> None:
        if self._failed_at is None:
            self._failed_at = self._clock.monotonic()
            self._signal(signal.SIGTERM)
        elif self._clock.monotonic() > self._failed_at + self._seconds:
            self._signal(signal.SIGKILL)

    def output(self) -> bytes:
        """What the ranks wrote to their standard output since the last call."""
        return self._tail.read()

    def logs(self) -> str:
        """All streams, and how ranks that failed ended, the first one first."""
        with contextlib.suppress(LaunchError):
            failures = [account(rank, code) for rank, code in self._server.codes().items() if code]
            return collect(self._directory, self.name) + "".join(failures)
        return ""

    def death(self, logs: str) -> str:
        """The rank that a signal killed."""
        return death(logs)

    def stop(self, seconds: float) -> None:
        """SIGTERM, and wait up to ``seconds``."""
        self._signal(signal.SIGTERM)
        last = self._clock.monotonic() + seconds
        while self.state() == "running" and self._clock.monotonic() < last:
            self._clock.sleep(POLL_SECONDS)

    def cancel(self) -> None:
        """Kill the ranks and what they started."""
        with contextlib.suppress(LaunchError):  # there are none
            self._signal(signal.SIGKILL)
            while self.state() == "running":
                self._clock.sleep(POLL_SECONDS)

    def _signal(self, number: int) -> None:
        """Send a signal to the processes of all ranks that live; those that are not there yet never come."""
        processes, ended = self._server.processes(), self._server.codes()
        if not processes:
            self._server.close()
        for rank, process in enumerate(processes):
            if rank not in ended:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process, number)
