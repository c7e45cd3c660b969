"""Collectives of records: all ranks succeed or all raise the same error. JSON and raw numbers; nothing is pickled."""

from __future__ import annotations

import io
import json
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

from pipeline.core.errors import NightjarError, PassingError

log = logging.getLogger(__name__)
# Seconds to wait before each further try after a passing fault.
PAUSES = (0.5, 1.0, 2.0)
_AGAIN = "run the same command again; that rank's log says more"


def this_rank() -> int:
    """Return this process's rank; 0 without a process group."""
    return dist.get_rank() if dist.is_initialized() else 0


def world_size() -> int:
    """Return the number of ranks; 1 without a process group."""
    return dist.get_world_size() if dist.is_initialized() else 1


def all_gather_records(record: Any, group: dist.ProcessGroup | None = None) -> list[Any]:
    """Gather every rank's ``record`` (JSON data) on all ranks, in rank order. Collective over ``group``."""
    if world_size() == 1:
        # Convert through JSON here too, so that one rank sees what several would: lists for tuples, strings for keys.
        return [json.loads(json.dumps(record))]
    data = _encode_json(record, _device_of(group))
    size = torch.tensor([len(data)], device=data.device)
    sizes = [torch.zeros_like(size) for _ in range(world_size())]
    dist.all_gather(sizes, size, group=group)
    # all_gather takes tensors of one size, so every record is padded to the longest.
    padded = torch.zeros(int(max(sizes)), dtype=torch.uint8, device=data.device)
    padded[: len(data)] = data
    gathered = [torch.zeros_like(padded) for _ in sizes]
    dist.all_gather(gathered, padded, group=group)
    records = []
    for other, length in zip(gathered, sizes, strict=True):
        records.append(_decode_json(other[: int(length)]))
    return records


def gather_records(record: Any, group: dist.ProcessGroup | None = None) -> list[Any]:
    """Gather every rank's ``record`` (JSON data) on rank 0, in rank order; [] on the others. Collective over ``group``.

    Only rank 0's memory use grows with the number of ranks.
    """
    if world_size() == 1:
        return [json.loads(json.dumps(record))]
    data = _encode_json(record, _device_of(group))
    # Records are decoded as they arrive, so that the bytes of all ranks are never in memory at once.
    others = [_decode_json(other) for other in _receive_on_first(data, group)]
    if this_rank() != 0:
        return []
    return [_decode_json(data), *others]


def run_on_rank0(what: str, work: Callable[[], Any], group: dist.ProcessGroup | None = None) -> Any:
    """Run ``work`` on rank 0 alone and broadcast what it returns (JSON data). Collective over ``group``.

    If it fails, all ranks raise its error, as in ``run_on_all_ranks``.
    """
    if world_size() == 1:
        return run_on_all_ranks(what, work)[0]
    cause: Exception | None = None
    answer: dict[str, Any] = {}
    if this_rank() == 0:
        cause, answer = _attempt(what, work)
    device = _device_of(group)
    data = _encode_json(answer, device)
    # Broadcast the size first: the other ranks allocate a tensor of this size to receive the answer.
    size = torch.tensor([len(data)], device=device)
    dist.broadcast(size, 0, group=group)
    if this_rank() != 0:
        data = torch.empty(int(size), dtype=torch.uint8, device=device)
    dist.broadcast(data, 0, group=group)
    answer = _decode_json(data)
    if "error" in answer:
        raise NightjarError.from_json(answer["error"]) from cause
    return answer["value"]


def run_on_all_ranks(what: str, work: Callable[[], Any], group: dist.ProcessGroup | None = None) -> list[Any]:
    """Run ``work`` on every rank and gather the results (JSON data) in rank order. Collective over ``group``.

    Raises:
        NightjarError: On all ranks, the error of the first rank on which ``work`` failed, so that none waits for ever.
            An unexpected exception becomes a PassingError that names the rank.
    """
    cause, record = _attempt(what, work)
    records = all_gather_records(record, group)
    for answer in records:
        if "error" in answer:
            raise NightjarError.from_json(answer["error"]) from cause
    return [answer["value"] for answer in records]


def _attempt(what: str, work: Callable[[], Any]) -> tuple[Exception | None, dict[str, Any]]:
    # Returns the exception itself, as the cause on this rank, and the record for the other ranks.
    try:
        return None, {"value": work()}
    except NightjarError as error:
        return error, {"error": error.to_json()}
    except Exception as error:
        # Running out of memory, threads or connections says nothing about what was read, so it may pass.
        message = f"{what} failed on rank {this_rank()}: {type(error).__name__}: {error}"
        return error, {"error": PassingError(message, hint=_AGAIN).to_json()}


def log_on_rank0(write: Callable[..., None], message: str, *values: object) -> None:
    """Log on rank 0 alone what happens on all ranks; ``write`` is a logger's method."""
    if this_rank() == 0:
        write(message, *values)


def retry_on_all_ranks(what: str, work: Callable[[], Any], group: dist.ProcessGroup | None = None) -> list[Any]:
    """Run as ``run_on_all_ranks`` does, and try again after each of ``PAUSES`` if a passing fault occurred.

    Each further try is logged. ``work`` must be safe to repeat.
    """
    for pause in PAUSES:
        try:
            return run_on_all_ranks(what, work, group)
        except PassingError as error:
            log_on_rank0(log.warning, "%s: again in %g s, because %s", what, pause, error.message)
            time.sleep(pause)
    return run_on_all_ranks(what, work, group)


@dataclass(frozen=True)
class Parcel:
    """A ``record`` (JSON data) with its ``arrays``, which are sent as raw numbers."""

    record: Any
    arrays: Sequence[NDArray[Any]] = ()


def all_gather_parcels(own: Parcel) -> list[Parcel]:
    """Gather every rank's parcel on all ranks, in rank order. Collective.

    Besides the result, a rank only needs memory for the largest parcel.
    """
    if world_size() == 1:
        return [own]
    data = _encode_parcel(own)
    parcels = []
    # Use one broadcast per rank, since all_gather would pad every parcel to the largest.
    for rank, size in enumerate(_gather_sizes(data)):
        if rank == this_rank():
            dist.broadcast(data, rank)
            parcels.append(own)
        else:
            other = torch.empty(size, dtype=torch.uint8, device=data.device)
            dist.broadcast(other, rank)
            parcels.append(_decode_parcel(other))
    return parcels


def gather_parcels(own: Parcel) -> list[Parcel]:
    """Gather every rank's parcel on rank 0, in rank order; [] on the others. Collective."""
    if world_size() == 1:
        return [own]
    others = [_decode_parcel(other) for other in _receive_on_first(_encode_parcel(own))]
    if this_rank() != 0:
        return []
    return [own, *others]


def _device_of(group: dist.ProcessGroup | None = None) -> torch.device:
    # NCCL only sends tensors on the GPU, Gloo only those in host memory.
    if dist.get_backend(group) == "nccl":
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def _gather_sizes(data: torch.Tensor, group: dist.ProcessGroup | None = None) -> list[int]:
    sizes = torch.zeros(world_size(), dtype=torch.int64, device=data.device)
    sizes[this_rank()] = len(data)
    dist.all_reduce(sizes, group=group)
    gathered: list[int] = sizes.tolist()
    return gathered


def _receive_on_first(data: torch.Tensor, group: dist.ProcessGroup | None = None) -> Iterator[torch.Tensor]:
    # On rank 0, yields the bytes of the other ranks, one rank at a time. The other ranks send theirs.
    sizes = _gather_sizes(data, group)
    if this_rank() != 0:
        dist.send(data, 0, group=group)
        return
    # Send point to point, since dist.gather would pad all of them to the longest.
    for rank, size in enumerate(sizes[1:], start=1):
        other = torch.empty(size, dtype=torch.uint8, device=data.device)
        dist.recv(other, rank, group=group)
        yield other


def _encode_json(record: Any, device: torch.device) -> torch.Tensor:
    return torch.frombuffer(bytearray(json.dumps(record).encode()), dtype=torch.uint8).to(device)


def _decode_json(data: torch.Tensor) -> Any:
    return json.loads(data.cpu().numpy().tobytes())


def _encode_parcel(parcel: Parcel) -> torch.Tensor:
    # Encode as NumPy files one after the other: first the record, with the number of arrays that follow.
    buffer = io.BytesIO()
    record = np.frombuffer(json.dumps([parcel.record, len(parcel.arrays)]).encode(), np.uint8)
    for array in (record, *parcel.arrays):
        np.lib.format.write_array(buffer, np.asarray(array), allow_pickle=False)
    return torch.frombuffer(bytearray(buffer.getvalue()), dtype=torch.uint8).to(_device_of())


def _decode_parcel(data: torch.Tensor) -> Parcel:
    source = io.BytesIO(data.cpu().numpy().tobytes())
    record, count = json.loads(np.lib.format.read_array(source, allow_pickle=False).tobytes())
    return Parcel(record, [np.lib.format.read_array(source, allow_pickle=False) for _ in range(count)])
