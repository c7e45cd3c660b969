"""Between the passes: typed blocks on the local disk, so that text is decoded and hashed once."""

from __future__ import annotations

import errno
import io
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import TypeVar, cast

import polars as pl

from pipeline.errors import ArtifactError

T = TypeVar("T")


class Spill:
    """Typed blocks in order, as Arrow IPC one after another in an unbuffered ``file``.

    lz4 takes as long as no compression here (less to write and read back) and a third of the disk.
    """

    def __init__(self, file: io.FileIO, folder: str) -> None:
        self.file = file
        self.folder = folder
        self.sizes: list[int] = []

    def write(self, frame: pl.DataFrame) -> None:
        """Append a block."""
        data = frame.write_ipc(None, compression="lz4").getbuffer()
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

    def read(self) -> Iterator[pl.DataFrame]:
        """Every block in order."""
        self.file.seek(0)
        for size in self.sizes:
            data = bytearray(size)
            filled = 0
            while filled < size:
                filled += self.file.readinto(memoryview(data)[filled:])
            yield pl.read_ipc(io.BytesIO(data))


@contextmanager
def temporary_spill() -> Iterator[Spill]:
    """A spill in a temporary file without a name: gone afterwards, even if the process is killed."""
    with tempfile.TemporaryFile(buffering=0) as file:
        yield Spill(cast(io.FileIO, file), tempfile.gettempdir())


def prefetched(items: Iterator[T]) -> Iterator[T]:
    """``items``, the next one always being made in a background thread."""
    done = object()
    with ThreadPoolExecutor(1) as executor:
        ahead = executor.submit(next, items, done)
        while (item := ahead.result()) is not done:
            ahead = executor.submit(next, items, done)
            yield item  # type: ignore[misc]
