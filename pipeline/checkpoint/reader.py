"""Reading a checkpoint and what it rests on: into a model of any world size and sharding, or without a model.

Rows are applied in the order of the chain, baseline first, each file verified as it is read. A damaged chain is
never half applied and called good: the caller falls back to an older checkpoint (``restore_newest``). Only proven
damage is a reason for that. What fails otherwise is tried again, and then stops the restore.
"""

from __future__ import annotations

import copy
import json
import logging
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pipeline.checkpoint.chunks import RowBlock, read_block
from pipeline.checkpoint.collectives import once, patiently
from pipeline.checkpoint.container import VERIFY, read_tensors, unreadable
from pipeline.checkpoint.fault_points import FaultPoint, OnPoint, ignore
from pipeline.checkpoint.index import DENSE, INDEX, STATE, damage_hint, restore_order
from pipeline.checkpoint.integrity import damage, listing, read_verified, require_seen_by_all
from pipeline.checkpoint.train_state import TrainState, load_optimizer, parse_state
from pipeline.embeddings.row_access import LocalShard, RowAccess, columns_of
from pipeline.embeddings.tables import TableSpec
from pipeline.embeddings.touched import TouchedRows, shard_key
from pipeline.errors import ArtifactError, DamagedError
from pipeline.records.checkpoint import Extent, Index, TableSize
from pipeline.store.artifacts import Store
from pipeline.store.errors import reachable
from pipeline.store.manifest import Artifact

OTHER_MODEL = "the data and model settings the checkpoint was written with, or force=true to train from the start"
_READERS = 2
# float32 bytes of a window of rows.
WINDOW_BYTES = 16 << 20
log = logging.getLogger(__name__)


@dataclass(frozen=True)
class RestoreTarget:
    """What a restore fills. ``optimizer`` None: dense weights only. ``states`` false: table state is zeroed.

    ``touched`` gets the rows of deltas marked, so that the next delta holds them too.
    """

    rows: RowAccess
    dense: dict[str, Tensor]
    optimizer: torch.optim.Optimizer | None = None
    states: bool = True
    touched: TouchedRows | None = None
    on_point: OnPoint = ignore


@torch.no_grad()
def restore(store: Store, artifact: Artifact, target: RestoreTarget) -> TrainState:
    """Read checkpoint ``artifact`` and its chain into ``target``. Collective: every rank reads what its shards need.

    The caller sets the random state from ``TrainState.rng``. On all ranks: DamagedError for a missing or corrupt file,
    PassingError where something else failed every time, ArtifactError naming every table and parameter that differs.
    """
    result: list[TrainState] = []

    def read() -> None:
        result.clear()  # of a try that failed
        with reachable(store.url_of(artifact.path)):
            chain = restore_order(store, artifact)
        _restore_rows(store, chain, target)
        result.append(restore_dense(store, artifact, target))

    try:
        patiently(f"restoring {artifact.path}", read)
    except DamagedError as error:
        require_seen_by_all(store, error)
        raise
    return result[0]


def restore_newest(
    store: Store, directory: str, target: RestoreTarget, damaged: dict[str, str] | None = None
) -> tuple[Artifact, TrainState] | None:
    """Restore the newest checkpoint under ``directory`` that is whole; None where there is none at all.

    Collective. Each one that is damaged, or rests on a damaged one, is logged, passed over and added to
    ``damaged`` ({name: what is wrong}); DamagedError where all are. PassingError where one cannot be read.
    """
    damaged = {} if damaged is None else damaged
    names, wrong = listing(store, directory)
    damaged |= wrong
    for message in wrong.values():
        once(log.warning, "a checkpoint cannot be used: %s", message)
    for name in reversed(names):
        path = f"{directory}/{name}"
        try:
            artifact = _open(store, path)
            return artifact, restore(store, artifact, target)
        except DamagedError as error:
            damaged[name] = error.message
            text = "checkpoint %s cannot be used, going back to the one before it: %s"
            once(log.warning, text, path, error.message)
    if damaged:
        raise DamagedError(
            f"no checkpoint in {store.url_of(directory)} is whole, the first of {len(damaged)}: "
            f"{next(iter(damaged.values()))}",
            hint="force=true trains from the start",
        )
    return None


def _open(store: Store, path: str) -> Artifact:
    opened: list[Artifact] = []

    def look() -> None:
        with reachable(store.url_of(path)):
            opened.append(store.get(path, "train"))

    patiently(f"opening {path}", look)
    return opened[-1]


def read_index(store: Store, artifact: Artifact) -> Index:
    """The index of a checkpoint; DamagedError where it is damaged, whatever its checksum says."""
    name = artifact.summary.get("index", INDEX)
    where, data = store.url_of(f"{artifact.path}/{name}"), read_verified(store, artifact, name)
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


def read_blocks(store: Store, artifact: Artifact, extents: list[Extent]) -> Iterator[RowBlock]:
    """The blocks of ``extents`` in order, verified, read ahead by threads."""

    def read(extent: Extent) -> RowBlock:
        name = extent.file
        block = read_block(read_verified(store, artifact, name), f"{store.url_of(artifact.path)}/{name}")
        if block.table != extent.table or len(block.ids) != extent.rows:
            where = f"{store.url_of(artifact.path)}/{name}"
            raise damage(store, artifact, f"{where} does not hold the rows that its index lists")
        return block

    with ThreadPoolExecutor(_READERS, thread_name_prefix="nightjar-restore") as pool:
        waiting = [pool.submit(read, extent) for extent in extents[: _READERS + 1]]
        for following in [*extents[_READERS + 1 :], *([None] * len(waiting))]:
            block = waiting.pop(0).result()
            if following is not None:
                waiting.append(pool.submit(read, following))
            yield block


def _restore_rows(store: Store, chain: list[Artifact], target: RestoreTarget) -> None:
    shards = target.rows.local_shards()
    for shard in shards:
        shard.zero_state()
    if target.touched is not None:
        target.touched.clear()
    names = {table: table for table in target.rows.tables}
    for artifact in chain:
        index = read_index(store, artifact)
        _check_tables(index.tables, target.rows.tables, store.url_of(artifact.path))
        if artifact is chain[0]:
            _check_cover(index.files, shards, store, artifact)
        put_rows(store, artifact, index, target, names, touched=target.touched if artifact is not chain[0] else None)


def put_rows(
    store: Store,
    artifact: Artifact,
    index: Index,
    target: RestoreTarget,
    names: dict[str, str],
    touched: TouchedRows | None = None,
) -> None:
    """Put a checkpoint's rows into this rank's shards; ``names``: {table there: table here}."""
    shards = target.rows.local_shards()
    wanted = [
        extent
        for extent in index.files
        if extent.table in names and any(meets(replace(extent, table=names[extent.table]), shard) for shard in shards)
    ]
    # Lowest columns first: they overwrite a row's state, further columns add their share to it.
    wanted.sort(key=lambda extent: (extent.table, extent.column, extent.first))
    for block in read_blocks(store, artifact, wanted):
        here = replace(block, table=names[block.table])
        for shard in shards:
            apply_block(here, shard, states=target.states, touched=touched)
        target.on_point(FaultPoint.RESTORE)


def meets(extent: Extent, shard: LocalShard) -> bool:
    """Whether an extent of the index and a shard have values in common."""
    return (
        extent.table == shard.table
        and extent.first < shard.row + shard.rows
        and extent.last >= shard.row
        and extent.column < shard.column + shard.columns
        and extent.column + extent.columns > shard.column
    )


def apply_block(block: RowBlock, shard: LocalShard, *, states: bool = True, touched: TouchedRows | None = None) -> int:
    """Copy what ``block`` and ``shard`` have in common and mark it in ``touched``; the number of rows.

    A state of whole rows belongs to a column range: Adagrad's sum is the mean of the squared gradients there. Where
    ranges differ, a shard gets the mean over its columns: exact when ranges join, the best known when they split.
    """
    if block.table != shard.table:
        return 0
    low, high = np.searchsorted(block.ids, [shard.row, shard.row + shard.rows])
    left = max(block.column, shard.column)
    right = min(block.column + block.weight.shape[1], shard.column + shard.columns)
    if low >= high or left >= right:
        return 0
    ids = block.ids[low:high] - shard.row
    is_range = int(ids[-1] - ids[0]) + 1 == len(ids)
    places: slice | Tensor = slice(int(ids[0]), int(ids[-1]) + 1) if is_range else torch.from_numpy(ids)
    part = slice(left - block.column, right - block.column)
    share = (right - left) / shard.columns
    # Tables that were trained without a state have none to give; a shard without takes none.
    kept = [name for name in shard.state_shapes(0) if states and name in block.state]
    state = columns_of({name: block.state[name][low:high] for name in kept}, part)
    state = {name: values if values.dim() > 1 else values * share for name, values in state.items()}
    shard.put(places, block.weight[low:high, part], state, left - shard.column, add=left > shard.column)
    if touched is not None:
        touched.mask(shard_key(shard))[places] = 1
    return int(high - low)


def _check_tables(stored: dict[str, TableSize], tables: dict[str, TableSpec], where: str) -> None:
    """ArtifactError that names every table that differs."""
    complaints = []
    for name in [*tables, *(name for name in stored if name not in tables)]:
        if name not in stored:
            complaints.append(f"table {name!r} of the model is not in it")
        elif name not in tables:
            complaints.append(f"its table {name!r} is not in the model")
        elif (stored[name].rows, stored[name].dim) != (tables[name].rows, tables[name].dim):
            then, now = stored[name], tables[name]
            complaints.append(
                f"table {name!r} is {then.rows} rows x {then.dim} in it, {now.rows} x {now.dim} in the model"
            )
    if complaints:
        raise ArtifactError(f"checkpoint {where} does not fit the model: {'; '.join(complaints)}", hint=OTHER_MODEL)


def _check_cover(extents: list[Extent], shards: list[LocalShard], store: Store, artifact: Artifact) -> None:
    """DamagedError where a baseline does not hold every value of a local shard.

    Counted by extents; those of a compacted baseline may have gaps that others fill, so there it is a lower bound.
    """
    for shard in shards:
        cells = sum(
            (min(e.last + 1, shard.row + shard.rows) - max(e.first, shard.row))
            * (min(e.column + e.columns, shard.column + shard.columns) - max(e.column, shard.column))
            for e in extents
            if meets(e, shard)
        )
        if cells < shard.rows * shard.columns:
            raise damage(
                store,
                artifact,
                f"checkpoint {store.url_of(artifact.path)} holds {cells} of the {shard.rows * shard.columns} values of "
                f"rows {shard.row} to {shard.row + shard.rows - 1} of table {shard.table!r}",
            )


def read_state(store: Store, artifact: Artifact) -> dict[str, Any]:
    """What ``state.json`` of checkpoint ``artifact`` holds; DamagedError where it is damaged."""
    return parse_state(read_verified(store, artifact, STATE), f"{store.url_of(artifact.path)}/{STATE}")


def read_dense(store: Store, artifact: Artifact) -> dict[str, Tensor]:
    """The dense parameters of checkpoint ``artifact`` by name; DamagedError where its file is damaged."""
    return _starting("param/", _dense_tensors(store, artifact))


def _dense_tensors(store: Store, artifact: Artifact) -> dict[str, Tensor]:
    return read_tensors(read_verified(store, artifact, DENSE), f"{store.url_of(artifact.path)}/{DENSE}")[0]


def _starting(prefix: str, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): value for name, value in tensors.items() if name.startswith(prefix)}


def restore_dense(store: Store, artifact: Artifact, target: RestoreTarget) -> TrainState:
    """Fill the dense parameters and their optimizer; ArtifactError naming each parameter that does not fit."""
    where = store.url_of(artifact.path)
    tensors, record = _dense_tensors(store, artifact), read_state(store, artifact)
    stored = _starting("param/", tensors)
    complaints = []
    for name in [*target.dense, *(name for name in stored if name not in target.dense)]:
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
        load_optimizer(target.optimizer, target.dense, _starting("optimizer/", tensors), record["optimizer"])
    return TrainState(**record["train"], rng=tensors.get("rng"))


class ChainReader:
    """Reads a checkpoint and what it rests on without a model: for export and comparison. ``tables``: by name.

    Rows come table by table in their order, the chain applied.
    Chunks are verified as they are read (DamagedError). Held in memory: a window, and of each checkpoint of the chain
    the chunks that overlap it.
    """

    def __init__(self, store: Store, artifact: Artifact) -> None:
        self.store, self.artifact = store, artifact
        self.chain = restore_order(store, artifact)
        self._indices = [read_index(store, each) for each in self.chain]
        self.tables: dict[str, TableSize] = self._indices[-1].tables
        self._open: dict[tuple[str, str], RowBlock] = {}
        self._states: dict[str, dict[str, bool]] = {}

    def reopened(self) -> ChainReader:
        """Another reader of the same checkpoint, for another thread: what a reader has open is its own."""
        other = copy.copy(self)
        other._open, other._states = {}, {}
        return other

    def states(self, table: str) -> dict[str, bool]:
        """The optimizer's states of ``table`` by name: whether each weight has one, not each row."""
        if table not in self._states:
            extents = [extent for extent in self._indices[0].files if extent.table == table]
            stored = self._block(self.chain[0], extents[0]).state if extents else {}
            self._states[table] = {name: stored[name].dim() > 1 for name in sorted(stored)}
        return self._states[table]

    def windows(self, table: str, window_bytes: int = WINDOW_BYTES) -> Iterator[LocalShard]:
        """All rows of ``table`` in order, as shards of its rows. A window's tensors are used again for the next one."""
        rows, dim = self.tables[table].rows, self.tables[table].dim
        size = max(1, window_bytes // (4 * dim))
        mine = [
            sorted((e for e in index.files if e.table == table), key=lambda extent: (extent.column, extent.first))
            for index in self._indices
        ]
        weight = torch.empty(min(size, rows), dim)
        states = {
            name: torch.empty((len(weight), dim) if wide else len(weight)) for name, wide in self.states(table).items()
        }
        self._open.clear()
        for first in range(0, rows, size):
            count = min(size, rows - first)
            state = {name: values[:count] for name, values in states.items()}
            window = LocalShard(table, first, count, 0, dim, True, weight[:count], state)
            self._fill(window, mine)
            yield window

    def _fill(self, window: LocalShard, mine: list[list[Extent]]) -> None:
        window.weight.fill_(float("nan"))
        for state in window.state.values():
            state.zero_()
        used = set()
        for artifact, extents in zip(self.chain, mine, strict=True):
            for extent in extents:
                if meets(extent, window):
                    apply_block(self._block(artifact, extent), window)
                    used.add((artifact.path, extent.file))
        for key in set(self._open) - used:
            del self._open[key]
        if window.weight.isnan().any():
            raise DamagedError(
                f"checkpoint {self.artifact.path} does not hold all of rows {window.row} to "
                f"{window.row + window.rows - 1} of table {window.table!r}",
                hint=damage_hint(self.store, self.artifact.path),
            )

    def _block(self, artifact: Artifact, extent: Extent) -> RowBlock:
        key = (artifact.path, extent.file)
        if key not in self._open:
            data = read_verified(self.store, artifact, extent.file)
            self._open[key] = read_block(data, self.store.url_of(f"{artifact.path}/{extent.file}"))
        return self._open[key]
