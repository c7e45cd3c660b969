"""Blocks of bytes in a temporary file: typed rows between the passes, and counts that do not fit into memory."""

from __future__ import annotations

import os
import tempfile
import threading
from collections.abc import Iterator

from pipeline.errors import FullDiskError, is_full


class Spill:
    """Blocks in order, in a temporary file without a name: gone with this object, even if the process is killed."""

    def __init__(self) -> None:
        self.file = tempfile.TemporaryFile(buffering=0)  # noqa: SIM115  (closed once nothing refers to it)
        self.ends = [0]
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self.ends) - 1

    def write(self, block: bytes) -> int:
        """Append a block; returns its number. Several threads may write at a time."""
        with self._lock:
            start, number = self.ends[-1], len(self.ends) - 1
            self.ends.append(start + len(block))
        left, handle = memoryview(block), self.file.fileno()
        try:
            while left:
                written = os.pwrite(handle, left, start)
                left, start = left[written:], start + written
        except OSError as error:
            if not is_full(error):
                raise
            raise FullDiskError(
                f"no space left for ingestion's temporary file in {tempfile.gettempdir()}",
                hint="free space there, or TMPDIR=<a folder with room for the uncompressed logs>",
            ) from None
        return number

    def clear(self) -> None:
        """Forget every block."""
        self.file.truncate(0)
        self.ends = [0]

    def read(self) -> Iterator[bytes]:
        """Every block in order."""
        return map(self.block, range(len(self)))

    def block(self, number: int) -> bytes:
        """One block."""
        start, stop = self.ends[number : number + 2]
        parts = []
        while start < stop and (part := os.pread(self.file.fileno(), stop - start, start)):
            parts.append(part)
            start += len(part)
        return parts[0] if len(parts) == 1 else b"".join(parts)
