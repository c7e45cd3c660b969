"""Measures the memory of a training on a rank, checks it against a host's limit, and opens the SSD tier's store."""

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

# Training logs a warning when it takes more than this share of the limit.
WARN_SHARE = 0.9
# The directory of a local store that has the files of tables on tier ssd.
SCRATCH = "scratch"
log = logging.getLogger(__name__)


class MemoryMeter:
    """Largest bytes that this process has taken since the meter was made.

    On CUDA these are the bytes of PyTorch's allocator; on a CPU resident memory beyond that at the start (interpreter,
    libraries). Memory that an earlier training in this process freed, or left as garbage, is not counted as taken at
    the start, since this training may reuse it.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
            return
        # Collect reference cycles of an earlier training: freed in the middle of this one, they would hide as many
        # bytes.
        gc.collect()
        give_back_freed()
        with contextlib.suppress(OSError):
            # Reset the peak; without this it would be the peak since the process started.
            Path("/proc/self/clear_refs").write_text("5")
        self._start = status_bytes("VmRSS") or peak_rss()

    def peak(self) -> int:
        """Return the most bytes taken so far; on a CPU beyond those at the start."""
        if self._device.type == "cuda":
            return int(torch.cuda.max_memory_allocated(self._device))
        return max((status_bytes("VmHWM") or peak_rss()) - self._start, 0)


def give_back_freed() -> None:
    """Give freed memory that glibc keeps back to the system; takes milliseconds.

    Training makes glibc keep it for the next step (``distributed.connect``). Pieces never fit exactly, so the kept
    memory grows slowly, by some hundred MiB at most.
    """
    # Only glibc has this function, and only glibc keeps memory because of ``connect``.
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def peak_rss() -> int:
    """Return the largest resident set of this process so far, in bytes."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def status_bytes(key: str) -> int:
    """Return the figure ``key`` of this process in bytes, such as VmRSS or VmHWM (its peak); 0 where not on Linux."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith(f"{key}:"):
                return int(line.split()[1]) * 1024
    return 0


class MemoryBudget(Callback):
    """Checks the memory of a host's ranks, ``hardware.ddr_gib`` for each. Reports the host nearest its limit.

    Every interval it adds up the PSS of a host's ranks, which counts memory that ranks share once. It warns when the
    limit is nearly used up, then ends the run. A memory cgroup (``launch/memory_cgroup.py``) enforces the limit between
    intervals where the machine allows one. This check says in time which setting is too small, and it is the only one
    where no cgroup can be made.

    ``wanted`` is ``launch.limit_memory``; auto limits plans with tables on SSD. ``measure`` returns this rank's bytes.
    """

    def __init__(
        self, hardware: HardwareConfig, wanted: str, plan: Plan, measure: Callable[[], int] = pss_bytes
    ) -> None:
        self.active = wanted == "always" or (wanted == "auto" and bool(plan.tables_on("ssd")))
        self._hardware, self._measure = hardware, measure
        self._limits: list[int] = []
        # There is one limit per host: embedding hosts may have more memory than workers.
        for first_rank in range(0, hardware.world_size, hardware.ranks_per_host):
            self._limits.append(int(hardware.ddr_gib_of(first_rank) * GIB) * hardware.ranks_per_host)
        self.limit, self.peak, self._warned = self._limits[0], 0, False

    def on_interval(self, interval: IntervalRecord) -> None:
        """Add ``host_memory_bytes`` of the host that takes the most.

        Raises:
            GuardError: A host is over its limit; raised on all ranks.
        """
        if not self.active:
            return
        hardware, step = self._hardware, interval.step
        local = hardware.ranks_per_host
        host = dist.get_rank() // local
        hosts = torch.zeros(hardware.hosts, dtype=torch.float64)
        # Reading PSS walks the page tables, so reuse a reading that the SSD tier has just made.
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
        # The limit here is per host, but the setting that the user knows is per rank.
        if count > 1:
            text += f" ({self.limit / count / GIB:g} GiB for each of {count} ranks)"
        return text

    def on_end(self, figures: dict[str, Any]) -> None:
        """Add the limit, and the most that a host took at an interval's end."""
        if self.active:
            figures["budget"] = {"limit_bytes": self.limit, "peak_bytes": self.peak}


@contextmanager
def open_row_store(hardware: HardwareConfig, store: Store, plan: Plan) -> Iterator[RowStore | None]:
    """Open this rank's rows of the plan's tables on tier ssd, until the end; None where the plan has none.

    Where ``hardware.ssd_paths`` is empty, the files are in directory ``scratch`` of a local store. Raises ConfigError
    for paths that cannot be used, and GuardError where a disk has no room.
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
    """Log once, on rank 0, which features for a fast SSD tier are missing on the machine of any rank. Collective."""
    if row_store is None:
        return
    # The call is collective, so a rank whose machine lacks nothing makes it too.
    of_ranks = all_gather_records(row_store.shortcomings())
    if dist.get_rank() == 0:
        # Ranks of one machine report the same shortcomings.
        for what, advice in dict.fromkeys(map(tuple, chain(*of_ranks))):
            log.warning("%s; %s", what, advice)


class SsdMeter(Callback):
    """Reports the SSD tier's figures over all ranks, by interval and in total. Collective; empty without the tier."""

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
        """Add the totals; ``peak_pss_bytes`` is that of the rank that used the most memory."""
        if self._row_store is None:
            return
        peak = largest(torch.tensor([self._peak], dtype=torch.float64)).item()
        figures["peak_pss_bytes"] = int(peak)
        figures["ssd"] = named(self._sums.tolist(), max(1, self._steps))


@contextmanager
def naming_checkpoint(store: Store, directory: str) -> Iterator[None]:
    """Add the newest checkpoint in ``directory`` to a GuardError; it is intact whatever stopped the run."""
    try:
        yield
    except GuardError as error:
        try:
            saved, newest = committed(store, directory), "no checkpoint was taken before"
            if saved:
                newest = f"the last checkpoint, {saved[-1].path}, is intact"
        except Exception as fault:
            # A failure here must not replace the error that stopped the run.
            newest = f"its checkpoints cannot be listed now ({fault})"
        raise GuardError(f"{error.message}; {newest}", hint=error.hint) from error
