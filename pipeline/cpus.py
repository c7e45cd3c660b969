"""CPUs that this process may use, by its affinity and its cgroups' quota (versions 1 and 2), and threads to match.

A container's quota is not shown by ``os.cpu_count()``. Threads beyond the quota make the kernel stop all of them for
the rest of every period.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from pathlib import Path

_ROOT = Path("/")
# How often a thread of an OpenMP team looks for the others at a barrier before it sleeps. GNU's default, 300,000, takes
# milliseconds: beside other work, waiting threads then hold the cores that those they wait for need. Measured in
# docs/measurements.md; GNU itself takes 100 to 1,000 where it knows of more threads than cores.
_SPINS = 1000


def share_cpus() -> None:
    """Have native libraries that are loaded from now on, here and in child processes, use the available CPUs fairly.

    Their pools get a thread for each of ``available_cpus``, and threads that wait go to sleep soon. The libraries know
    environment variables only; one that is set already stays.
    """
    cpus = str(available_cpus())
    own = {
        "OMP_NUM_THREADS": cpus,  # torch, MKL, OpenBLAS, Arrow
        "POLARS_MAX_THREADS": cpus,
        "GOMP_SPINCOUNT": str(_SPINS),  # GNU's OpenMP, which torch's wheels bring along
        "KMP_BLOCKTIME": "0",  # milliseconds; LLVM's and Intel's OpenMP, in other builds of torch
    }
    for name, value in own.items():
        os.environ.setdefault(name, value)


def available_cpus(root: Path | None = None) -> int:
    """Whole CPUs of this process, at least one: the smaller of its affinity and its quota.

    A quota of 2.5 gives 2: the rest is for the threads that read, write and talk beside those that compute. ``root``:
    where ``proc`` and the cgroups are, by default ``/``.
    """
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota = cpu_quota(root)
    return allowed if quota is None else max(1, min(allowed, math.floor(quota)))


def cpu_quota(root: Path | None = None) -> float | None:
    """CPUs by the quota of this process's cgroup and of those above it, the smallest; None where none is set."""
    try:
        quotas = [quota for folder in _cgroups(root or _ROOT) if (quota := _quota_of(folder)) is not None]
    except (OSError, ValueError):  # no cgroups here, or files of another form
        return None
    return min(quotas, default=None)


def _cgroups(root: Path) -> Iterator[Path]:
    """Folders of this process's cgroups that may hold a CPU quota, from its own up to the mounted root."""
    owns: dict[str, str] = {}
    for line in (root / "proc/self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        owns |= dict.fromkeys(controllers.split(","), path)
    for line in (root / "proc/self/mountinfo").read_text().splitlines():
        # 36 35 0:32 <root> <mount point> <options> [...] - <kind> <source> <options>
        mount, _, about = line.partition(" - ")
        top, point = mount.split()[3:5]
        kind, options = about.split(maxsplit=1)[0], about.rsplit(maxsplit=1)[-1]  # what is mounted may have no name
        if kind == "cgroup2":
            own = owns.get("")
        elif kind == "cgroup" and "cpu" in options.split(","):
            own = owns.get("cpu")
        else:
            continue
        if own is not None:
            yield from _upwards(root / point.lstrip("/"), top, own)


def _upwards(point: Path, top: str, own: str) -> Iterator[Path]:
    """The folder of cgroup ``own`` and those above it, where the hierarchy below ``top`` is mounted at ``point``.

    A cgroup outside of what is mounted (a container's own view of a hierarchy) is its root.
    """
    parts = Path(own).parts[1:]
    if top != "/":
        above = Path(top).parts[1:]
        parts = parts[len(above) :] if parts[: len(above)] == above else ()
    if ".." in parts:
        parts = ()
    for count in range(len(parts), -1, -1):
        yield point.joinpath(*parts[:count])


def _quota_of(folder: Path) -> float | None:
    """CPUs of the cgroup at ``folder``; None without a limit of its own."""
    if (both := folder / "cpu.max").is_file():
        quota, period = both.read_text().split()
    elif (old := folder / "cpu.cfs_quota_us").is_file():
        quota, period = old.read_text().strip(), (folder / "cpu.cfs_period_us").read_text().strip()
    else:
        return None
    return None if quota == "max" or int(quota) <= 0 else int(quota) / int(period)
