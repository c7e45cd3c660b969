"""Rows that start anew: a row that now belongs to another id keeps nothing that the former id learnt."""

from __future__ import annotations

import numpy as np
import torch

from pipeline.embeddings.rows import RowAccess
from pipeline.embeddings.scattered import rows_at

_AT_ONCE = 1 << 18


@torch.no_grad()
def reset_rows(access: RowAccess, table: str, rows: np.ndarray, seed: int) -> None:
    """Give the global ``rows`` (int64 [n], each once) of ``table`` their initial values and zero their optimizer state.

    Writes the rows of this rank's shards and replicas alone: call it on every rank. ``seed``: of the training.
    """
    spec = access.tables[table]
    for shard in access.local_shards():
        if shard.table != table:
            continue
        own = rows[(rows >= shard.row) & (rows < shard.row + shard.rows)]
        for start in range(0, len(own), _AT_ONCE):
            part = own[start : start + _AT_ONCE].astype(np.int64)
            values = rows_at(seed, spec, part)[:, shard.column : shard.column + shard.columns]
            places = torch.from_numpy(part - shard.row).to(shard.device)
            zeros = {name: torch.zeros(s, device=shard.device) for name, s in shard.state_shapes(len(part)).items()}
            shard.put(places, torch.from_numpy(np.ascontiguousarray(values)).to(shard.device), zeros)
