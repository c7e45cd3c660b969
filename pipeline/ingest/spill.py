"""Between the passes: typed blocks on the local disk, so that text is decoded and hashed once."""

from __future__ import annotations

import errno
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

import polars as pl

from pipeline.errors import ArtifactError

T = TypeVar("T")


class Spill:
    """Typed blocks in order, as uncompressed Arrow IPC files (faster here than lz4) in ``folder``."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.blocks = 0

    def write(self, frame: pl.DataFrame) -> None:
        """Append a block."""
        path = self.folder / f"{self.blocks:08d}.arrow"
        try:
            frame.write_ipc(path)
        except (OSError, pl.exceptions.PolarsError) as error:
            full = getattr(error, "errno", None) in (errno.ENOSPC, errno.EDQUOT)
            if not full and "No space left" not in str(error):
                raise
            raise ArtifactError(
                f"no space left for ingestion's temporary files in {self.folder.parent}",
                hint="free space there, or TMPDIR=<a folder with room for the uncompressed logs>",
            ) from None
        self.blocks += 1

    def read(self) -> Iterator[pl.DataFrame]:
        """Every block in order; each file is removed once it was read."""
        for number in range(self.blocks):
            path = self.folder / f"{number:08d}.arrow"
            with path.open("rb") as source:
                frame = pl.read_ipc(source)
            path.unlink()
            yield frame


@contextmanager
def temporary_spill() -> Iterator[Spill]:
    """A spill in a temporary folder that is gone afterwards, whatever happens."""
    with tempfile.TemporaryDirectory(prefix="nightjar-ingest-") as folder:
        yield Spill(Path(folder))


def prefetched(items: Iterator[T]) -> Iterator[T]:
    """``items``, the next one always being made in a background thread."""
    done = object()
    with ThreadPoolExecutor(1) as executor:
        ahead = executor.submit(next, items, done)
        while (item := ahead.result()) is not done:
            ahead = executor.submit(next, items, done)
            yield item  # type: ignore[misc]
