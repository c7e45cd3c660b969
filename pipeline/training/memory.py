"""The memory that training adds to a rank's process, which compares with a plan's."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import resource
import sys
from pathlib import Path

import torch


class MemoryMeter:
    """Largest bytes that this process has taken since the meter was made.

    On CUDA those of PyTorch's allocator; on a CPU resident memory beyond that of the start (interpreter, libraries).
    Memory that an earlier training in this process freed, or left as garbage, does not count as there at the start:
    this one may reuse it.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
            return
        gc.collect()  # what an earlier training left in cycles would go in the middle of this one, and hide as much
        give_back_freed()
        with contextlib.suppress(OSError):  # else the peak is that of the process since its start
            Path("/proc/self/clear_refs").write_text("5")
        self._start = status_bytes("VmRSS") or peak_rss()

    def peak(self) -> int:
        """Bytes."""
        if self._device.type == "cuda":
            return int(torch.cuda.max_memory_allocated(self._device))
        return max((status_bytes("VmHWM") or peak_rss()) - self._start, 0)


def give_back_freed() -> None:
    """Give freed memory that glibc keeps back to the system; takes milliseconds.

    Training has glibc keep it for the next step (``distributed.connect``). Pieces never fit exactly, so the kept memory
    grows slowly, by some hundred MiB at most.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def peak_rss() -> int:
    """Largest resident set of this process so far, in bytes."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def status_bytes(key: str) -> int:
    """The figure ``key`` of this process in bytes, such as VmRSS now and VmHWM at its largest; 0 where not on Linux."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith(f"{key}:"):
                return int(line.split()[1]) * 1024
    return 0
