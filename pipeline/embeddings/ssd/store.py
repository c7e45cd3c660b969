"""The tables on tier ssd of one rank: fetches the rows of coming batches and redirects lookups to their slots."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Mapping, Sequence
from threading import Event
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.modules.embedding_modules import EmbeddingBagCollection

from pipeline.embeddings.initial import INIT_BLOCK_ROWS
from pipeline.embeddings.row_access import LocalShard, Places
from pipeline.embeddings.ssd.aio import I64
from pipeline.embeddings.ssd.cached import CachedShard
from pipeline.embeddings.ssd.diagnostics import SsdFigures, shortcomings
from pipeline.embeddings.ssd.fetch import Fetcher, SsdWorker, WaitingParts, check_room
from pipeline.embeddings.ssd.kernel import KernelBuffers, give_buffers, mapped, sparse_memory, states_of, storage_of
from pipeline.embeddings.ssd.log import F32
from pipeline.embeddings.ssd.scratch_files import ScratchFile, check_paths, pieces, spread
from pipeline.embeddings.ssd.shard import ShardRequest, SsdShard
from pipeline.embeddings.ssd.slots import looked_up
from pipeline.embeddings.table_optimizer_config import TableRules
from pipeline.embeddings.tables import TableSpec, kept_state, kernels
from pipeline.records.plan import Plan, ShardPlan
from pipeline.records.scratch import LOG_SPARE
from pipeline.specs.optimizers import FLOAT, StateColumn

SSD = "ssd"
# Of the rows kept in memory, the share of those that are there because they were used last: rows that become popular in
# a training, or after it was ingested. The others are the first ones, which were the most frequent in the dataset.
RECENT = 0.2
Ids = Mapping[str, NDArray[np.int64]]


def ssd_tables(plan: Plan) -> list[str]:
    """The tables of ``plan`` on tier ssd, in order."""
    return [name for name, table in plan.tables.items() if table.tier == SSD]


class SsdStore:
    """The rows of this rank's shards. Pass it to ``shard_model``, announce the ids of coming batches, and close it.

    ``paths``: ``hardware.ssd_paths``; shards and checkpoints' copies of them are spread over these by their bytes.
    ``spare``: ``hardware.ssd_spare``.
    Each shard keeps its share of a table's ``cache_rows`` rows in memory: its first rows, and for share ``RECENT`` the
    last used ones; in a ``cached`` store (None: for a plan for GPUs) the last used ones only, and then the kernels have
    memory for no other rows. ConfigError for
    paths that cannot be used, GuardError where a disk has no room.
    """

    def __init__(
        self, plan: Plan, paths: Sequence[str], rank: int, cached: bool | None = None, spare: float = LOG_SPARE
    ) -> None:
        self._directories = check_paths(paths)
        self.figures = SsdFigures()
        self._plan, self._names = plan, ssd_tables(plan)
        self.cached = plan.device != "cpu" if cached is None else cached
        self._shards: dict[str, SsdShard] = {}
        self._waiting: dict[str, deque[ShardRequest]] = {}
        self._hooks: list[Any] = []
        self._disks = {
            (piece.table, piece.copy): self._directories[disk]
            for piece, disk in spread(pieces(plan, self._names, rank, spare), len(self._directories)).items()
            if piece.rank == rank
        }
        self._copies: dict[str, Tensor] = {}
        for name in self._names:
            for shard in plan.tables[name].shards:
                if shard.rank == rank and shard.rows:
                    self._shards[name] = self._shard(name, shard, spare)
                    self._waiting[name] = deque()
        self._fetcher = Fetcher()
        self._line = WaitingParts(self._bring)
        self._done: deque[tuple[SsdShard, ShardRequest]] = deque()
        self._worker = SsdWorker(self._tidy)

    def _shard(self, name: str, shard: ShardPlan, spare: float) -> SsdShard:
        table, directory = self._plan.tables[name], self._disks[name, False]
        kept = min(shard.rows, -(-table.cache_rows * shard.rows // table.rows))
        values = table.row_bytes(shard.columns) // FLOAT
        log = spare, self.figures.log
        if self.cached:
            return CachedShard(directory, name, shard, kept, table.rows, values, table.hosted(shard), *log)
        recent = int(RECENT * kept)
        return SsdShard(directory, name, shard, kept - recent, values, *log, recent)

    @property
    def tables(self) -> tuple[str, ...]:
        """The tables on SSD of which this rank holds rows."""
        return tuple(self._shards)

    @property
    def placed(self) -> dict[str, tuple[ShardPlan, ...]]:
        """The tables on SSD, each with its shards on all ranks."""
        return {name: self._plan.tables[name].shards for name in self._names}

    def shortcomings(self) -> list[tuple[str, str]]:
        """Features that make the tier fast and that the machine refuses, each with what to change."""
        files = [shard.log.file for shard in self._shards.values()]
        return shortcomings(self._fetcher.queue, self._worker, files)

    def give(self, collection: EmbeddingBagCollection, rules: TableRules) -> None:
        """Store the tables of ``collection``, all of the plan's or those of a tower, in our memory once sharded.

        Tables of the same width and pooling that learn alike share a kernel.
        """
        kinds: dict[tuple[str, int, str, str], list[str]] = {}
        pooling = {config.name: config.pooling.value for config in collection.embedding_bag_configs()}
        for name in (name for name in self._names if name in pooling):
            plan = self._plan.tables[name]
            kinds.setdefault((plan.sharding, plan.dim, pooling[name], rules.kind(name)), []).append(name)
        buffers: dict[str, KernelBuffers] = {}
        for (_, dim, _, _), names in kinds.items():
            optimizer = rules.of(names[0])
            shards = [self._shards[name] for name in names if name in self._shards]
            fused = optimizer.columns if optimizer.fused_on(self._plan.device) else ()
            buffers |= dict.fromkeys(names, self._buffers(shards, dim, fused))
        give_buffers(collection, buffers)

    def _buffers(self, shards: list[SsdShard], dim: int, states: Sequence[StateColumn]) -> KernelBuffers:
        if self.cached:
            return KernelBuffers(
                {shard.name: shard.count for shard in shards if isinstance(shard, CachedShard)} or {"": 0}
            )
        rows = sum(shard.rows for shard in shards)
        # FBGEMM calls the first state of every optimizer momentum1, and refuses one that the optimizer lacks.
        own = {f"momentum{i}": sparse_memory(rows * (dim if s.per_value else 1)) for i, s in enumerate(states, 1)}
        return KernelBuffers(None, weights=sparse_memory(rows * dim), **own)

    def attach(self, dmp: DistributedModelParallel) -> None:
        """Turn the row numbers of the sharded model's lookups into slots; prepend hooks that need row numbers."""
        for kernel in kernels(dmp):
            names = [table.name for table in kernel.tables]
            if self._shards.keys().isdisjoint(names):
                continue
            kept = kept_state(kernel.module)
            states = states_of(kernel.module) if kept is None else [list(each.values()) for each in kept]
            for name, weights, parts in zip(names, storage_of(kernel.module), states, strict=True):
                if name in self._shards:
                    self._shards[name].live_in([weights.detach(), *parts])
            hook = _Redirect(self, {table.name: len(table.feature_names) for table in kernel.tables})
            self._hooks.append(kernel.module.register_forward_pre_hook(hook, with_kwargs=True))

    def begin(self, table: TableSpec, seed: int) -> None:
        """Give all rows of ``table`` on this rank their initial values and zero their optimizer state, at once."""
        shard = self._shards.get(table.name)
        if shard is not None:
            self._waiting[table.name].clear()
            shard.slots.trained()
            self._worker.call(lambda: self._begin(shard, table, seed))

    def _begin(self, shard: SsdShard, table: TableSpec, seed: int) -> None:
        self._line.leave(shard)
        shard.begin(table, seed)

    def scratch(self, table: str) -> Tensor:
        """float32 on disk, with room for a copy of this rank's rows of ``table`` and their state; for checkpoints.

        The first call takes the space for the copies of all tables. GuardError where there is no room.
        """
        if not self._copies:
            self._copies = self._make_copies()
        return self._copies[table]

    def _make_copies(self) -> dict[str, Tensor]:
        made: dict[str, Tensor] = {}
        for directory in self._directories:
            names = [name for name in self._shards if self._disks[name, True] == directory]
            rows = [(self._shards[name], self._plan.tables[name]) for name in names]
            counts = [shard.rows * table.row_bytes(shard.dim) // FLOAT for shard, table in rows]
            if names:
                file = ScratchFile(directory, 4 * sum(counts), "a checkpoint's copy of the rows of tables on SSD")
                made |= zip(names, mapped(file, sum(counts)).split(counts), strict=True)
                file.close()
        return made

    def prefetch(self, ids: Ids) -> None:
        """Bring the rows of a coming batch into memory. ``ids``: row numbers by table, of the whole global batch.

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
        self._worker.submit(lambda: self._line.join(parts))

    def _bring(self, parts: list[tuple[SsdShard, ShardRequest]]) -> None:
        self._fetcher.fetch(parts)
        self.figures.asked += sum(part.lookups for _, part in parts)
        self.figures.there += sum(part.lookups - part.missing for _, part in parts)
        self.figures.hosted += sum(part.hosted for _, part in parts)

    def hold(self, table: str, rows: NDArray[Any], lookups: int) -> tuple[ShardRequest, NDArray[Any]]:
        """The part of a batch with ``rows`` (of the shard, not pinned), and the slots that these are in; waits.

        A batch whose rows are looked up in the order in which they were announced finds its slots ready. Else it is the
        first one that has all of them. Batches announced before it were dropped by their reader, and their slots are
        released. Those of this batch's announcements in pieces are released too, once its rows have slots.
        """
        shard, waiting = self._shards[table], self._waiting[table]
        number, places = _announced(rows, list(waiting))
        if number is None:
            part = ShardRequest(lookups, rows.copy(), Event())
            self._fetch_now(shard, part)
            pieces = _pieces(part, list(waiting))
        else:
            pieces = 0
            self.let_go([(table, waiting.popleft()) for _ in range(number)])
            part = waiting.popleft()
        early = part.ready.is_set()
        if not early:
            self._worker.wait(part.ready)
        self.let_go([(table, waiting.popleft()) for _ in range(pieces)])
        self.figures.looked += lookups
        self.figures.found += lookups if early else max(0, lookups - part.missing)
        return part, part.each if places is None else part.slots[places]

    def _fetch_now(self, shard: SsdShard, part: ShardRequest) -> None:
        def fetch() -> None:
            self._release()  # parts that were let go before, whose release is still queued
            check_room(shard, part)
            self._fetcher.fetch([(shard, part)])

        self._worker.submit(fetch, urgent=True)

    def let_go(self, parts: Sequence[tuple[str, ShardRequest]]) -> None:
        """Release the slots of ``parts``, each with its table: their batches are trained, or left out."""
        if parts:
            done = [(self._shards[table], part) for table, part in parts]
            for shard, _ in done:
                shard.slots.trained()
            self._done.extend(done)
            self._worker.submit(self._release)

    def _release(self) -> None:
        done = []
        while self._done:
            done.append(self._done.popleft())
        self._line.release(done)

    def _tidy(self) -> bool:
        """Empty some segments of the first log that is worth it; whether there was one."""
        shard = next((shard for shard in self._shards.values() if shard.log.worth_emptying()), None)
        if shard is not None:
            shard.tidy()
        return shard is not None

    def shard(self, table: str) -> SsdShard:
        """The shard of ``table`` on this rank; KeyError where there is none."""
        return self._shards[table]

    def local_shard(self, table: str, owner: bool, states: Sequence[StateColumn]) -> LocalShard:
        """The shard of ``table`` on this rank, as row access and checkpoints see it."""
        return _DiskShard(self, self._shards[table], owner, states)

    def read(self, table: str, places: NDArray[np.int64]) -> F32:
        """Copies of the rows at ``places`` [n] (of the shard): float32 [n, values + 1], the last one meaningless."""
        shard = self._shards[table]
        shard.slots.trained()
        return self._worker.call(lambda: self._fetcher.read(shard, places))

    def write(self, table: str, places: NDArray[np.int64], values: F32) -> None:
        """Overwrite the rows at ``places`` [n], each once, with ``values`` [n, values]: weights and states."""
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
        """Call before a step: GuardError for a truncated file, and any error of the worker thread."""
        for shard in self._shards.values():
            shard.log.file.check()
        self._worker.check()

    def close(self) -> None:
        """Stop fetching and close the files; the memory is freed with the model's tensors."""
        self._worker.close()
        self._fetcher.close()
        for hook in self._hooks:
            hook.remove()
        for shard in self._shards.values():
            shard.log.file.close()
        self._shards.clear()


def _announced(rows: NDArray[Any], waiting: Sequence[ShardRequest]) -> tuple[int | None, I64 | None]:
    """Which of the announced parts has ``rows``, and their places among its rows; None: they are as announced."""
    for number, part in enumerate(waiting):
        if np.array_equal(part.asked, rows):
            return number, None
    for number, part in enumerate(waiting):
        places = part.find(rows)
        if places is not None:
            return number, places
    return None, None


def _pieces(batch: ShardRequest, waiting: Sequence[ShardRequest]) -> int:
    """How many of the announced parts, from the first on, are together no more than ``batch``."""
    count, lookups = 0, 0
    for part in waiting:
        lookups += part.lookups
        if lookups > batch.lookups or batch.find(part.rows) is None:
            break
        count += 1
    return count


class _DiskShard(LocalShard):
    """A shard on tier ssd, whose ``weight`` and ``state`` copy all its rows. A new row has its initial value."""

    _store: SsdStore
    _states: dict[str, slice | int]  # which values of a row they are
    _values: int

    def __init__(self, store: SsdStore, shard: SsdShard, owner: bool, states: Sequence[StateColumn]) -> None:
        place = {"table": shard.name, "row": shard.first, "rows": shard.rows, "column": 0, "columns": shard.dim}
        own = {"_store": store, "_states": _places(states, shard.dim), "_values": shard.values}
        for name, value in {**place, "owner": owner, **own}.items():
            object.__setattr__(self, name, value)

    @property
    def weight(self) -> Tensor:  # type: ignore[override]
        """All rows: [rows, columns]. Only for tables that fit in memory."""
        return self._read(slice(0, self.rows))[:, : self.columns].contiguous()

    @property
    def state(self) -> dict[str, Tensor]:  # type: ignore[override]
        """The states of all rows by name: [rows] or [rows, columns]."""
        records = self._read(slice(0, self.rows)) if self._states else None
        return {name: records[:, at].contiguous() for name, at in self._states.items() if records is not None}

    def _read(self, places: Places) -> Tensor:
        return torch.from_numpy(self._store.read(self.table, _numbers(places)))[:, : self._values]

    def copy(self, places: Places, weight: Tensor, state: Mapping[str, Tensor]) -> None:
        """See ``LocalShard``."""
        records = self._read(places)
        weight.copy_(records[:, : self.columns])
        for name, into in state.items():
            into.copy_(records[:, self._states[name]])

    def put(
        self, places: Places, weight: Tensor, state: Mapping[str, Tensor], column: int = 0, *, add: bool = False
    ) -> None:
        """See ``LocalShard.put``. Rows that are not given whole are read first."""
        whole = weight.shape[1] == self.columns and not add and state.keys() == self._states.keys()
        records = torch.zeros(len(weight), self._values) if whole else self._read(places)
        records[:, column : column + weight.shape[1]] = weight
        for name, values in state.items():
            at = self._states[name]
            if isinstance(at, slice):
                records[:, at.start + column : at.start + column + values.shape[1]] = values
            else:
                records[:, at] = records[:, at] + values if add else values
        self._store.write(self.table, _numbers(places), records.numpy())

    def scratch(self) -> Tensor | None:
        """See ``LocalShard``."""
        return self._store.scratch(self.table)

    def begin(self, table: TableSpec, seed: int) -> None:
        """Give all rows their initial values, and zeros as state, at once."""
        self._store.begin(table, seed)

    @property
    def device(self) -> torch.device:
        """See ``LocalShard``."""
        return torch.device("cpu")

    def state_shapes(self, rows: int) -> dict[str, tuple[int, ...]]:
        """See ``LocalShard.state_shapes``."""
        return {name: (rows, self.columns) if isinstance(at, slice) else (rows,) for name, at in self._states.items()}

    def zero_state(self) -> None:
        """Set the optimizer state of all rows to zero."""
        if self._states:
            self._store.zero_state(self.table)


def _places(states: Sequence[StateColumn], dim: int) -> dict[str, slice | int]:
    """Which of a row's values each state is; the weights come first."""
    places: dict[str, slice | int] = {}
    at = dim
    for column in states:
        places[column.name] = slice(at, at + dim) if column.per_value else at
        at += dim if column.per_value else 1
    return places


def _numbers(places: Places) -> NDArray[np.int64]:
    return np.arange(places.start, places.stop) if isinstance(places, slice) else places.cpu().numpy()


class _Redirect:
    """The hook before a kernel's lookup: row numbers become slots, in which the rows stay until the next lookup.

    By then the backward pass of the former one has updated them: TorchRec's pipelines run one batch at a time.
    ``tables``: of the kernel, with the number of their features.
    """

    def __init__(self, store: SsdStore, tables: Mapping[str, int]) -> None:
        self._store, self._tables = store, list(tables)
        self._ends = [0, *itertools.accumulate(tables.values())]
        self._held: list[tuple[str, ShardRequest]] = []

    def __call__(
        self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        self._store.let_go(self._held)
        self._held = []
        indices: Tensor = kwargs["indices"] if "indices" in kwargs else args[0]
        offsets: Tensor = kwargs["offsets"] if "offsets" in kwargs else args[1]
        batch = (len(offsets) - 1) // self._ends[-1]
        ends = offsets[::batch][self._ends].tolist() if batch else [0] * len(self._ends)
        moved, rows = looked_up(indices)
        for table, first, last in zip(self._tables, ends, ends[1:], strict=False):
            if first < last:  # a rank may have no row of a small table
                self._redirect(table, rows[first:last])
        moved = moved.to(indices.device)
        if "indices" in kwargs:
            return args, {**kwargs, "indices": moved}
        return (moved, *args[1:]), kwargs

    def _redirect(self, table: str, rows: NDArray[Any]) -> None:
        """Turn the row numbers ``rows`` of ``table`` into slots, in place."""
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
