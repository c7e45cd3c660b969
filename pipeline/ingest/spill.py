"""Blocks of bytes in a temporary file: typed rows between the passes, and counts that do not fit into memory."""

from __future__ import annotations

import errno
import tempfile
from collections.abc import Iterator

from pipeline.errors import ArtifactError


class Spill:
    """Blocks in order, in a temporary file without a name: gone with this object, even if the process is killed."""

    def __init__(self) -> None:
        self.file = tempfile.TemporaryFile()  # noqa: SIM115  (closed once nothing refers to it)
        self.ends = [0]

    def __len__(self) -> int:
        return len(self.ends) - 1

    def write(self, block: bytes) -> None:
        """Append a block."""
        try:
            self.file.seek(self.ends[-1])
            self.file.write(block)
            self.file.flush()
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise
            raise ArtifactError(
                f"no space left for ingestion's temporary file in {tempfile.gettempdir()}",
                hint="free space there, or TMPDIR=<a folder with room for the uncompressed logs>",
            ) from None
        self.ends.append(self.ends[-1] + len(block))

    def clear(self) -> None:
        """Forget every block."""
        self.file.truncate(0)
        self.ends = [0]

    def read(self) -> Iterator[bytes]:
        """Every block in order."""
        return map(self.block, range(len(self)))

    def block(self, number: int) -> bytes:
        """One block."""
        self.file.seek(self.ends[number])
        return self.file.read(self.ends[number + 1] - self.ends[number])
