"""This machine: the memory and GPUs that a run may use, and what tells its kind from others. No torch."""

from __future__ import annotations

import os
import platform
import socket
import stat
import subprocess
import tempfile
import time
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from pipeline.core.cpus import available_cpus, cgroup_folders

_ROOT = Path("/")
_STATUS = _ROOT / "proc/self/status"
# Files with the memory limit of a cgroup, in version 2 and 1.
_LIMITS = ("memory.max", "memory.limit_in_bytes")
# Seconds that nvidia-smi may take.
_SECONDS = 30.0
# Loopback bit of the kernel's interface flags.
_IFF_LOOPBACK = 8
# Seconds for which ``is_busy`` measures.
BLINK_SECONDS = 0.2
# Share of all CPUs above which other programs disturb a measurement.
BUSY_SHARE = 0.1
# Seconds of tolerance: the kernel counts in hundredths of a second and does not update all counters at the same time.
CLOCK_SLACK = 0.05


@dataclass(frozen=True)
class Gpu:
    """A GPU: its name and memory in bytes, 0 where the driver does not say (memory that it shares with the CPU)."""

    name: str
    memory: int


def usable_memory(root: Path | None = None) -> int:
    """Return the bytes of memory that this process may use: the machine's, or the smallest limit of its cgroups.

    ``root``: the folder of ``proc`` and the cgroups, by default ``/``. Without ``proc``, the C library says how much.
    """
    root = root or _ROOT
    installed = _figure(root / "proc/meminfo", "MemTotal")
    limits = [installed or os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")]
    try:
        # The limits of parents apply, too. Version 1 writes a number larger than any memory where there is none.
        for folder in cgroup_folders("memory", root):
            for name in _LIMITS:
                file = folder / name
                limit = file.read_text().strip() if file.is_file() else "max"
                if limit != "max":
                    limits.append(int(limit))
    except (OSError, ValueError):
        # There are no cgroups, or their files have another format: what was found so far counts.
        pass
    return min(limits)


def spare_memory() -> int:
    """Return the bytes that this process could still take: what the machine and its cgroups have left."""
    # ``left`` may be negative: VmRSS includes shared pages, which may not count towards this process's cgroup.
    left = usable_memory() - _figure(_STATUS, "VmRSS")
    return max(min(_figure(_ROOT / "proc/meminfo", "MemAvailable"), left), 0)


def own_memory() -> int:
    """Return the bytes of this process that no file backs, which another process like it would take anew."""
    return _figure(_STATUS, "RssAnon")


def _figure(file: Path, key: str) -> int:
    # Returns the value of ``key`` in a file of proc, in bytes; 0 if there is none, or no proc. The kernel's kB are
    # 1,024 bytes.
    try:
        for line in file.read_text().splitlines():
            if line.startswith(f"{key}:"):
                return int(line.split()[1]) * 1024
    except (OSError, ValueError):
        pass
    return 0


@cache
def processor() -> str:
    """Return the processor's name."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    for line in lines:
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    # On ARM the file has numbers instead of a name.
    return "cpu"


def machine_of() -> str:
    """Return what tells this kind of machine from others by speed: its processor, the CPUs to use, and GPUs.

    No host name: a container has another one at each start.
    """
    parts = [processor(), f"{available_cpus()} CPUs"]
    for name, count in Counter(gpu.name for gpu in gpus()).items():
        parts.append(f"{count} x {name}")
    return ", ".join(parts)


@cache
def gpus() -> tuple[Gpu, ...]:
    """Return the GPUs that this process may use; none where the installed packages are those for CPUs.

    ``CUDA_VISIBLE_DEVICES`` names them, as it does in CUDA: by numbers or beginnings of UUIDs.
    """
    if not _has_driver():
        return ()
    # Ask nvidia-smi and not torch, which would initialise CUDA: a process with CUDA cannot be forked.
    command = ["nvidia-smi", "--query-gpu=uuid,name,memory.total", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_SECONDS, check=True)
    except (OSError, subprocess.SubprocessError):
        return ()
    by_uuid: dict[str, Gpu] = {}
    for line in done.stdout.splitlines():
        if line.count(",") >= 2:
            # Split from both ends, because a name may have a comma. Memory is in MiB, or [N/A].
            head, _, memory = line.rpartition(",")
            uuid, _, name = head.partition(",")
            size = int(memory) << 20 if memory.strip().isdigit() else 0
            by_uuid[uuid.strip()] = Gpu(name.strip(), size)
    cards = list(by_uuid.values())
    names = os.environ.get("CUDA_VISIBLE_DEVICES")
    if names is None:
        return tuple(cards)
    visible: list[Gpu] = []
    for name in map(str.strip, names.split(",")):
        if name.isdigit():
            named = cards[int(name) : int(name) + 1]
        elif name.startswith("MIG-"):
            # A part of a GPU, which nvidia-smi does not list, counts as the first GPU.
            named = cards[:1]
        else:
            named = [card for uuid, card in by_uuid.items() if name and uuid.startswith(name)]
        # As in CUDA, the first name that matches no GPU ends the list.
        if len(named) != 1:
            break
        visible += named
    return tuple(visible)


def _has_driver() -> bool:
    """Whether there is NVIDIA's driver, and packages that use it."""
    # Look only at the installed packages, because importing torch takes seconds. fbgemm-gpu is the GPU build; the CPU
    # build is called fbgemm-gpu-cpu.
    try:
        return Path("/proc/driver/nvidia").is_dir() and bool(version("fbgemm-gpu"))
    except PackageNotFoundError:
        return False


def pinned_figures() -> Path:
    """Return the file of ``conf/hardware`` that ``hardware=auto`` stands for on this machine, where it exists."""
    return _own_folder(os.environ.get("XDG_CONFIG_HOME"), ".config") / "hardware.yaml"


def kept_figures(key: str) -> Path:
    """Return where figures that are measured for ``key`` are kept from now on: in the user's cache folder.

    In containers whose home cannot be written they are among temporary files. Otherwise every plan would measure again.
    """
    path = _cached_figures(key)
    # The folder may not exist yet, so the nearest existing parent decides whether it can be created.
    existing = next(folder for folder in path.parents if _may(folder, os.F_OK))
    if _may(existing, os.W_OK):
        return path
    return _private(_temporary()) / ".cache" / "machines" / path.name


def known_figures(key: str) -> Path:
    """Return where figures for ``key`` are: where this user keeps them, else in an image's read-only home."""
    written = kept_figures(key)
    if _may(written, os.R_OK):
        return written
    return _cached_figures(key)


def _cached_figures(key: str) -> Path:
    return _own_folder(os.environ.get("XDG_CACHE_HOME"), ".cache") / "machines" / f"{key}.json"


def _may(path: Path, mode: int) -> bool:
    # Unlike Path.exists, os.access raises no error for a folder above that cannot be entered.
    return os.access(path, mode, effective_ids=os.access in os.supports_effective_ids)


@dataclass(frozen=True)
class CpuTimes:
    """Seconds: of a clock, of CPU time of the whole machine, and of CPU time of this process."""

    clock: float
    machine: float
    own: float


def cpu_times(root: Path | None = None) -> CpuTimes:
    """Return the times until now; those of the machine are 0 without ``proc``. ``root``: its folder, by default ``/``.

    Children count as this process's work when they have ended. CPU time that a hypervisor gave to others is left out.
    """
    own = os.times()
    spent = own.user + own.system + own.children_user + own.children_system
    file = (root or _ROOT) / "proc/stat"
    try:
        # The first line sums up all CPUs: user nice system idle iowait irq softirq steal ...
        user, nice, system, _, _, irq, softirq = map(int, file.read_text().split()[1:8])
    except (OSError, ValueError):
        return CpuTimes(time.perf_counter(), 0.0, spent)
    return CpuTimes(time.perf_counter(), (user + nice + system + irq + softirq) / os.sysconf("SC_CLK_TCK"), spent)


def is_disturbed(began: CpuTimes, ended: CpuTimes) -> bool:
    """Whether other programs took more than ``BUSY_SHARE`` of the machine's CPUs between the two times."""
    others = ended.machine - began.machine - (ended.own - began.own)
    return others > BUSY_SHARE * (os.cpu_count() or 1) * (ended.clock - began.clock) + CLOCK_SLACK


def is_busy() -> bool:
    """Whether other programs use so much of the CPUs that they would disturb a measurement.

    The load average cannot tell, because it also counts what this process itself did in the last minute.
    """
    began = cpu_times()
    time.sleep(BLINK_SECONDS)
    return is_disturbed(began, cpu_times())


def loopback_variables() -> dict[str, str]:
    """Return the variables by which gloo and NCCL listen on the loopback alone; none if it cannot be found.

    Without them, gloo listens on the address of the machine's name, NCCL on the first interface that is no loopback.
    """
    for _, name in socket.if_nameindex():
        try:
            loopback = bool(int(Path(f"/sys/class/net/{name}/flags").read_text(), 16) & _IFF_LOOPBACK)
        except (OSError, ValueError):
            # The system does not show the flags, so go by the usual names.
            loopback = name in ("lo", "lo0")
        if loopback:
            # NCCL takes a name after = literally, and others as prefixes.
            return {"GLOO_SOCKET_IFNAME": name, "NCCL_SOCKET_IFNAME": f"={name}"}
    return {}


def stay_on_loopback() -> None:
    """Let gloo and NCCL of this process listen on the loopback alone, unless the user has said where."""
    for name, value in loopback_variables().items():
        os.environ.setdefault(name, value)


def _own_folder(given: str | None, usual: str) -> Path:
    # A user without a home, as in containers, has a folder among temporary files.
    if given:
        return Path(given) / "nightjar"
    try:
        return Path.home() / usual / "nightjar"
    except RuntimeError:
        return _private(_temporary()) / usual


def _temporary() -> Path:
    return Path(tempfile.gettempdir()) / f"nightjar-{os.getuid()}"


@cache
def _private(folder: Path) -> Path:
    # Anybody may create a folder among temporary files, and the files in this one are trusted. If somebody else could
    # write to it, a new folder with another name takes its place.
    with suppress(FileExistsError):
        folder.mkdir(mode=0o700)
    # lstat, because a symbolic link could lead to a folder that somebody else chose.
    found = folder.lstat()
    if stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid() and not found.st_mode & 0o022:
        return folder
    return Path(tempfile.mkdtemp(prefix=f"{folder.name}-"))
