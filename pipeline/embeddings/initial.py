"""Initial values of table rows: a function of seed, table and row alone, so they are the same on any sharding.

``initial_rows`` returns consecutive rows. ``rows_at`` returns the same values for scattered rows, computed when a row
is first used, so that a table of any size starts at once: the generator is counter-based. NumPy has no call for
scattered counters, so Philox4x64-10 is computed here for all wanted rows at once (Salmon et al., "Parallel Random
Numbers: As Easy as 1, 2, 3", SC'11, section 3.3).
"""

from __future__ import annotations

import hashlib

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pipeline.embeddings.tables import TableSpec

INIT_BLOCK_ROWS = 8192
U64 = NDArray[np.uint64]
_ROUNDS = 10
_MULTIPLIERS = (np.uint64(0xD2E7470EE14C6C93), np.uint64(0xCA5A826395121157))
_WEYL = (np.uint64(0x9E3779B97F4A7C15), np.uint64(0xBB67AE8584CAA73B))
_LOW, _HALF = np.uint64(0xFFFFFFFF), np.uint64(32)
# The floats of a block of the generator: four 64-bit numbers give two float32 each.
_FLOATS = 8
# Floats of the rows that are computed at a time: the intermediate numbers stay in the second-level cache.
_PIECE_FLOATS = 1 << 17


def initial_rows(seed: int, table: TableSpec, start: int, stop: int) -> Tensor:
    """Return the initial values of rows [start, stop): [stop - start, dim], uniform in +-``table.initial_bound``.

    They are a function of (seed, table, global row) alone: each block of ``INIT_BLOCK_ROWS`` rows has its own
    counter-based generator, so a range costs at most two blocks more than itself.
    """
    bound = table.initial_bound
    parts = [np.empty((0, table.dim), np.float32)]
    for block in range(start // INIT_BLOCK_ROWS, -(-stop // INIT_BLOCK_ROWS)):
        generator = np.random.Generator(np.random.Philox(key=int.from_bytes(block_key(seed, table, block), "little")))
        first = block * INIT_BLOCK_ROWS
        size = min(INIT_BLOCK_ROWS, table.rows - first)
        values = generator.random((size, table.dim), dtype=np.float32)
        parts.append(values[max(start - first, 0) : stop - first])
    flat = np.concatenate(parts)
    # Use NumPy rather than torch: blocks are small, and threads for them would wait for one another.
    flat *= np.float32(2 * bound)
    flat -= np.float32(bound)
    return torch.from_numpy(flat)


def block_key(seed: int, table: TableSpec, block: int) -> bytes:
    """Return the 128-bit key of the generator of a block of ``INIT_BLOCK_ROWS`` rows, little-endian."""
    return hashlib.blake2b(f"{seed}|{table.name}|{block}".encode(), digest_size=16).digest()


def rows_at(seed: int, table: TableSpec, rows: NDArray[np.int64]) -> NDArray[np.float32]:
    """Return the values that ``initial_rows`` gives for scattered rows: float32 [n, dim].

    Args:
        seed: The seed of the training.
        table: The table of the rows.
        rows: The global row numbers, int64 [n], in any order.
    """
    step = max(1, _PIECE_FLOATS // table.dim)
    parts = [np.empty((0, table.dim), np.float32)]
    for start in range(0, len(rows), step):
        parts.append(_rows_of_piece(seed, table, rows[start : start + step]))
    return np.concatenate(parts)


def _rows_of_piece(seed: int, table: TableSpec, rows: NDArray[np.int64]) -> NDArray[np.float32]:
    # 1. Find the generator of each row's block, and the counters of the numbers that the row has.
    blocks, places = np.divmod(rows, INIT_BLOCK_ROWS)
    unique, inverse = np.unique(blocks, return_inverse=True)
    words = b"".join(block_key(seed, table, int(block)) for block in unique)
    keys = np.frombuffer(words, dtype="<u8").astype(np.uint64).reshape(-1, 2)[inverse]
    first, skip = np.divmod(places * table.dim, _FLOATS)
    count = -(-(table.dim + int(skip.max(initial=0))) // _FLOATS)
    # NumPy increments the counter before it computes, so its first block has counter 1.
    counters = (first[:, None] + np.arange(1, count + 1)).astype(np.uint64)
    # 2. Make two floats of each 64-bit word, from the 24 highest bits of its halves: uniform in [0, 1).
    words64 = np.stack(_philox(counters, keys[:, :1], keys[:, 1:]), axis=-1)
    halves = np.stack([words64 & _LOW, words64 >> _HALF], axis=-1).astype(np.uint32)
    floats = (halves >> np.uint32(8)).astype(np.float32) * np.float32(2**-24)
    flat = floats.reshape(len(rows), count * _FLOATS)
    # 3. Cut out the rows, which may begin in the middle of a block of the generator.
    if skip.any():
        flat = np.take_along_axis(flat, skip[:, None] + np.arange(table.dim), axis=1)
    bound = table.initial_bound
    flat = flat[:, : table.dim] * np.float32(2 * bound)
    flat -= np.float32(bound)
    return flat


def _philox(counters: U64, low: U64, high: U64) -> tuple[U64, U64, U64, U64]:
    zero = np.zeros_like(counters)
    a, b, c, d = counters, zero, zero, zero
    for turn in range(_ROUNDS):
        if turn:
            low, high = low + _WEYL[0], high + _WEYL[1]
        high0, low0 = _multiply_128(_MULTIPLIERS[0], a)
        high1, low1 = _multiply_128(_MULTIPLIERS[1], c)
        a, b, c, d = high1 ^ b ^ low, low1, high0 ^ d ^ high, low0
    return a, b, c, d


def _multiply_128(factor: np.uint64, values: U64) -> tuple[U64, U64]:
    # Returns high and low 64 bits of the 128-bit products, by schoolbook multiplication of 32-bit halves.
    f0, f1 = factor & _LOW, factor >> _HALF
    v0, v1 = values & _LOW, values >> _HALF
    middle = v1 * f0 + (v0 * f0 >> _HALF)
    other = v0 * f1 + (middle & _LOW)
    return v1 * f1 + (middle >> _HALF) + (other >> _HALF), values * factor
