"""Files of a log as sources of blocks, whole or in parts."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from fsspec import AbstractFileSystem

from pipeline.config import DataConfig
from pipeline.ingest.formats import FileFormat, LogFile, format_named
from pipeline.ingest.hive import PartitionBlock, values_of
from pipeline.ingest.rawfiles import COMPRESSED, Files
from pipeline.ingest.sources import Block, Source, decompressed, readable
from pipeline.ingest.spec import DataSpec
from pipeline.units import MIB

BLOCK_UNIT = MIB  # of ingest.block_mib
PART_BLOCKS = 4  # blocks of a part that another process reads


@dataclass(frozen=True)
class FileSource(Source):
    """A file, or part of one, on any filesystem, at ``path``."""

    fs: AbstractFileSystem
    path: str
    file: LogFile

    @property
    def format(self) -> FileFormat:
        """How its bytes are read."""
        return format_named(self.file.data.format)

    @property
    def is_later(self) -> bool:  # type: ignore[override]
        """Whether another part comes before it."""
        return self.file.start > 0

    @property
    def lines_before(self) -> int:  # type: ignore[override]
        """The header, where there is one."""
        return self.format.header_lines(self.file.data)

    def numbered(self, before: int) -> FileSource:
        """The same part, with ``before`` lines of its file before it."""
        return replace(self, file=replace(self.file, first_line=before + 1)) if self.is_later else self

    def parts(self) -> list[FileSource]:
        """Ranges of a few blocks of lines, found by a look at where they meet; the file, if not plain text."""
        if not self.format.by_line or self.path.endswith(COMPRESSED):
            return [self]
        size = PART_BLOCKS * self.file.block_bytes
        cuts = [0]
        with readable(self.file.label), self.fs.open(self.path, "rb") as source:
            for at in range(size, self.fs.size(self.path), size):
                if (cut := self.format.cut(source, max(at, cuts[-1]), self.file)) is not None:
                    cuts.append(cut)
        ranges = zip(cuts, [*cuts[1:], None], strict=True)
        return [replace(self, file=replace(self.file, start=start, stop=stop)) for start, stop in ranges]

    def blocks(self) -> Iterator[Block]:
        """The rows in blocks of about ``block_bytes`` of uncompressed data; DataError where the file is damaged."""
        for block, _ in self.placed_blocks():
            yield block

    def placed_blocks(self) -> Iterator[tuple[Block, int]]:
        """As ``blocks``, each block with where in the file (bytes on disk) its reader has come to."""
        path = self.path if self.format.by_line else ""  # files of columns compress their own pages
        with (
            readable(self.file.label),
            self.fs.open(self.path, "rb") as source,
            decompressed(source, path) as stream,
        ):
            for block in self.format.blocks(stream, self.file):
                values, columns = self.file.values, list(self.file.spec.columns)
                yield (PartitionBlock(block=block, values=values, columns=columns) if values else block), source.tell()


def file_sources(data: DataConfig, spec: DataSpec, files: Files, block_mib: int) -> list[FileSource]:
    """Every file of a log, in order, to be read in blocks of ``block_mib``."""
    size = block_mib * BLOCK_UNIT
    named = zip(files.paths, files.labels, files.places, strict=True)
    return [
        FileSource(
            files.fs,
            path,
            LogFile(
                label=label, data=data, spec=spec, block_bytes=size, place=place, values=values_of(path, spec.columns)
            ),
        )
        for path, label, place in named
    ]
