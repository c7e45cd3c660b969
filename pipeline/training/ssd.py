"""The SSD tier of a training run: where its files are, its figures, and which checkpoint a guard's error names."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from pipeline.checkpoint.collectives import all_gather_records
from pipeline.checkpoint.index import committed
from pipeline.config.hardware import HardwareConfig
from pipeline.embeddings.ssd.diagnostics import FIGURES, named, pss_bytes
from pipeline.embeddings.ssd.store import SsdStore, ssd_tables
from pipeline.errors import GuardError
from pipeline.records.plan import Plan
from pipeline.store.artifacts import Store
from pipeline.training.callbacks import Callback, IntervalRecord
from pipeline.training.distributed import add_up, largest

SCRATCH = "scratch"
log = logging.getLogger(__name__)


@contextmanager
def ssd_store(hardware: HardwareConfig, store: Store, plan: Plan) -> Iterator[SsdStore | None]:
    """This rank's files of the plan's tables on tier ssd, closed at the end; None where the plan has none.

    Where ``hardware.ssd_paths`` is empty, the files are in directory ``scratch`` of a local store.
    ConfigError for paths that cannot be used, GuardError where a disk has no room.
    """
    if not ssd_tables(plan):
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


def log_shortcomings(ssd: SsdStore | None) -> None:
    """Log once, on rank 0, which features that make the tier fast the machine of any rank refuses. Collective."""
    if ssd is None:
        return
    shortcomings = [(what, advice) for refused in all_gather_records(ssd.shortcomings()) for what, advice in refused]
    for what, advice in dict.fromkeys(shortcomings) if dist.get_rank() == 0 else ():
        log.warning("%s; %s", what, advice)


class SsdMeter(Callback):
    """The figures of the SSD tier over all ranks, by interval and for the session. Collective; empty without it."""

    def __init__(self, ssd: SsdStore | None) -> None:
        self._ssd = ssd
        self._sums = torch.zeros(FIGURES, dtype=torch.float64)
        self._peak = self._steps = 0

    def on_interval(self, interval: IntervalRecord) -> None:
        """Add the figures of the interval; ``pss_bytes`` are this rank's."""
        if self._ssd is None:
            return
        sums = add_up(torch.tensor(self._ssd.figures.take(), dtype=torch.float64))
        self._sums += sums
        self._steps += interval.steps
        used = pss_bytes()
        self._peak = max(self._peak, used)
        interval.figures |= named(sums.tolist(), interval.steps)
        interval.figures["pss_bytes"] = used

    def on_end(self, figures: dict[str, Any]) -> None:
        """Add those of the session; ``peak_pss_bytes``: of the rank that used most memory."""
        if self._ssd is None:
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
            saved = committed(store, directory)
            newest = f"the last checkpoint, {saved[-1].path}, is intact" if saved else "no checkpoint was taken before"
        except Exception as fault:
            # The message is about what stopped the run.
            newest = f"its checkpoints cannot be listed now ({fault})"
        raise GuardError(f"{error.message}; {newest}", hint=error.hint) from error
