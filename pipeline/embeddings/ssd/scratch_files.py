"""Scratch files of the SSD tier, which have no names, and the disks on which they lie.

A file is opened without a name (``O_TMPFILE``), or unlinked at once where the file system does not support that, so no
other run can read it. The kernel frees it when the process ends, in whatever way, so there are no stale files to
remove. Its space is taken at the start, so a disk that is too small fails before the first step.
"""

from __future__ import annotations

import errno
import fcntl
import heapq
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

from pipeline.core.errors import ConfigError, FullScratchError, GuardError
from pipeline.core.units import GIB
from pipeline.records.plan import Plan
from pipeline.records.scratch import LOG_SPARE, PAGE, log_shape

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def check_paths(paths: Sequence[str]) -> list[Path]:
    """Return ``hardware.ssd_paths`` as directories; ConfigError if there are none, or one is missing or read-only."""
    if sys.platform != "linux":
        raise ConfigError("tier ssd needs Linux", hint="+plan.tables.<table>.tier=ddr for every table")
    if not paths:
        raise ConfigError(
            "the plan has tables on tier ssd, but hardware.ssd_paths names no directory and the store is not local",
            hint="hardware.ssd_paths=[/path/on/a/local/ssd]",
        )
    for path in paths:
        if not (Path(path).is_dir() and os.access(path, os.W_OK | os.X_OK)):
            raise ConfigError(
                f"hardware.ssd_paths names {path!r}, which is not a directory that this user may write to",
                hint="hardware.ssd_paths=[/path/on/a/local/ssd]",
            )
    return list(map(Path, paths))


class ScratchFile:
    """``size`` bytes, rounded up to pages, on the disk of ``directory``; ``what`` names their use in messages.

    With ``direct``, reads and writes take whole pages in page-aligned memory and bypass the page cache, so they use no
    memory but the caller's. If the file system refuses that, ``cached`` says why, and they use the page cache. Raises
    GuardError if there is no room.
    """

    def __init__(self, directory: Path, size: int, what: str, direct: bool = False) -> None:
        self.directory, self.what, self.cached = directory, what, ""
        self.size = -(-size // PAGE) * PAGE
        try:
            self._file = tempfile.TemporaryFile(dir=directory, buffering=0)  # noqa: SIM115, as long as the table
        except OSError as error:
            raise _creation_error(error, directory, size, what) from error
        try:
            os.ftruncate(self.fd, self.size)
            os.posix_fallocate(self.fd, 0, self.size)
        except OSError as error:
            self._file.close()
            raise _creation_error(error, directory, self.size, what) from error
        if direct:
            try:
                fcntl.fcntl(self.fd, fcntl.F_SETFL, fcntl.fcntl(self.fd, fcntl.F_GETFL) | os.O_DIRECT)
            except OSError as error:
                self.cached = error.strerror or str(error)

    @property
    def fd(self) -> int:
        """The file descriptor of the open file."""
        return self._file.fileno()

    def check(self) -> None:
        """Raise GuardError if another process truncated the file."""
        # A read past the end would only report the end of the file, and access to mapped memory would kill the process.
        size = os.fstat(self.fd).st_size
        if size < self.size:
            raise GuardError(
                f"the scratch file of {self.what} in {self.directory} was cut from {self.size} to {size} bytes "
                "by another process",
                hint="the same command continues from the last checkpoint",
            )

    def write(self, data: memoryview, place: int) -> None:
        """Write ``data`` at byte ``place``. GuardError if the disk fails."""
        self._transfer(os.pwrite, data, place, "written")

    def read_into(self, data: memoryview, place: int) -> None:
        """Fill ``data`` from byte ``place`` on. GuardError if the disk fails."""
        self._transfer(lambda fd, rest, at: os.preadv(fd, [rest], at), data, place, "read")

    def _transfer(self, call: Callable[[int, memoryview, int], int], data: memoryview, place: int, done: str) -> None:
        rest, at = data, place
        try:
            while rest:
                count = call(self.fd, rest, at)
                if not count:
                    self.check()
                    raise OSError(errno.EIO, f"the file ends at byte {at:,}")
                rest, at = rest[count:], at + count
        except OSError as error:
            raise self.failed(error, f"{done}: {len(data):,} bytes at byte {place:,}") from error

    def failed(self, error: OSError, task: str) -> GuardError:
        """Return the GuardError for ``error``; ``task`` ends its sentence "the file cannot be ..."."""
        message = f"the scratch file of {self.what} in {self.directory} cannot be {task} ({error.strerror or error}"
        hint = "hardware.ssd_paths=[/another/disk]; the same command continues from the last checkpoint"
        if error.errno in _FULL:
            free = _gib(shutil.disk_usage(self.directory).free)
            return FullScratchError(f"{message}, {free} are free)", hint=f"free space there, or {hint}")
        return GuardError(message + ")", hint=hint)

    def close(self) -> None:
        """Close the file; its space is freed once no mapping is left."""
        self._file.close()


def _creation_error(error: OSError, directory: Path, size: int, what: str) -> Exception:
    if error.errno not in _FULL:
        return ConfigError(
            f"no scratch file can be made in {directory} (hardware.ssd_paths): {error.strerror}",
            hint="hardware.ssd_paths=[/path/on/a/local/ssd]",
        )
    free = shutil.disk_usage(directory).free
    return FullScratchError(
        f"the disk of {directory} is full: {what} needs {_gib(size)}, {_gib(free)} are free",
        hint=f"free space there, or hardware.ssd_paths=[{directory},/another/disk]",
    )


def _gib(size: int) -> str:
    return f"{size / GIB:.3g} GiB"


class DiskUse(NamedTuple):
    """Bytes on a disk: a shard's log, or the ``copy`` of its rows that a checkpoint takes."""

    size: int
    table: str
    rank: int
    copy: bool


def pieces(plan: Plan, tables: Iterable[str], rank: int, spare: float = LOG_SPARE) -> list[DiskUse]:
    """Return the pieces of ``tables`` of all ranks on the host of ``rank``, which share its disks."""
    host = rank // plan.ranks_per_host
    on_host = []
    for name in tables:
        for shard in plan.tables[name].shards:
            if shard.rank // plan.ranks_per_host == host and shard.rows:
                row_bytes = plan.tables[name].row_bytes(shard.columns)
                log_bytes = log_shape(shard.rows, row_bytes, spare).bytes
                on_host.append(DiskUse(log_bytes, name, shard.rank, copy=False))
                on_host.append(DiskUse(shard.rows * row_bytes, name, shard.rank, copy=True))
    return on_host


def spread(on_host: Iterable[DiskUse], disks: int) -> dict[DiskUse, int]:
    """Return the disk of each piece: the largest first, each to the disk with the fewest bytes so far.

    It depends only on its arguments, so every rank of the host gets the same answer without communication.
    """
    filled = [(0, disk) for disk in range(disks)]
    placed = {}
    for piece in sorted(on_host, reverse=True):
        size, disk = heapq.heappop(filled)
        placed[piece] = disk
        heapq.heappush(filled, (size + piece.size, disk))
    return placed
