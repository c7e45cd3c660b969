"""Memory that training takes of a rank: what was there before is left out, so that it compares with a plan's."""

from __future__ import annotations

import contextlib
import ctypes
import resource
import sys
from pathlib import Path

import torch


class MemoryMeter:
    """Largest bytes that this process has taken since the meter was made.

    On CUDA those of PyTorch's allocator; on a CPU resident memory beyond that of the start (interpreter, libraries).
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
            return
        with contextlib.suppress(OSError):  # else the peak is that of the process' whole life
            Path("/proc/self/clear_refs").write_text("5")
        self._start = _status("VmRSS") or peak_rss()

    def peak(self) -> int:
        """Bytes."""
        if self._device.type == "cuda":
            return int(torch.cuda.max_memory_allocated(self._device))
        return max((_status("VmHWM") or peak_rss()) - self._start, 0)


def give_back_freed() -> None:
    """Give the memory that was freed back to the system, which glibc keeps for what comes next; takes milliseconds.

    Training has glibc keep it (``distributed.connect``), for the next step wants pieces like the last one's. They never
    fit exactly, so what is kept grows slowly, by some hundred MiB at most.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def peak_rss() -> int:
    """Largest resident set of this process so far, in bytes."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def _status(key: str) -> int:
    """Linux' figure ``key`` of this process in bytes, 0 where there is none."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith(f"{key}:"):
                return int(line.split()[1]) * 1024
    return 0
