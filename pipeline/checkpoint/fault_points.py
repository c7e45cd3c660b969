"""The named points of a run with checkpoints, which ``on_point`` hooks get on the rank that reaches them."""

from __future__ import annotations

from collections.abc import Callable
from enum import StrEnum


class FaultPoint(StrEnum):
    """A point that a rank reaches. Tests prove that a death at any of them loses no committed checkpoint."""

    BATCH = "batch"  # training loop: a step is about to be taken
    STAGE = "stage"  # a table's rows were copied into host memory, training stands still
    ENCODE = "encode"  # a chunk is about to be quantised and compressed
    CHUNK = "chunk"  # a chunk's bytes were handed over, its file is still open
    DENSE = "dense"  # rank 0: the dense parameters' bytes were handed over, their file is still open
    WRITTEN = "written"  # this rank's files are complete, others' may not be
    BEFORE_COMMIT = "before commit"  # rank 0: all files of all ranks lie there, the manifest does not
    AFTER_COMMIT = "after commit"  # rank 0: the manifest is written, nobody else knows yet
    PRUNE = "prune"  # rank 0: a checkpoint to remove has lost its manifest, its files lie there
    COMPACT = "compact"  # compaction: a chunk's bytes were handed over, its file is still open
    BEFORE_SWAP = "before swap"  # compaction: the new files lie beside the old ones, the manifest names the old ones
    AFTER_SWAP = "after swap"  # compaction: the manifest names the new files, the old ones are still there
    RESTORE = "restore"  # a block of rows was put into the tables


OnPoint = Callable[[FaultPoint], None]


def ignore(point: FaultPoint) -> None:
    """Do nothing at ``point``."""
