"""The slots of a shard, in host memory or in tensors of a device, and the order in which their rows leave.

A slot is a row of the kernel's storage. One thread fills and empties slots and another one trains. On a CUDA device
neither waits for the other: an event and a stream keep the order that both need (``DeviceSlots``).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pipeline.embeddings.ssd.aio import I64
from pipeline.embeddings.ssd.log import F32

# The most entries per slot; beyond, the queue drops the entries of rows that were used since.
_STALE = 4


class HostSlots:
    """Slots in host memory: ``parts`` are the weights [slots, dim] and the states, [slots] or [slots, dim].

    A row's ``values`` are those of all parts in order. ``width`` of them are moved: what the parts lack is 0.
    """

    def __init__(self, parts: Sequence[Tensor], width: int) -> None:
        self._parts: list[F32] = [part.numpy().reshape(len(part), -1) for part in parts]
        self._starts = _starts(self._parts)
        self._width = width

    def read(self, slots: I64) -> F32:
        """Return copies of the values in ``slots`` [n]: [n, width]."""
        values = np.zeros((len(slots), self._width), np.float32)
        for part, start in zip(self._parts, self._starts, strict=True):
            values[:, start : start + part.shape[1]] = part[slots]
        return values

    def write(self, slots: I64 | slice, values: F32) -> None:
        """Overwrite ``slots`` [n], each once, with ``values`` [n, width]."""
        for part, start in zip(self._parts, self._starts, strict=True):
            part[slots] = values[:, start : start + part.shape[1]]

    def trained(self) -> None:
        """Order the calling thread's work so far before later reads and writes; call it after slots have changed."""

    def arrived(self) -> None:
        """Order the writes so far before the calling thread's next work; call it before slots are used."""


class DeviceSlots:
    """Slots in tensors of a device; on CUDA rows move in batches through page-locked memory on a separate stream.

    ``parts`` and ``width`` are as in ``HostSlots``. ``read`` returns once the rows have arrived, ``write`` once the
    copy is under way. Copies keep every bit.
    """

    def __init__(self, parts: Sequence[Tensor], width: int) -> None:
        # ``data`` has its own version counter: slots are filled between a lookup and its backward pass, and autograd
        # must not take that for a change of the tensors that it saved.
        self._parts = [part.data.view(len(part), -1) for part in parts]
        self._starts = _starts(self._parts)
        self._width, self._device = width, parts[0].device
        self._cuda = self._device.type == "cuda"
        self._stream: Any = torch.cuda.Stream(self._device) if self._cuda else None
        self._trained: Any = None

    def read(self, slots: I64) -> F32:
        """See ``HostSlots``."""
        host = self._staging(len(slots))
        with self._copy_stream():
            places = self._to_device(torch.from_numpy(slots))
            rows = torch.zeros(len(slots), self._width, device=self._device)
            for part, start in zip(self._parts, self._starts, strict=True):
                rows[:, start : start + part.shape[1]] = part.index_select(0, places)
            host.copy_(rows, non_blocking=self._cuda)
        if self._cuda:
            self._stream.synchronize()
        values: F32 = host.numpy()
        return values

    def write(self, slots: I64 | slice, values: F32) -> None:
        """See ``HostSlots``."""
        numbers = np.arange(slots.start, slots.stop) if isinstance(slots, slice) else slots
        host = self._staging(len(numbers))
        host.numpy()[:] = values
        with self._copy_stream():
            places = self._to_device(torch.from_numpy(numbers))
            rows = host.to(self._device, non_blocking=self._cuda)
            for part, start in zip(self._parts, self._starts, strict=True):
                part.index_copy_(0, places, rows[:, start : start + part.shape[1]])

    def trained(self) -> None:
        """See ``HostSlots``; orders the work of the caller's stream."""
        if self._cuda:
            event = torch.cuda.Event()
            event.record(torch.cuda.current_stream(self._device))
            self._trained = event

    def arrived(self) -> None:
        """See ``HostSlots``; orders the work of the caller's stream."""
        if self._cuda:
            torch.cuda.current_stream(self._device).wait_stream(self._stream)

    def _staging(self, rows: int) -> Tensor:
        # PyTorch keeps page-locked memory and hands it out again once its copy is done.
        return torch.empty(rows, self._width, pin_memory=self._cuda)

    def _to_device(self, places: Tensor) -> Tensor:
        if not self._cuda:
            return places
        return places.pin_memory().to(self._device, non_blocking=True)

    def _copy_stream(self) -> AbstractContextManager[Any]:
        if not self._cuda:
            return nullcontext()
        # Wait for training's last change of the slots.
        if self._trained is not None:
            self._stream.wait_event(self._trained)
        return torch.cuda.stream(self._stream)


Slots = HostSlots | DeviceSlots


def _starts(parts: Sequence[Any]) -> list[int]:
    # Returns where the values of each part begin within those of a row.
    starts, start = [], 0
    for part in parts:
        starts.append(start)
        start += part.shape[1]
    return starts


def looked_up(ids: Tensor) -> tuple[Tensor, NDArray[Any]]:
    """Return a copy of ``ids`` in host memory, and an array view of it; waits for the device they come from."""
    copy = ids.to("cpu", copy=True)
    return copy, copy.numpy()


class Recency:
    """A queue of the slots whose rows no batch holds, in the order in which their last batches released them.

    A slot may be used again meanwhile, in which case its old entry is skipped.
    """

    def __init__(self, slots: int = 0) -> None:
        # The queue of (times, slots).
        self._queue: deque[tuple[I64, I64]] = deque()
        self._queued = 0
        # The time when a slot was last released; -1: it has left since.
        self._time = np.full(slots, -1, np.int64)
        self._now = 0

    def grow(self, slots: int) -> None:
        """Make room for ``slots`` more."""
        self._time = np.concatenate([self._time, np.full(slots, -1, np.int64)])

    def add(self, slots: I64, held: np.ndarray) -> None:
        """Queue the released ``slots``; ``held`` is how many batches hold each slot."""
        self._now += 1
        self._time[slots] = self._now
        self._queue.append((self._time[slots], slots))
        self._queued += len(slots)
        if self._queued > _STALE * len(self._time):
            live = np.flatnonzero((self._time > 0) & (held == 0))
            live = live[np.argsort(self._time[live], kind="stable")]
            self._queue, self._queued = deque([(self._time[live], live)]), len(live)

    def take(self, count: int, held: np.ndarray) -> I64:
        """Take the ``count`` longest unused slots out of the queue, which must have that many."""
        leaving = [np.empty(0, np.int64)]
        while count:
            times, slots = self._queue.popleft()
            self._queued -= len(slots)
            idle = np.flatnonzero((self._time[slots] == times) & (held[slots] == 0))
            leaving.append(slots[idle[:count]])
            if len(idle) > count:
                rest = idle[count:]
                self._queue.appendleft((times[rest], slots[rest]))
                self._queued += len(rest)
            count -= len(leaving[-1])
        taken = np.concatenate(leaving)
        self._time[taken] = -1
        return taken
