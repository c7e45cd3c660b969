"""The checkpoint in flight, seen from all ranks: they wait for it together and agree how it ended.

Ranks write for different lengths of time, and one may not end at all. Each write has a time limit of its own; the
writers' process group waits longer than that, so that the slow rank's word arrives. Where even that fails the group is
of no more use: the ranks make another one, the checkpoint is lost and training goes on.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from pipeline.checkpoint.fault_points import OnPoint
from pipeline.checkpoint.index import Entry, entry_from, entry_of
from pipeline.checkpoint.job import Job
from pipeline.checkpoint.ranks import exchange
from pipeline.checkpoint.writer import Outcome, Writer
from pipeline.errors import NightjarError, PassingError
from pipeline.store import Store


@dataclass(frozen=True)
class Limits:
    """Seconds: a rank may ``write`` one checkpoint for so long, and may be late by ``slack`` to say how it ended.

    ``slack`` stays below the time limit of training's own process group, which waits for the last rank.
    """

    write: float = 6 * 3600.0
    slack: float = 600.0


@dataclass(frozen=True)
class Landed:
    """How a checkpoint ended, the same on every rank.

    ``entry``, ``path``: of what was committed (None: nothing was). ``error``: why nothing was, or why it is committed
    but not compacted. ``stay``: names that pruning kept (None: nothing was pruned), ``note``: why some are left.
    ``bytes`` written by all ranks in ``seconds``; ``bytes_full``: of a full one. ``stuck``: a rank writes on.
    """

    entry: Entry | None
    path: str
    error: NightjarError | None
    stay: list[str] | None
    note: str
    bytes: int
    bytes_full: int
    seconds: float
    stuck: bool


class Flight:
    """One checkpoint at a time, written behind training by a thread on every rank. All methods are collective."""

    def __init__(self, store: Store, on_point: OnPoint, limits: Limits) -> None:
        self._store, self._on_phase, self._limits = store, on_point, limits
        self._flying = False
        self._record: dict[str, Any] | None = None  # this rank's, where others were still writing
        self._renew()

    @property
    def busy(self) -> bool:
        """Whether any rank still writes."""
        return bool(max(exchange(int(self._writer.busy))))

    def submit(self, job: Job) -> None:
        """Start writing ``job``; the one before must have landed."""
        self._writer.submit(replace(job, seconds=self._limits.write))
        self._flying = True

    def abandon(self, seconds: float) -> None:
        """Wait up to ``seconds`` until this rank writes no more, whatever came of it. The one method not collective.

        A thread that still writes when the interpreter ends aborts the process.
        """
        with suppress(TimeoutError):
            self._writer.wait(seconds)

    def land(self, timeout: float | None = None) -> Landed | None:
        """Wait for what is in flight and agree how it ended; None where there is nothing.

        TimeoutError on all ranks where one has not ended after ``timeout`` seconds: it is still in flight then.
        """
        if not self._flying:
            return None
        longest = self._limits.write + 2 * self._limits.slack
        stuck = ""
        try:
            self._record = self._record or _recorded(self._writer.wait(longest if timeout is None else timeout))
        except TimeoutError as error:
            stuck = str(error)
        records = exchange({**(self._record or {"lost": True}), "stuck": stuck})
        stuck = next((each["stuck"] for each in records if each["stuck"]), "")
        if stuck and timeout is not None:
            raise TimeoutError(stuck)
        self._flying, self._record = False, None
        if stuck or any(each["lost"] for each in records):
            self._renew()
        return _landed([each for each in records if not each["stuck"]], stuck)

    def _renew(self) -> None:
        """A process group that nothing else uses, and a writer on it."""
        group = None
        if dist.is_initialized() and dist.get_world_size() > 1:
            seconds = self._limits.write + self._limits.slack
            group = dist.new_group(backend="gloo", timeout=timedelta(seconds=seconds))
        self._writer = Writer(self._store, group, self._on_phase)


def _recorded(outcome: Outcome | None) -> dict[str, Any]:
    """``outcome`` as plain data."""
    if outcome is None:
        raise RuntimeError("no checkpoint is in flight on this rank")
    artifact, error = outcome.artifact, outcome.error
    return {
        "entry": None if artifact is None else asdict(entry_of(artifact)),
        "path": "" if artifact is None else artifact.path,
        "bytes_full": 0 if artifact is None else artifact.summary["bytes_full"],
        "error": None if error is None else error.to_json(),
        **{name: getattr(outcome, name) for name in ("stay", "note", "bytes", "seconds", "lost")},
    }


def _landed(records: list[dict[str, Any]], stuck: str) -> Landed:
    """What the ranks that ended say together: committed where one of them knows it, for then all had written."""
    best = next((each for each in records if each["entry"]), None)
    failed = next((each for each in records if each["error"]), None)
    one = best or failed or {"entry": None, "path": "", "stay": None, "note": "", "bytes": 0, "bytes_full": 0,
                             "seconds": 0.0, "error": None}  # fmt: skip
    error = NightjarError.from_json(one["error"]) if one["error"] else None
    if one["entry"] is None and error is None:
        error = PassingError(stuck or "the writer ended without an outcome", hint="check the store's disk")
    return Landed(
        entry=None if one["entry"] is None else entry_from(one["entry"]), error=error, stuck=bool(stuck),
        **{name: one[name] for name in ("path", "stay", "note", "bytes", "bytes_full", "seconds")},
    )  # fmt: skip
