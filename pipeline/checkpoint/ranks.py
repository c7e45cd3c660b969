"""Doing something on all ranks so that all succeed or all raise the same error."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from pipeline.errors import ArtifactError, NightjarError


def this_rank() -> int:
    """This process's rank; 0 without a process group."""
    return dist.get_rank() if dist.is_initialized() else 0


def exchange(record: Any) -> list[Any]:
    """Every rank's ``record`` (JSON data), in rank order. Collective; sent as JSON bytes, never pickled."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return [json.loads(json.dumps(record))]
    device = torch.device("cuda", torch.cuda.current_device()) if dist.get_backend() == "nccl" else torch.device("cpu")
    data = bytearray(json.dumps(record).encode())
    size = torch.tensor([len(data)], device=device)
    sizes = [torch.zeros_like(size) for _ in range(dist.get_world_size())]
    dist.all_gather(sizes, size)
    longest = max(int(each) for each in sizes)
    block = torch.zeros(longest, dtype=torch.uint8, device=device)
    block[: len(data)] = torch.frombuffer(data, dtype=torch.uint8).to(device)
    blocks = [torch.zeros_like(block) for _ in sizes]
    dist.all_gather(blocks, block)
    return [json.loads(b[: int(n)].cpu().numpy().tobytes()) for b, n in zip(blocks, sizes, strict=True)]


def together(what: str, work: Callable[[], Any]) -> list[Any]:
    """Run ``work`` on every rank and return all results (JSON data) in rank order. Collective.

    Where it fails on some ranks, all ranks raise the error of the first of them, so none waits for ever.
    An unexpected exception becomes an ArtifactError that names the rank.
    """
    cause: Exception | None = None
    try:
        record = {"value": work()}
    except NightjarError as error:
        cause, record = error, {"error": error.to_json()}
    except Exception as error:
        message = f"{what} failed on rank {this_rank()}: {type(error).__name__}: {error}"
        cause, record = error, {"error": ArtifactError(message, hint="the log of that rank says more").to_json()}
    records = exchange(record)
    for each in records:
        if "error" in each:
            raise NightjarError.from_json(each["error"]) from cause
    return [each["value"] for each in records]
