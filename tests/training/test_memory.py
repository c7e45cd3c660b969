"""The memory that a training adds to its process."""

from __future__ import annotations

import gc

import torch

from pipeline.training.memory import MemoryMeter
from tests.alone import alone

BYTES = 256 << 20  # far above what Linux counts late: some 100 pages of every CPU
PIECE = 64 << 10  # small enough for glibc to keep when it is freed; a hole of that size hides one page in 17 at most
CPU = torch.device("cpu")


@alone
def test_what_is_taken_is_measured_also_where_an_earlier_training_freed_as_much() -> None:
    for _ in range(2):
        meter = MemoryMeter(CPU)
        pieces = [torch.ones(PIECE, dtype=torch.uint8) for _ in range(BYTES // PIECE)]
        assert BYTES * 0.9 <= meter.peak() <= BYTES * 1.5
        assert sum(map(len, pieces)) == BYTES
        del pieces


@alone
def test_garbage_of_before_that_goes_in_the_middle_hides_nothing() -> None:
    gc.collect()
    cycle: list[object] = [torch.ones(BYTES // 2, dtype=torch.uint8)]
    cycle.append(cycle)
    del cycle
    meter = MemoryMeter(CPU)
    gc.collect()  # as Python does by itself once enough objects were made
    taken = torch.ones(BYTES, dtype=torch.uint8)
    assert meter.peak() >= BYTES * 0.9
    assert len(taken) == BYTES


@alone
def test_memory_of_before_does_not_count_and_what_was_freed_since_does() -> None:
    before = torch.ones(BYTES, dtype=torch.uint8)
    meter = MemoryMeter(CPU)
    assert meter.peak() < BYTES // 8
    more = torch.ones(2 * BYTES, dtype=torch.uint8)
    del more
    assert 2 * BYTES * 0.95 < meter.peak() < 2 * BYTES * 1.1
    assert len(before) == BYTES
