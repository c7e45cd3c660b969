"""The tables on tier ssd of one rank: fetches the rows of coming batches and redirects lookups to their slots."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from threading import Event
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.modules.embedding_modules import EmbeddingBagCollection

from pipeline.embeddings.huge_pages import sparse_memory
from pipeline.embeddings.initial import INIT_BLOCK_ROWS
from pipeline.embeddings.row_access import LocalShard, Places
from pipeline.embeddings.ssd.aio import I64
from pipeline.embeddings.ssd.cached import CachedShard
from pipeline.embeddings.ssd.diagnostics import SsdFigures, shortcomings
from pipeline.embeddings.ssd.fetch import Fetcher, SsdWorker, WaitingParts, check_room
from pipeline.embeddings.ssd.kernel import KernelBuffers, give_buffers, kernels_on_ssd, mapped
from pipeline.embeddings.ssd.log import F32
from pipeline.embeddings.ssd.scratch_files import ScratchFile, check_paths, pieces, spread
from pipeline.embeddings.ssd.shard import ShardRequest, SsdShard
from pipeline.embeddings.ssd.slots import looked_up
from pipeline.embeddings.table_optimizers import TableRules
from pipeline.embeddings.tables import TableSpec, kept_state, kernels, states_of, storage_of
from pipeline.records.plan import Plan, ShardPlan
from pipeline.records.scratch import LOG_SPARE
from pipeline.specs.optimizers import FLOAT, StateColumn

# The share of the rows in memory that are kept because they were used last, such as rows that become popular during a
# training or after ingestion. The others are the first ones, which were the most frequent in the dataset.
RECENT = 0.2
Ids = Mapping[str, NDArray[np.int64]]


class SsdStore:
    """The ``RowStore`` of tables on SSD: the rows of this rank's shards.

    Pass it to ``shard_model``, announce the ids of coming batches, and close it.

    ``paths`` is ``hardware.ssd_paths``; shards and checkpoints' copies of them are spread over these by their bytes.
    ``spare`` is ``hardware.ssd_spare``. Each shard keeps its share of a table's ``cache_rows`` rows in memory: its
    first rows, and for share ``RECENT`` the last used ones. In a ``cached`` store (None: cached if the plan is for
    GPUs) it keeps only the last used ones, and the kernels have memory for no other rows. Raises ConfigError for paths
    that cannot be used, GuardError if a disk has no room.
    """

    def __init__(
        self, plan: Plan, paths: Sequence[str], rank: int, cached: bool | None = None, spare: float = LOG_SPARE
    ) -> None:
        self._directories = check_paths(paths)
        self.figures = SsdFigures()
        self._plan, self._names = plan, plan.tables_on("ssd")
        self.cached = plan.device != "cpu" if cached is None else cached
        self._shards: dict[str, SsdShard] = {}
        self._waiting: dict[str, deque[ShardRequest]] = {}
        self._hooks: list[Any] = []
        # The directory of each table's log (False) and of a checkpoint's copy of its rows (True).
        self._disks: dict[tuple[str, bool], Path] = {}
        for piece, disk in spread(pieces(plan, self._names, rank, spare), len(self._directories)).items():
            if piece.rank == rank:
                self._disks[piece.table, piece.copy] = self._directories[disk]
        self._copies: dict[str, Tensor] = {}
        for name in self._names:
            for shard in plan.tables[name].shards:
                if shard.rank == rank and shard.rows:
                    self._shards[name] = self._make_shard(name, shard, spare)
                    self._waiting[name] = deque()
        self._fetcher = Fetcher()
        self._queue = WaitingParts(self._fetch)
        # Parts that were let go, until the worker releases their slots.
        self._done: deque[tuple[SsdShard, ShardRequest]] = deque()
        self._worker = SsdWorker(self._tidy)

    def _make_shard(self, name: str, shard: ShardPlan, spare: float) -> SsdShard:
        table, directory = self._plan.tables[name], self._disks[name, False]
        in_memory = min(shard.rows, -(-table.cache_rows * shard.rows // table.rows))
        values = table.row_bytes(shard.columns) // FLOAT
        counts = self.figures.log
        if self.cached:
            hosted = table.hosted(shard)
            return CachedShard(directory, name, shard, in_memory, table.rows, values, hosted, spare, counts)
        recent = int(RECENT * in_memory)
        return SsdShard(directory, name, shard, in_memory - recent, values, spare, counts, recent)

    @property
    def tables(self) -> tuple[str, ...]:
        """The tables on SSD of which this rank holds rows."""
        return tuple(self._shards)

    @property
    def placed(self) -> dict[str, tuple[ShardPlan, ...]]:
        """The tables on SSD, each with its shards on all ranks."""
        return {name: self._plan.tables[name].shards for name in self._names}

    def take_counts(self) -> list[float]:
        """Return the counts since the last call, from which ``diagnostics.named`` makes figures."""
        return self.figures.take()

    def shortcomings(self) -> list[tuple[str, str]]:
        """Return the features for a fast tier that the machine refuses, each with what to change."""
        files = [shard.log.file for shard in self._shards.values()]
        return shortcomings(self._fetcher.queue, self._worker, files)

    def provide_memory(self, collection: EmbeddingBagCollection, rules: TableRules) -> None:
        """Store the tables of ``collection``, all of the plan's or those of a tower, in our memory once sharded.

        Tables of the same width and pooling that learn alike share a kernel.
        """
        by_kind: dict[tuple[str, int, str, str], list[str]] = {}
        pooling = {config.name: config.pooling.value for config in collection.embedding_bag_configs()}
        for name in self._names:
            if name in pooling:
                table = self._plan.tables[name]
                kind = table.sharding, table.dim, pooling[name], rules.kind(name)
                by_kind.setdefault(kind, []).append(name)
        buffers: dict[str, KernelBuffers] = {}
        for (_, dim, _, _), names in by_kind.items():
            optimizer = rules.of(names[0])
            states = optimizer.columns if optimizer.fused_on(self._plan.device) else ()
            shards = [self._shards[name] for name in names if name in self._shards]
            buffers |= dict.fromkeys(names, self._make_buffers(shards, dim, states))
        give_buffers(collection, buffers)

    def _make_buffers(self, shards: list[SsdShard], dim: int, states: Sequence[StateColumn]) -> KernelBuffers:
        slots, rows = {}, 0
        for shard in shards:
            rows += shard.rows
            if isinstance(shard, CachedShard):
                slots[shard.name] = shard.count
        if self.cached:
            # An empty dict would mean a kernel without slots, but a rank without rows of its tables needs a kernel with
            # slots, too.
            return KernelBuffers(slots or {"": 0})
        buffers = {"weights": sparse_memory(rows * dim)}
        for i, column in enumerate(states, 1):
            # FBGEMM calls the first state of every optimizer momentum1, and rejects a state that the optimizer lacks.
            width = dim if column.per_value else 1
            buffers[f"momentum{i}"] = sparse_memory(rows * width)
        return KernelBuffers(None, **buffers)

    def building_kernels(self) -> AbstractContextManager[None]:
        """Give kernels that TorchRec builds inside the context the memory of ``provide_memory``."""
        return kernels_on_ssd()

    def attach(self, dmp: DistributedModelParallel) -> None:
        """Turn the row numbers of the sharded model's lookups into slots; prepend hooks that need row numbers."""
        for kernel in kernels(dmp):
            names = [table.name for table in kernel.tables]
            if self._shards.keys().isdisjoint(names):
                continue
            own_state = kept_state(kernel.module)
            if own_state is not None:
                states = [list(state.values()) for state in own_state]
            else:
                states = states_of(kernel.module)
            feature_counts = {}
            for table, weights, parts in zip(kernel.tables, storage_of(kernel.module), states, strict=True):
                feature_counts[table.name] = len(table.feature_names)
                if table.name in self._shards:
                    self._shards[table.name].live_in([weights.detach(), *parts])
            hook = _Redirect(self, feature_counts)
            self._hooks.append(kernel.module.register_forward_pre_hook(hook, with_kwargs=True))

    def begin(self, table: TableSpec, seed: int) -> None:
        """Set all rows of ``table`` on this rank to their initial values and zero their optimizer state, at once."""
        shard = self._shards.get(table.name)
        if shard is None:
            return

        def begin() -> None:
            self._queue.leave(shard)
            shard.begin(table, seed)

        self._waiting[table.name].clear()
        shard.slots.trained()
        self._worker.call(begin)

    def scratch(self, table: str) -> Tensor:
        """Return float32 on disk, with room for a copy of this rank's rows of ``table`` and their state.

        The first call takes the space for the copies of all tables. Raises GuardError if there is no room.
        """
        if self._copies:
            return self._copies[table]
        copies: dict[str, Tensor] = {}
        for directory in self._directories:
            names, counts = [], []
            for name, shard in self._shards.items():
                if self._disks[name, True] == directory:
                    names.append(name)
                    counts.append(shard.rows * self._plan.tables[name].row_bytes(shard.dim) // FLOAT)
            if names:
                file = ScratchFile(directory, 4 * sum(counts), "a checkpoint's copy of the rows of tables on SSD")
                copies |= zip(names, mapped(file, sum(counts)).split(counts), strict=True)
                file.close()
        self._copies = copies
        return copies[table]

    def prefetch(self, ids: Ids) -> None:
        """Bring the rows of a coming batch into memory. ``ids`` has row numbers by table, of the whole global batch.

        Tables and rows that this rank does not hold are left out.

        Returns at once. Call it from one thread, in the order of the batches; rows stay until the batch is trained.
        """
        parts = []
        for name, rows in ids.items():
            if name in self._shards:
                shard = self._shards[name]
                part = shard.part(rows, Event())
                parts.append((shard, part))
                if len(part.asked):
                    self._waiting[name].append(part)
        self._worker.submit(lambda: self._queue.join(parts))

    def _fetch(self, parts: list[tuple[SsdShard, ShardRequest]]) -> None:
        self._fetcher.fetch(parts)
        for _, part in parts:
            self.figures.asked += part.lookups
            self.figures.there += part.lookups - part.missing
            self.figures.hosted += part.hosted

    def hold(self, table: str, rows: NDArray[Any], lookups: int) -> tuple[ShardRequest, NDArray[Any]]:
        """Return the part of a batch with ``rows`` (of the shard, not pinned), and their slots; waits for the slots.

        A batch whose rows are looked up in the order in which they were announced finds its slots ready. Otherwise the
        part is the first one that has all of them.
        """
        shard, waiting = self._shards[table], self._waiting[table]
        number, places = _find_announced(rows, list(waiting))
        pieces = 0
        if number is not None:
            # Batches announced before this one were dropped by their reader.
            self._let_go_first(table, number)
            part = waiting.popleft()
        else:
            part = ShardRequest(lookups, rows.copy(), Event())

            def fetch() -> None:
                self._release()  # parts that were let go before, whose release is still queued
                check_room(shard, part)
                self._fetcher.fetch([(shard, part)])

            self._worker.submit(fetch, urgent=True)
            pieces = _count_pieces(part, list(waiting))
        found = lookups
        if not part.ready.is_set():
            self._worker.wait(part.ready)
            # A row that had no slot is missed once: the batch's other lookups of it find it there.
            found = max(0, lookups - part.missing)
        self.figures.looked += lookups
        self.figures.found += found
        # This batch may have been announced in pieces. Their slots are released once its rows have slots.
        self._let_go_first(table, pieces)
        if places is None:
            return part, part.each
        return part, part.slots[places]

    def _let_go_first(self, table: str, count: int) -> None:
        parts = []
        for _ in range(count):
            parts.append((table, self._waiting[table].popleft()))
        self.let_go(parts)

    def let_go(self, parts: Sequence[tuple[str, ShardRequest]]) -> None:
        """Release the slots of ``parts``, each with its table: their batches are trained, or left out."""
        if not parts:
            return
        done = []
        for table, part in parts:
            shard = self._shards[table]
            # The worker may read a slot only after training has changed it for the last time.
            shard.slots.trained()
            done.append((shard, part))
        self._done.extend(done)
        self._worker.submit(self._release)

    def _release(self) -> None:
        done = []
        while self._done:
            done.append(self._done.popleft())
        self._queue.release(done)

    def _tidy(self) -> bool:
        # Empties some segments of the first log that is worth it; returns whether there was one.
        for shard in self._shards.values():
            if shard.log.worth_emptying():
                shard.tidy()
                return True
        return False

    def shard(self, table: str) -> SsdShard:
        """Return the shard of ``table`` on this rank; KeyError where there is none."""
        return self._shards[table]

    def local_shard(self, table: str, owner: bool, states: Sequence[StateColumn]) -> LocalShard:
        """Return the shard of ``table`` on this rank, as row access and checkpoints see it."""
        return _DiskShard(self, self._shards[table], owner, states)

    def read(self, table: str, places: NDArray[np.int64]) -> F32:
        """Return copies of the shard's rows at ``places`` [n]: float32 [n, values + 1], the last value meaningless."""
        shard = self._shards[table]
        shard.slots.trained()
        return self._worker.call(lambda: self._fetcher.read(shard, places))

    def write(self, table: str, places: NDArray[np.int64], values: F32) -> None:
        """Overwrite the rows at ``places`` [n], each given once, with ``values`` [n, values]: weights and states."""
        shard = self._shards[table]
        shard.slots.trained()
        self._worker.call(lambda: shard.put(places, values))

    def zero_state(self, table: str) -> None:
        """Set the optimizer state of all rows of ``table`` on this rank to zero; reads and writes the used ones."""
        shard = self._shards[table]
        shard.slots.trained()

        def zero(places: I64) -> None:
            places = shard.used(places)
            if len(places):
                values = self._fetcher.read(shard, places)[:, :-1]
                values[:, shard.dim :] = 0.0
                shard.put(places, values)

        for start in range(0, shard.rows, INIT_BLOCK_ROWS):
            block = np.arange(start, min(start + INIT_BLOCK_ROWS, shard.rows))
            self._worker.call(lambda block=block: zero(block))  # type: ignore[misc]

    def check(self) -> None:
        """Raise GuardError for a truncated file, and any error of the worker thread. Call it before a step."""
        for shard in self._shards.values():
            shard.log.file.check()
        self._worker.check()

    def close(self) -> None:
        """Stop fetching and close the files; the memory is freed with the model's tensors."""
        # Close the worker first, because it uses the queue and the files.
        self._worker.close()
        self._fetcher.close()
        for hook in self._hooks:
            hook.remove()
        for shard in self._shards.values():
            shard.log.file.close()
        self._shards.clear()


def _find_announced(rows: NDArray[Any], waiting: Sequence[ShardRequest]) -> tuple[int | None, I64 | None]:
    # Finds the announced part that has ``rows``, and their places among its rows; None: they are as announced.
    for number, part in enumerate(waiting):
        if np.array_equal(part.asked, rows):
            return number, None
    for number, part in enumerate(waiting):
        places = part.find(rows)
        if places is not None:
            return number, places
    return None, None


def _count_pieces(batch: ShardRequest, waiting: Sequence[ShardRequest]) -> int:
    # Counts the announced parts, from the first on, that together are no more than ``batch``. The first one beyond that
    # may belong to the next batch, and so may all after it.
    count, lookups = 0, 0
    for part in waiting:
        lookups += part.lookups
        if lookups > batch.lookups or batch.find(part.rows) is None:
            break
        count += 1
    return count


class _DiskShard(LocalShard):
    """A shard on tier ssd, whose ``weight`` and ``state`` copy all its rows. A new row has its initial value."""

    def __init__(self, store: SsdStore, shard: SsdShard, owner: bool, states: Sequence[StateColumn]) -> None:
        # A row has its weights first, then its states, so these are the positions of each.
        places: dict[str, slice | int] = {}
        start = shard.dim
        for column in states:
            if column.per_value:
                places[column.name] = slice(start, start + shard.dim)
                start += shard.dim
            else:
                places[column.name] = start
                start += 1
        # ``weight`` and ``state`` are properties here, so the fields are not set by the constructor of the base class.
        self.table, self.row, self.rows = shard.name, shard.first, shard.rows
        self.column, self.columns, self.owner = 0, shard.dim, owner
        self._store, self._states, self._values = store, places, shard.values

    @property
    def weight(self) -> Tensor:  # type: ignore[override]
        """All rows, [rows, columns]. Use it only for tables that fit in memory."""
        return self._read(slice(0, self.rows))[:, : self.columns].contiguous()

    @property
    def state(self) -> dict[str, Tensor]:  # type: ignore[override]
        """The states of all rows by name: [rows] or [rows, columns]."""
        if not self._states:
            return {}
        records = self._read(slice(0, self.rows))
        return {name: records[:, at].contiguous() for name, at in self._states.items()}

    def _read(self, places: Places) -> Tensor:
        return torch.from_numpy(self._store.read(self.table, _numbers(places)))[:, : self._values]

    def copy(self, places: Places, weight: Tensor, state: Mapping[str, Tensor]) -> None:
        records = self._read(places)
        weight.copy_(records[:, : self.columns])
        for name, destination in state.items():
            destination.copy_(records[:, self._states[name]])

    def put(
        self, places: Places, weight: Tensor, state: Mapping[str, Tensor], column: int = 0, *, add: bool = False
    ) -> None:
        # Rows that are not given whole are read first.
        whole = weight.shape[1] == self.columns and not add and state.keys() == self._states.keys()
        records = torch.zeros(len(weight), self._values) if whole else self._read(places)
        records[:, column : column + weight.shape[1]] = weight
        for name, values in state.items():
            at = self._states[name]
            if isinstance(at, slice):
                records[:, at.start + column : at.start + column + values.shape[1]] = values
            elif add:
                records[:, at] = records[:, at] + values
            else:
                records[:, at] = values
        self._store.write(self.table, _numbers(places), records.numpy())

    def scratch(self) -> Tensor | None:
        return self._store.scratch(self.table)

    def begin(self, table: TableSpec, seed: int) -> None:
        self._store.begin(table, seed)

    @property
    def device(self) -> torch.device:
        return torch.device("cpu")

    def state_shapes(self, rows: int) -> dict[str, tuple[int, ...]]:
        shapes: dict[str, tuple[int, ...]] = {}
        for name, at in self._states.items():
            shapes[name] = (rows, self.columns) if isinstance(at, slice) else (rows,)
        return shapes

    def zero_state(self) -> None:
        if self._states:
            self._store.zero_state(self.table)


def _numbers(places: Places) -> NDArray[np.int64]:
    if isinstance(places, slice):
        return np.arange(places.start, places.stop)
    return places.cpu().numpy()


class _Redirect:
    """The hook before a kernel's lookup: row numbers become slots, in which the rows stay until the next lookup.

    By then the backward pass of the previous lookup has updated them, since TorchRec's pipelines run one batch at a
    time. ``tables`` are those of the kernel, with the number of their features.
    """

    def __init__(self, store: SsdStore, tables: Mapping[str, int]) -> None:
        self._store, self._tables = store, list(tables)
        self._feature_ends = [0, *itertools.accumulate(tables.values())]
        self._held: list[tuple[str, ShardRequest]] = []

    def __call__(
        self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        self._store.let_go(self._held)
        self._held = []
        indices: Tensor = kwargs["indices"] if "indices" in kwargs else args[0]
        offsets: Tensor = kwargs["offsets"] if "offsets" in kwargs else args[1]
        batch = (len(offsets) - 1) // self._feature_ends[-1]
        slots, rows = looked_up(indices)
        if batch:
            ends = offsets[::batch][self._feature_ends].tolist()
            for table, first, last in zip(self._tables, ends, ends[1:], strict=False):
                if first < last:  # a rank may have no row of a small table
                    self._replace(table, rows[first:last])
        slots = slots.to(indices.device)
        if "indices" in kwargs:
            return args, {**kwargs, "indices": slots}
        return (slots, *args[1:]), kwargs

    def _replace(self, table: str, rows: NDArray[Any]) -> None:
        # Turns row numbers into slots, in place. The row numbers of pinned rows are their slots.
        shard, lookups = self._store.shard(table), len(rows)
        cold = np.flatnonzero(rows >= shard.pinned) if shard.pinned else slice(None)
        asked = rows[cold]
        if not len(asked):
            self._store.figures.looked += lookups
            self._store.figures.found += lookups
            return
        part, slots = self._store.hold(table, asked, lookups)
        shard.slots.arrived()
        self._held.append((table, part))
        rows[cold] = slots
