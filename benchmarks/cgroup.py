"""A cgroup with a CPU quota around processes of a benchmark, version 1 or 2 as the machine has it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

PERIOD_US = 100_000
# The mounted hierarchy, the file of the quota, what is written there.
_KINDS = (
    (Path("/sys/fs/cgroup/cpu"), "cpu.cfs_quota_us", "{quota}"),
    (Path("/sys/fs/cgroup"), "cpu.max", "{quota} {period}"),
)


@contextmanager
def cpu_quota(cpus: float, name: str) -> Iterator[Path | None]:
    """The ``cgroup.procs`` of a cgroup of ``cpus`` CPUs, removed at the end; None where none can be made."""
    for parent, file, value in _KINDS:
        folder = parent / f"nightjar-{name}-{os.getpid()}"
        try:
            folder.mkdir()
        except OSError:
            continue
        try:
            (folder / file).write_text(value.format(quota=int(cpus * PERIOD_US), period=PERIOD_US))
        except OSError:
            folder.rmdir()
            continue
        try:
            yield folder / "cgroup.procs"
        finally:
            folder.rmdir()
        return
    yield None
