"""The part of the checkpoint benchmark that training pays: samples/s with checkpoints over samples/s without."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch

from pipeline.checkpoint import native
from pipeline.checkpoint.checkpointer import Checkpointer
from pipeline.checkpoint.quantise import choose_coding, encode
from pipeline.checkpoint.train_state import TrainState
from pipeline.embeddings.touched import _Marker


class Steps(Protocol):
    """Trains so many steps; the seconds they take."""

    def __call__(self, steps: int) -> float: ...


def measure_share(train: Steps, saver: Checkpointer, interval: float, count: int) -> dict[str, Any]:
    """Train for ``interval`` seconds without checkpoints and with one, ``count`` times in turn.

    With: a checkpoint is taken at the beginning, as after the last of so many seconds, and what is still being written
    at their end is waited for. Without: nothing marks rows, either. The first checkpoint of a cycle is a baseline.
    """
    train(3)
    rates, alone, stalls, waits, writing = [], [], [], [], []
    for number in range(1, count + 1):
        with _unmarked():
            alone.append(_rate(train, interval))
        began, written = time.perf_counter(), saver.figures.writing
        saver.save(TrainState(step=number))
        stalls.append(time.perf_counter() - began)
        steps = 0
        while time.perf_counter() - began < interval:
            train(1)
            steps += 1
        waited = time.perf_counter()
        saver.close()
        waits.append(time.perf_counter() - waited)
        rates.append(steps / (time.perf_counter() - began))
        writing.append(saver.figures.writing - written)
        print(
            f"{number}: {rates[-1] / alone[-1]:.4f} of the samples/s, stopped {1000 * stalls[-1]:.0f} ms, written in "
            f"{writing[-1]:.1f} s, waited {1000 * waits[-1]:.0f} ms",
            flush=True,
        )
    return {
        "throughput_share": statistics.fmean(rates) / statistics.fmean(alone),
        "throughput_share_each": [round(a / b, 4) for a, b in zip(rates, alone, strict=True)],
        "throughput_interval_seconds": interval,
        "throughput_stall_ms": [round(1000 * stall) for stall in stalls],
        "throughput_wait_ms": [round(1000 * wait) for wait in waits],
        "throughput_write_seconds": [round(seconds, 2) for seconds in writing],
        "threads": torch.get_num_threads(),
    }


def _rate(train: Steps, seconds: float) -> float:
    began, steps = time.perf_counter(), 0
    while time.perf_counter() - began < seconds:
        train(1)
        steps += 1
    return steps / (time.perf_counter() - began)


@contextmanager
def _unmarked() -> Iterator[None]:
    """No lookup marks rows."""
    call = _Marker.__call__
    _Marker.__call__ = lambda *_: None  # type: ignore[method-assign]
    try:
        yield
    finally:
        _Marker.__call__ = call  # type: ignore[method-assign]


def measure_coding(rows: torch.Tensor) -> dict[str, Any]:
    """MB/s of float32 that one thread codes in 4 bits, with the search that is chosen for ``rows`` and the costliest.

    ``coding_compiled``: whether the library is installed; ``coding_mb_s_torch``: without it.
    """
    coding = choose_coding(rows[:: max(1, len(rows) // 4096)][:4096], 4)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    library = native.library()
    figures = {
        "coding_mb_s": _speed(lambda: encode(rows, coding), rows),
        "coding_search": [coding.steps, coding.shrink, coding.fits],
        "coding_compiled": library is not None,
    }
    used, native.library = native.library, lambda: None  # type: ignore[assignment]
    part = rows[: len(rows) // 8]
    figures["coding_mb_s_torch"] = _speed(lambda: encode(part, coding), part)
    native.library = used
    torch.set_num_threads(threads)
    return figures


def _speed(work: Callable[[], object], rows: torch.Tensor, rounds: int = 5) -> float:
    seconds = []
    for _ in range(rounds):
        began = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - began)
    return rows.nbytes / 1e6 / statistics.median(seconds)
