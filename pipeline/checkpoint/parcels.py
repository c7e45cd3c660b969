"""Records with arrays, sent between ranks as JSON and raw numbers; nothing is pickled."""

from __future__ import annotations

import io
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

from pipeline.checkpoint.ranks import device_of, this_rank, world_size


@dataclass(frozen=True)
class Parcel:
    """``record`` (JSON data), and the ``arrays`` that belong to it."""

    record: Any
    arrays: Sequence[NDArray[Any]] = ()


def from_all(own: Parcel) -> list[Parcel]:
    """Every rank's parcel, in rank order, on every rank. Collective.

    Beside what it gives, a rank needs memory for the largest parcel alone.
    """
    if world_size() == 1:
        return [own]
    found = []
    for rank, size in enumerate(_sizes(data := _packed(own))):
        block = data if rank == this_rank() else torch.empty(size, dtype=torch.uint8, device=data.device)
        dist.broadcast(block, rank)
        found.append(own if rank == this_rank() else _unpacked(block))
    return found


def to_first(own: Parcel) -> list[Parcel]:
    """Every rank's parcel, in rank order, on rank 0; [] on the others. Collective."""
    if world_size() == 1:
        return [own]
    sizes = _sizes(data := _packed(own))
    if this_rank() != 0:
        dist.send(data, 0)
        return []
    found = [own]
    for rank, size in enumerate(sizes[1:], start=1):
        block = torch.empty(size, dtype=torch.uint8, device=data.device)
        dist.recv(block, rank)
        found.append(_unpacked(block))
    return found


def _sizes(data: torch.Tensor) -> list[int]:
    """Bytes of every rank's ``data``. Collective."""
    sizes = torch.zeros(world_size(), dtype=torch.int64, device=data.device)
    sizes[this_rank()] = len(data)
    dist.all_reduce(sizes)
    return [int(size) for size in sizes.tolist()]


def _packed(parcel: Parcel) -> torch.Tensor:
    """The bytes of a parcel, uint8 [n]: NumPy's arrays one behind the other, the record first."""
    buffer = io.BytesIO()
    record = np.frombuffer(json.dumps([parcel.record, len(parcel.arrays)]).encode(), np.uint8)
    for array in (record, *parcel.arrays):
        np.lib.format.write_array(buffer, np.asarray(array), allow_pickle=False)
    return torch.frombuffer(bytearray(buffer.getvalue()), dtype=torch.uint8).to(device_of())


def _unpacked(data: torch.Tensor) -> Parcel:
    source = io.BytesIO(data.cpu().numpy().tobytes())
    record, count = json.loads(np.lib.format.read_array(source, allow_pickle=False).tobytes())
    return Parcel(record, [np.lib.format.read_array(source, allow_pickle=False) for _ in range(count)])
