"""Writing a full checkpoint: collect rows, write files, commit. Collective; the manifest comes last."""

from __future__ import annotations

import time
from dataclasses import asdict
from typing import Any

import torch
from safetensors.torch import save as to_safetensors
from torch import Tensor

from pipeline.artifacts import Artifact, Draft, FileEntry, Store
from pipeline.checkpoint.collect import pack, pieces
from pipeline.checkpoint.ranks import this_rank, together
from pipeline.checkpoint.state import TrainState, flatten_optimizer
from pipeline.embeddings import RowAccess

KIND = "checkpoint"
FORMAT = 1
CHUNK_BYTES = 64 << 20
INDEX, STATE, DENSE = "index.json", "state.json", "dense.safetensors"


def _plain(tensor: Tensor) -> Tensor:
    """A contiguous CPU tensor that shares no storage with another one of the file."""
    return tensor.detach().cpu().contiguous()


def _write_rows(draft: Draft, rows: RowAccess, limit: int) -> list[dict[str, Any]]:
    """Write this rank's owned rows; the index entries of its files."""
    entries = []
    for number, group in enumerate(pack(pieces(rows.local_shards(), limit), limit)):
        name = f"rows/rank-{this_rank():05d}-{number:05d}.safetensors"
        tensors = {p.extent.key(part): _plain(t) for p in group for part, t in p.tensors.items()}
        spans = {p.extent.key("rows"): f"{p.extent.rows} x {p.extent.columns}" for p in group}
        with draft.open(name) as sink:
            sink.write(to_safetensors(tensors, metadata=spans))
        entries.append({"file": name, "extents": [asdict(p.extent) for p in group]})
    return entries


def _write_rest(
    draft: Draft, state: TrainState, dense: dict[str, Tensor], optimizer: torch.optim.Optimizer | None
) -> None:
    """Write dense parameters, dense optimizer and train state (rank 0's work)."""
    tensors = {f"param/{name}": _plain(value).clone() for name, value in dense.items()}
    record: dict[str, Any] = {"train": state.to_json(), "optimizer": None}
    if optimizer is not None:
        parts, record["optimizer"] = flatten_optimizer(optimizer, dense)
        tensors |= {f"optimizer/{name}": _plain(value).clone() for name, value in parts.items()}
    if state.rng is not None:
        tensors["rng"] = _plain(state.rng)
    with draft.open(DENSE) as sink:
        sink.write(to_safetensors(tensors))
    draft.write_json(STATE, record)


def _commit(draft: Draft, parts: list[dict[str, Any]], rows: RowAccess, state: TrainState, started: float) -> Artifact:
    """Gather all ranks' files into the index and the manifest."""
    for part in parts:
        draft.files.update({name: FileEntry(**entry) for name, entry in part["files"].items()})
    tables = {name: {"rows": spec.rows, "dim": spec.dim} for name, spec in rows.tables.items()}
    files = [entry for part in parts for entry in part["rows"]]
    draft.write_json(INDEX, {"format": FORMAT, "tables": tables, "files": files})
    size = sum(entry.bytes for entry in draft.files.values())
    seconds = time.monotonic() - started
    return draft.commit({"step": state.step, "bytes": size, "tables": len(tables), "seconds": round(seconds, 3)})


def save(
    store: Store,
    path: str,
    *,
    state: TrainState,
    rows: RowAccess,
    dense: dict[str, Tensor],
    optimizer: torch.optim.Optimizer | None,
    key: str,
    config: dict[str, Any],
    inputs: dict[str, str] | None = None,
    chunk_bytes: int = CHUNK_BYTES,
) -> Artifact:
    """Write a full checkpoint at ``path``. Collective: every rank its own rows, rank 0 the rest and the manifest.

    ``dense``: dense parameters by name (``dense_parameters(dmp)``); ``optimizer``: theirs. Files hold at
    most ``chunk_bytes`` bytes of rows. ArtifactError on all ranks if any of them cannot write; nothing stays then.
    """
    started = time.monotonic()
    leader = this_rank() == 0
    draft = Draft(store, path, KIND, key, config, inputs or {})

    def write() -> dict[str, Any]:
        entries = _write_rows(draft, rows, chunk_bytes)
        if leader:
            _write_rest(draft, state, dense, optimizer)
        return {"rows": entries, "files": {name: asdict(entry) for name, entry in draft.files.items()}}

    try:
        together(f"clearing {path}", lambda: draft.discard() if leader else None)
        parts = together(f"writing {path}", write)
        commit = together(
            f"committing {path}",
            lambda: _commit(draft, parts, rows, state, started).to_json() if leader else None,
        )
    except BaseException:
        if leader:
            draft.discard()
        raise
    record = commit[0]
    files = {name: FileEntry(**entry) for name, entry in record.pop("files").items()}
    return Artifact(path=path, files=files, **record)
