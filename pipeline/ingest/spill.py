"""Between the passes: typed blocks on the local disk, so that text is decoded and hashed once."""

from __future__ import annotations

import errno
import io
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import accumulate
from typing import cast

from pipeline.errors import ArtifactError


class Spill:
    """Blocks of bytes in order, one after another in an unbuffered ``file``."""

    def __init__(self, file: io.FileIO, folder: str) -> None:
        self.file = file
        self.folder = folder
        self.sizes: list[int] = []

    def write(self, block: bytes) -> None:
        """Append a block."""
        data = memoryview(block)
        try:
            written = 0
            while written < data.nbytes:
                written += self.file.write(data[written:])
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise
            raise ArtifactError(
                f"no space left for ingestion's temporary file in {self.folder}",
                hint="free space there, or TMPDIR=<a folder with room for the uncompressed logs>",
            ) from None
        self.sizes.append(data.nbytes)

    def clear(self) -> None:
        """Forget every block."""
        self.file.seek(0)
        self.file.truncate()
        self.sizes = []

    def read(self) -> Iterator[bytearray]:
        """Every block in order."""
        return (self._at(start, size) for start, size in zip(accumulate(self.sizes, initial=0), self.sizes))  # noqa: B905

    def block(self, number: int) -> bytearray:
        """One block."""
        return self._at(sum(self.sizes[:number]), self.sizes[number])

    def _at(self, start: int, size: int) -> bytearray:
        data, filled = bytearray(size), 0
        while filled < size:
            filled += os.preadv(self.file.fileno(), [memoryview(data)[filled:]], start + filled)
        return data


@contextmanager
def temporary_spill() -> Iterator[Spill]:
    """A spill in a temporary file without a name: gone afterwards, even if the process is killed."""
    with tempfile.TemporaryFile(buffering=0) as file:
        yield Spill(cast(io.FileIO, file), tempfile.gettempdir())
