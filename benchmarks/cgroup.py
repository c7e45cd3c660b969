"""Cgroups with CPU quotas around processes of a benchmark, version 1 or 2 as the machine has it."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from pipeline.core.cpus import available_cpus

PERIOD_US = 100_000
SHORT_PERIOD_US = 10_000  # for processes that wait for each other: one that has used its share stops the others
# The mounted hierarchy, and what is written into which file.
_KINDS = (
    (Path("/sys/fs/cgroup/cpu"), {"cpu.cfs_period_us": "{period}", "cpu.cfs_quota_us": "{quota}"}),
    (Path("/sys/fs/cgroup"), {"cpu.max": "{quota} {period}"}),
)
# Of the CPUs, where processes have shares of them: the kernel takes some for files and for switching between processes.
FOR_RUNS = 0.8
_PROCESSES = "cgroup.procs"
_SPIN = "import os\nparent = os.getppid()\nwhile os.getppid() == parent: pass"  # until this process ends, however


def equal_share(processes: int) -> float:
    """CPUs that each of so many processes can have at once: 1, or an equal share of ``FOR_RUNS`` of the machine."""
    cpus = available_cpus()
    return 1.0 if cpus >= processes else FOR_RUNS * cpus / processes


@contextmanager
def shares(pids: Iterable[int], cpus: float, together: float | None = None) -> Iterator[float]:
    """Give each process at most ``cpus`` CPUs, as on a machine that has as many, slower ones; yields what each has.

    That is 1 where ``cpus`` is, or where no cgroups can be made. Processes that one of them starts share its CPUs.
    ``together``: CPUs of all of them at once. Keep the CPUs ``awake`` meanwhile.
    """
    with ExitStack() as stack:
        every = None
        if cpus < 1 and together is not None:
            every = stack.enter_context(cpu_quota(together, "shares", SHORT_PERIOD_US, divided=True))
        for pid in pids if cpus < 1 else ():
            within = every.parent if every else None
            place = stack.enter_context(cpu_quota(cpus, f"share-{pid}", SHORT_PERIOD_US, within=within))
            if place is None:
                cpus = 1.0
                break
            _move(pid, place)
        yield cpus


@contextmanager
def awake(needed: bool = True) -> Iterator[None]:
    """Keep every CPU busy with what has no priority at all, if that is ``needed``.

    One that a quota stops half of the time sleeps, and wakes up slow and cold: the same work took up to 1.8 times the
    CPU seconds, which few processes would pay for and many, who leave no CPU idle, would not.
    """
    with ExitStack() as stack:
        for cpu in sorted(os.sched_getaffinity(0)) if needed else ():
            spinning = stack.enter_context(subprocess.Popen([sys.executable, "-c", _SPIN]))
            stack.callback(spinning.kill)
            os.sched_setscheduler(spinning.pid, os.SCHED_IDLE, os.sched_param(0))
            os.sched_setaffinity(spinning.pid, [cpu])
        yield


def _move(pid: int, place: Path) -> None:
    with suppress(ProcessLookupError):
        place.write_text(str(pid))


@contextmanager
def cpu_quota(
    cpus: float, name: str, period_us: int = PERIOD_US, *, within: Path | None = None, divided: bool = False
) -> Iterator[Path | None]:
    """The ``cgroup.procs`` of a cgroup of ``cpus`` CPUs, removed at the end; None where none can be made.

    ``within``: the cgroup that it is made in, one that is ``divided`` for that. What still runs in it at the end goes
    on where all cgroups are made.
    """
    for root, files in _KINDS:
        folder = (within or root) / f"nightjar-{name}-{os.getpid()}"
        if root not in folder.parents:
            continue
        try:
            folder.mkdir()
        except OSError:
            continue
        try:
            for file, value in files.items():
                (folder / file).write_text(value.format(quota=int(cpus * period_us), period=period_us))
            if divided and (folder / "cgroup.subtree_control").exists():
                (folder / "cgroup.subtree_control").write_text("+cpu")
        except OSError:
            folder.rmdir()
            continue
        try:
            yield folder / _PROCESSES
        finally:
            while left := (folder / _PROCESSES).read_text().split():
                for pid in left:
                    _move(int(pid), root / _PROCESSES)
            folder.rmdir()
        return
    yield None
