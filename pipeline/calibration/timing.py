"""Timings on this machine: the embedding kernel, collectives between ranks, and a disk's reads.

The ranks of a host measure at the same time, so that memory and cores are measured as shared.
"""

from __future__ import annotations

import mmap
import os
import random
import statistics
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipeline.calibration.fit import KernelTime, LinkTime
from pipeline.planning.cost import PAGE

if TYPE_CHECKING:
    from collections.abc import Iterator

    import torch

# (tables, rows, columns, ids a table): from all overhead to all bandwidth, tables in the cache and far beyond it.
KERNEL_SHAPES = (
    (1, 1_000, 16, 1_024),
    (8, 1_000, 16, 1_024),
    (26, 1_000, 16, 1_024),
    (26, 1_000, 16, 8_192),
    (8, 1_000, 64, 4_096),
    (8, 100_000, 32, 8_192),
    (26, 100_000, 16, 4_096),
    (8, 400_000, 16, 8_192),
    (8, 400_000, 64, 8_192),
    (8, 400_000, 64, 1_024),
)
LINK_BYTES = tuple(1 << power for power in range(10, 25, 2))
REPEATS, WARM_UP = 7, 2
DEPTH = 32  # random reads in flight
BLOCK = 1 << 22  # bytes of a sequential read


def time_kernels(
    device: torch.device, meet: Callable[[], None], shapes: Sequence[tuple[int, int, int, int]] = KERNEL_SHAPES
) -> list[KernelTime]:
    """Time the fused kernel over ``shapes``; ``meet`` is called before each, so that ranks start together."""
    times = []
    for shape in shapes:
        meet()
        times.append(_time_kernel(device, *shape))
    return times


def _time_kernel(device: torch.device, tables: int, rows: int, columns: int, lookups: int) -> KernelTime:
    import torch

    kernel = _kernel(device, tables, rows, columns)
    generator = torch.Generator().manual_seed(rows + columns)
    offsets = torch.arange(tables * lookups + 1, device=device)
    gradient = torch.randn(lookups, tables * columns, generator=generator).to(device)
    spent = []
    for _ in range(WARM_UP + REPEATS):
        ids = torch.randint(0, rows, (tables * lookups,), generator=generator).to(device)
        began = _now(device)
        pooled = kernel(ids, offsets)
        middle = _now(device)
        pooled.backward(gradient)
        spent.append((middle - began, _now(device) - middle))
    lookup, update = (1e3 * statistics.median(times) for times in zip(*spent[WARM_UP:], strict=True))
    distinct = rows * (1 - (1 - 1 / rows) ** lookups)
    return KernelTime(
        tables=tables, columns=columns, lookups=lookups, distinct=distinct, lookup_ms=lookup, update_ms=update
    )


def _kernel(device: torch.device, tables: int, rows: int, columns: int) -> Any:
    """The kernel of TorchRec's fused tables: row-wise Adagrad inside the backward pass."""
    from fbgemm_gpu.split_embedding_configs import EmbOptimType
    from fbgemm_gpu.split_table_batched_embeddings_ops_common import BoundsCheckMode, EmbeddingLocation
    from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
        ComputeDevice,
        SplitTableBatchedEmbeddingBagsCodegen,
    )

    gpu = device.type == "cuda"
    place = (EmbeddingLocation.DEVICE, ComputeDevice.CUDA) if gpu else (EmbeddingLocation.HOST, ComputeDevice.CPU)
    return SplitTableBatchedEmbeddingBagsCodegen(
        [(rows, columns, *place)] * tables,
        optimizer=EmbOptimType.EXACT_ROWWISE_ADAGRAD,
        learning_rate=0.01,
        bounds_check_mode=BoundsCheckMode.FATAL,
        device=device,
    )


def _now(device: torch.device) -> float:
    """Seconds, after all work on ``device`` is done."""
    if device.type == "cuda":
        import torch

        torch.cuda.synchronize(device)
    return time.perf_counter()


def time_links(device: torch.device, sizes: Sequence[int] = LINK_BYTES, repeats: int = 3 * REPEATS) -> list[LinkTime]:
    """Time all-to-alls of ``sizes`` bytes between the ranks of the process group; [] for one rank."""
    import torch
    import torch.distributed as dist

    world = dist.get_world_size()
    times = []
    for size in sizes if world > 1 else ():
        sent = torch.zeros(size // 4 * world, device=device)
        got = torch.empty_like(sent)
        spent = []
        for _ in range(WARM_UP + repeats):
            began = _now(device)
            dist.all_to_all_single(got, sent)
            spent.append(_now(device) - began)
        times.append(LinkTime(bytes_away=size * (world - 1), ms=1e3 * statistics.median(spent[WARM_UP:])))
    return times


def time_copies(device: torch.device, size: int = 1 << 28) -> float:
    """GB/s of copies of ``size`` bytes from page-locked memory to the GPU."""
    import torch

    host, there = (
        torch.empty(size, dtype=torch.uint8, pin_memory=True),
        torch.empty(size, dtype=torch.uint8, device=device),
    )
    spent = []
    for _ in range(WARM_UP + REPEATS):
        began = _now(device)
        there.copy_(host)
        spent.append(_now(device) - began)
    return size / statistics.median(spent[WARM_UP:]) / 1e9


def time_disk(folder: Path, size: int = 1 << 28, seconds: float = 2.0) -> dict[str, float]:
    """Random 4 KiB reads a second at depth 32, and GB/s of sequential reads, of the disk that holds ``folder``.

    Reads bypass the page cache (O_DIRECT); where the file system does not allow that, its pages are dropped first and
    none is read twice. Writes and removes a scratch file of ``size`` bytes. Raises OSError.
    """
    path = folder / f".nightjar-calibrate-{os.getpid()}"
    try:
        _write_scratch(path, size)
        with _uncached(path) as file:
            count, spent = _random_reads(file, size, seconds)
        with _uncached(path) as file:
            began = time.perf_counter()
            read = _read_in_order(file, size, seconds)
            ordered = time.perf_counter() - began
        return {"ssd_read_iops": count / spent, "ssd_gb_per_s": read / ordered / 1e9}
    finally:
        path.unlink(missing_ok=True)


def _write_scratch(path: Path, size: int) -> None:
    noise = random.Random(1).randbytes(BLOCK)  # a disk that compresses would look faster with zeros
    with path.open("wb") as file:
        for _ in range(size // BLOCK):
            file.write(noise)
        file.flush()
        os.fsync(file.fileno())


@contextmanager
def _uncached(path: Path) -> Iterator[int]:
    try:
        file = os.open(path, os.O_RDONLY | getattr(os, "O_DIRECT", 0))
    except OSError:
        file = os.open(path, os.O_RDONLY)
    try:
        os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
        yield file
    finally:
        os.close(file)


def _random_reads(file: int, size: int, seconds: float) -> tuple[int, float]:
    """(pages read, seconds) of DEPTH threads that read in random order, each page at most once."""
    pages = list(range(size // PAGE))
    random.Random(2).shuffle(pages)
    end = time.perf_counter() + seconds

    def work(first: int) -> int:
        with mmap.mmap(-1, PAGE) as buffer:  # O_DIRECT needs page-aligned memory
            done = 0
            for page in pages[first::DEPTH]:
                done += os.preadv(file, [buffer], page * PAGE) == PAGE
                if time.perf_counter() > end:
                    break
        return done

    began = time.perf_counter()
    with ThreadPoolExecutor(DEPTH) as pool:
        count = sum(pool.map(work, range(DEPTH)))
    return count, time.perf_counter() - began


def _read_in_order(file: int, size: int, seconds: float) -> int:
    """Bytes read: one block at least, whatever else the machine does meanwhile."""
    end, at = time.perf_counter() + seconds, 0
    with mmap.mmap(-1, BLOCK) as buffer:
        while at < size:
            at += os.preadv(file, [buffer], at)
            if time.perf_counter() > end:
                break
    return at
