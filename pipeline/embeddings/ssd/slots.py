"""The slots of a shard: in host memory through NumPy, or in tensors of a device.

A slot is a row of the kernel's storage. One thread fills and empties slots and another one trains. On a CUDA device
neither waits for the other: an event and a stream keep the order that both need (``DeviceSlots``).
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pipeline.embeddings.ssd.aio import I64
from pipeline.embeddings.ssd.kernel import sparse_memory
from pipeline.embeddings.ssd.log import F32


class HostSlots:
    """Slots in the kernel's host memory: ``weights`` [slots, dim], ``state`` [slots] where its optimizer has one."""

    def __init__(self, weights: Tensor, state: Tensor | None) -> None:
        self._weights: F32 = weights.numpy()
        self._state: F32 = (sparse_memory(len(weights)) if state is None else state).numpy()

    def read(self, slots: I64) -> tuple[F32, F32]:
        """Copies of the weights [n, dim] and the states [n] in ``slots`` [n]."""
        return self._weights[slots], self._state[slots]

    def write(self, slots: I64 | slice, weights: F32, state: F32) -> None:
        """Overwrite ``slots`` [n], each once, with ``weights`` [n, dim] and ``state`` [n]."""
        self._weights[slots], self._state[slots] = weights, state

    def trained(self) -> None:
        """Call after the calling thread changed slots: its work so far comes before later reads and writes."""

    def arrived(self) -> None:
        """Call before the calling thread uses slots: the writes so far come before its next work."""


class DeviceSlots:
    """Slots in tensors of a device; on CUDA rows travel in batches through page-locked memory on a stream of their own.

    ``weights`` [slots, dim] and ``state`` [slots] as in ``HostSlots``. ``read`` returns once the rows have arrived,
    ``write`` once the copy is under way. Copies keep every bit.
    """

    def __init__(self, weights: Tensor, state: Tensor | None) -> None:
        # ``data`` has its own version counter: slots are filled between a lookup and its backward pass, and autograd
        # must not take that for a change of the tensors that it saved.
        self._weights = weights.data
        self._state = torch.zeros(len(weights), device=weights.device) if state is None else state.data
        self._cuda = weights.device.type == "cuda"
        self._stream: Any = torch.cuda.Stream(weights.device) if self._cuda else None
        self._trained: Any = None

    def read(self, slots: I64) -> tuple[F32, F32]:
        """See ``HostSlots``."""
        count, dim = len(slots), self._weights.shape[1]
        here = self._staging(count, dim + 1)
        with self._in_order():
            places = self._sent(torch.from_numpy(slots))
            rows = torch.empty(count, dim + 1, device=self._weights.device)
            rows[:, :dim] = self._weights.index_select(0, places)
            rows[:, dim] = self._state.index_select(0, places)
            here.copy_(rows, non_blocking=self._cuda)
        if self._cuda:
            self._stream.synchronize()
        records: F32 = here.numpy()
        return records[:, :-1], records[:, -1]

    def write(self, slots: I64 | slice, weights: F32, state: F32) -> None:
        """See ``HostSlots``."""
        numbers = np.arange(slots.start, slots.stop) if isinstance(slots, slice) else slots
        dim = self._weights.shape[1]
        here = self._staging(len(numbers), dim + 1)
        records = here.numpy()
        records[:, :dim], records[:, dim] = weights, state
        with self._in_order():
            places = self._sent(torch.from_numpy(numbers))
            rows = here.to(self._weights.device, non_blocking=self._cuda)
            self._weights.index_copy_(0, places, rows[:, :dim])
            self._state.index_copy_(0, places, rows[:, dim])

    def trained(self) -> None:
        """See ``HostSlots``; orders the work of the caller's stream."""
        if self._cuda:
            event = torch.cuda.Event()
            event.record(torch.cuda.current_stream(self._weights.device))
            self._trained = event

    def arrived(self) -> None:
        """See ``HostSlots``; orders the work of the caller's stream."""
        if self._cuda:
            torch.cuda.current_stream(self._weights.device).wait_stream(self._stream)

    def _staging(self, rows: int, words: int) -> Tensor:
        """Host memory for copies; PyTorch keeps page-locked memory and hands it out again once its copy is done."""
        return torch.empty(rows, words, pin_memory=self._cuda)

    def _sent(self, places: Tensor) -> Tensor:
        if not self._cuda:
            return places
        return places.pin_memory().to(self._weights.device, non_blocking=True)

    def _in_order(self) -> AbstractContextManager[Any]:
        """Work on the copy stream, after training's last change of the slots."""
        if not self._cuda:
            return nullcontext()
        if self._trained is not None:
            self._stream.wait_event(self._trained)
        return torch.cuda.stream(self._stream)


Slots = HostSlots | DeviceSlots


def looked_up(ids: Tensor) -> tuple[Tensor, NDArray[Any]]:
    """A copy of ``ids`` in host memory, and the array over it; waits for the device they come from."""
    copy = ids.to("cpu", copy=True)
    return copy, copy.numpy()
