"""Log files of launched stages: following one as it grows, and gathering all of them after a failure."""

from __future__ import annotations

import re
import signal
from pathlib import Path

LONGEST = 1 << 20  # bytes kept of one log file, from its end


class Tail:
    """Reads a growing file byte by byte's worth, so that carriage returns of a progress line pass through."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.offset = 0

    def read(self) -> bytes:
        """What was written since the last call; empty while the file does not exist."""
        try:
            with self.path.open("rb") as source:
                source.seek(self.offset)
                data = source.read()
        except FileNotFoundError:
            return b""
        self.offset += len(data)
        return data


def collect(directory: Path, handle: str) -> str:
    """All log files of the app ``handle`` below ``directory``, each behind its name."""
    app = handle.rsplit("/", 1)[-1]
    parts = []
    for path in sorted(directory.glob(f"*/{app}/**/*.log")):
        if path.name == "combined.log" or not path.stat().st_size:
            continue
        with path.open("rb") as source:
            source.seek(max(0, path.stat().st_size - LONGEST))
            parts.append(f"==> {path.relative_to(directory)} <==\n{source.read().decode(errors='replace')}")
    return "\n".join(parts)


def exit_hint(log: str) -> str:
    """How the first rank died, from torchrun's own account in ``log``; "" where it gives none."""
    exit_code = re.search(r"exitcode\s*:\s*(-?\d+)", log)
    if not exit_code:
        return ""
    code = int(exit_code[1])
    return f" (killed by signal {-code}{cause_of(-code)})" if code < 0 else f" (exit code {code})"


def cause_of(number: int) -> str:
    """The most likely reason of a death by signal ``number``, to be put behind it; "" where there is none."""
    return ": most often the machine ran out of memory" if number == signal.SIGKILL else ""


def killed_rank(log: str) -> tuple[int, int] | None:
    """The rank that a signal killed and the signal's number, from torchrun's account in ``log``; None if there is none.

    Ranks that torchrun itself stopped (SIGTERM) and those that failed because a peer was gone are not the cause.
    """
    for rank, code in re.findall(r"rank\s*:\s*(\d+)[^\n]*\n\s*exitcode\s*:\s*(-?\d+)", log):
        if int(code) < 0 and -int(code) != signal.SIGTERM:
            return int(rank), -int(code)
    return None


def account(rank: int, code: int) -> str:
    """How ``rank`` ended, in torchrun's words: ``code`` is its exit code, negative for a signal."""
    return f"\n  rank      : {rank} (local_rank: {rank})\n  exitcode  : {code}\n"


def death(log: str) -> str:
    """The rank that a signal killed, in words; "" where the account in ``log`` names none."""
    dead = killed_rank(log)
    return f"rank {dead[0]} was killed by signal {dead[1]}{cause_of(dead[1])}" if dead else ""


def never_met(log: str) -> bool:
    """Whether torchrun gave up waiting for the other hosts, by its own account in ``log``."""
    return "RendezvousTimeoutError" in log or "RendezvousConnectionError" in log
