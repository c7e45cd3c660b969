"""The memory of a training: measured on a rank, watched against a host's limit, and the SSD tier behind it."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import logging
import math
import resource
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import chain
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from pipeline.checkpoint.collectives import all_gather_records
from pipeline.checkpoint.index import committed
from pipeline.config.hardware import HardwareConfig
from pipeline.core.errors import GuardError
from pipeline.core.units import GIB
from pipeline.embeddings.row_access import RowStore
from pipeline.embeddings.ssd.diagnostics import FIGURES, named, pss_bytes
from pipeline.embeddings.ssd.store import SsdStore
from pipeline.records.plan import Plan
from pipeline.store.artifacts import Store
from pipeline.training.callbacks import Callback, IntervalRecord
from pipeline.training.distributed import add_up, largest

# A warning is logged where training takes more than this share of the limit.
WARN_SHARE = 0.9
# Directory of a local store for the files of tables on tier ssd.
SCRATCH = "scratch"
log = logging.getLogger(__name__)


class MemoryMeter:
    """Largest bytes that this process has taken since the meter was made.

    On CUDA those of PyTorch's allocator; on a CPU resident memory beyond that of the start (interpreter, libraries).
    Memory that an earlier training in this process freed, or left as garbage, does not count as there at the start:
    this one may reuse it.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
            return
        # What an earlier training left in cycles would be freed in the middle of this one, and hide as much.
        gc.collect()
        give_back_freed()
        with contextlib.suppress(OSError):
            # Without it, the peak is that of the process since its start.
            Path("/proc/self/clear_refs").write_text("5")
        self._start = status_bytes("VmRSS") or peak_rss()

    def peak(self) -> int:
        """The most bytes taken so far; on a CPU beyond those that the process had at the start."""
        if self._device.type == "cuda":
            return int(torch.cuda.max_memory_allocated(self._device))
        return max((status_bytes("VmHWM") or peak_rss()) - self._start, 0)


def give_back_freed() -> None:
    """Give freed memory that glibc keeps back to the system; takes milliseconds.

    Training has glibc keep it for the next step (``distributed.connect``). Pieces never fit exactly, so the kept memory
    grows slowly, by some hundred MiB at most.
    """
    # Only glibc has this function, and only glibc keeps memory because of ``connect``.
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def peak_rss() -> int:
    """Largest resident set of this process so far, in bytes."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def status_bytes(key: str) -> int:
    """The figure ``key`` of this process in bytes, such as VmRSS now and VmHWM at its largest; 0 where not on Linux."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith(f"{key}:"):
                return int(line.split()[1]) * 1024
    return 0


class MemoryBudget(Callback):
    """The limit of a host's ranks together: ``hardware.ddr_gib`` for each, that of the host nearest to its own.

    At every interval the PSS of a host's ranks is added up, in which memory that ranks share counts once: a warning
    when the limit is nearly used up, then the end of the run. A memory cgroup (``launch/memory_cgroup.py``) keeps the
    limit between intervals where the machine allows one. This check names the setting that is too small in time, and
    it is the only one where no cgroup can be made.

    ``wanted``: ``launch.limit_memory``; auto limits plans with tables on SSD. ``measure``: bytes that this rank takes.
    """

    def __init__(
        self, hardware: HardwareConfig, wanted: str, plan: Plan, measure: Callable[[], int] = pss_bytes
    ) -> None:
        self.active = wanted == "always" or (wanted == "auto" and bool(plan.tables_on("ssd")))
        self._hardware, self._measure = hardware, measure
        self._limits: list[int] = []
        # One for each host: embedding hosts may have more memory than workers.
        for first_rank in range(0, hardware.world_size, hardware.ranks_per_host):
            self._limits.append(int(hardware.ddr_gib_of(first_rank) * GIB) * hardware.ranks_per_host)
        self.limit, self.peak, self._warned = self._limits[0], 0, False

    def on_interval(self, interval: IntervalRecord) -> None:
        """Add ``host_memory_bytes`` of the host that takes most.

        Raises:
            GuardError: A host is over its limit; on all ranks.
        """
        if not self.active:
            return
        hardware, step = self._hardware, interval.step
        local = hardware.ranks_per_host
        host = dist.get_rank() // local
        hosts = torch.zeros(hardware.hosts, dtype=torch.float64)
        # Reading PSS walks the page tables, so a reading that the SSD tier has just made is taken for this one.
        used = interval.figures.get("pss_bytes") or self._measure()
        # Near this rank's share of the limit, freed memory that glibc keeps for later must not count.
        if used > WARN_SHARE * self._limits[host] / local:
            give_back_freed()
            used = self._measure()
        hosts[host] = used
        device = "cpu" if dist.get_backend() == "gloo" else "cuda"
        sums = add_up(hosts.to(device)).tolist()
        fullest = max(range(hardware.hosts), key=lambda host: sums[host] / self._limits[host])
        taken, self.limit = int(sums[fullest]), self._limits[fullest]
        self.peak = max(self.peak, taken)
        if taken > self.limit:
            setting = "hardware.ddr_gib"
            if fullest * local >= hardware.workers and hardware.embedding_ddr_gib is not None:
                setting = "hardware.embedding_ddr_gib"
            raise GuardError(
                f"training takes {self._of(taken)} on a host after step {step}, more than {setting} gives it",
                hint=f"train.prefetch_batches=1, or smaller cache_rows; {setting}="
                f"{math.ceil(11 * taken / GIB / local) / 10:g} where the machine has it; or "
                "launch.limit_memory=never",
            )
        if taken > WARN_SHARE * self.limit and not self._warned and dist.get_rank() == 0:
            log.warning("memory: training takes %s after step %d, and stops where it takes more", self._of(taken), step)
        self._warned |= taken > WARN_SHARE * self.limit
        interval.figures["host_memory_bytes"] = taken

    def _of(self, taken: int) -> str:
        text = f"{taken / GIB:.3g} of {self.limit / GIB:.3g} GiB of memory"
        count = self._hardware.ranks_per_host
        # The limit here is that of a host, but the setting that the user knows is that of a rank.
        if count > 1:
            text += f" ({self.limit / count / GIB:g} GiB for each of {count} ranks)"
        return text

    def on_end(self, figures: dict[str, Any]) -> None:
        """Add the limit, and the most that a host took at an interval's end."""
        if self.active:
            figures["budget"] = {"limit_bytes": self.limit, "peak_bytes": self.peak}


@contextmanager
def open_row_store(hardware: HardwareConfig, store: Store, plan: Plan) -> Iterator[RowStore | None]:
    """The rows of the plan's tables on tier ssd that this rank has, closed at the end; None where the plan has none.

    Where ``hardware.ssd_paths`` is empty, the files are in directory ``scratch`` of a local store.
    ConfigError for paths that cannot be used, GuardError where a disk has no room.
    """
    if not plan.tables_on("ssd"):
        yield None
        return
    paths = hardware.ssd_paths
    if not paths and store.is_local:
        scratch = Path(store.full(SCRATCH))
        scratch.mkdir(parents=True, exist_ok=True)
        paths = [str(scratch)]
    ssd = SsdStore(plan, paths, dist.get_rank(), spare=hardware.ssd_spare)
    try:
        yield ssd
    finally:
        ssd.close()


def log_shortcomings(row_store: RowStore | None) -> None:
    """Log once, on rank 0, which features that make the tier fast the machine of any rank refuses. Collective."""
    if row_store is None:
        return
    # Collective, so also where this rank's machine lacks nothing.
    of_ranks = all_gather_records(row_store.shortcomings())
    if dist.get_rank() == 0:
        # Ranks of one machine lack the same.
        for what, advice in dict.fromkeys(map(tuple, chain(*of_ranks))):
            log.warning("%s; %s", what, advice)


class SsdMeter(Callback):
    """The figures of the SSD tier over all ranks, by interval and for the session. Collective; empty without it."""

    def __init__(self, row_store: RowStore | None) -> None:
        self._row_store = row_store
        self._sums = torch.zeros(FIGURES, dtype=torch.float64)
        self._peak = self._steps = 0

    def on_interval(self, interval: IntervalRecord) -> None:
        """Add the figures of the interval; ``pss_bytes`` are this rank's."""
        if self._row_store is None:
            return
        sums = add_up(torch.tensor(self._row_store.take_counts(), dtype=torch.float64))
        self._sums += sums
        self._steps += interval.steps
        used = pss_bytes()
        self._peak = max(self._peak, used)
        interval.figures |= named(sums.tolist(), interval.steps)
        interval.figures["pss_bytes"] = used

    def on_end(self, figures: dict[str, Any]) -> None:
        """Add those of the session; ``peak_pss_bytes``: of the rank that used most memory."""
        if self._row_store is None:
            return
        peak = largest(torch.tensor([self._peak], dtype=torch.float64)).item()
        figures["peak_pss_bytes"] = int(peak)
        figures["ssd"] = named(self._sums.tolist(), max(1, self._steps))


@contextmanager
def naming_checkpoint(store: Store, directory: str) -> Iterator[None]:
    """Add to a GuardError the newest checkpoint in ``directory``, which is intact whatever stopped the run."""
    try:
        yield
    except GuardError as error:
        try:
            saved, newest = committed(store, directory), "no checkpoint was taken before"
            if saved:
                newest = f"the last checkpoint, {saved[-1].path}, is intact"
        except Exception as fault:
            # The message is about what stopped the run.
            newest = f"its checkpoints cannot be listed now ({fault})"
        raise GuardError(f"{error.message}; {newest}", hint=error.hint) from error
