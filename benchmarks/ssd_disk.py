"""Random reads a second of a disk, past the page cache."""

from __future__ import annotations

import mmap
import os
import random
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

PAGE, DEPTH = 4096, 32


def random_read_iops(folder: Path, size: int = 1 << 30, seconds: float = 3.0) -> float:
    """Reads of 4 KiB a second by 32 threads from a written file of ``size`` bytes in ``folder``, with O_DIRECT."""
    path = folder / "iops"
    noise = random.Random(1).randbytes(8 << 20)
    with path.open("wb") as file:
        for _ in range(size // len(noise)):
            file.write(noise)
        file.flush()
        os.fsync(file.fileno())
    fd = os.open(path, os.O_RDONLY | os.O_DIRECT)
    try:
        return _reads(fd, size, seconds)
    finally:
        os.close(fd)
        path.unlink()


def _reads(fd: int, size: int, seconds: float) -> float:
    began = time.perf_counter()

    def work(number: int) -> int:
        draw, done = random.Random(number), 0
        with mmap.mmap(-1, PAGE) as buffer:
            while time.perf_counter() < began + seconds:
                done += os.preadv(fd, [buffer], draw.randrange(size // PAGE) * PAGE) == PAGE
        return done

    with ThreadPoolExecutor(DEPTH) as pool:
        return sum(pool.map(work, range(DEPTH))) / (time.perf_counter() - began)
