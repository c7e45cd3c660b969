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
    """In each step every rank submits a wish (0, SAVE or STOP) and gets the largest wish of the step before.

    The exchange runs beside the step on its own process group, so no step waits for it; all ranks act after the same
    step. A SIGTERM becomes the wish STOP. A context manager, which restores the former handler.
    """

    def __init__(self) -> None:
        self._group = dist.new_group(backend="gloo") if dist.get_world_size() > 1 else None
        self._flag = torch.zeros(1, dtype=torch.int32)
        self._pending: Any = None
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
        """Record, on every rank, that a checkpoint was taken after this step, which grants the wishes in flight."""
        self._answered = True

    def step(self, save: bool) -> int:
        """Submit this rank's wish at the end of a step; returns what all agree on: 0, SAVE or STOP."""
        wish = SAVE if save else 0
        if self._terminated.is_set():
            wish = STOP
        if self._group is None:
            return wish
        agreed = 0
        if self._pending is not None:
            self._pending.wait()
            agreed = int(self._flag.item())
            # It was asked for before the checkpoint that has just been taken.
            if self._answered and agreed == SAVE:
                agreed = 0
        self._answered = False
        self._flag = torch.tensor([wish], dtype=torch.int32)
        self._pending = dist.all_reduce(self._flag, op=dist.ReduceOp.MAX, group=self._group, async_op=True)
        return agreed
