"""Partitions as Hive writes them: a folder ``name=value`` says what column ``name`` holds in all files below it."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from urllib.parse import unquote

import polars as pl

from pipeline.ingest.sources import Block, RawBlock

_MISSING = "__HIVE_DEFAULT_PARTITION__"  # what stands for no value


def partition_values(path: str) -> dict[str, str | None]:
    """The values of the partitions that ``path`` lies in, by column; None where missing."""
    folders = (folder.partition("=") for folder in path.split("/")[:-1])
    return {unquote(name): None if value == _MISSING else unquote(value) for name, mark, value in folders if mark}


def values_of(path: str, columns: Collection[str]) -> dict[str, str | None]:
    """Those of ``columns`` that the path of a file tells, with their values."""
    return {name: value for name, value in partition_values(path).items() if name in columns}


@dataclass(frozen=True, kw_only=True)
class PartitionBlock:
    """Rows of a file of a partition: ``block`` without the columns that the path tells, ``values``."""

    block: Block
    values: dict[str, str | None]
    columns: Sequence[str]

    @property
    def file(self) -> str:
        """The file in messages."""
        return self.block.file

    def read(self) -> RawBlock:
        """The rows, with the partition's columns."""
        raw = self.block.read()
        told = [pl.lit(value, pl.String).alias(name) for name, value in self.values.items()]
        return raw.with_frame(raw.frame.with_columns(told).select(self.columns))
