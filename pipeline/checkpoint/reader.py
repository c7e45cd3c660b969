"""Reads a checkpoint and what it rests on: into a model of any world size and sharding, or without a model.

``restore_newest`` finds the newest whole checkpoint; ``restore`` reads its chain, file by file (``read_blocks``), and
puts what this rank's shards need in place (``apply_block``). ``ChainReader`` does the same without a model.

Rows are applied in the order of the chain, baseline first, and each file is verified as it is read. A damaged chain is
never half applied and called good: the caller falls back to an older checkpoint (``restore_newest``). Only proven
damage is a reason for that. Other failures are tried again, and then stop the restore.
"""

from __future__ import annotations

import copy
import json
import logging
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pipeline.checkpoint.chunks import RowBlock, read_block
from pipeline.checkpoint.collectives import log_on_rank0, retry_on_all_ranks
from pipeline.checkpoint.container import VERIFY, read_tensors, unreadable
from pipeline.checkpoint.fault_points import FaultPoint, OnPoint, ignore
from pipeline.checkpoint.index import DENSE, INDEX, STATE, damage_hint, restore_order
from pipeline.checkpoint.integrity import damage, listing, read_verified, require_seen_by_all
from pipeline.checkpoint.train_state import TrainState, load_optimizer, parse_state
from pipeline.core.errors import ArtifactError, DamagedError
from pipeline.embeddings.row_access import LocalShard, RowAccess, columns_of
from pipeline.embeddings.tables import TableSpec
from pipeline.embeddings.touched import TouchedRows, shard_key
from pipeline.records.checkpoint import Extent, Index, TableSize
from pipeline.store.artifacts import Store
from pipeline.store.errors import reachable
from pipeline.store.manifest import Artifact

OTHER_MODEL = "the data and model settings the checkpoint was written with, or force=true to train from the start"
_READ_THREADS = 2
# The float32 bytes of a window of rows.
WINDOW_BYTES = 16 << 20
log = logging.getLogger(__name__)


@dataclass(frozen=True)
class RestoreTarget:
    """What a restore fills. ``optimizer`` None restores dense weights only. ``states`` false sets table state to zero.

    In ``touched`` the rows of deltas are marked, so that the next delta holds them too.
    """

    rows: RowAccess
    dense: dict[str, Tensor]
    optimizer: torch.optim.Optimizer | None = None
    states: bool = True
    touched: TouchedRows | None = None
    on_point: OnPoint = ignore


def restore_newest(
    store: Store, directory: str, target: RestoreTarget, damaged: dict[str, str] | None = None
) -> tuple[Artifact, TrainState] | None:
    """Restore the newest checkpoint under ``directory`` that is whole; None if there is none at all. Collective.

    Each one that is damaged, or rests on a damaged one, is logged, skipped and added to ``damaged`` ({name: what is
    wrong}).

    Raises:
        DamagedError: All checkpoints are damaged.
        PassingError: One cannot be read.
    """
    if damaged is None:
        damaged = {}
    names, problems = listing(store, directory)
    damaged |= problems
    for message in problems.values():
        log_on_rank0(log.warning, "a checkpoint cannot be used: %s", message)
    for name in reversed(names):
        path = f"{directory}/{name}"
        try:
            artifact = _open(store, path)
            return artifact, restore(store, artifact, target)
        except DamagedError as error:
            damaged[name] = error.message
            text = "checkpoint %s cannot be used, going back to the one before it: %s"
            log_on_rank0(log.warning, text, path, error.message)
    if damaged:
        raise DamagedError(
            f"no checkpoint in {store.url_of(directory)} is whole, the first of {len(damaged)}: "
            f"{next(iter(damaged.values()))}",
            hint="force=true trains from the start",
        )
    return None


def _open(store: Store, path: str) -> Artifact:
    artifacts: list[Artifact] = []

    def find() -> None:
        with reachable(store.url_of(path)):
            artifacts.append(store.get(path, "train"))

    retry_on_all_ranks(f"opening {path}", find)
    # A try that failed on another rank has left an artifact here too, so take the last one.
    return artifacts[-1]


@torch.no_grad()
def restore(store: Store, artifact: Artifact, target: RestoreTarget) -> TrainState:
    """Read checkpoint ``artifact`` and its chain into ``target``. Collective: every rank reads what its shards need.

    The caller sets the random state from ``TrainState.rng``.

    Raises:
        DamagedError: On all ranks, for a missing or corrupt file.
        PassingError: On all ranks, if something else failed every time.
        ArtifactError: On all ranks; names every table and parameter that differs.
    """
    states: list[TrainState] = []

    def read() -> None:
        # Drop what a try that failed on another rank has left.
        states.clear()
        with reachable(store.url_of(artifact.path)):
            chain = restore_order(store, artifact)
        _restore_rows(store, chain, target)
        states.append(restore_dense(store, artifact, target))

    try:
        retry_on_all_ranks(f"restoring {artifact.path}", read)
    except DamagedError as error:
        # Hosts may see different files. It is damage, and a reason to go back, only if all ranks agree.
        require_seen_by_all(store, error)
        raise
    return states[0]


def _restore_rows(store: Store, chain: list[Artifact], target: RestoreTarget) -> None:
    # 1. Start from zero: part of another chain may have been applied before it turned out to be damaged.
    shards = target.rows.local_shards()
    for shard in shards:
        shard.zero_state()
    if target.touched is not None:
        target.touched.clear()

    # 2. Apply the baseline, which must hold every value, and then the deltas, oldest first. Only rows of deltas are
    # marked: the next delta must have them, besides those that training touches.
    names = {table: table for table in target.rows.tables}
    for artifact in chain:
        index = read_index(store, artifact)
        _check_tables(index.tables, target.rows.tables, store.url_of(artifact.path))
        if artifact is chain[0]:
            _check_cover(index.files, shards, store, artifact)
            put_rows(store, artifact, index, target, names)
        else:
            put_rows(store, artifact, index, target, names, touched=target.touched)


def put_rows(
    store: Store,
    artifact: Artifact,
    index: Index,
    target: RestoreTarget,
    names: dict[str, str],
    touched: TouchedRows | None = None,
) -> None:
    """Copy a checkpoint's rows to this rank's shards; ``names``: {table of the checkpoint: table of the model}."""
    # Chunks of all ranks are considered, because the checkpoint may have been written with another sharding.
    shards = target.rows.local_shards()
    wanted = []
    for extent in index.files:
        if extent.table in names:
            renamed = replace(extent, table=names[extent.table])
            if any(meets(renamed, shard) for shard in shards):
                wanted.append(extent)
    # Apply the lowest columns first: they overwrite a row's state, and further columns add their share to it.
    wanted.sort(key=lambda extent: (extent.table, extent.column, extent.first))
    for block in read_blocks(store, artifact, wanted):
        renamed_block = replace(block, table=names[block.table])
        for shard in shards:
            apply_block(renamed_block, shard, states=target.states, touched=touched)
        target.on_point(FaultPoint.RESTORE)


def read_blocks(store: Store, artifact: Artifact, extents: list[Extent]) -> Iterator[RowBlock]:
    """Yield the blocks of ``extents`` in order, verified, read ahead by threads."""

    def read(extent: Extent) -> RowBlock:
        where = f"{store.url_of(artifact.path)}/{extent.file}"
        block = read_block(read_verified(store, artifact, extent.file), where)
        if block.table != extent.table or len(block.ids) != extent.rows:
            raise damage(store, artifact, f"{where} does not hold the rows that its index lists")
        return block

    with ThreadPoolExecutor(_READ_THREADS, thread_name_prefix="nightjar-restore") as pool:
        # Read one block more than there are threads; memory holds only these, however many blocks there are.
        waiting: deque[Future[RowBlock]] = deque()
        for extent in extents:
            if len(waiting) > _READ_THREADS:
                block = waiting.popleft().result()
                waiting.append(pool.submit(read, extent))
                yield block
            else:
                waiting.append(pool.submit(read, extent))
        while waiting:
            yield waiting.popleft().result()


def meets(extent: Extent, shard: LocalShard) -> bool:
    """Whether an extent of the index and a shard have values in common."""
    # Only the extent's first and last row are known. It may lack rows between them, so its chunk may still have none.
    return (
        extent.table == shard.table
        and extent.first < shard.row + shard.rows
        and extent.last >= shard.row
        and extent.column < shard.column + shard.columns
        and extent.column + extent.columns > shard.column
    )


def apply_block(block: RowBlock, shard: LocalShard, *, states: bool = True, touched: TouchedRows | None = None) -> int:
    """Copy the rows that ``block`` and ``shard`` share, mark them in ``touched``, and return their number."""
    if block.table != shard.table:
        return 0
    # 1. Find the shared rows and columns. Ids rise, so these rows are adjacent in the block.
    low, high = np.searchsorted(block.ids, [shard.row, shard.row + shard.rows])
    left = max(block.column, shard.column)
    right = min(block.column + block.weight.shape[1], shard.column + shard.columns)
    if low >= high or left >= right:
        return 0
    part = slice(left - block.column, right - block.column)

    # 2. Find their positions in the shard. Adjacent rows are copied as a slice, without an index.
    ids = block.ids[low:high] - shard.row
    places: slice | Tensor = torch.from_numpy(ids)
    if int(ids[-1] - ids[0]) + 1 == len(ids):
        places = slice(int(ids[0]), int(ids[-1]) + 1)

    # 3. Restore their state. Tables that were trained without a state have none to give; a shard without one takes
    # none.
    stored: dict[str, Tensor] = {}
    for name in shard.state_shapes(0):
        if states and name in block.state:
            stored[name] = block.state[name][low:high]
    # A state of whole rows belongs to a range of columns: Adagrad's sum is the mean of the squared gradients there.
    # Where ranges differ, a shard gets the mean over its columns, which is exact when ranges join and the best estimate
    # when they split.
    share = (right - left) / shard.columns
    state: dict[str, Tensor] = {}
    for name, values in columns_of(stored, part).items():
        if values.dim() == 1:
            values = values * share
        state[name] = values
    shard.put(places, block.weight[low:high, part], state, left - shard.column, add=left > shard.column)
    if touched is not None:
        touched.mask(shard_key(shard))[places] = 1
    return int(high - low)


def _check_tables(stored: dict[str, TableSize], tables: dict[str, TableSpec], where: str) -> None:
    complaints = []
    for name, now in tables.items():
        then = stored.get(name)
        if then is None:
            complaints.append(f"table {name!r} of the model is not in it")
        elif (then.rows, then.dim) != (now.rows, now.dim):
            complaints.append(
                f"table {name!r} is {then.rows} rows x {then.dim} in it, {now.rows} x {now.dim} in the model"
            )
    for name in stored:
        if name not in tables:
            complaints.append(f"its table {name!r} is not in the model")
    if complaints:
        raise ArtifactError(f"checkpoint {where} does not fit the model: {'; '.join(complaints)}", hint=OTHER_MODEL)


def _check_cover(extents: list[Extent], shards: list[LocalShard], store: Store, artifact: Artifact) -> None:
    # Checks that a baseline holds every value of a local shard, counted by extents. Extents of a compacted baseline may
    # have gaps that others fill, so for those this is a lower bound.
    for shard in shards:
        cells = 0
        for extent in extents:
            if meets(extent, shard):
                rows = min(extent.last + 1, shard.row + shard.rows) - max(extent.first, shard.row)
                right = min(extent.column + extent.columns, shard.column + shard.columns)
                cells += rows * (right - max(extent.column, shard.column))
        if cells < shard.rows * shard.columns:
            raise damage(
                store,
                artifact,
                f"checkpoint {store.url_of(artifact.path)} holds {cells} of the {shard.rows * shard.columns} values of "
                f"rows {shard.row} to {shard.row + shard.rows - 1} of table {shard.table!r}",
            )


def restore_dense(store: Store, artifact: Artifact, target: RestoreTarget) -> TrainState:
    """Fill the dense parameters and their optimizer; ArtifactError naming each parameter that does not fit."""
    where = store.url_of(artifact.path)
    tensors, _ = read_tensors(read_verified(store, artifact, DENSE), f"{where}/{DENSE}")
    record = read_state(store, artifact)
    stored = _select_prefix("param/", tensors)
    # Report all differences at once: a restore takes too long to find them one by one.
    complaints = []
    for name in {**target.dense, **stored}:
        now = tuple(target.dense[name].shape) if name in target.dense else None
        then = tuple(stored[name].shape) if name in stored else None
        if now != then:
            complaints.append(f"parameter {name!r} is {then or 'not there'} in it, {now or 'not there'} in the model")
    if complaints:
        raise ArtifactError(f"checkpoint {where} does not fit the model: {'; '.join(complaints)}", hint=OTHER_MODEL)
    for name, parameter in target.dense.items():
        parameter.copy_(stored[name])
    if target.optimizer is not None:
        if record["optimizer"] is None:
            raise ArtifactError(f"checkpoint {where} holds no dense optimizer", hint="force=true")
        load_optimizer(target.optimizer, target.dense, _select_prefix("optimizer/", tensors), record["optimizer"])
    return TrainState(**record["train"], rng=tensors.get("rng"))


def read_index(store: Store, artifact: Artifact) -> Index:
    """Read the index of a checkpoint; DamagedError if it is invalid, even with a correct checksum."""
    name = artifact.summary.get("index", INDEX)
    where = store.url_of(f"{artifact.path}/{name}")
    data = read_verified(store, artifact, name)
    try:
        index = Index.from_json(json.loads(data), where)
        for extent in index.files:
            if extent.table not in index.tables:
                raise ValueError(f"{extent.file} belongs to table {extent.table!r}, which it does not list")
    except ArtifactError as error:
        raise DamagedError(error.message, hint=VERIFY) from None
    except ValueError as error:
        raise unreadable(where, "a checkpoint's index", error) from None
    return index


def read_state(store: Store, artifact: Artifact) -> dict[str, Any]:
    """Read ``state.json`` of checkpoint ``artifact``; DamagedError if it is damaged."""
    return parse_state(read_verified(store, artifact, STATE), f"{store.url_of(artifact.path)}/{STATE}")


def read_dense(store: Store, artifact: Artifact) -> dict[str, Tensor]:
    """Read the dense parameters of checkpoint ``artifact`` by name; DamagedError if their file is damaged."""
    tensors, _ = read_tensors(read_verified(store, artifact, DENSE), f"{store.url_of(artifact.path)}/{DENSE}")
    return _select_prefix("param/", tensors)


def _select_prefix(prefix: str, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): value for name, value in tensors.items() if name.startswith(prefix)}


class ChainReader:
    """Reads a checkpoint and what it rests on without a model, for export and comparison. ``tables`` are by name.

    Rows come table by table in their order, with the chain applied. Chunks are verified as they are read
    (DamagedError). Memory holds one window, and the chunks of each checkpoint of the chain that overlap it.
    """

    def __init__(self, store: Store, artifact: Artifact) -> None:
        self.store = store
        self.artifact = artifact
        self.chain = restore_order(store, artifact)
        self._indices = [read_index(store, checkpoint) for checkpoint in self.chain]
        self.tables: dict[str, TableSize] = self._indices[-1].tables
        self._blocks: dict[tuple[str, str], RowBlock] = {}
        self._states: dict[str, dict[str, bool]] = {}

    def reopened(self) -> ChainReader:
        """Return another reader of the same checkpoint for another thread, since a reader's open files are its own."""
        other = copy.copy(self)
        other._blocks = {}
        other._states = {}
        return other

    def states(self, table: str) -> dict[str, bool]:
        """Return the optimizer's states of ``table`` by name: True if each weight has one, False if each row."""
        if table not in self._states:
            stored: dict[str, Tensor] = {}
            for extent in self._indices[0].files:
                if extent.table == table:
                    stored = self._read_block(self.chain[0], extent).state
                    break
            self._states[table] = {name: stored[name].dim() > 1 for name in sorted(stored)}
        return self._states[table]

    def windows(self, table: str, window_bytes: int = WINDOW_BYTES) -> Iterator[LocalShard]:
        """Yield all rows of ``table`` in order, as shards of its rows. The next window reuses the tensors."""
        rows, dim = self.tables[table].rows, self.tables[table].dim
        size = max(1, window_bytes // (4 * dim))
        chain_extents = []
        for index in self._indices:
            extents = [extent for extent in index.files if extent.table == table]
            # Sort the lowest columns first, as in ``put_rows``.
            chain_extents.append(sorted(extents, key=lambda extent: (extent.column, extent.first)))
        weight = torch.empty(min(size, rows), dim)
        states: dict[str, Tensor] = {}
        for name, per_weight in self.states(table).items():
            states[name] = torch.empty((len(weight), dim) if per_weight else len(weight))
        self._blocks.clear()
        for first in range(0, rows, size):
            count = min(size, rows - first)
            state = {name: values[:count] for name, values in states.items()}
            window = LocalShard(table, first, count, 0, dim, True, weight[:count], state)
            self._fill(window, chain_extents)
            yield window

    def _fill(self, window: LocalShard, chain_extents: list[list[Extent]]) -> None:
        # No stored weight is NaN (``copy_rows`` checks it), so a NaN that is left marks a weight that was not written.
        window.weight.fill_(float("nan"))
        for state in window.state.values():
            state.zero_()
        used = set()
        for artifact, extents in zip(self.chain, chain_extents, strict=True):
            for extent in extents:
                if meets(extent, window):
                    apply_block(self._read_block(artifact, extent), window)
                    used.add((artifact.path, extent.file))
        for key in set(self._blocks) - used:
            del self._blocks[key]
        if window.weight.isnan().any():
            raise DamagedError(
                f"checkpoint {self.artifact.path} does not hold all of rows {window.row} to "
                f"{window.row + window.rows - 1} of table {window.table!r}",
                hint=damage_hint(self.store, self.artifact.path),
            )

    def _read_block(self, artifact: Artifact, extent: Extent) -> RowBlock:
        key = (artifact.path, extent.file)
        if key not in self._blocks:
            data = read_verified(self.store, artifact, extent.file)
            self._blocks[key] = read_block(data, self.store.url_of(f"{artifact.path}/{extent.file}"))
        return self._blocks[key]
