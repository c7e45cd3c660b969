"""The disk part of the checkpoint benchmark: float32 writing and restoring against ``dd``, turn by turn."""

from __future__ import annotations

import os
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from benchmarks.checkpoint_model import config_of, plan_of, schema_of
from pipeline.checkpoint.checkpointer import latest
from pipeline.checkpoint.reader import RestoreTarget, restore
from pipeline.store import Store
from pipeline.training.config_settings import select_model_settings
from pipeline.training.distributed import connect
from pipeline.training.step import StepExecutor

_CACHES = Path("/proc/sys/vm/drop_caches")


def race_dd(write: Callable[[], tuple[int, float, float]], folder: Path, rounds: int) -> dict[str, Any]:
    """Float32 checkpoints by ``write`` (bytes, writer's seconds, whole seconds) against dd of as many bytes."""
    ours, whole, synced, direct = [], [], [], []
    for number in range(rounds):
        size, writing, call = write()
        os.sync()
        ours.append(size / writing)
        whole.append(size / call)
        synced.append(_dd_write(folder, size, "conv=fdatasync"))
        direct.append(_dd_write(folder, size, "oflag=direct"))
        print(
            f"fp32 write {number + 1}: ours {ours[-1] / 1e6:.0f} MB/s, dd fdatasync {synced[-1] / 1e6:.0f}, "
            f"direct {direct[-1] / 1e6:.0f}",
            flush=True,
        )
    return {
        "write_mb_s": statistics.median(ours) / 1e6,
        "write_mb_s_with_snapshot": statistics.median(whole) / 1e6,
        "dd_write_mb_s": statistics.median(synced) / 1e6,
        "dd_write_direct_mb_s": statistics.median(direct) / 1e6,
        "write_against_dd": statistics.median(ours) / statistics.median(synced),
    }


def _dd_write(folder: Path, size: int, flag: str) -> float:
    target = folder / "dd"
    target.unlink(missing_ok=True)
    os.sync()
    return _dd(f"if=/dev/zero of={target} bs=16M count={size >> 24} {flag}")


def _dd(arguments: str) -> float:
    """Bytes a second as dd itself says it."""
    said = subprocess.run(["dd", *arguments.split()], capture_output=True, text=True, check=True).stderr
    told = re.search(r"(\d+) bytes.*copied, ([\d.e-]+) s", said)
    if told is None:
        sys.exit(f"dd said something unexpected: {said}")
    return int(told[1]) / float(told[2])


def drop_caches() -> bool:
    """Make the next read cold; False where this user may not."""
    os.sync()
    try:
        _CACHES.write_text("3\n")
    except OSError:
        return False
    return True


def measure_restore(folder: str, directory: str, shape: tuple[int, int, int, int], rounds: int) -> dict[str, Any]:
    """Restore the newest checkpoint of ``directory`` on two ranks, cold, in turn with dd's cold read of one file."""
    mp.spawn(_rank, args=(folder, directory, shape, rounds), nprocs=2)
    ours, read = [], []
    for line in (Path(folder) / "restore.txt").read_text().splitlines():
        mine, theirs = map(float, line.split())
        ours.append(mine)
        read.append(theirs)
    return {
        "restore_mb_s": statistics.median(ours) / 1e6,
        "dd_read_mb_s": statistics.median(read) / 1e6,
        "restore_against_dd": statistics.median(ours) / statistics.median(read),
        "caches_dropped": drop_caches(),
    }


def _rank(rank: int, folder: str, directory: str, shape: tuple[int, int, int, int], rounds: int) -> None:
    os.environ.update(RANK=str(rank), WORLD_SIZE="2", LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE="2")
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=2)
    tables, rows, dim, batch = shape
    schema, config = schema_of(tables, rows), config_of(dim, batch, ranks=2, threads=1)
    device = connect(config.hardware, config.train.threads_per_rank)
    trainer = StepExecutor(select_model_settings(config), schema, plan_of(schema, config), device)
    store = Store(folder)
    artifact = latest(store, directory)
    if artifact is None:
        sys.exit(f"no checkpoint in {folder}/{directory}")
    size = sum(entry.bytes for entry in artifact.files.values())
    target = RestoreTarget(trainer.rows, dict(trainer.dense), trainer.optimizers.dense)
    lines = []
    for number in range(rounds):
        if rank == 0:
            drop_caches()
            read = _dd(f"if={folder}/dd of=/dev/null bs=16M")
            drop_caches()
        dist.barrier()
        began = time.perf_counter()
        restore(store, artifact, target)
        dist.barrier()
        seconds = time.perf_counter() - began
        if rank == 0:
            lines.append(f"{size / seconds} {read}")
            print(f"restore {number + 1}: {size / seconds / 1e6:.0f} MB/s, dd read {read / 1e6:.0f}", flush=True)
    if rank == 0:
        (Path(folder) / "restore.txt").write_text("\n".join(lines))
    torch.distributed.destroy_process_group()
