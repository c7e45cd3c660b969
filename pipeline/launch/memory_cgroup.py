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
from pipeline.errors import GuardError
from pipeline.records.runs import Step
from pipeline.store.artifacts import Store
from pipeline.store.manifest import Artifact
from pipeline.units import GIB

_MOUNTS = Path("/proc/self/mounts")
_OWN = Path("/proc/self/cgroup")
_NAME = "nightjar-ranks"
_LIMIT = {1: "memory.limit_in_bytes", 2: "memory.max"}
_SWAP = {1: "memory.memsw.limit_in_bytes", 2: "memory.swap.max"}
_USED = {1: "memory.usage_in_bytes", 2: "memory.current"}
_PEAK = {1: "memory.max_usage_in_bytes", 2: "memory.peak"}
_EVENTS = {1: "memory.oom_control", 2: "memory.events"}


class MemoryCgroup:
    """A cgroup below our own, there until ``remove``; ``limit`` in bytes, None for one that another process made.

    OSError where none can be made.
    """

    def __init__(self, name: str, limit: int | None = None) -> None:
        parent, self._version = _own_group()
        self.path = parent / name
        if limit is None:
            return
        self.path.mkdir(exist_ok=True)
        try:
            self._write(_LIMIT[self._version], limit)
        except OSError:
            with contextlib.suppress(OSError):
                self.path.rmdir()
            raise
        with contextlib.suppress(OSError):  # a kernel that does not count swap has no such file
            self._write(_SWAP[self._version], limit if self._version == 1 else 0)  # version 1 counts both together

    def add(self, pid: int) -> None:
        """Move process ``pid`` into the group; its memory from then on counts."""
        self._write("cgroup.procs", pid)

    def used(self) -> int:
        """Bytes in use, page cache included."""
        return int(self._read(_USED[self._version]))

    def peak(self) -> int:
        """The most bytes that were in use at a time, page cache included."""
        return int(self._read(_PEAK[self._version]))

    def limit(self) -> int:
        """Bytes."""
        return int(self._read(_LIMIT[self._version]))

    def killed(self) -> int:
        """How many processes the kernel killed because the group had no memory left."""
        lines = (line.split() for line in self._read(_EVENTS[self._version]).splitlines())
        return sum(int(words[1]) for words in lines if words[0] == "oom_kill")

    def remove(self) -> None:
        """Remove the group, which the last process has left; OSError where one is still in it."""
        for _ in range(50):
            try:
                self.path.rmdir()
                return
            except FileNotFoundError:
                return
            except OSError:  # the kernel is still giving the memory back
                time.sleep(0.1)
        self.path.rmdir()

    def _write(self, name: str, value: int) -> None:
        (self.path / name).write_text(f"{value}\n")

    def _read(self, name: str) -> str:
        return (self.path / name).read_text()


def _own_group() -> tuple[Path, int]:
    """Directory of our own memory cgroup, and the version of its hierarchy."""
    owns = [line.split(":", 2) for line in _OWN.read_text().splitlines()]
    own = {kind: path for _, kinds, path in owns for kind in kinds.split(",")}
    for line in _MOUNTS.read_text().splitlines():
        _, place, kind, options, *_ = line.split()
        if kind == "cgroup" and "memory" in options.split(",") and "memory" in own:
            return Path(place + own["memory"]), 1
        if kind == "cgroup2" and "memory" not in own and "" in own:
            return Path(place + own[""]), 2
    raise OSError("no memory cgroup hierarchy is mounted")


def plan_of(step: Step, store: Store) -> Artifact | None:
    """The plan that ``step`` reads; None where it reads none."""
    return store.find(step.inputs["plan"]) if "plan" in step.inputs else None


def is_held(config: Config, plan: Artifact | None) -> bool:
    """Whether ``launch.limit_memory`` asks for a limit on runs of ``plan``: with auto, those with tables on SSD."""
    if config.launch.limit_memory != "auto":
        return config.launch.limit_memory == "always"
    return plan is not None and plan.summary.get("tiers", {}).get("ssd_bytes", 0) > 0


def hold(config: Config, launcher: int) -> str:
    """Put this process, a rank, under the limit of the ranks of ``launcher``; one line for people that says how.

    The limit is ``hardware.ddr_gib`` for each rank on this machine.
    """
    hardware, here = config.hardware, config.machine_ranks
    first = config.launch.host_index * here if here < config.world_size else 0
    limit = int(sum(hardware.ddr_gib_of(rank) for rank in range(first, first + here)) * GIB)
    several = f" for each of {here} ranks" if here > 1 else ""
    ranks = f"hardware.ddr_gib={hardware.ddr_gib:g}{several}"
    if hardware.embedding_ddr_gib is not None:
        ranks += f", hardware.embedding_ddr_gib={hardware.embedding_ddr_gib:g} on embedding hosts"
    try:
        _remove_stale(MemoryCgroup(_NAME).path.parent)
        group = MemoryCgroup(f"{_NAME}-{launcher}", limit)
        group.add(os.getpid())
    except OSError as error:
        return (
            f"memory: {limit / GIB:.3g} GiB at most ({ranks}); no memory cgroup can be made "
            f"({error.strerror or error}), so the run watches itself and stops where it takes more"
        )
    return f"memory: {limit / GIB:.3g} GiB at most ({ranks}), held by a memory cgroup"


def _remove_stale(parent: Path) -> None:
    for path in parent.glob(f"{_NAME}-*"):
        pid = path.name.rpartition("-")[2]
        if not Path(f"/proc/{pid}").exists():
            with contextlib.suppress(OSError):
                path.rmdir()


def release(launcher: int) -> None:
    """Remove the group of the ranks of ``launcher``, if there is one and nobody is left in it."""
    with contextlib.suppress(OSError):
        group = MemoryCgroup(f"{_NAME}-{launcher}")
        if group.path.exists():
            group.remove()


def exceeded(config: Config, store: Store, step: Step, launcher: int) -> GuardError | None:
    """Why a rank of ``launcher`` was killed, where its group had no memory left; None where that was not it."""
    try:
        group = MemoryCgroup(f"{_NAME}-{launcher}")
        if not group.killed():
            return None
        limit, ranks = group.limit(), f"{config.machine_ranks} ranks" if config.machine_ranks > 1 else "rank"
    except OSError:
        return None
    less = "train.prefetch_batches=1, or smaller cache_rows" if step.scratch else "a smaller evaluate.global_batch"
    return GuardError(
        f"the {step.name} stage needed more than the {limit / GIB:.3g} GiB of memory that hardware.ddr_gib="
        f"{config.hardware.ddr_gib:g} gives its {ranks}, and was stopped{_checkpoint(store, step)}",
        hint=f"{less}; hardware.ddr_gib="
        f"{math.ceil(15 * config.hardware.ddr_gib) / 10:g} where the machine has it; or launch.limit_memory=never",
    )


def _checkpoint(store: Store, step: Step) -> str:
    """Which checkpoint of a training ``step`` stands, to be put behind a message."""
    if not step.scratch:
        return ""
    names = sorted(store.names(step.scratch[0]), reverse=True)
    newest = next(filter(None, (store.find(f"{step.scratch[0]}/{name}") for name in names)), None)
    return f"; the last checkpoint, {newest.path}, is intact" if newest else "; no checkpoint was taken before"
