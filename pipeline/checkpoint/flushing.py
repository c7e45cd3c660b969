"""Written files on the way to a local disk: the manifest, written last, must not outlive them."""

from __future__ import annotations

import os
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor

from pipeline.store import Draft, disk_errors

# Files flushed at once (each flush waits for the disk's journal, together they wait once), and files written but not
# on the disk yet.
_FLUSHES, _UNFLUSHED = 8, 16


class Flushing:
    """Flushes files of ``draft`` to a local disk behind the writer; leaving it waits for all of them."""

    def __init__(self, draft: Draft) -> None:
        self._draft = draft
        self._pool = ThreadPoolExecutor(_FLUSHES, thread_name_prefix="nightjar-flush") if draft.store.is_local else None
        self._waiting: deque[Future[None]] = deque()

    def __enter__(self) -> Flushing:
        return self

    def add(self, name: str) -> None:
        """Flush file ``name`` soon; waits while too many are not on the disk yet."""
        if self._pool is not None:
            self._waiting.append(self._pool.submit(self._flush, name))
            if len(self._waiting) > _UNFLUSHED:
                self._waiting.popleft().result()

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if self._pool is not None:
            self._pool.shutdown(wait=True, cancel_futures=kind is not None)
            for future in self._waiting if kind is None else ():
                future.result()

    def _flush(self, name: str) -> None:
        path = self._draft.store.full(f"{self._draft.path}/{name}")
        with disk_errors(f"{self._draft.path}/{name}"):
            handle = os.open(path, os.O_RDONLY)
            try:
                os.fsync(handle)
            finally:
                os.close(handle)
