"""The CPUs that this process may use, by its affinity and the quota of its cgroups (versions 1 and 2).

``os.cpu_count()`` ignores a container's quota. With more threads than the quota allows, the kernel stops all threads
for the rest of every period.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from pathlib import Path

_ROOT = Path("/")
# How often a thread of an OpenMP team polls at a barrier before it sleeps. GNU's default, 300,000, takes milliseconds,
# in which waiting threads hold the cores that the others need (docs/measurements/first-runs.md); GNU itself uses 100 to
# 1,000 if it knows of more threads than cores.
_SPINS = 1000


def share_cpus() -> None:
    """Set the environment so that native libraries loaded from now on, here and in children, share the CPUs fairly.

    Their pools get one thread per available CPU, and waiting threads sleep soon. Variables that are already set stay.
    """
    cpus = str(available_cpus())
    own = {
        # Read by torch, MKL, OpenBLAS and Arrow.
        "OMP_NUM_THREADS": cpus,
        "POLARS_MAX_THREADS": cpus,
        # Read by GNU's OpenMP, which torch's wheels bring along.
        "GOMP_SPINCOUNT": str(_SPINS),
        # Milliseconds, read by LLVM's and Intel's OpenMP, which other builds of torch use.
        "KMP_BLOCKTIME": "0",
    }
    for name, value in own.items():
        os.environ.setdefault(name, value)


def available_cpus(root: Path | None = None) -> int:
    """Return the number of whole CPUs of this process, at least one: the smaller of its affinity and its quota.

    A quota of 2.5 gives 2; the rest is left for threads of input and output. ``root``: the folder of ``proc`` and the
    cgroups, by default ``/``.
    """
    allowed = os.cpu_count() or 1
    # macOS has no affinity.
    if hasattr(os, "sched_getaffinity"):
        allowed = len(os.sched_getaffinity(0))
    quota = cpu_quota(root)
    if quota is None:
        return allowed
    return max(1, min(allowed, math.floor(quota)))


def cpu_quota(root: Path | None = None) -> float | None:
    """Return the smallest CPU quota of this process's cgroup and its parents; None if there is none."""
    quotas = []
    try:
        for folder in cgroup_folders("cpu", root or _ROOT):
            quota = _quota_of(folder)
            if quota is not None:
                quotas.append(quota)
    except (OSError, ValueError):
        # There are no cgroups, or their files have another format. What was read so far is not used, because the
        # smallest quota may be one that could not be read.
        return None
    return min(quotas, default=None)


def cgroup_folders(controller: str, root: Path = _ROOT) -> Iterator[Path]:
    """Yield folders of this process's cgroups that may limit ``controller`` (cpu, memory), from its own up to the root.

    Raises OSError where there are no cgroups, ValueError where files have another form.
    """
    owns: dict[str, str] = {}
    for line in (root / "proc/self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        owns |= dict.fromkeys(controllers.split(","), path)
    for line in (root / "proc/self/mountinfo").read_text().splitlines():
        # 36 35 0:32 <root> <mount point> <options> [...] - <kind> <source> <options>
        mount, _, about = line.partition(" - ")
        top, point = mount.split()[3:5]
        # Split from both ends, because the source between the two may be empty.
        kind, options = about.split(maxsplit=1)[0], about.rsplit(maxsplit=1)[-1]
        if kind == "cgroup2":
            own = owns.get("")
        elif kind == "cgroup" and controller in options.split(","):
            own = owns.get(controller)
        else:
            continue
        if own is not None:
            yield from _upwards(root / point.lstrip("/"), top, own)


def _upwards(point: Path, top: str, own: str) -> Iterator[Path]:
    """Yield the folder of cgroup ``own`` and its parents, if the hierarchy below ``top`` is mounted at ``point``.

    A cgroup outside the mount (in a container's view of the hierarchy) counts as the root.
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
    """Return the CPU quota of the cgroup at ``folder``; None if it has none."""
    both, old = folder / "cpu.max", folder / "cpu.cfs_quota_us"
    if both.is_file():
        quota, period = both.read_text().split()
    elif old.is_file():
        quota, period = old.read_text().strip(), (folder / "cpu.cfs_period_us").read_text().strip()
    else:
        return None
    # Without a quota, version 2 of cgroups writes max, and version 1 writes -1. Both figures are in microseconds.
    if quota == "max" or int(quota) <= 0:
        return None
    return int(quota) / int(period)
