"""The number of threads that a CPU kernel's backward pass runs on.

FBGEMM sorts the ids of every table with a team of OpenMP threads. For the tables and batches of click models, starting
and joining the team often costs more than it saves. The result is the same to the bit, so both are tried.
"""

from __future__ import annotations

import statistics
import time
from typing import Any

import torch
from torch import Tensor
from torchrec.distributed.model_parallel import DistributedModelParallel

from pipeline.embeddings.tables import kernels

TRIES = 5  # backward passes with each number, after the first one, which allocates


def choose_threads(dmp: DistributedModelParallel) -> None:
    """Have every fused CPU kernel of ``dmp`` try one thread and all threads of the process, and keep the quicker."""
    threads = torch.get_num_threads()
    if threads > 1:
        for kernel in kernels(dmp):
            if kernel.fused and kernel.module.current_device.type == "cpu":
                kernel.module.register_forward_hook(_Trial(threads))


class _Trial:
    """The forward hook of a kernel: its backward pass runs on ``chosen`` threads, first tried, then settled."""

    def __init__(self, threads: int) -> None:
        self._all, self._passes, self._began = threads, 0, 0.0
        self._seconds: dict[int, list[float]] = {1: [], threads: []}
        self.chosen = threads

    def __call__(self, module: Any, args: tuple[Any, ...], output: Tensor) -> None:
        if output.grad_fn is not None:
            output.grad_fn.register_prehook(self._before)
            output.grad_fn.register_hook(self._after)

    def _before(self, *_: Any) -> None:
        torch.set_num_threads(self.chosen)
        self._began = time.perf_counter()

    def _after(self, *_: Any) -> None:
        seconds = time.perf_counter() - self._began
        torch.set_num_threads(self._all)
        if self._passes <= 2 * TRIES:
            self._try_next(seconds)

    def _try_next(self, seconds: float) -> None:
        if self._passes:
            self._seconds[self.chosen].append(seconds)
        self._passes += 1
        self.chosen = 1 if self._passes % 2 else self._all
        if self._passes > 2 * TRIES:
            self.chosen = min(self._seconds, key=lambda count: statistics.median(self._seconds[count]))
