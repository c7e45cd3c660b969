"""Initial values of table rows: a function of seed, table and row alone, so the same on any sharding."""

from __future__ import annotations

import hashlib
import math

import numpy as np
import torch
from torch import Tensor

from pipeline.embeddings.tables import TableSpec

INIT_BLOCK_ROWS = 8192


def initial_rows(seed: int, table: TableSpec, start: int, stop: int) -> Tensor:
    """Initial values of rows [start, stop): uniform in +-1 / sqrt(table.rows), [stop - start, dim].

    A function of (seed, table, global row) alone: each block of ``INIT_BLOCK_ROWS`` rows has a
    counter-based generator of its own, so any range costs at most two blocks more than itself.
    """
    bound = 1.0 / math.sqrt(table.rows)
    parts = []
    for block in range(start // INIT_BLOCK_ROWS, -(-stop // INIT_BLOCK_ROWS)):
        generator = np.random.Generator(np.random.Philox(key=int.from_bytes(block_key(seed, table, block), "little")))
        first = block * INIT_BLOCK_ROWS
        size = min(INIT_BLOCK_ROWS, table.rows - first)
        values = generator.random((size, table.dim), dtype=np.float32)
        parts.append(values[max(start - first, 0) : stop - first])
    flat = np.concatenate(parts) if parts else np.empty((0, table.dim), dtype=np.float32)
    # numpy, not torch: blocks are small, and threads for them would wait for one another.
    flat *= np.float32(2 * bound)
    flat -= np.float32(bound)
    return torch.from_numpy(flat)


def block_key(seed: int, table: TableSpec, block: int) -> bytes:
    """The 128-bit key of the generator of a block of ``INIT_BLOCK_ROWS`` rows, little-endian."""
    return hashlib.blake2b(f"{seed}|{table.name}|{block}".encode(), digest_size=16).digest()
