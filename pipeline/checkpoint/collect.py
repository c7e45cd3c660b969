"""What a rank has to write: its owned rows, cut into pieces and packed into files of bounded size."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from torch import Tensor

from pipeline.embeddings import LocalShard

WEIGHT = "weight"


@dataclass(frozen=True)
class Extent:
    """Rows [row, row + rows) and columns [column, column + columns) of ``table``, as the index names them."""

    table: str
    row: int
    rows: int
    column: int
    columns: int

    def key(self, part: str) -> str:
        """Name of this extent's tensor ``part`` in its file."""
        return f"{self.table}/{self.row}/{self.column}/{part}"


@dataclass(frozen=True)
class Piece:
    """An extent and views of its values: ``weight`` [rows, columns] and each optimizer state [rows]."""

    extent: Extent
    tensors: dict[str, Tensor]

    @property
    def bytes(self) -> int:
        """Bytes the piece takes in a file."""
        return sum(tensor.nbytes for tensor in self.tensors.values())


def pieces(shards: Iterable[LocalShard], limit: int) -> list[Piece]:
    """The owned ``shards`` cut by rows so that no piece passes ``limit`` bytes (one row at least). Views, no copies."""
    result = []
    for shard in shards:
        if not shard.owner:
            continue
        tensors = {WEIGHT: shard.weight, **shard.state}
        row_bytes = sum(tensor[0].nbytes for tensor in tensors.values())
        step = max(1, limit // row_bytes)
        for start in range(0, shard.rows, step):
            rows = min(step, shard.rows - start)
            extent = Extent(shard.table, shard.row + start, rows, shard.column, shard.columns)
            result.append(Piece(extent, {name: t[start : start + rows] for name, t in tensors.items()}))
    return result


def pack(parts: list[Piece], limit: int) -> list[list[Piece]]:
    """Neighbouring pieces put together into files of at most ``limit`` bytes."""
    files: list[list[Piece]] = []
    size = limit
    for piece in parts:
        if not files or size + piece.bytes > limit:
            files.append([])
            size = 0
        files[-1].append(piece)
        size += piece.bytes
    return files
