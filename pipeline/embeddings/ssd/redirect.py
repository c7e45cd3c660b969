"""The hook before a lookup of tables on SSD, which gives the kernel slots in place of row numbers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from pipeline.embeddings.ssd.aio import I64
from pipeline.embeddings.ssd.figures import Figures
from pipeline.embeddings.ssd.shard import Part, SsdShard
from pipeline.embeddings.ssd.slots import looked_up


class Redirect:
    """The hook before a kernel's lookup: row numbers become slots, in which the rows stay until the next lookup.

    By then the backward pass of the former one has updated them: TorchRec's pipelines run one batch at a time.
    ``tables``: the table of each feature of the kernel; ``hold``, ``let_go``: of ``SsdStore``.
    """

    def __init__(
        self,
        shards: Mapping[str, SsdShard],
        tables: Sequence[str],
        figures: Figures,
        hold: Callable[[str, I64, int], tuple[Part, I64]],
        let_go: Callable[[Sequence[tuple[str, Part]]], None],
    ) -> None:
        self._shards, self._tables, self._figures = shards, tables, figures
        self._hold, self._let_go = hold, let_go
        self._held: list[tuple[str, Part]] = []

    def __call__(
        self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        self._let_go(self._held)
        self._held = []
        indices: Tensor = kwargs["indices"] if "indices" in kwargs else args[0]
        offsets: Tensor = kwargs["offsets"] if "offsets" in kwargs else args[1]
        batch = (len(offsets) - 1) // len(self._tables)
        ends = offsets[::batch].tolist() if batch else [0] * (len(self._tables) + 1)
        moved, rows = looked_up(indices)
        for table, first, last in zip(self._tables, ends, ends[1:], strict=False):
            self._redirect(table, rows[first:last])
        moved = moved.to(indices.device)
        if "indices" in kwargs:
            return args, {**kwargs, "indices": moved}
        return (moved, *args[1:]), kwargs

    def _redirect(self, table: str, rows: NDArray[Any]) -> None:
        """Turn the row numbers ``rows`` of ``table`` into slots, in place."""
        shard = self._shards[table]
        cold = np.flatnonzero(rows >= shard.pinned)
        if not len(cold):
            self._figures.looked += len(rows)
            self._figures.found += len(rows)
            return
        part, places = self._hold(table, rows[cold].astype(np.int64, copy=False), len(rows))
        shard.slots.arrived()
        self._held.append((table, part))
        rows[cold] = part.slots[places]
