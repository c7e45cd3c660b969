"""Spreads the logs of a host's shards, and a checkpoint's copies of their rows, over the disks by their bytes."""

from __future__ import annotations

import heapq
from collections.abc import Iterable
from typing import NamedTuple

from pipeline.records import Plan
from pipeline.records.scratch import LOG_SPARE, log_shape


class DiskUse(NamedTuple):
    """Bytes on a disk: a shard's log, or the ``copy`` of its rows that a checkpoint takes."""

    size: int
    table: str
    rank: int
    copy: bool


def pieces(plan: Plan, tables: Iterable[str], rank: int, spare: float = LOG_SPARE) -> list[DiskUse]:
    """The pieces of ``tables`` of all ranks on the host of ``rank``, which share its disks."""
    host, on_host = rank // plan.ranks_per_host, []
    for name in tables:
        for shard in plan.tables[name].shards:
            if shard.rank // plan.ranks_per_host == host and shard.rows:
                row = plan.tables[name].row_bytes(shard.columns)
                on_host.append(DiskUse(log_shape(shard.rows, row, spare).bytes, name, shard.rank, copy=False))
                on_host.append(DiskUse(shard.rows * row, name, shard.rank, copy=True))
    return on_host


def spread(on_host: Iterable[DiskUse], disks: int) -> dict[DiskUse, int]:
    """The disk of each piece: the largest first, each to the disk with fewest bytes so far.

    A function of its arguments alone, so every rank of the host gets the same answer without communication.
    """
    filled = [(0, disk) for disk in range(disks)]
    placed = {}
    for piece in sorted(on_host, reverse=True):
        size, disk = heapq.heappop(filled)
        placed[piece] = disk
        heapq.heappush(filled, (size + piece.size, disk))
    return placed
