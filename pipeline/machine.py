"""This machine: the memory and GPUs that a run may use, and what tells its kind from others. No torch."""

from __future__ import annotations

import os
import platform
import stat
import subprocess
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from pipeline.cpus import available_cpus, cgroup_folders

_ROOT = Path("/")
_LIMITS = ("memory.max", "memory.limit_in_bytes")  # of cgroups, version 2 and 1
_SECONDS = 30.0  # that nvidia-smi may take


@dataclass(frozen=True)
class Gpu:
    """A GPU: its name and memory in bytes, 0 where the driver does not say (memory that it shares with the CPU)."""

    name: str
    memory: int


def usable_memory(root: Path | None = None) -> int:
    """Bytes of memory that this process may use: the machine's, or the smallest limit of its cgroups.

    ``root``: the folder of ``proc`` and the cgroups, by default ``/``. Without ``proc``, what the C library says.
    """
    root = root or _ROOT
    return min([_installed(root), *_limits(root)])


def spare_memory() -> int:
    """Bytes that this process could still take: what the machine has left, and its cgroups beside this process."""
    return max(
        min(_figure("/proc/meminfo", "MemAvailable"), usable_memory() - _figure("/proc/self/status", "VmRSS")), 0
    )


def own_memory() -> int:
    """Bytes of this process that are in no file, which another process like it would take anew."""
    return _figure("/proc/self/status", "RssAnon")


def _figure(file: str, key: str) -> int:
    """The line ``key`` of a file of ``proc``, in bytes; 0 where there is none, as without ``proc``."""
    try:
        lines = Path(file).read_text().splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{key}:"))
    except (OSError, StopIteration, ValueError):
        return 0


def _installed(root: Path) -> int:
    try:
        lines = (root / "proc/meminfo").read_text().splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemTotal:"))
    except (OSError, StopIteration, ValueError):
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _limits(root: Path) -> Iterator[int]:
    """Limits of this process's cgroups and their parents; none where there are no cgroups."""
    try:
        for folder in cgroup_folders("memory", root):
            for file in (folder / name for name in _LIMITS):
                if file.is_file() and (text := file.read_text().strip()) != "max":
                    yield int(text)
    except (OSError, ValueError):
        return


@cache
def processor() -> str:
    """The processor's name."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "cpu")


@cache
def gpus() -> tuple[Gpu, ...]:
    """The GPUs that this process may use; none where the installed packages are those for CPUs.

    ``CUDA_VISIBLE_DEVICES`` names them, as it does in CUDA.
    """
    if not _has_driver():
        return ()
    command = ["nvidia-smi", "--query-gpu=uuid,name,memory.total", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_SECONDS, check=True)
    except (OSError, subprocess.SubprocessError):
        return ()
    every = dict(_gpu(line) for line in done.stdout.splitlines() if line.count(",") >= 2)
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    return tuple(every.values()) if visible is None else tuple(_visible(every, visible.split(",")))


def _gpu(line: str) -> tuple[str, Gpu]:
    """UUID and GPU of a line of nvidia-smi, which has MiB, or ``[N/A]``."""
    head, _, memory = line.rpartition(",")
    uuid, _, name = head.partition(",")
    return uuid.strip(), Gpu(name.strip(), int(memory) << 20 if memory.strip().isdigit() else 0)


def _visible(every: Mapping[str, Gpu], names: Iterable[str]) -> Iterator[Gpu]:
    """The GPUs of ``names``, which are numbers or (beginnings of) UUIDs; as in CUDA, the first that is none ends them.

    A part of a GPU (``MIG-..``), which nvidia-smi does not list, counts as the first one.
    """
    cards = list(every.values())
    for name in map(str.strip, names):
        if name.isdigit():
            named = cards[int(name) : int(name) + 1]
        elif name.startswith("MIG-"):
            named = cards[:1]
        else:
            named = [card for uuid, card in every.items() if name and uuid.startswith(name)]
        if len(named) != 1:
            return
        yield from named


def _has_driver() -> bool:
    """Whether there is NVIDIA's driver, and packages that use it."""
    try:
        return Path("/proc/driver/nvidia").is_dir() and bool(version("fbgemm-gpu"))
    except PackageNotFoundError:
        return False


def pinned_figures() -> Path:
    """The file of ``conf/hardware`` that ``hardware=auto`` stands for on this machine, where it exists."""
    return _own_folder(os.environ.get("XDG_CONFIG_HOME"), ".config") / "hardware.yaml"


def kept_figures(key: str) -> Path:
    """Where the figures that were measured for ``key`` are kept: in the user's cache folder.

    In containers whose home cannot be written they are among temporary files, or every plan would measure again.
    """
    folder = _own_folder(os.environ.get("XDG_CACHE_HOME"), ".cache")
    if not os.access(next(each for each in (folder, *folder.parents) if each.exists()), os.W_OK):
        folder = _private(_temporary()) / ".cache"
    return folder / "machines" / f"{key}.json"


def is_busy() -> bool:
    """Whether other programs take so much of the CPUs that what is measured now would be theirs, too."""
    return os.getloadavg()[0] > available_cpus() / 2


def _own_folder(given: str | None, usual: str) -> Path:
    """Our folder in the user's; a user without a home, as in containers, has one among temporary files."""
    try:
        return (Path(given) if given else Path.home() / usual) / "nightjar"
    except RuntimeError:
        return _private(_temporary()) / usual


def _temporary() -> Path:
    return Path(tempfile.gettempdir()) / f"nightjar-{os.getuid()}"


@cache
def _private(folder: Path) -> Path:
    """``folder``, made if need be; a new one of another name where somebody else could write to it.

    Everybody may make a folder among temporary files, and what lies in this one is trusted.
    """
    with suppress(FileExistsError):
        folder.mkdir(mode=0o700)
    found = folder.lstat()
    if stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid() and not found.st_mode & 0o022:
        return folder
    return Path(tempfile.mkdtemp(prefix=f"{folder.name}-"))
