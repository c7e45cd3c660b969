"""Between the passes: typed blocks on the local disk, so that text is decoded and hashed once."""

from __future__ import annotations

import errno
import io
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
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

    def read(self) -> Iterator[bytearray]:
        """Every block in order."""
        self.file.seek(0)
        for size in self.sizes:
            data = bytearray(size)
            filled = 0
            while filled < size:
                filled += self.file.readinto(memoryview(data)[filled:])
            yield data


@contextmanager
def temporary_spill() -> Iterator[Spill]:
    """A spill in a temporary file without a name: gone afterwards, even if the process is killed."""
    with tempfile.TemporaryFile(buffering=0) as file:
        yield Spill(cast(io.FileIO, file), tempfile.gettempdir())
