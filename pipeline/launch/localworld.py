"""The number of a host's ranks, where libraries look for it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

LOCAL = "LOCAL_WORLD_SIZE"  # torchrun's


@contextmanager
def local_world(ranks: int) -> Iterator[None]:
    """Have TorchRec, which asks the environment as torchrun sets it, find ``ranks`` ranks on this host."""
    before = os.environ.get(LOCAL)
    os.environ[LOCAL] = str(ranks)
    try:
        yield
    finally:
        os.environ.pop(LOCAL)
        if before is not None:
            os.environ[LOCAL] = before
