"""A rank that measures the bed: what gets from one host to the next through gloo."""

from __future__ import annotations

import time
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.harness import serve


def exchange(mib: int, times: int) -> dict[str, Any]:
    """All-to-all of ``mib`` MiB per rank, ``times`` times after one to warm up: seconds and bytes sent to others."""
    world, rank = dist.get_world_size(), dist.get_rank()
    each = mib * 2**20 // world
    given = torch.full((world * each,), rank, dtype=torch.uint8)
    got = torch.empty_like(given)
    dist.all_to_all_single(got, given)
    dist.barrier()
    began = time.perf_counter()
    for _ in range(times):
        dist.all_to_all_single(got, given)
    dist.barrier()
    right = torch.equal(got, torch.arange(world, dtype=torch.uint8).repeat_interleave(each))
    return {"seconds": time.perf_counter() - began, "bytes": each * (world - 1) * times, "right": right}


if __name__ == "__main__":
    dist.init_process_group("gloo")
    serve(exchange)
    dist.destroy_process_group()
