"""The figures of the SSD tier: lookups with their row in memory, page faults, bytes read and written, memory."""

from __future__ import annotations

import resource
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from pipeline.embeddings.ssd.log import WriteCounts

# Numbers that ``SsdFigures.take`` gives.
FIGURES = 10


def pss_bytes() -> int:
    """Proportional set size of this process, with its mapped part of the page cache; 0 where unknown.

    Walks the page tables: about a millisecond for every GiB in memory.
    """
    try:
        lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("Pss:")), 0)


def _disk_bytes() -> tuple[int, int]:
    """Bytes that this process has read from and written to disks so far."""
    try:
        fields = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    except OSError:
        return 0, 0
    return int(fields["read_bytes"]), int(fields["write_bytes"])


class SsdFigures:
    """Counts of one rank since the last ``take``.

    ``looked``/``found``: lookups, and those whose row was in memory at that moment; ``asked``/``there``: the same when
    the ids of a batch are announced, a row counted once; ``hosted``: of ``asked``, those whose row was in host memory
    behind a device's; ``log``: bytes that left memory and that logs wrote. One thread writes ``looked`` and ``found``,
    one the others.
    """

    def __init__(self) -> None:
        self.looked = self.found = self.asked = self.there = self.hosted = 0
        self.log = WriteCounts()
        self._former = self._now()

    def _now(self) -> NDArray[np.float64]:
        faults = resource.getrusage(resource.RUSAGE_SELF).ru_majflt
        counted = self.looked, self.found, self.asked, self.there, self.hosted, faults, *_disk_bytes()
        return np.array([*counted, self.log.left, self.log.logged], np.float64)

    def take(self) -> list[float]:
        """What ``named`` takes, added up over the ranks."""
        now = self._now()
        taken, self._former = now - self._former, now
        return taken.tolist()


def named(sums: Sequence[float], steps: int) -> dict[str, float | None]:
    """The figures of an interval of ``steps`` for ``metrics.jsonl``, from the ``sums`` of ``take`` over all ranks.

    ``ssd_prefetch_coverage``: of the lookups whose row was not in memory when their ids were announced, the share whose
    row was there at the lookup. ``ssd_device_share``, ``ssd_host_share``: of the lookups announced, those whose row was
    in the memory that is looked up in, and in the host memory behind it. None without lookups.
    ``ssd_write_amplification``: bytes that logs wrote for each byte of rows that left memory; None where none did.
    """
    looked, hits, asked, there, hosted, faults, read, written, left, logged = sums
    cold, missed = (1 - there / asked if asked else 0.0), (1 - hits / looked if looked else 0.0)
    return {
        "ssd_hit_rate": hits / looked if looked else None,
        "ssd_prefetch_coverage": max(0.0, 1 - missed / cold) if cold and looked else None,
        "ssd_device_share": there / asked if asked else None,
        "ssd_host_share": hosted / asked if asked else None,
        "ssd_faults": faults / steps,
        "ssd_read_bytes": read / steps,
        "ssd_written_bytes": written / steps,
        "ssd_write_amplification": logged / left if left else None,
    }
