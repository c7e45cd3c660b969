"""Tables of tier ``ssd`` of one rank: their files, their kernels' buffers, and what happens around each lookup."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.modules.embedding_modules import EmbeddingBagCollection

from pipeline.contracts import Plan, ShardPlan
from pipeline.embeddings.ssd.budget import trim
from pipeline.embeddings.ssd.buffers import Buffer, HostBuffers, give_buffers
from pipeline.embeddings.ssd.figures import SAMPLE, Figures, resident
from pipeline.embeddings.ssd.files import PAGE, ScratchFile, check_paths
from pipeline.embeddings.ssd.lazy import LazyRows
from pipeline.embeddings.ssd.prefetch import Ids, Prefetcher, pages_of, will_need
from pipeline.embeddings.tables import TableSpec, kernels

SSD = "ssd"
_VALUE_BYTES = 4


def ssd_tables(plan: Plan) -> list[str]:
    """The tables of ``plan`` on tier ssd, in order."""
    return [name for name, table in plan.tables.items() if table.tier == SSD]


@dataclass
class _Shard:
    """Rows [first, first + rows) of a table: its two buffers, and what gives rows their initial values (None: done)."""

    first: int
    rows: int
    width: int
    weights: Buffer
    state: Buffer
    lazy: LazyRows | None = None
    fresh: bool = True

    def local(self, ids: NDArray[np.int64]) -> NDArray[np.int64]:
        """Places of those global row numbers that lie here."""
        places = ids - self.first
        return places[(places >= 0) & (places < self.rows)]

    def count(self, places: NDArray[np.int64]) -> tuple[int, int]:
        """Of a sample of ``places``: how many were looked at, and how many have their weights in memory."""
        if not len(places):
            return 0, 0
        sample = places[:: max(1, len(places) // SAMPLE)]
        pages = sample * self.width // PAGE
        cold = pages[pages >= self.weights.pinned // PAGE]
        return len(sample), len(sample) - len(cold) + resident(self.weights.address, cold)


class SsdStore:
    """The files of this rank's shards; give it to ``shard_model``, feed it the ids of coming batches, close it.

    ``paths``: ``hardware.ssd_paths``, over which the shards are spread. The first ``cache_rows`` rows of a table stay
    in memory. ConfigError for paths that cannot be used, GuardError where a disk has no room.
    """

    def __init__(self, plan: Plan, paths: Sequence[str], rank: int) -> None:
        self._directories = check_paths(paths)
        self.figures = Figures()
        self._names = ssd_tables(plan)
        self._shards: dict[str, _Shard] = {}
        self._prefetcher: Prefetcher | None = None
        self._hooks: list[Any] = []
        for index, name in enumerate(self._names):
            table = plan.tables[name]
            for shard in table.shards:
                if shard.rank == rank and shard.rows:
                    directory = self._directories[(index + rank) % len(self._directories)]
                    self._shards[name] = _open(directory, name, shard, table.cache_rows)

    @property
    def tables(self) -> tuple[str, ...]:
        """The tables on SSD of which this rank holds rows."""
        return tuple(self._shards)

    def give(self, collection: EmbeddingBagCollection) -> None:
        """Make the tables of ``collection``, all of the plan's or those of a tower, live in the files once sharded."""
        buffers = {}
        for name in (name for name in self._names if name in collection.embedding_bags):
            shard = self._shards.get(name)
            empty = torch.empty(0)
            weights, state = (shard.weights.values, shard.state.values) if shard else (empty, empty)
            buffers[name] = HostBuffers(weights=weights, momentum1=state)
        give_buffers(collection, buffers)

    def attach(self, dmp: DistributedModelParallel) -> None:
        """Watch the lookups of the sharded model: rows get initial values and are counted."""
        for kernel in kernels(dmp):
            name = kernel.tables[0].name
            if name in self._shards:
                watch = _Watch(self._shards[name], self.figures)
                self._hooks.append(kernel.module.register_forward_pre_hook(watch, with_kwargs=True))

    def begin(self, table: TableSpec, seed: int) -> bool:
        """Initial values for all rows, given when they are first used; False where the caller must write them.

        Optimizer state is zero in a new file. A file that was used before is the caller's.
        """
        shard = self._shards.get(table.name)
        if shard is None:
            return False
        fresh, shard.fresh = shard.fresh, False
        weights = shard.weights.values.view(shard.rows, table.dim)
        shard.lazy = LazyRows(weights, shard.weights.write, shard.first, table, seed) if fresh else None
        return fresh

    def touch(self, table: str, places: Tensor) -> None:
        """Give the rows at ``places`` (relative to the shard) of ``table`` their initial values if they have none."""
        shard = self._shards.get(table)
        if shard is not None and shard.lazy is not None:
            shard.lazy.touch(places.numpy())

    def fill(self) -> None:
        """Give all rows that have none their initial values."""
        for shard in self._shards.values():
            if shard.lazy is not None:
                shard.lazy.fill()
        self.filled()

    def filled(self) -> None:
        """All rows have values: none waits for its initial one."""
        for shard in self._shards.values():
            shard.lazy, shard.fresh = None, False

    def scratch(self, count: int) -> Tensor:
        """float32 [count] on disk, lasting as long as the tensor. GuardError where there is no room."""
        if not count:
            return torch.empty(0)
        file = ScratchFile(self._directories[0], count * _VALUE_BYTES, "a copy of the rows for a checkpoint")
        values = Buffer(file, count).values
        file.close()
        return values

    def prefetch(self, ids: Ids, depth: int = 2) -> None:
        """Bring the rows of a batch to come into memory. ``ids``: row numbers by table, of the whole global batch.

        Returns at once unless ``depth`` batches wait already. Call from one thread, batch after batch.
        """
        if self._prefetcher is None:
            self._prefetcher = Prefetcher(self._bring, depth)
        self._prefetcher.put(ids)

    def _bring(self, ids: Ids) -> None:
        for name, rows in ids.items():
            shard = self._shards.get(name)
            if shard is None:
                continue
            places = shard.local(rows)
            asked, there = shard.count(places)
            self.figures.asked += asked
            self.figures.there += there
            for buffer, width in ((shard.weights, shard.width), (shard.state, _VALUE_BYTES)):
                will_need(buffer.address, pages_of(places, width, buffer.pinned))
            lazy = shard.lazy
            if lazy is not None:
                lazy.touch(places)

    def trim(self, excess: int) -> int:
        """Drop about ``excess`` bytes of mapped rows from memory, coldest first; the bytes dropped. Takes disk time."""
        buffers = [buffer for shard in self._shards.values() for buffer in (shard.weights, shard.state)]
        return trim(sorted(buffers, key=lambda buffer: -buffer.file.size), excess)

    def check(self) -> None:
        """Call before a step: GuardError for a file that was cut, and what the prefetching thread met."""
        for shard in self._shards.values():
            shard.weights.file.check()
            shard.state.file.check()
        if self._prefetcher is not None:
            self._prefetcher.check()

    def close(self) -> None:
        """Stop prefetching and let go of the files; their space is freed with the model's tensors."""
        if self._prefetcher is not None:
            self._prefetcher.close()
        for hook in self._hooks:
            hook.remove()
        for shard in self._shards.values():
            shard.weights.file.close()
            shard.state.file.close()
        self._shards.clear()


def _open(directory: Any, name: str, shard: ShardPlan, cache_rows: int) -> _Shard:
    width = shard.columns * _VALUE_BYTES
    pinned = min(max(cache_rows - shard.row, 0), shard.rows)

    def buffer(what: str, row_bytes: int, pinned: int) -> Buffer:
        prefix = pinned * row_bytes // PAGE * PAGE
        file = ScratchFile(directory, shard.rows * row_bytes, f"{what} of table {name!r}", prefix)
        return Buffer(file, shard.rows * row_bytes // _VALUE_BYTES, prefix)

    # A page of state holds the sums of a thousand rows: each cold row would change one and have it written.
    whole = -(-shard.rows * _VALUE_BYTES // PAGE) * PAGE // _VALUE_BYTES
    weights, state = buffer("the weights", width, pinned), buffer("the optimizer state", _VALUE_BYTES, whole)
    return _Shard(shard.row, shard.rows, width, weights, state)


class _Watch:
    """The hook before a kernel's lookup: initial values, and a sample of which rows are in memory."""

    def __init__(self, shard: _Shard, figures: Figures) -> None:
        self._shard, self._figures = shard, figures

    def __call__(self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        indices: Tensor = kwargs["indices"] if "indices" in kwargs else args[0]
        places = indices.numpy().astype(np.int64, copy=False)
        looked, found = self._shard.count(places)
        self._figures.looked += looked
        self._figures.found += found
        if self._shard.lazy is not None:
            self._shard.lazy.touch(places)
