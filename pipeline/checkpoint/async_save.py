"""Writes checkpoints behind training: a thread on every rank, and an agreement of all ranks on how each one ended.

``AsyncSave`` is what the checkpointer talks to, on all ranks at once; its ``Writer`` runs ``save.write_checkpoint`` in
a thread of this rank. A checkpoint goes this way:

1. ``AsyncSave.submit`` starts the writer's thread, and training goes on.
2. The thread writes, commits, compacts and prunes, and meets the other ranks' threads on a process group of their own.
3. ``AsyncSave.land`` waits for the thread and exchanges outcomes on training's process group.

Ranks write for different lengths of time, and one may not end at all. Each write has its own time limit; the writers'
process group waits longer than that, so that a slow rank's outcome still arrives. If even that fails, the group is
unusable: the ranks make another one, the checkpoint is lost and training goes on.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from pipeline.checkpoint.collectives import all_gather_records, run_on_rank0
from pipeline.checkpoint.fault_points import OnPoint, ignore
from pipeline.checkpoint.index import Entry, entry_of
from pipeline.checkpoint.save import SLOW, Job, write_checkpoint
from pipeline.core.errors import NightjarError, PassingError
from pipeline.store.artifacts import Store
from pipeline.store.manifest import Artifact

_LOWEST_PRIORITY = 19  # niceness


@dataclass
class WriteOutcome:
    """How a checkpoint ended, on one rank or, once they agree, on all of them.

    ``entry`` and ``path`` describe what was committed (None: nothing was). ``error`` says why nothing was, or why it is
    committed but not compacted. ``stay`` has the names that pruning kept (None: nothing was pruned), ``note`` says why
    some are left. ``bytes`` is what all ranks wrote in ``seconds``, ``bytes_full`` the size of a full checkpoint.
    ``lost``: the ranks lost each other, so the process group is unusable. ``stuck`` describes a rank that still writes
    ("": none does).
    """

    entry: Entry | None = None
    path: str = ""
    error: NightjarError | None = None
    stay: list[str] | None = None
    note: str = ""
    bytes: int = 0
    bytes_full: int = 0
    seconds: float = 0.0
    lost: bool = False
    stuck: str = ""

    def record_commit(self, artifact: Artifact) -> None:
        """Note that ``artifact`` is committed, or replaces what was."""
        self.entry = entry_of(artifact)
        self.path = artifact.path
        self.bytes_full = artifact.summary["bytes_full"]
        # Sizes are added up, since a compaction writes a second time.
        self.bytes += artifact.total_bytes

    def to_json(self) -> dict[str, Any]:
        """Return plain data for the other ranks; ``from_json`` restores it."""
        record = dict(vars(self))
        for name in ("entry", "error"):
            if record[name] is not None:
                record[name] = record[name].to_json()
        return record

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> WriteOutcome:
        """Restore what ``to_json`` of a rank returned."""
        outcome = cls(**data)
        if data["entry"] is not None:
            outcome.entry = Entry.from_json(data["entry"])
        if data["error"] is not None:
            outcome.error = NightjarError.from_json(data["error"])
        return outcome


@dataclass
class Writer:
    """Writes one job at a time behind the caller, on this rank.

    ``group``: a process group used by nothing else (None: one rank). With a group of their own the ranks meet without
    disturbing training's collectives. ``on_point`` is called at the points that the writer passes.
    """

    store: Store
    group: dist.ProcessGroup | None = None
    on_point: OnPoint = ignore
    _thread: threading.Thread | None = None
    _outcome: WriteOutcome | None = None

    @property
    def busy(self) -> bool:
        """Whether a job is being written (on this rank)."""
        return self._thread is not None and self._thread.is_alive()

    def submit(self, job: Job) -> None:
        """Start writing ``job``; the one before must have been collected with ``wait``."""
        if self._outcome is not None:
            raise RuntimeError("a checkpoint is in flight: wait for it first")
        self._outcome = outcome = WriteOutcome()
        ready = threading.Event()
        num_threads = torch.get_num_threads()
        thread = threading.Thread(
            target=self._run, args=(job, ready, outcome, not job.awaited), name="nightjar-checkpoint", daemon=True
        )
        try:
            thread.start()
            self._thread = thread
        except RuntimeError:
            # The thread could not be started, so write here: the other ranks' writers wait for this one's outcome.
            self._run(job, ready, outcome, yielding=False)
        ready.wait()
        # Restore the number of threads, since the thread's own setting would also apply to threads made later.
        torch.set_num_threads(num_threads)

    def wait(self, timeout: float | None = None) -> WriteOutcome | None:
        """Return the outcome of the job in flight, once it has ended; None if there is none.

        Raises:
            TimeoutError: It has not ended after ``timeout`` seconds.
        """
        thread = self._thread
        if thread is not None:
            # The caller waits for the thread, so it no longer yields to other programs.
            _raise_priority(thread)
            thread.join(timeout)
            if thread.is_alive():
                raise TimeoutError(f"the checkpoint in flight is not written after {timeout:.1f} s")
        outcome, self._thread, self._outcome = self._outcome, None, None
        return outcome

    def _run(self, job: Job, ready: threading.Event, outcome: WriteOutcome, yielding: bool) -> None:
        # 1. Stay out of training's way: a write that nobody waits for only gets the CPU time that training leaves. Only
        #    Linux gives a thread a priority of its own.
        if yielding and sys.platform == "linux":
            with suppress(OSError):
                os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _LOWEST_PRIORITY)
        began = time.monotonic()
        # Run torch's operations of this thread in it alone: a second team of threads would fight with training's for
        # the cores. The first call makes the setting this thread's own.
        torch.get_num_threads()
        torch.set_num_threads(1)
        ready.set()

        # 2. Write, commit, compact. All ranks meet in each of these, and fail together.
        try:
            artifact = write_checkpoint(self.store, job, self.group, self.on_point)
            outcome.record_commit(artifact)
            if job.compact is not None:
                compact = partial(job.compact, artifact)
                record = run_on_rank0(f"compacting {artifact.path}", lambda: compact().to_json(), self.group)
                outcome.record_commit(Artifact.from_json(artifact.path, record))
        except NightjarError as error:
            # The training loop gets the error and decides.
            outcome.error = error
        except Exception as error:
            # The exchange itself failed, since what fails on one rank arrives as a NightjarError on all of them.
            outcome.lost = True
            outcome.error = PassingError(f"the ranks lost contact while writing {job.path}: {error}", hint=SLOW)

        # 3. Prune. The checkpoint is committed by now, so a failure to remove old ones is a note, not an error.
        if outcome.entry is not None and job.prune is not None and not outcome.lost:
            prune = partial(job.prune, outcome.entry)
            try:
                outcome.stay, outcome.note = run_on_rank0("pruning checkpoints", prune, self.group)
            except NightjarError as error:
                outcome.note = f"old checkpoints are kept until the next one: {error.message}"
            except Exception as error:
                outcome.lost = True
                outcome.note = f"old checkpoints are kept until the next one: {error}"
        outcome.seconds = time.monotonic() - began


def _raise_priority(thread: threading.Thread) -> None:
    # Raise it to the caller's own priority. Only privileged processes may; for others it stays as it is.
    if sys.platform == "linux" and thread.is_alive() and thread.native_id is not None:
        with suppress(OSError):
            priority = os.getpriority(os.PRIO_PROCESS, threading.get_native_id())
            os.setpriority(os.PRIO_PROCESS, thread.native_id, priority)


@dataclass(frozen=True)
class Limits:
    """Seconds that a rank may ``write`` one checkpoint, and seconds of ``slack`` by which its outcome may be late.

    ``slack`` stays below the time limit of training's own process group, which waits for the last rank. ``now`` is the
    clock, in seconds, that measures ``write``.
    """

    write: float = 6 * 3600.0
    slack: float = 600.0
    now: Callable[[], float] = time.monotonic


class AsyncSave:
    """Writes one checkpoint at a time, behind training, in a thread on every rank. All methods are collective."""

    def __init__(self, store: Store, on_point: OnPoint, limits: Limits) -> None:
        self._store = store
        self._on_point = on_point
        self._limits = limits
        self._in_flight = False
        # This rank's outcome, kept while others were still writing at a timeout.
        self._ended: WriteOutcome | None = None
        self._renew_writer()

    def any_rank_busy(self) -> bool:
        """Return whether any rank still writes."""
        return bool(max(all_gather_records(int(self._writer.busy))))

    def submit(self, job: Job) -> None:
        """Start writing ``job``; the one before must have landed."""
        self._writer.submit(replace(job, seconds=self._limits.write, now=self._limits.now))
        self._in_flight = True

    def abandon(self, seconds: float) -> None:
        """Wait up to ``seconds`` for this rank's write to end, whatever its outcome. The only method not collective."""
        # A thread that still writes when the interpreter ends aborts the process.
        with suppress(TimeoutError):
            self._writer.wait(seconds)

    def land(self, timeout: float | None = None) -> WriteOutcome | None:
        """Wait for the write in flight and agree on how it ended; None if there is none.

        Raises:
            TimeoutError: On all ranks, if one has not ended after ``timeout`` seconds. It is still in flight then.
        """
        if not self._in_flight:
            return None
        # 1. Find how it ended here. Beyond all limits a rank counts as stuck, and its thread is left alone.
        longest = self._limits.write + 2 * self._limits.slack
        try:
            outcome = self._ended or self._writer.wait(longest if timeout is None else timeout)
            self._ended = outcome
        except TimeoutError as error:
            outcome = WriteOutcome(lost=True, stuck=str(error))
        if outcome is None:
            raise RuntimeError("no checkpoint is in flight on this rank")

        # 2. Find how it ended elsewhere. If the caller set the timeout, all ranks may come back and wait again.
        stuck, lost = "", False
        committed: WriteOutcome | None = None
        failed: WriteOutcome | None = None
        for record in all_gather_records(outcome.to_json()):
            other = WriteOutcome.from_json(record)
            lost = lost or other.lost
            if other.stuck:
                stuck = stuck or other.stuck
            elif other.entry is not None:
                committed = committed or other
            elif other.error is not None:
                failed = failed or other
        if stuck and timeout is not None:
            raise TimeoutError(stuck)
        self._in_flight = False
        self._ended = None
        if stuck or lost:
            self._renew_writer()

        # 3. Decide. It is committed if one rank knows it to be, since then all had written. Otherwise the first error
        # counts.
        agreed = committed or failed
        if agreed is None:
            text = stuck or "the writer ended without an outcome"
            agreed = WriteOutcome(error=PassingError(text, hint="check the store's disk"))
        return replace(agreed, stuck=stuck)

    def _renew_writer(self) -> None:
        group = None
        if dist.is_initialized() and dist.get_world_size() > 1:
            seconds = self._limits.write + self._limits.slack
            group = dist.new_group(backend="gloo", timeout=timedelta(seconds=seconds))
        self._writer = Writer(self._store, group, self._on_point)
