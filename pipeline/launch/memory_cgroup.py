"""The memory that a plan counts on, kept at run time: a memory cgroup (version 1 or 2) around a stage's ranks.

Every rank puts itself into the group of its launcher before it imports much, so no process needs more rights than the
user has, and what the ranks take, page cache included, is counted together. The launcher removes the group at its end;
groups of launchers that were killed are removed by the next one.
"""

from __future__ import annotations

import contextlib
import math
import os
import time
from pathlib import Path

from pipeline.config import Config
from pipeline.core.errors import GuardError
from pipeline.core.units import GIB
from pipeline.records.runs import Step
from pipeline.store.artifacts import Store
from pipeline.store.manifest import Artifact

_MOUNTS = Path("/proc/self/mounts")
_OWN = Path("/proc/self/cgroup")
_NAME = "nightjar-ranks"
_LIMIT = {1: "memory.limit_in_bytes", 2: "memory.max"}
_SWAP = {1: "memory.memsw.limit_in_bytes", 2: "memory.swap.max"}
_PEAK = {1: "memory.max_usage_in_bytes", 2: "memory.peak"}
_EVENTS = {1: "memory.oom_control", 2: "memory.events"}


class MemoryCgroup:
    """A cgroup below our own, which exists until ``remove``; OSError if none can be made.

    Args:
        limit: Bytes, or None for a group that another process made.
    """

    def __init__(self, name: str, limit: int | None = None) -> None:
        parent, self._version = _parent_group()
        self.path = parent / name
        if limit is None:
            return
        # Every rank calls this; the first one makes the group.
        self.path.mkdir(exist_ok=True)
        try:
            self._write(_LIMIT[self._version], limit)
        except OSError:
            with contextlib.suppress(OSError):
                self.path.rmdir()
            raise
        # A kernel that does not count swap has no such file. Version 1 counts memory and swap together.
        most_swapped = limit if self._version == 1 else 0
        with contextlib.suppress(OSError):
            self._write(_SWAP[self._version], most_swapped)

    def add(self, pid: int) -> None:
        """Move process ``pid`` into the group; its memory from then on counts."""
        self._write("cgroup.procs", pid)

    def peak(self) -> int:
        """Return the most bytes that were in use at a time, page cache included."""
        return int(self._read(_PEAK[self._version]))

    def limit(self) -> int:
        """Return the limit in bytes."""
        return int(self._read(_LIMIT[self._version]))

    def killed(self) -> int:
        """Return how many processes the kernel killed because the group had no memory left."""
        # Old kernels with version 1 do not count kills; the result is then 0.
        for line in self._read(_EVENTS[self._version]).splitlines():
            name, count = line.split()
            if name == "oom_kill":
                return int(count)
        return 0

    def remove(self) -> None:
        """Remove the group, which the last process has left; OSError if one is still in it."""
        for _ in range(50):
            try:
                self.path.rmdir()
                return
            except FileNotFoundError:
                return
            except OSError:
                # The kernel is still giving the memory back.
                time.sleep(0.1)
        self.path.rmdir()

    def _write(self, name: str, value: int) -> None:
        (self.path / name).write_text(f"{value}\n")

    def _read(self, name: str) -> str:
        return (self.path / name).read_text()


def _parent_group() -> tuple[Path, int]:
    """Return the directory of our own memory cgroup, and the version of its hierarchy."""
    groups = {}
    for line in _OWN.read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        for controller in controllers.split(","):
            groups[controller] = path
    for line in _MOUNTS.read_text().splitlines():
        _, mount, kind, options, *_ = line.split()
        if kind == "cgroup" and "memory" in options.split(",") and "memory" in groups:
            return Path(mount + groups["memory"]), 1
        if kind == "cgroup2" and "memory" not in groups and "" in groups:
            return Path(mount + groups[""]), 2
    raise OSError("no memory cgroup hierarchy is mounted")


def plan_of(step: Step, store: Store) -> Artifact | None:
    """Return the plan that ``step`` reads; None if it reads none."""
    return store.find(step.inputs["plan"]) if "plan" in step.inputs else None


def is_held(config: Config, plan: Artifact | None) -> bool:
    """Return whether ``launch.limit_memory`` limits runs of ``plan``: with auto, those with tables on SSD."""
    if config.launch.limit_memory != "auto":
        return config.launch.limit_memory == "always"
    return plan is not None and plan.summary.get("tiers", {}).get("ssd_bytes", 0) > 0


def hold(config: Config, launcher: int) -> str:
    """Put this process, a rank, under the limit of the ranks of ``launcher``; return one line that says how.

    The limit is ``hardware.ddr_gib`` for each rank on this machine.
    """
    hardware, ranks = config.hardware, config.machine_ranks
    # Ranks of embedding hosts may have another limit, so find out which ranks are on this host.
    first = config.launch.host_index * ranks if ranks < config.world_size else 0
    limit = int(sum(hardware.ddr_gib_of(rank) for rank in range(first, first + ranks)) * GIB)
    settings = f"hardware.ddr_gib={hardware.ddr_gib:g}"
    if ranks > 1:
        settings += f" for each of {ranks} ranks"
    if hardware.embedding_ddr_gib is not None:
        settings += f", hardware.embedding_ddr_gib={hardware.embedding_ddr_gib:g} on embedding hosts"
    try:
        # Remove the groups of launchers that were killed.
        for path in MemoryCgroup(_NAME).path.parent.glob(f"{_NAME}-*"):
            if not Path(f"/proc/{path.name.rpartition('-')[2]}").exists():
                with contextlib.suppress(OSError):
                    path.rmdir()
        group = MemoryCgroup(f"{_NAME}-{launcher}", limit)
        group.add(os.getpid())
    except OSError as error:
        return (
            f"memory: {limit / GIB:.3g} GiB at most ({settings}); no memory cgroup can be made "
            f"({error.strerror or error}), so the run watches itself and stops where it takes more"
        )
    return f"memory: {limit / GIB:.3g} GiB at most ({settings}), held by a memory cgroup"


def release(launcher: int) -> None:
    """Remove the group of the ranks of ``launcher``, if there is one and nobody is left in it."""
    # If it cannot be removed now, the next launcher removes it.
    with contextlib.suppress(OSError):
        group = MemoryCgroup(f"{_NAME}-{launcher}")
        if group.path.exists():
            group.remove()


def exceeded(config: Config, store: Store, step: Step, launcher: int) -> GuardError | None:
    """Return the error of a rank of ``launcher`` that was killed because its group had no memory left, else None."""
    try:
        group = MemoryCgroup(f"{_NAME}-{launcher}")
        if not group.killed():
            return None
        limit = group.limit()
    except OSError:
        return None
    ranks = "rank"
    if config.machine_ranks > 1:
        ranks = f"{config.machine_ranks} ranks"
    less, checkpoint = "a smaller evaluate.global_batch", ""
    # Only a training has scratch folders, which hold its checkpoints.
    if step.scratch:
        less = "train.prefetch_batches=1, or smaller cache_rows"
        checkpoint = "; no checkpoint was taken before"
        for name in sorted(store.names(step.scratch[0]), reverse=True):
            if (newest := store.find(f"{step.scratch[0]}/{name}")) is not None:
                checkpoint = f"; the last checkpoint, {newest.path}, is intact"
                break
    # Propose 1.5 times as much, rounded up to a tenth of a GiB.
    ddr_gib = config.hardware.ddr_gib
    return GuardError(
        f"the {step.name} stage needed more than the {limit / GIB:.3g} GiB of memory that hardware.ddr_gib="
        f"{ddr_gib:g} gives its {ranks}, and was stopped{checkpoint}",
        hint=f"{less}; hardware.ddr_gib={math.ceil(15 * ddr_gib) / 10:g} where the machine has it; or "
        "launch.limit_memory=never",
    )
