"""What a file format is: how the bytes of one file of a log become blocks of rows."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import BinaryIO

from pipeline.config import DataConfig
from pipeline.errors import DataError
from pipeline.ingest.sources import Block, counted_lines
from pipeline.ingest.spec import DataSpec


@dataclass(frozen=True, kw_only=True)
class LogFile:
    """One file of a log, or its lines from byte ``start`` to ``stop``, the first of them ``first_line``.

    ``first_line`` is 1 until the lines before it are counted. ``label``: the file in messages. ``place``: as of
    ``Files``. ``block_bytes``: uncompressed bytes of a block. ``values``: of columns that its path tells.
    """

    label: str
    data: DataConfig
    spec: DataSpec
    block_bytes: int
    start: int = 0
    stop: int | None = None
    first_line: int = 1
    place: str = ""
    values: dict[str, str | None] = field(default_factory=dict)

    @property
    def own(self) -> DataSpec:
        """``spec`` with those columns alone that are in the file itself."""
        if not self.values:
            return self.spec
        columns = {name: option for name, option in self.spec.columns.items() if name not in self.values}
        return replace(self.spec, columns=columns)


class FileFormat(ABC):
    """A choice of ``data.format`` that names files. ``by_line``: whether each row is a line of text.

    Files of lines may be compressed, are cut into parts at the ends of lines, and have their lines numbered.
    """

    name: str
    by_line: bool

    @abstractmethod
    def blocks(self, stream: BinaryIO, file: LogFile) -> Iterator[Block]:
        """The rows of ``file``, whose uncompressed bytes are ``stream``, in order.

        Raises DataError where the file is of another kind or lacks columns of ``file.spec``.
        """

    def cut(self, source: BinaryIO, at: int, file: LogFile) -> int | None:
        """A place of plain text from ``at`` on where a part of ``file`` may end; None where none is near.

        Behind a line that is not blank, so only the file's own end can have blank lines that are no rows.
        """
        source.seek(at)
        line_end = _LINE_END.search(source.read(SEEN))
        return at + line_end.end() if line_end else None

    def header_lines(self, data: DataConfig) -> int:
        """Lines before the first row."""
        return 0

    def rows(self, stream: BinaryIO) -> int:
        """Rows of a file whose rows are no lines, from what it says of itself."""
        raise NotImplementedError(f"rows of {self.name} are lines")

    def rows_until(self, stream: BinaryIO, data: DataConfig, enough: int) -> int:
        """Rows as they were delivered, those that will not parse included; of text, counted until there are enough."""
        if not self.by_line:
            return self.rows(stream)
        header = self.header_lines(data)
        return max(counted_lines(stream, enough + header) - header, 0)


SEEN = 1 << 20  # bytes in which a line must end where parts meet
_LINE_END = re.compile(rb"[^\r\n]\r*\n")
_UNPACK = "unpack it, or pack it as .gz, .zst, .bz2 or .xz"
# First bytes of what is no text: what it is, and what to do.
_NO_TEXT = {
    b"PAR1": ("a Parquet file", "data.format=parquet"),
    b"ORC": ("an ORC file", "data.format=orc"),
    b"Obj\x01": ("an Avro file", "data.format=avro"),
    b"\x1f\x8b": ("compressed by gzip", "a name that ends with .gz"),
    b"\x28\xb5\x2f\xfd": ("compressed by Zstandard", "a name that ends with .zst"),
    b"PK\x03\x04": ("a ZIP archive", _UNPACK),
    b"BZh91AY&": ("compressed by bzip2", "a name that ends with .bz2"),
    b"\xfd7zXZ\x00": ("compressed by xz", "a name that ends with .xz"),
    b"\xff\xfe": ("text in UTF-16", "write it in UTF-8"),
    b"\xfe\xff": ("text in UTF-16", "write it in UTF-8"),
}


def require_text(start: bytes, label: str) -> None:
    """Raise DataError where a file that begins with ``start`` is of a kind that is no text."""
    for mark, (what, hint) in _NO_TEXT.items():
        if start.startswith(mark):
            raise DataError(f"{label} is {what}, expected text", hint=hint)
