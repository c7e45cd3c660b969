"""The SSD tier of a training run: where its files go, and what a full disk is told."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from pipeline.checkpoint import committed
from pipeline.checkpoint.ranks import exchange
from pipeline.config import Config
from pipeline.embeddings.ssd import FIGURES, SsdStore, named, pss_bytes, ssd_tables
from pipeline.errors import GuardError
from pipeline.records import Plan
from pipeline.store import Store
from pipeline.training.distributed import add_up, largest

SCRATCH = "scratch"
log = logging.getLogger(__name__)


@contextmanager
def ssd_store(config: Config, store: Store, plan: Plan) -> Iterator[SsdStore | None]:
    """This rank's files of the plan's tables on tier ssd, closed at the end; None where the plan has none.

    They go to ``hardware.ssd_paths``, by default to directory ``scratch`` of a local store. ConfigError for paths
    that cannot be used, GuardError where a disk has no room.
    """
    if not ssd_tables(plan):
        yield None
        return
    ssd = SsdStore(plan, _paths(config, store), dist.get_rank())
    try:
        yield ssd
    finally:
        ssd.close()


def _paths(config: Config, store: Store) -> list[str]:
    if config.hardware.ssd_paths or not store.is_local:
        return list(config.hardware.ssd_paths)
    scratch = Path(store.full(SCRATCH))
    scratch.mkdir(parents=True, exist_ok=True)
    return [str(scratch)]


def log_shortcomings(ssd: SsdStore | None) -> None:
    """Log once, on rank 0, what the machine of any rank refuses that the tier is quick with. Collective."""
    if ssd is None:
        return
    found = [(what, advice) for refused in exchange(ssd.shortcomings()) for what, advice in refused]
    for what, advice in dict.fromkeys(found) if dist.get_rank() == 0 else ():
        log.warning("%s; %s", what, advice)


class SsdMeter:
    """The figures of the SSD tier over all ranks, by interval and for the session. Collective; empty without it."""

    def __init__(self, ssd: SsdStore | None) -> None:
        self._ssd = ssd
        self._sums = torch.zeros(FIGURES, dtype=torch.float64)
        self._peak = 0

    def interval(self, steps: int) -> dict[str, Any]:
        """For ``metrics.jsonl``: an interval of ``steps``; ``pss_bytes`` are this rank's."""
        if self._ssd is None:
            return {}
        sums = add_up(torch.tensor(self._ssd.figures.take(), dtype=torch.float64))
        self._sums += sums
        used = pss_bytes()
        self._peak = max(self._peak, used)
        return {**named(sums.tolist(), steps), "pss_bytes": used}

    def summary(self, steps: int) -> dict[str, Any]:
        """For ``result.json``: the session's ``steps``; ``peak_pss_bytes``: of the rank that used most memory."""
        if self._ssd is None:
            return {}
        peak = largest(torch.tensor([self._peak], dtype=torch.float64)).item()
        return {"peak_pss_bytes": int(peak), "ssd": named(self._sums.tolist(), max(1, steps))}


@contextmanager
def naming_checkpoint(store: Store, directory: str) -> Iterator[None]:
    """Add to a GuardError the newest checkpoint in ``directory``: it stands, whatever stopped the run."""
    try:
        yield
    except GuardError as error:
        try:
            found = committed(store, directory)
            newest = f"the last checkpoint, {found[-1].path}, is intact" if found else "no checkpoint was taken before"
        except Exception as fault:  # what stopped the run is what is told
            newest = f"its checkpoints cannot be listed now ({fault})"
        raise GuardError(f"{error.message}; {newest}", hint=error.hint) from error
