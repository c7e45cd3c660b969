"""The checkpoint in flight, seen from all ranks: they wait for it together and agree how it ended.

Ranks write for different lengths of time, and one may not end at all. Each write has a time limit of its own; the
writers' process group waits longer than that, so that the slow rank's word arrives. Where even that fails the group is
of no more use: the ranks make another one, the checkpoint is lost and training goes on.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import timedelta

import torch.distributed as dist

from pipeline.checkpoint.fault_points import OnPoint
from pipeline.checkpoint.ranks import exchange
from pipeline.checkpoint.save import Job
from pipeline.checkpoint.writer import WriteOutcome, Writer
from pipeline.errors import PassingError
from pipeline.store import Store


@dataclass(frozen=True)
class Limits:
    """Seconds: a rank may ``write`` one checkpoint for so long, and may be late by ``slack`` to say how it ended.

    ``slack`` stays below the time limit of training's own process group, which waits for the last rank. ``now``: the
    clock, in seconds, that ``write`` is measured by.
    """

    write: float = 6 * 3600.0
    slack: float = 600.0
    now: Callable[[], float] = time.monotonic


class Flight:
    """One checkpoint at a time, written behind training by a thread on every rank. All methods are collective."""

    def __init__(self, store: Store, on_point: OnPoint, limits: Limits) -> None:
        self._store, self._on_phase, self._limits = store, on_point, limits
        self._flying = False
        self._ended: WriteOutcome | None = None  # this rank's, where others were still writing
        self._renew()

    @property
    def busy(self) -> bool:
        """Whether any rank still writes."""
        return bool(max(exchange(int(self._writer.busy))))

    def submit(self, job: Job) -> None:
        """Start writing ``job``; the one before must have landed."""
        self._writer.submit(replace(job, seconds=self._limits.write, now=self._limits.now))
        self._flying = True

    def abandon(self, seconds: float) -> None:
        """Wait up to ``seconds`` until this rank writes no more, whatever came of it. The one method not collective.

        A thread that still writes when the interpreter ends aborts the process.
        """
        with suppress(TimeoutError):
            self._writer.wait(seconds)

    def land(self, timeout: float | None = None) -> WriteOutcome | None:
        """Wait for what is in flight and agree how it ended; None where there is nothing.

        TimeoutError on all ranks where one has not ended after ``timeout`` seconds: it is still in flight then.
        """
        if not self._flying:
            return None
        longest = self._limits.write + 2 * self._limits.slack
        try:
            self._ended = mine = self._ended or self._writer.wait(longest if timeout is None else timeout)
        except TimeoutError as error:
            mine = WriteOutcome(lost=True, stuck=str(error))
        if mine is None:
            raise RuntimeError("no checkpoint is in flight on this rank")
        outcomes = [WriteOutcome.from_json(each) for each in exchange(mine.to_json())]
        stuck = next((each.stuck for each in outcomes if each.stuck), "")
        if stuck and timeout is not None:
            raise TimeoutError(stuck)
        self._flying, self._ended = False, None
        if stuck or any(each.lost for each in outcomes):
            self._renew()
        return _agreed(outcomes, stuck)

    def _renew(self) -> None:
        """A process group that nothing else uses, and a writer on it."""
        group = None
        if dist.is_initialized() and dist.get_world_size() > 1:
            seconds = self._limits.write + self._limits.slack
            group = dist.new_group(backend="gloo", timeout=timedelta(seconds=seconds))
        self._writer = Writer(self._store, group, self._on_phase)


def _agreed(outcomes: list[WriteOutcome], stuck: str) -> WriteOutcome:
    """What the ranks that ended say together: committed where one of them knows it, for then all had written."""
    ended = [each for each in outcomes if not each.stuck]
    best = next((each for each in ended if each.entry), None) or next(
        (each for each in ended if each.error), WriteOutcome()
    )
    if best.entry is None and best.error is None:
        best.error = PassingError(stuck or "the writer ended without an outcome", hint="check the store's disk")
    return replace(best, stuck=stuck)
