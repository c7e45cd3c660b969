"""Bringing the rows of coming batches into memory while the current one is computed.

Ids become pages of weights and optimizer state, sorted and each once, and one system call asks for up to 1024 runs of
them. The disk then works at its own depth. Of the ways measured (docs/measurements.md) this one was the fastest and
took the least processor time.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import queue
import threading
from collections.abc import Callable, Mapping

import numpy as np
from numpy.typing import NDArray

from pipeline.embeddings.ssd.files import PAGE

Ids = Mapping[str, NDArray[np.int64]]
_SYS_PROCESS_MADVISE = 440  # the same on every architecture
_RUNS_A_CALL = 1024
_LIBC = ctypes.CDLL(None, use_errno=True)


def pages_of(places: NDArray[np.int64], width: int, pinned: int) -> NDArray[np.int64]:
    """Sorted numbers of the pages that hold the rows at ``places``, each ``width`` bytes, ``pinned`` bytes left out."""
    first, last = places * width // PAGE, (places * width + width - 1) // PAGE
    most = 1 if PAGE % width == 0 else (width + PAGE - 2) // PAGE + 1
    pages = np.unique(np.concatenate([np.minimum(first + step, last) for step in range(most)]))
    return pages[np.searchsorted(pages, pinned // PAGE) :]


def will_need(address: int, pages: NDArray[np.int64]) -> None:
    """Ask the kernel to read ``pages`` (sorted numbers, counted from ``address``) of a file mapping; does not wait.

    Where process_madvise(2) is not allowed (some containers), one madvise(2) a run does the same, a little slower.
    """
    if not len(pages):
        return
    starts = np.flatnonzero(np.diff(pages, prepend=pages[0] - 2) != 1)
    runs = np.empty((len(starts), 2), np.uint64)
    runs[:, 0] = address + pages[starts] * PAGE
    runs[:, 1] = np.diff(starts, append=len(pages)) * PAGE
    own = os.pidfd_open(os.getpid())
    try:
        for start in range(0, len(runs), _RUNS_A_CALL):
            part = runs[start : start + _RUNS_A_CALL]
            vector = part.ctypes.data_as(ctypes.c_void_p)
            done = _LIBC.syscall(
                ctypes.c_long(_SYS_PROCESS_MADVISE), own, vector, ctypes.c_size_t(len(part)), mmap.MADV_WILLNEED, 0
            )
            if done < 0:
                for place, size in part.tolist():
                    _LIBC.madvise(ctypes.c_void_p(place), ctypes.c_size_t(size), mmap.MADV_WILLNEED)
    finally:
        os.close(own)


class Prefetcher:
    """A thread that hands the ids of batches, in their order, to ``bring``; at most ``depth`` batches wait."""

    def __init__(self, bring: Callable[[Ids], None], depth: int) -> None:
        self._bring = bring
        self._queue: queue.Queue[Ids | None] = queue.Queue(maxsize=depth)
        self._error: BaseException | None = None
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="nightjar-prefetch", daemon=True)
        self._thread.start()

    def put(self, ids: Ids) -> None:
        """Row numbers by table of a batch to come; waits while ``depth`` batches are waiting already."""
        while not self._stop.is_set():
            try:
                self._queue.put(ids, timeout=0.1)
                return
            except queue.Full:
                continue

    def check(self) -> None:
        """Raise what the thread met."""
        if self._error is not None:
            raise self._error

    def close(self) -> None:
        """Stop the thread; batches that wait are dropped."""
        self._stop.set()
        while self._thread.is_alive():
            try:
                self._queue.put_nowait(None)
            except queue.Full:
                self._drop()
            self._thread.join(timeout=0.01)

    def _drop(self) -> None:
        try:
            self._queue.get_nowait()
        except queue.Empty:
            return

    def _run(self) -> None:
        try:
            while not self._stop.is_set():
                ids = self._queue.get()
                if ids is not None:
                    self._bring(ids)
        except BaseException as error:  # raised where training looks
            self._error = error
            self._stop.set()
