"""Reports on the SSD tier: its figures, and features that the machine refuses.

A kernel, a container or a file system may refuse what makes the tier fast; it works without, and says so.
"""

from __future__ import annotations

import resource
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from pipeline.embeddings.ssd.aio import DiskQueue, Threads
from pipeline.embeddings.ssd.fetch import SsdWorker
from pipeline.embeddings.ssd.log import WriteCounts
from pipeline.embeddings.ssd.scratch_files import PAGE, ScratchFile

# The number of figures that ``SsdFigures.take`` returns.
FIGURES = 10


def pss_bytes() -> int:
    """Return the proportional set size of this process, with its mapped part of the page cache; 0 where unknown.

    It walks the page tables, which takes about a millisecond for every GiB in memory.
    """
    try:
        lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    except OSError:
        return 0
    for line in lines:
        if line.startswith("Pss:"):
            return int(line.split()[1]) * 1024
    return 0


class SsdFigures:
    """Counts of one rank since the last ``take``.

    ``looked`` counts lookups, and ``found`` those whose row was in memory at that moment; ``asked`` and ``there`` count
    the same when the ids of a batch are announced, each row once; ``hosted`` counts those of ``asked`` whose row was in
    host memory behind a device's; ``log`` counts bytes that left memory and that logs wrote. One thread writes
    ``looked`` and ``found``, another one the rest.
    """

    def __init__(self) -> None:
        self.looked = self.found = self.asked = self.there = self.hosted = 0
        self.log = WriteCounts()
        self._former = self._now()

    def _now(self) -> NDArray[np.float64]:
        faults = resource.getrusage(resource.RUSAGE_SELF).ru_majflt
        read = written = 0
        try:
            fields = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
            read, written = int(fields["read_bytes"]), int(fields["write_bytes"])
        except OSError:
            pass
        counts = self.looked, self.found, self.asked, self.there, self.hosted
        return np.array([*counts, faults, read, written, self.log.left, self.log.logged], np.float64)

    def take(self) -> list[float]:
        """Return what ``named`` expects, to be added up over the ranks."""
        now = self._now()
        taken, self._former = now - self._former, now
        return taken.tolist()


def named(sums: Sequence[float], steps: int) -> dict[str, float | None]:
    """Return an interval's figures for ``metrics.jsonl``, for ``steps`` and the ``sums`` of ``take`` over all ranks.

    Among the lookups whose row was not in memory when their ids were announced, ``ssd_prefetch_coverage`` is the share
    whose row was there at the lookup. ``ssd_device_share`` and ``ssd_host_share`` are the shares of announced lookups
    whose row was in the memory that is looked up in, and in the host memory behind it. They are None without lookups.
    ``ssd_write_amplification`` is the bytes that logs wrote for each byte of rows that left memory; None if none did.
    """
    looked, hits, asked, there, hosted, faults, read, written, left, logged = sums
    hit_rate = coverage = device_share = host_share = None
    if looked:
        hit_rate = hits / looked
    if asked:
        device_share, host_share = there / asked, hosted / asked
        cold = 1 - there / asked
        if cold and looked:
            coverage = max(0.0, 1 - (1 - hits / looked) / cold)
    return {
        "ssd_hit_rate": hit_rate,
        "ssd_prefetch_coverage": coverage,
        "ssd_device_share": device_share,
        "ssd_host_share": host_share,
        "ssd_faults": faults / steps,
        "ssd_read_bytes": read / steps,
        "ssd_written_bytes": written / steps,
        "ssd_write_amplification": logged / left if left else None,
    }


def reading(queue: DiskQueue) -> str:
    """Return a sentence that says what reads rows, and why nothing better does."""
    refused = "".join(f"; {name} is refused ({reason})" for name, reason in queue.refused.items())
    return f"rows on SSD are read by {queue.engine}{refused}"


def shortcomings(queue: DiskQueue, worker: SsdWorker, files: Iterable[ScratchFile]) -> list[tuple[str, str]]:
    """Return what was refused, why and what it costs; with each, what to change."""
    found = []
    # Linux AIO is as good as io_uring, so only threads are reported.
    if queue.engine == Threads.name:
        found.append(
            (
                f"{reading(queue)}: at several times the processor time",
                "allow io_uring_setup, io_uring_enter and io_uring_register, or io_setup, io_submit, io_getevents and "
                "io_destroy, or raise fs.aio-max-nr",
            )
        )
    if worker.refused:
        cost = "the thread that reads rows from SSD ahead competes with training for the cores"
        found.append((f"setpriority is refused ({worker.refused}): {cost}", "allow setpriority"))
    cached = {file.directory: file.cached for file in files if file.cached}
    for directory, why in cached.items():
        cost = "rows on SSD go through the page cache, which counts as memory"
        found.append(
            (f"{directory} refuses O_DIRECT ({why}): {cost}", "hardware.ssd_paths=[/a/directory/on/ext4/or/xfs]")
        )
    return found


def examine(directory: Path) -> tuple[str, list[tuple[str, str]]]:
    """Return ``reading`` and ``shortcomings`` of tables on SSD in ``directory``.

    Raises ConfigError or GuardError if no file can be made.
    """
    file = ScratchFile(directory, PAGE, "a trial of tables on SSD", direct=True)
    queue, worker = DiskQueue(), SsdWorker()
    try:
        return reading(queue), shortcomings(queue, worker, [file])
    finally:
        worker.close()
        queue.close()
        file.close()
