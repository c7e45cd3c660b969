"""Log files of launched stages: following one as it grows, and gathering all of them after a failure."""

from __future__ import annotations

import re
import signal
from pathlib import Path

# Bytes kept of one log file, from its end.
MAX_LOG_BYTES = 1 << 20


class LoggedJob:
    """The part of a ``StageJob`` on this machine that reads its log files.

    Args:
        name: The app's name, as TorchX's handle or its last part; its log files lie below ``directory``.
        stdout: The file that ``output`` follows.
    """

    def __init__(self, name: str, directory: Path, stdout: Path) -> None:
        self.name, self._directory, self._stdout, self._offset = name, directory, stdout, 0

    def output(self) -> bytes:
        """Return what was written to standard output since the last call; empty while the file does not exist.

        In bytes, so that carriage returns of a progress line pass through.
        """
        try:
            with self._stdout.open("rb") as source:
                source.seek(self._offset)
                data = source.read()
        except FileNotFoundError:
            return b""
        self._offset += len(data)
        return data

    def logs(self) -> str:
        """Return both streams of every rank, each file after its name."""
        app = self.name.rsplit("/", 1)[-1]
        parts = []
        for path in sorted(self._directory.glob(f"*/{app}/**/*.log")):
            size = path.stat().st_size
            # TorchX's combined.log repeats the other two.
            if path.name == "combined.log" or not size:
                continue
            # Read only the end of a long file, which has the error.
            with path.open("rb") as source:
                source.seek(max(0, size - MAX_LOG_BYTES))
                parts.append(f"==> {path.relative_to(self._directory)} <==\n{source.read().decode(errors='replace')}")
        return "\n".join(parts)

    def death(self, logs: str) -> str:
        """Describe the rank that a signal killed, by the account in ``logs``; "" if that names none."""
        dead = killed_rank(logs)
        if dead is None:
            return ""
        rank, number = dead
        return f"rank {rank} was killed by signal {number}{cause_of(number)}"


def exit_hint(log: str) -> str:
    """Describe how the first rank died, by torchrun's own account in ``log``; "" if it gives none."""
    exit_code = re.search(r"exitcode\s*:\s*(-?\d+)", log)
    if not exit_code:
        return ""
    # As in ``subprocess``, a negative code is a signal: -9 is SIGKILL.
    code = int(exit_code[1])
    if code < 0:
        return f" (killed by signal {-code}{cause_of(-code)})"
    return f" (exit code {code})"


def cause_of(number: int) -> str:
    """Return the most likely reason of a death by signal ``number``, to append to it; "" if there is none."""
    # The kernel's out-of-memory killer sends SIGKILL. Nightjar sends it only to ranks that it means to end.
    if number != signal.SIGKILL:
        return ""
    return ": most often the machine ran out of memory"


def killed_rank(log: str) -> tuple[int, int] | None:
    """Return the rank that a signal killed and its number, according to ``log``; None if there is none."""
    # Ranks that torchrun stopped (SIGTERM) and ranks that failed because a peer was gone are not the cause.
    for rank, code in re.findall(r"rank\s*:\s*(\d+)[^\n]*\n\s*exitcode\s*:\s*(-?\d+)", log):
        if int(code) < 0 and -int(code) != signal.SIGTERM:
            return int(rank), -int(code)
    return None


def never_met(log: str) -> bool:
    """Return whether torchrun gave up waiting for the other hosts, according to ``log``."""
    # Look for the names of its exceptions, because torchrun has no exit code for this.
    return "RendezvousTimeoutError" in log or "RendezvousConnectionError" in log
