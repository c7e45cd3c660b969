"""Scratch files of the SSD tier: they have no name, so nothing of a run outlives it or is ever read by another.

A file is opened without a name (``O_TMPFILE``; where the file system has none, it is unlinked at once). The kernel
frees it with the process that holds it, however that ends: there is no stale file to find and none to remove.
Its space is taken at the start. A write through a mapping has no error to return, so a disk that filled up under a
sparse file would kill the process (SIGBUS); one that is too small says so before the first step.
"""

from __future__ import annotations

import ctypes
import errno
import os
import shutil
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from pipeline.errors import ConfigError, GuardError

PAGE = 4096
# Bytes of a file being written in order that may wait for the disk.
_BEHIND = 16 << 20
# sync_file_range(2): wait for pages being written, before and after; start writing the others.
_WAIT, _WRITE = 1 | 4, 2
_LIBC = ctypes.CDLL(None, use_errno=True)
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def check_paths(paths: Sequence[str]) -> list[Path]:
    """``hardware.ssd_paths`` as directories; ConfigError for none, and for one that is missing or read-only."""
    if sys.platform != "linux":
        raise ConfigError("tier ssd maps files as only Linux does", hint="plan.tables.<table>=ddr for all tables")
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
    return [Path(path) for path in paths]


class ScratchFile:
    """``size`` bytes, rounded up to pages, on the disk of ``directory``; ``what`` names their use in messages.

    The first ``unused`` bytes (whole pages) take no space: memory lies over them. GuardError where there is no room.
    """

    def __init__(self, directory: Path, size: int, what: str, unused: int = 0) -> None:
        self.directory, self.what = directory, what
        self.size = -(-size // PAGE) * PAGE
        try:
            self._file = tempfile.TemporaryFile(dir=directory, buffering=0)  # noqa: SIM115, as long as the table
        except OSError as error:
            raise _error(error, directory, size, what) from error
        try:
            os.ftruncate(self.fd, self.size)
            if self.size > unused:
                os.posix_fallocate(self.fd, unused, self.size - unused)
        except OSError as error:
            self._file.close()
            raise _error(error, directory, self.size - unused, what) from error

    @property
    def fd(self) -> int:
        """The open file."""
        return self._file.fileno()

    def write(self, place: int, data: memoryview) -> None:
        """Write ``data`` at byte ``place``, and let go of what was written before it: little stays in memory."""
        while data:
            done = os.pwrite(self.fd, data, place)
            place, data = place + done, data[done:]
        behind = max(0, place - _BEHIND)
        _sync(self.fd, behind, place, _WRITE)
        before = max(0, behind - _BEHIND)
        _sync(self.fd, before, behind, _WAIT | _WRITE)
        os.posix_fadvise(self.fd, before, behind - before, os.POSIX_FADV_DONTNEED)

    def check(self) -> None:
        """GuardError where the file is shorter than its mapping: touching what is gone would kill the process."""
        size = os.fstat(self.fd).st_size
        if size < self.size:
            raise GuardError(
                f"the scratch file of {self.what} in {self.directory} was cut from {self.size} to {size} bytes "
                "by another process",
                hint="the same command again goes on from the last checkpoint",
            )

    def close(self) -> None:
        """Close the file; its space is freed once no mapping is left."""
        self._file.close()


def _sync(fd: int, low: int, high: int, how: int) -> None:
    """sync_file_range(2); where it does not work the kernel writes when it sees fit."""
    if high > low:
        _LIBC.sync_file_range(ctypes.c_int(fd), ctypes.c_int64(low), ctypes.c_int64(high - low), ctypes.c_uint(how))


def _error(error: OSError, directory: Path, size: int, what: str) -> Exception:
    if error.errno not in _FULL:
        return ConfigError(
            f"no scratch file can be made in {directory} (hardware.ssd_paths): {error.strerror}",
            hint="hardware.ssd_paths=[/path/on/a/local/ssd]",
        )
    free = shutil.disk_usage(directory).free
    return GuardError(
        f"the disk of {directory} is full: {what} needs {size / 2**30:.3g} GiB, {free / 2**30:.3g} GiB are free",
        hint=f"free space there, or hardware.ssd_paths=[{directory},/another/disk]",
    )
