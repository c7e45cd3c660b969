"""Ranks agree, at a step boundary, to take a checkpoint or to stop: a clock or a SIGTERM on one counts for all."""

from __future__ import annotations

import signal
import threading
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist

SAVE, STOP = 1, 2


class Agreement:
    """Each step every rank puts in its wish (0, SAVE or STOP) and learns the largest of the step before.

    The exchange runs behind the step on a process group of its own, so no step waits for it; all ranks act on the
    same step. A SIGTERM that arrives becomes the wish STOP. Use as a context manager: the former handler comes back.
    """

    def __init__(self) -> None:
        many = dist.get_world_size() > 1
        self._group = dist.new_group(backend="gloo") if many else None
        self._flag = torch.zeros(1, dtype=torch.int32)
        self._flight: Any = None
        self._answered = False
        self._terminated = threading.Event()
        self._former: Any = None

    def __enter__(self) -> Agreement:
        if threading.current_thread() is threading.main_thread():
            self._former = signal.signal(signal.SIGTERM, self._on_signal)
        return self

    def __exit__(self, *_: object) -> None:
        if self._former is not None:
            signal.signal(signal.SIGTERM, self._former)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self._terminated.set()

    def saved(self) -> None:
        """Tell, on every rank, that a checkpoint was taken after this step: wishes for one in flight are granted."""
        self._answered = True

    def step(self, save: bool) -> int:
        """Put in this rank's wish for the end of this step; what all agreed on: 0, SAVE or STOP."""
        wish = STOP if self._terminated.is_set() else SAVE if save else 0
        if self._group is None:
            return wish
        agreed = 0
        if self._flight is not None:
            self._flight.wait()
            agreed = int(self._flag.item())
            if self._answered and agreed == SAVE:
                agreed = 0
        self._answered = False
        self._flag = torch.tensor([wish], dtype=torch.int32)
        self._flight = dist.all_reduce(self._flag, op=dist.ReduceOp.MAX, group=self._group, async_op=True)
        return agreed
