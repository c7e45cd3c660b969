"""Tries that follow each other at once: how long the code waits between them is no business of most tests."""

from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

from pipeline.store import retrying


@contextmanager
def no_waits() -> Iterator[None]:
    """As many tries as ever, and no pauses, of stores and of ranks."""
    from pipeline.checkpoint import ranks

    none = tuple(0.0 for _ in ranks.PAUSES)
    with mock.patch.object(retrying, "FIRST_SECONDS", 0.0), mock.patch.object(ranks, "PAUSES", none):
        yield
