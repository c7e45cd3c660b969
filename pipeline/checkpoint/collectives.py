"""Collectives of records: all ranks succeed or all raise the same error. JSON and raw numbers; nothing is pickled."""

from __future__ import annotations

import io
import json
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

from pipeline.errors import NightjarError, PassingError

log = logging.getLogger(__name__)
PAUSES = (0.5, 1.0, 2.0)  # seconds before each further try of what met a passing fault
_AGAIN = "run the same command again; that rank's log says more"


def this_rank() -> int:
    """This process's rank; 0 without a process group."""
    return dist.get_rank() if dist.is_initialized() else 0


def world_size() -> int:
    """The number of ranks; 1 without a process group."""
    return dist.get_world_size() if dist.is_initialized() else 1


def exchange(record: Any, group: dist.ProcessGroup | None = None) -> list[Any]:
    """Every rank's ``record`` (JSON data), in rank order. Collective over ``group``; JSON bytes, never pickled."""
    if world_size() == 1:
        return [json.loads(json.dumps(record))]
    device = device_of(group)
    data = bytearray(json.dumps(record).encode())
    size = torch.tensor([len(data)], device=device)
    sizes = [torch.zeros_like(size) for _ in range(dist.get_world_size())]
    dist.all_gather(sizes, size, group=group)
    longest = max(int(each) for each in sizes)
    block = torch.zeros(longest, dtype=torch.uint8, device=device)
    block[: len(data)] = torch.frombuffer(data, dtype=torch.uint8).to(device)
    blocks = [torch.zeros_like(block) for _ in sizes]
    dist.all_gather(blocks, block, group=group)
    return [json.loads(b[: int(n)].cpu().numpy().tobytes()) for b, n in zip(blocks, sizes, strict=True)]


def device_of(group: dist.ProcessGroup | None = None) -> torch.device:
    """Where tensors must lie that ``group`` sends."""
    return (
        torch.device("cuda", torch.cuda.current_device()) if dist.get_backend(group) == "nccl" else torch.device("cpu")
    )


def _json_bytes(record: Any, device: torch.device) -> torch.Tensor:
    """``record`` as JSON, uint8 [bytes]."""
    return torch.frombuffer(bytearray(json.dumps(record).encode()), dtype=torch.uint8).to(device)


def _record_of(data: torch.Tensor) -> Any:
    return json.loads(data.cpu().numpy().tobytes())


def to_first(record: Any, group: dist.ProcessGroup | None = None) -> list[Any]:
    """Every rank's ``record`` (JSON data), in rank order, on rank 0; [] on the others. Collective over ``group``.

    What a rank keeps does not grow with the number of ranks, but on rank 0.
    """
    if world_size() == 1:
        return [json.loads(json.dumps(record))]
    own = _json_bytes(record, device_of(group))
    sizes = torch.zeros(dist.get_world_size(), dtype=torch.int64, device=own.device)
    sizes[dist.get_rank()] = len(own)
    dist.all_reduce(sizes, group=group)
    if dist.get_rank() != 0:
        dist.send(own, 0, group=group)
        return []
    records = [_record_of(own)]
    for rank, size in enumerate(sizes.tolist()[1:], start=1):  # as many bytes as there are, not ranks times the longest
        block = torch.empty(size, dtype=torch.uint8, device=own.device)
        dist.recv(block, rank, group=group)
        records.append(_record_of(block))
    return records


def from_first(what: str, work: Callable[[], Any], group: dist.ProcessGroup | None = None) -> Any:
    """What ``work`` (JSON data) gives on rank 0, which alone does it, on every rank. Collective over ``group``.

    Where it fails, all ranks raise its error, as in ``together``.
    """
    if world_size() == 1:
        return together(what, work)[0]
    cause, record = _tried(what, work) if dist.get_rank() == 0 else (None, {})
    device = device_of(group)
    data = _json_bytes(record, device)
    size = torch.tensor([len(data)], device=device)
    dist.broadcast(size, 0, group=group)
    if dist.get_rank() != 0:
        data = torch.empty(int(size), dtype=torch.uint8, device=device)
    dist.broadcast(data, 0, group=group)
    answer = _record_of(data)
    if "error" in answer:
        raise NightjarError.from_json(answer["error"]) from cause
    return answer["value"]


def together(what: str, work: Callable[[], Any], group: dist.ProcessGroup | None = None) -> list[Any]:
    """Run ``work`` on every rank and return all results (JSON data) in rank order. Collective over ``group``.

    Where it fails on some ranks, all ranks raise the error of the first of them, so none waits for ever.
    An unexpected exception becomes a PassingError that names the rank: memory, a thread or a connection that was not
    to be had says nothing about what was read.
    """
    cause, record = _tried(what, work)
    records = exchange(record, group)
    for each in records:
        if "error" in each:
            raise NightjarError.from_json(each["error"]) from cause
    return [each["value"] for each in records]


def _tried(what: str, work: Callable[[], Any]) -> tuple[Exception | None, dict[str, Any]]:
    """What ``work`` gives, or its error: the exception itself (None: there is none), and a record for other ranks."""
    try:
        return None, {"value": work()}
    except NightjarError as error:
        return error, {"error": error.to_json()}
    except Exception as error:
        message = f"{what} failed on rank {this_rank()}: {type(error).__name__}: {error}"
        return error, {"error": PassingError(message, hint=_AGAIN).to_json()}


def once(write: Callable[..., None], message: str, *values: object) -> None:
    """Log what all ranks come upon alike, on rank 0 alone; ``write``: a logger's method."""
    if this_rank() == 0:
        write(message, *values)


def patiently(what: str, work: Callable[[], Any], group: dist.ProcessGroup | None = None) -> list[Any]:
    """``together``, again after a pause where a passing fault was met, as often as there are ``PAUSES``.

    ``work`` must bear being done twice. Each further try is logged.
    """
    for pause in PAUSES:
        try:
            return together(what, work, group)
        except PassingError as error:
            once(log.warning, "%s: again in %g s, because %s", what, pause, error.message)
            time.sleep(pause)
    return together(what, work, group)


@dataclass(frozen=True)
class Parcel:
    """``record`` (JSON data), and the ``arrays`` that belong to it, which travel as raw numbers."""

    record: Any
    arrays: Sequence[NDArray[Any]] = ()


def all_gather_parcels(own: Parcel) -> list[Parcel]:
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


def gather_parcels(own: Parcel) -> list[Parcel]:
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
