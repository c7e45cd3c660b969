"""Threads that score side by side, each with one thread of torch, so that their number changes no bit."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

import torch

from pipeline.ingest.engines import in_order

A = TypeVar("A")
B = TypeVar("B")


@contextlib.contextmanager
def one_thread() -> Iterator[int]:
    """Within: torch computes with one thread, as every rank does; threads decide in which order a library adds.

    Gives the number of threads that it had.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield before
    finally:
        torch.set_num_threads(before)


def run_in_threads(work: Callable[[A], B], items: Iterable[A]) -> Iterator[B]:
    """``work`` of each item in the order of the items, by as many threads as torch has; it has one in each of them."""
    with one_thread() as threads, contextlib.closing(in_order(work, iter(items), threads)) as made:
        yield from made
