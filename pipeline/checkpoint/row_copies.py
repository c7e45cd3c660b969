"""Copies rows into host memory at a step boundary, while training stops for milliseconds.

Values are checked as they are copied, while they are in the cache: a state that is not finite is never written. The
copy is consistent (no batch is in flight); encoding and writing go on while training continues (Check-N-Run, NSDI'22,
section 3.1). The buffers are reused from copy to copy.
"""

from __future__ import annotations

import math
import threading
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pipeline.checkpoint.chunks import RowBlock
from pipeline.checkpoint.fault_points import FaultPoint, OnPoint, ignore
from pipeline.core.errors import GuardError
from pipeline.embeddings.row_access import LocalShard, RowAccess
from pipeline.embeddings.touched import TouchedRows, shard_key

# The number of values that are copied and checked at a time, so that they stay in the second-level cache.
_VALUES_AT_ONCE = 1 << 18


@dataclass
class CopyBuffers:
    """Growing host memory that copies are cut from, one after the other.

    Rows of tables on SSD are copied to a disk instead (``LocalShard.scratch``).
    """

    # The memory is not page-locked: it is as large as the tables, and locked pages are lost to everything else on the
    # host.
    memory: Tensor = field(default_factory=lambda: torch.empty(0))
    used: int = 0
    _filling: threading.Thread | None = None

    def prepare(self, values: int) -> None:
        """Allocate room for ``values`` float32 in the background."""
        # A thread touches the memory before the first copy does, since touching fresh memory takes four times as long
        # as a copy.
        self.memory = torch.empty(values)
        self._filling = threading.Thread(target=self.memory.zero_, name="nightjar-buffers", daemon=True)
        self._filling.start()

    def reserve(self, values: int) -> None:
        """Start over with room for ``values`` float32; earlier cuts are overwritten from now on."""
        if self._filling is not None:
            self._filling.join()
            self._filling = None
        self.used = 0
        if values > self.memory.numel():
            self.memory = torch.empty(values)

    def cut(self, count: int) -> Tensor:
        """Return the next ``count`` float32 values."""
        part = self.memory[self.used : self.used + count]
        self.used += count
        return part


def full_values(access: RowAccess) -> int:
    """Count the float32 values that a copy of all rows of this rank takes in memory."""
    values = 0
    for shard in access.local_shards():
        if shard.owner and shard.scratch() is None:
            values += _count_values(shard, shard.rows)
    return values


def full_bytes(access: RowAccess) -> int:
    """Return the bytes of all tables in float32 on all ranks together, with the optimizer's state."""
    return sum(t.rows * (4 * t.dim + access.rules.of(t.name).state_bytes(t.dim)) for t in access.tables.values())


@torch.no_grad()
def copy_rows(
    access: RowAccess, touched: TouchedRows | None, buffers: CopyBuffers, on_point: OnPoint = ignore
) -> list[RowBlock]:
    """Copy this rank's owned rows: those that ``touched`` marks, or all (None). Call ``touched.unite`` before.

    Shards without such rows have no block.

    Raises:
        GuardError: A weight or an optimizer state is not finite; names table and row.
    """
    # Compute all sizes before the first copy, so that one reservation serves all of them.
    picked: list[tuple[LocalShard, Tensor | None, int]] = []
    in_memory = 0
    for shard in access.local_shards():
        if not shard.owner:
            continue
        rows = None
        count = shard.rows
        if touched is not None:
            rows = touched.mask(shard_key(shard)).nonzero().squeeze(1)
            count = len(rows)
        # A shard that was not trained since the baseline has nothing to encode, and no sample to choose a coding by.
        if not count:
            continue
        picked.append((shard, rows, count))
        if shard.scratch() is None:
            in_memory += _count_values(shard, count)
    buffers.reserve(in_memory)
    blocks = []
    for shard, rows, count in picked:
        blocks.append(_copy_rows(shard, rows, count, buffers))
        on_point(FaultPoint.STAGE)
    return blocks


def _count_values(shard: LocalShard, count: int) -> int:
    return count * shard.columns + sum(map(math.prod, shard.state_shapes(count).values()))


def _copy_rows(shard: LocalShard, rows: Tensor | None, count: int, buffers: CopyBuffers) -> RowBlock:
    ids = np.arange(shard.row, shard.row + count) if rows is None else rows.cpu().numpy() + shard.row
    # Weights and states follow each other in ``room``. A table on SSD may not fit into memory, so its copy goes to a
    # disk.
    values = _count_values(shard, count)
    disk = shard.scratch()
    room = buffers.cut(values) if disk is None else disk[:values]
    weight = room[: count * shard.columns].view(count, shard.columns)
    state: dict[str, Tensor] = {}
    used = weight.numel()
    for name, shape in shard.state_shapes(count).items():
        size = math.prod(shape)
        state[name] = room[used : used + size].view(shape)
        used += size
    step = max(1, _VALUES_AT_ONCE // shard.columns)
    for start in range(0, count, step):
        part = slice(start, min(start + step, count))
        part_state = {name: column[part] for name, column in state.items()}
        shard.copy(part if rows is None else rows[part], weight[part], part_state)
        _require_finite(shard.table, ids[part], {"": weight[part], **part_state})
    return RowBlock(shard.table, ids.astype(np.int64, copy=False), shard.column, weight, state)


def _require_finite(table: str, ids: NDArray[np.int64], tensors: dict[str, Tensor]) -> None:
    for name, values in tensors.items():
        # If a value is not finite, neither is the sum, which takes one pass. Large finite values may overflow it as
        # well.
        if bool(torch.isfinite(values.sum())):
            continue
        bad = ~torch.isfinite(values.view(len(ids), -1)).all(dim=1)
        if bool(bad.any()):
            what = f": its {name}" if name else ""
            raise GuardError(
                f"table {table!r} row {ids[int(bad.long().argmax())]}{what} is not finite; no checkpoint was written",
                hint="lower train.lr and train.sparse_lr, raise train.warmup_steps, or train.clip.table_value=0.001",
            )
