"""A memory limit for a child of a benchmark: a memory cgroup (version 1 or 2) of its own, where one can be made."""

from __future__ import annotations

import os
import time
from pathlib import Path

_MOUNTS = Path("/proc/self/mounts")
_OWN = Path("/proc/self/cgroup")


class MemoryCgroup:
    """A cgroup below our own, gone after ``remove``. OSError where none can be made."""

    def __init__(self, name: str, limit: int) -> None:
        parent, self._version = _own_group()
        self.path = parent / f"{name}-{os.getpid()}"
        self.path.mkdir()
        try:
            self._write({1: "memory.limit_in_bytes", 2: "memory.max"}[self._version], limit)
        except OSError:
            self.path.rmdir()
            raise

    def add(self, pid: int) -> None:
        """Move process ``pid`` into the group; its memory from then on counts."""
        self._write("cgroup.procs", pid)

    def used(self) -> int:
        """Bytes in use, page cache included."""
        return self._read({1: "memory.usage_in_bytes", 2: "memory.current"}[self._version])

    def peak(self) -> int:
        """The most bytes that were in use at a time, page cache included."""
        return self._read({1: "memory.max_usage_in_bytes", 2: "memory.peak"}[self._version])

    def remove(self) -> None:
        """Remove the group, which the last process has left."""
        for _ in range(50):
            try:
                self.path.rmdir()
                return
            except OSError:  # the kernel is still giving the memory back
                time.sleep(0.1)
        self.path.rmdir()

    def _write(self, name: str, value: int) -> None:
        (self.path / name).write_text(f"{value}\n")

    def _read(self, name: str) -> int:
        return int((self.path / name).read_text())


def _own_group() -> tuple[Path, int]:
    """Directory of our own memory cgroup, and the version of its hierarchy."""
    owns = [line.split(":", 2) for line in _OWN.read_text().splitlines()]
    own = {kind: path for _, kinds, path in owns for kind in kinds.split(",")}
    for line in _MOUNTS.read_text().splitlines():
        _, place, kind, options, *_ = line.split()
        if kind == "cgroup" and "memory" in options.split(",") and "memory" in own:
            return Path(place + own["memory"]), 1
        if kind == "cgroup2" and "memory" not in own and "" in own:
            return Path(place + own[""]), 2
    raise OSError("no memory cgroup hierarchy is mounted")
