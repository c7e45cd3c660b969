"""Restoring a checkpoint into any world size and sharding: rows by (table, global row), dense parts by name."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

import torch
import xxhash
from safetensors.torch import load as from_safetensors
from torch import Tensor

from pipeline.artifacts import Artifact, FileEntry, Store
from pipeline.checkpoint.collect import WEIGHT, Extent
from pipeline.checkpoint.ranks import together
from pipeline.checkpoint.state import TrainState, load_optimizer
from pipeline.checkpoint.write import DENSE, FORMAT, INDEX, KIND, STATE
from pipeline.embeddings import LocalShard, RowAccess, TableSpec
from pipeline.errors import ArtifactError

_OTHER_MODEL = "the data and model settings the checkpoint was written with, or force=true to train from the start"


@dataclass(frozen=True)
class _Overlap:
    """What a stored extent and a local shard have in common."""

    extent: Extent
    shard: LocalShard
    row: int
    stop: int
    column: int
    end: int

    @property
    def cells(self) -> int:
        """Values in common."""
        return (self.stop - self.row) * (self.end - self.column)


def _overlap(extent: Extent, shard: LocalShard) -> _Overlap | None:
    if extent.table != shard.table:
        return None
    row, stop = max(extent.row, shard.row), min(extent.row + extent.rows, shard.row + shard.rows)
    column = max(extent.column, shard.column)
    end = min(extent.column + extent.columns, shard.column + shard.columns)
    return _Overlap(extent, shard, row, stop, column, end) if row < stop and column < end else None


def read_verified(store: Store, artifact: Artifact, name: str) -> bytes:
    """The bytes of file ``name`` of ``artifact``; ArtifactError if it is missing or differs from the manifest.

    Whole files also from a local disk: the checksum needs every byte, and a file is a chunk of bounded size.
    """
    path = f"{artifact.path}/{name}"
    hint = "an older checkpoint, or force=true to train from the start"
    if name not in artifact.files:
        raise ArtifactError(f"{store.url_of(artifact.path)} has no file {name}, expected in a {KIND}", hint=hint)
    try:
        with store.open(path) as source:
            data: bytes = source.read()
    except FileNotFoundError:
        raise ArtifactError(f"{store.url_of(path)} is missing from its artifact", hint=hint) from None
    found = FileEntry(len(data), f"xxh3_128:{xxhash.xxh3_128_hexdigest(data)}")
    expected = artifact.files[name]
    if found != expected:
        raise ArtifactError(
            f"{store.url_of(path)} is corrupt: {found.bytes} bytes and checksum {found.checksum}, "
            f"expected {expected.bytes} and {expected.checksum}",
            hint=hint,
        )
    return data


def _check_tables(stored: dict[str, dict[str, int]], tables: dict[str, TableSpec], where: str) -> None:
    """ArtifactError that names every table that differs."""
    complaints = []
    for name in [*tables, *(name for name in stored if name not in tables)]:
        if name not in stored:
            complaints.append(f"table {name!r} of the model is not in it")
        elif name not in tables:
            complaints.append(f"its table {name!r} is not in the model")
        elif (stored[name]["rows"], stored[name]["dim"]) != (tables[name].rows, tables[name].dim):
            then, now = stored[name], tables[name]
            complaints.append(
                f"table {name!r} is {then['rows']} rows x {then['dim']} in it, {now.rows} x {now.dim} in the model"
            )
    if complaints:
        raise ArtifactError(f"checkpoint {where} does not fit the model: {'; '.join(complaints)}", hint=_OTHER_MODEL)


def _match(index: dict[str, Any], shards: list[LocalShard], where: str) -> dict[str, list[_Overlap]]:
    """The overlaps to read by file; ArtifactError if they do not cover a shard."""
    wanted: dict[str, list[_Overlap]] = {}
    covered = [0] * len(shards)
    for entry in index["files"]:
        for extent in (Extent(**record) for record in entry["extents"]):
            for i, shard in enumerate(shards):
                found = _overlap(extent, shard)
                if found is not None:
                    wanted.setdefault(entry["file"], []).append(found)
                    covered[i] += found.cells
    for shard, cells in zip(shards, covered, strict=True):
        if cells != shard.rows * shard.columns:
            raise ArtifactError(
                f"checkpoint {where} holds {cells} of the {shard.rows * shard.columns} values of rows {shard.row} to "
                f"{shard.row + shard.rows - 1} of table {shard.table!r}",
                hint="an older checkpoint, or force=true to train from the start",
            )
    return wanted


def _copy(overlap: _Overlap, tensors: dict[str, Tensor], states: bool) -> None:
    """Copy one overlap into its shard.

    A row's Adagrad sum belongs to a column range: the mean of its squared gradients there. Where the
    ranges differ, a shard gets the mean over its columns, exact when ranges join, the best known when
    they split.
    """
    extent, shard = overlap.extent, overlap.shard
    source = slice(overlap.row - extent.row, overlap.stop - extent.row)
    target = slice(overlap.row - shard.row, overlap.stop - shard.row)
    values = tensors[extent.key(WEIGHT)][source, overlap.column - extent.column : overlap.end - extent.column]
    shard.weight[target, overlap.column - shard.column : overlap.end - shard.column].copy_(values)
    if states:
        share = (overlap.end - overlap.column) / shard.columns
        for name, state in shard.state.items():
            part = tensors[extent.key(name)][source].to(state.device)
            if share == 1.0:
                state[target].copy_(part)
            else:
                state[target].add_(part, alpha=share)


def _restore_rows(store: Store, artifact: Artifact, rows: RowAccess, states: bool) -> None:
    where = store.url_of(artifact.path)
    index = json.loads(read_verified(store, artifact, INDEX))
    if index["format"] != FORMAT:
        raise ArtifactError(f"checkpoint {where} has format {index['format']}, expected {FORMAT}", hint="force=true")
    _check_tables(index["tables"], rows.tables, where)
    shards = rows.local_shards()
    for shard in shards:
        for state in shard.state.values():
            state.zero_()
    for name, overlaps in _match(index, shards, where).items():
        tensors = from_safetensors(read_verified(store, artifact, name))
        for overlap in overlaps:
            _copy(overlap, tensors, states)


def _restore_dense(dense: dict[str, Tensor], tensors: dict[str, Tensor], where: str) -> None:
    stored = {name.removeprefix("param/"): value for name, value in tensors.items() if name.startswith("param/")}
    complaints = []
    for name in [*dense, *(name for name in stored if name not in dense)]:
        now = tuple(dense[name].shape) if name in dense else None
        then = tuple(stored[name].shape) if name in stored else None
        if now != then:
            complaints.append(f"parameter {name!r} is {then or 'not there'} in it, {now or 'not there'} in the model")
    if complaints:
        raise ArtifactError(f"checkpoint {where} does not fit the model: {'; '.join(complaints)}", hint=_OTHER_MODEL)
    for name, parameter in dense.items():
        parameter.copy_(stored[name])


@torch.no_grad()
def restore(
    store: Store,
    artifact: Artifact,
    *,
    rows: RowAccess,
    dense: dict[str, Tensor],
    optimizer: torch.optim.Optimizer | None = None,
    weights_only: bool = False,
) -> TrainState:
    """Read checkpoint ``artifact`` into tables, ``dense`` parameters and their ``optimizer``, on any world size.

    Collective: every rank reads the files that hold rows of its shards. ``optimizer`` None leaves the
    dense optimizer out; ``weights_only`` (for evaluation) also zeroes the tables' state instead of reading it. The
    caller sets the random state from ``TrainState.rng``. ArtifactError on all ranks for a missing or
    corrupt file, and naming every table and parameter that differs.
    """
    result: list[TrainState] = []

    def read() -> None:
        where = store.url_of(artifact.path)
        _restore_rows(store, artifact, rows, states=not weights_only)
        tensors = from_safetensors(read_verified(store, artifact, DENSE))
        record = json.loads(read_verified(store, artifact, STATE))
        _restore_dense(dense, tensors, where)
        if optimizer is not None:
            if record["optimizer"] is None:
                raise ArtifactError(f"checkpoint {where} holds no dense optimizer", hint="force=true")
            prefix = "optimizer/"
            parts = {name.removeprefix(prefix): v for name, v in tensors.items() if name.startswith(prefix)}
            load_optimizer(optimizer, dense, parts, record["optimizer"])
        result.append(TrainState(**record["train"], rng=tensors.get("rng")))

    together(f"restoring {artifact.path}", read)
    return result[0]
