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
# Samples, and inputs and outputs, of the layer whose products are timed.
PRODUCT = (1024, 512)
# Random reads in flight.
DEPTH = 32
# Bytes of a sequential read.
BLOCK = 1 << 22


def product_rate(device: torch.device, precision: str) -> float:
    """Return the GFLOP/s of a linear layer's products, forward and backward, as training computes them.

    Args:
        device: The device that trains.
        precision: ``train.precision``.
    """
    import torch

    from pipeline.training.linear import CpuLinear
    from pipeline.training.model import compute_dtype

    samples, width = PRODUCT
    layer = CpuLinear(torch.nn.Linear(width, width), relu=True).to(device)
    values = torch.randn(samples, width, device=device, requires_grad=True)
    dtype, spent = compute_dtype(precision, device), []
    for _ in range(WARM_UP + REPEATS):
        began = _now(device)
        with torch.autocast(device.type, dtype, enabled=dtype is not None):
            out = layer(values)
        out.backward(torch.ones_like(out))
        spent.append(_now(device) - began)
    # Three products: the outputs, and the gradients of inputs and weights.
    return 3 * 2 * samples * width**2 / 1e9 / statistics.median(spent[WARM_UP:])


def time_kernels(
    device: torch.device, meet: Callable[[], None], shapes: Sequence[tuple[int, int, int, int]] = KERNEL_SHAPES
) -> list[KernelTime]:
    """Time the kernel that trains tables over ``shapes``; ``meet`` is called before each: ranks start together."""
    import torch

    times = []
    for tables, rows, columns, lookups in shapes:
        meet()
        kernel = _build_kernel(device, tables, rows, columns)
        generator = torch.Generator().manual_seed(rows + columns)
        offsets = torch.arange(tables * lookups + 1, device=device)
        gradient = torch.randn(lookups, tables * columns, generator=generator).to(device)
        lookup_seconds, update_seconds = [], []
        for _ in range(WARM_UP + REPEATS):
            ids = torch.randint(0, rows, (tables * lookups,), generator=generator).to(device)
            began = _now(device)
            pooled = kernel(ids, offsets)
            looked_up = _now(device)
            pooled.backward(gradient)
            lookup_seconds.append(looked_up - began)
            update_seconds.append(_now(device) - looked_up)
        measured = KernelTime(
            tables=tables,
            columns=columns,
            lookups=lookups,
            distinct=rows * (1 - (1 - 1 / rows) ** lookups),
            lookup_ms=1e3 * statistics.median(lookup_seconds[WARM_UP:]),
            update_ms=1e3 * statistics.median(update_seconds[WARM_UP:]),
        )
        times.append(measured)
    return times


def _build_kernel(device: torch.device, tables: int, rows: int, columns: int) -> Callable[..., Any]:
    # The forward pass of TorchRec's fused tables, with row-wise Adagrad in its backward pass: FBGEMM's kernel, or the
    # compiled ones that training puts in its place.
    from fbgemm_gpu.split_embedding_configs import EmbOptimType
    from fbgemm_gpu.split_table_batched_embeddings_ops_common import BoundsCheckMode, EmbeddingLocation
    from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
        ComputeDevice,
        SplitTableBatchedEmbeddingBagsCodegen,
    )
    from torchrec.modules.embedding_configs import EmbeddingBagConfig

    from pipeline.core.kernels import load_kernels
    from pipeline.embeddings.compiled_tables import CompiledTables, compiled_on
    from pipeline.embeddings.table_optimizers import ROWWISE_ADAGRAD
    from pipeline.embeddings.tables import Kernel

    location, compute = EmbeddingLocation.HOST, ComputeDevice.CPU
    if device.type == "cuda":
        location, compute = EmbeddingLocation.DEVICE, ComputeDevice.CUDA
    module = SplitTableBatchedEmbeddingBagsCodegen(
        [(rows, columns, location, compute)] * tables,
        optimizer=EmbOptimType.EXACT_ROWWISE_ADAGRAD,
        learning_rate=0.01,
        bounds_check_mode=BoundsCheckMode.FATAL,
        device=device,
    )
    # Write all rows once, as those of a training are: the first use of a page takes longer.
    module.init_embedding_weights_uniform(-0.01, 0.01)
    for states in module.split_optimizer_states():
        for state in states:
            state.zero_()
    if not compiled_on(ROWWISE_ADAGRAD, device.type):
        return module
    configs = []
    for number in range(tables):
        name = f"t{number}"
        configs.append(EmbeddingBagConfig(name=name, num_embeddings=rows, embedding_dim=columns, feature_names=[name]))
    return CompiledTables(Kernel(module, configs), ROWWISE_ADAGRAD, load_kernels("steps"))


def _now(device: torch.device) -> float:
    if device.type == "cuda":
        # A GPU runs asynchronously, so wait for it before the clock is read.
        import torch

        torch.cuda.synchronize(device)
    return time.perf_counter()


def time_links(device: torch.device, sizes: Sequence[int] = LINK_BYTES, repeats: int = 3 * REPEATS) -> list[LinkTime]:
    """Time all-to-alls of ``sizes`` bytes between the ranks of the process group; [] for one rank."""
    import torch
    import torch.distributed as dist

    world = dist.get_world_size()
    if world == 1:
        return []
    times = []
    for size in sizes:
        sent = torch.zeros(size // 4 * world, device=device)
        received = torch.empty_like(sent)
        spent = []
        for _ in range(WARM_UP + repeats):
            began = _now(device)
            dist.all_to_all_single(received, sent)
            spent.append(_now(device) - began)
        times.append(LinkTime(bytes_away=size * (world - 1), ms=1e3 * statistics.median(spent[WARM_UP:])))
    return times


def time_copies(device: torch.device, size: int = 1 << 28) -> float:
    """Measure the GB/s of copies of ``size`` bytes from page-locked memory to the GPU."""
    import torch

    on_host = torch.empty(size, dtype=torch.uint8, pin_memory=True)
    on_device = torch.empty(size, dtype=torch.uint8, device=device)
    spent = []
    for _ in range(WARM_UP + REPEATS):
        began = _now(device)
        on_device.copy_(on_host)
        spent.append(_now(device) - began)
    return size / statistics.median(spent[WARM_UP:]) / 1e9


def time_disk(folder: Path, size: int = 1 << 28, seconds: float = 2.0) -> dict[str, float]:
    """Time random 4 KiB reads at depth 32, and sequential reads, of the disk that holds ``folder``.

    Writes and removes a scratch file of ``size`` bytes. Each of the two takes about ``seconds``.

    Returns:
        Random reads a second and GB/s of sequential ones, by their names in the hardware.

    Raises:
        OSError: The folder cannot be written or read.
    """
    path = folder / f".nightjar-calibrate-{os.getpid()}"
    try:
        # A disk that compresses would look faster with zeros.
        noise = random.Random(1).randbytes(BLOCK)
        with path.open("wb") as file:
            for _ in range(size // BLOCK):
                file.write(noise)
            file.flush()
            os.fsync(file.fileno())
        with _open_uncached(path) as descriptor:
            count, spent = _read_at_random(descriptor, size, seconds)
        with _open_uncached(path) as descriptor:
            began = time.perf_counter()
            read = _read_in_order(descriptor, size, seconds)
            ordered = time.perf_counter() - began
        return {"ssd_read_iops": count / spent, "ssd_gb_per_s": read / ordered / 1e9}
    finally:
        path.unlink(missing_ok=True)


@contextmanager
def _open_uncached(path: Path) -> Iterator[int]:
    # Reads bypass the page cache (O_DIRECT). If the file system does not allow that, the file's pages are dropped
    # first and none is read twice.
    try:
        file = os.open(path, os.O_RDONLY | getattr(os, "O_DIRECT", 0))
    except OSError:
        file = os.open(path, os.O_RDONLY)
    try:
        os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
        yield file
    finally:
        os.close(file)


def _read_at_random(file: int, size: int, seconds: float) -> tuple[int, float]:
    """Return (pages read, seconds) of DEPTH threads that read in random order, each page at most once."""
    pages = list(range(size // PAGE))
    random.Random(2).shuffle(pages)
    end = time.perf_counter() + seconds

    def work(first: int) -> int:
        # O_DIRECT needs page-aligned memory.
        with mmap.mmap(-1, PAGE) as buffer:
            done = 0
            # The threads take turns, so no two of them read the same page.
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
    # Read at least one block, however busy the machine is.
    end, at = time.perf_counter() + seconds, 0
    # An anonymous mapping is page-aligned, as O_DIRECT requires.
    with mmap.mmap(-1, BLOCK) as buffer:
        while at < size:
            at += os.preadv(file, [buffer], at)
            if time.perf_counter() > end:
                break
    return at
