"""Doing something on all ranks so that all succeed or all raise the same error."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from pipeline.errors import NightjarError, PassingError

log = logging.getLogger(__name__)
PAUSES = (0.5, 1.0, 2.0)  # seconds before each further try of what met a passing fault


def this_rank() -> int:
    """This process's rank; 0 without a process group."""
    return dist.get_rank() if dist.is_initialized() else 0


def exchange(record: Any, group: dist.ProcessGroup | None = None) -> list[Any]:
    """Every rank's ``record`` (JSON data), in rank order. Collective over ``group``; JSON bytes, never pickled."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return [json.loads(json.dumps(record))]
    device = (
        torch.device("cuda", torch.cuda.current_device()) if dist.get_backend(group) == "nccl" else torch.device("cpu")
    )
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


_AGAIN = "the same command again; the log of that rank says more"


def together(what: str, work: Callable[[], Any], group: dist.ProcessGroup | None = None) -> list[Any]:
    """Run ``work`` on every rank and return all results (JSON data) in rank order. Collective over ``group``.

    Where it fails on some ranks, all ranks raise the error of the first of them, so none waits for ever.
    An unexpected exception becomes a PassingError that names the rank: memory, a thread or a connection that was not
    to be had says nothing about what was read.
    """
    cause: Exception | None = None
    try:
        record = {"value": work()}
    except NightjarError as error:
        cause, record = error, {"error": error.to_json()}
    except Exception as error:
        message = f"{what} failed on rank {this_rank()}: {type(error).__name__}: {error}"
        cause, record = error, {"error": PassingError(message, hint=_AGAIN).to_json()}
    records = exchange(record, group)
    for each in records:
        if "error" in each:
            raise NightjarError.from_json(each["error"]) from cause
    return [each["value"] for each in records]


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
