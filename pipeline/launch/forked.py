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

from pipeline.core.clock import CLOCK, Clock
from pipeline.core.errors import LaunchError
from pipeline.core.logs import level_arguments
from pipeline.launch.forkserver import REFUSED, Request
from pipeline.launch.stage_logs import LoggedJob

POLL_SECONDS = 0.02


def start_server(command: list[str], environment: Mapping[str, str], log: BinaryIO) -> subprocess.Popen[bytes]:
    """Start ``command`` in a new process group: pipes as standard input and output, errors in ``log``."""
    return subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, env=environment, start_new_session=True
    )


class ForkServer:
    """The process of ``forkserver.py``.

    Args:
        modules: The modules that it imports.
        environment: Its variables during the imports.
        command: The internal command that its ranks run.
    """

    def __init__(
        self, modules: Sequence[str], environment: Mapping[str, str], directory: Path, command: str = "worker"
    ) -> None:
        words = [sys.executable, "-m", "pipeline.cli", "fork-server", "--ranks", command, *level_arguments(), *modules]
        # The server's errors go to a file, because a pipe that nobody reads would fill up and block it.
        directory.mkdir(parents=True, exist_ok=True)
        with (directory / "fork-server.log").open("wb") as log:
            self._process = start_server(words, {**os.environ, **environment}, log)
        assert self._process.stdin is not None and self._process.stdout is not None
        self._requests, self._answers = self._process.stdin, self._process.stdout
        os.set_blocking(self._answers.fileno(), False)
        self._received, self._ranks = b"", 0

    def lives(self) -> bool:
        """Return whether the server can fork."""
        return self._process.poll() is None

    def fork(self, request: Request) -> None:
        """Ask for the processes of ``request``; ``processes`` and ``codes`` tell how they go."""
        self._received, self._ranks = b"", len(request.stderr)
        # BrokenPipeError means that the server is gone, which ``codes`` reports.
        with contextlib.suppress(BrokenPipeError):
            self._requests.write(request.line().encode())
            self._requests.flush()

    def processes(self) -> list[int]:
        """Return the ranks' processes, rank 0 first; empty until all are forked.

        Raises:
            LaunchError: The machine refuses.
        """
        lines = self._lines()[: self._ranks]
        # A signal to only some of the ranks would miss those that are forked a moment later.
        if len(lines) < self._ranks:
            return []
        return [int(line) for line in lines]

    def codes(self) -> dict[int, int]:
        """Return exit codes of the ranks that have ended, in the order of their ends; LaunchError as ``processes``."""
        # Check this before the read, so that everything that the server wrote is read.
        gone = not self.lives()
        codes: dict[int, int] = {}
        for line in self._lines()[self._ranks :]:
            rank, code = line.split()
            codes[int(rank)] = int(code)
        # If the server was killed, so were the ranks. Those that had ended before keep their codes.
        if gone:
            for other in range(self._ranks):
                codes.setdefault(other, -signal.SIGKILL)
        return codes

    def _lines(self) -> list[str]:
        # The pipe is non-blocking, because the launcher has output to pass on and deadlines to keep.
        with contextlib.suppress(BlockingIOError):
            while not self._answers.closed and (data := os.read(self._answers.fileno(), 1 << 10)):
                self._received += data
        lines = [line.decode() for line in self._received.splitlines(keepends=True) if line.endswith(b"\n")]
        if lines and lines[0].startswith(REFUSED):
            raise LaunchError(
                f"this machine does not start {self._ranks} more processes: {lines[0].removeprefix(REFUSED).strip()}",
                hint="free memory, raise the limit of processes (ulimit -u), or hardware.ranks_per_host=1",
            )
        return lines

    def close(self) -> None:
        """End it, and with it the processes it waits for."""
        # The kernel kills the ranks with it (``end_with_parent``).
        self._process.kill()
        self._process.wait()
        for pipe in (self._requests, self._answers):
            with contextlib.suppress(BrokenPipeError):
                pipe.close()


class ForkedJob(LoggedJob):
    """A stage's ranks, forked by ``server``.

    Args:
        directory: The folder of all logs.
        name: The app's folder in it.
        seconds: How long the other ranks may take to end once one has failed.
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
        # Use the folders of TorchX's local scheduler, so that ``LoggedJob`` finds the logs of both.
        folders = [directory / "nightjar" / name / str(rank) for rank in range(ranks)]
        for folder in folders:
            folder.mkdir(parents=True, exist_ok=True)
        stdout = folders[0] / "stdout.log"
        super().__init__(name, directory, stdout)
        self._server, self._ranks, self._seconds, self._clock = server, ranks, seconds, clock
        self._failed_at: float | None = None
        stderr = [str(folder / "stderr.log") for folder in folders]
        server.fork(Request([*arguments], str(stdout), stderr, dict(environment)))

    def state(self) -> str:
        """Return the state by the ranks' exit codes. Where one has failed, the others are ended."""
        codes = self._server.codes()
        failed = any(codes.values())
        if len(codes) == self._ranks:
            return "failed" if failed else "succeeded"
        # End the other ranks, too: they would wait minutes in their next collective until it times out.
        if failed:
            if self._failed_at is None:
                self._failed_at = self._clock.monotonic()
                self._signal(signal.SIGTERM)
            elif self._clock.monotonic() > self._failed_at + self._seconds:
                self._signal(signal.SIGKILL)
        return "running"

    def logs(self) -> str:
        """Return all streams, and how ranks that failed ended, the first one first."""
        with contextlib.suppress(LaunchError):
            text = ""
            for rank, code in self._server.codes().items():
                # Use torchrun's wording, which ``stage_logs`` parses.
                if code:
                    text += f"\n  rank      : {rank} (local_rank: {rank})\n  exitcode  : {code}\n"
            return super().logs() + text
        return ""

    def stop(self, seconds: float) -> None:
        """Send SIGTERM, and wait up to ``seconds``."""
        self._signal(signal.SIGTERM)
        # Poll ``state``, which also ends ranks whose peers have failed.
        last = self._clock.monotonic() + seconds
        while self.state() == "running" and self._clock.monotonic() < last:
            self._clock.sleep(POLL_SECONDS)

    def cancel(self) -> None:
        """Kill the ranks and what they started."""
        # LaunchError means that there are no ranks.
        with contextlib.suppress(LaunchError):
            self._signal(signal.SIGKILL)
            while self.state() == "running":
                self._clock.sleep(POLL_SECONDS)

    def _signal(self, number: int) -> None:
        processes, ended = self._server.processes(), self._server.codes()
        # Ranks that have not started yet never will.
        if not processes:
            self._server.close()
        for rank, process in enumerate(processes):
            # Signal the rank's whole process group, but skip ranks that have ended: their numbers may be reused by now.
            if rank not in ended:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process, number)
