"""Writing behind training: a thread on every rank, and how all ranks agree how a checkpoint ended.

Ranks write for different lengths of time, and one may not end at all. Each write has a time limit of its own; the
writers' process group waits longer than that, so that the slow rank's word arrives. Where even that fails the group is
of no more use: the ranks make another one, the checkpoint is lost and training goes on.
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
from typing import Any

import torch
import torch.distributed as dist

from pipeline.checkpoint.collectives import exchange, from_first
from pipeline.checkpoint.fault_points import OnPoint, ignore
from pipeline.checkpoint.index import Entry, entry_of
from pipeline.checkpoint.save import SLOW, Job, parsed_artifact, write_checkpoint
from pipeline.errors import NightjarError, PassingError
from pipeline.store.artifacts import Store
from pipeline.store.manifest import Artifact

_LOWEST = 19  # niceness


@dataclass
class WriteOutcome:
    """How a checkpoint ended, on one rank or, once they agree, on all of them.

    ``entry``, ``path``: of what was committed (None: nothing was). ``error``: why nothing was, or why it is committed
    but not compacted. ``stay``: names that pruning kept (None: nothing was pruned), ``note``: why some are left.
    ``bytes`` written by all ranks in ``seconds``; ``bytes_full``: of a full one. ``lost``: the ranks lost each other,
    so the process group is of no more use. ``stuck``: what is said of a rank that writes on ("": none does).
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

    def is_now(self, artifact: Artifact) -> None:
        """``artifact`` is committed, or replaces what was."""
        self.entry, self.path, self.bytes_full = entry_of(artifact), artifact.path, artifact.summary["bytes_full"]
        self.bytes += sum(file.bytes for file in artifact.files.values())

    def to_json(self) -> dict[str, Any]:
        """As plain data, for the other ranks."""
        parts = {"entry": self.entry, "error": self.error}
        return {**vars(self), **{name: part and part.to_json() for name, part in parts.items()}}

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> WriteOutcome:
        """What ``to_json`` of a rank gave."""
        entry = Entry.from_json(data["entry"]) if data["entry"] else None
        return cls(**{**data, "entry": entry, "error": data["error"] and NightjarError.from_json(data["error"])})


def _hurry(thread: threading.Thread) -> None:
    """Give ``thread`` the caller's priority; only privileged processes may, the others leave it as it is."""
    if sys.platform == "linux" and thread.is_alive() and thread.native_id is not None:
        with suppress(OSError):
            own = os.getpriority(os.PRIO_PROCESS, threading.get_native_id())
            os.setpriority(os.PRIO_PROCESS, thread.native_id, own)


@dataclass
class Writer:
    """Writes one job at a time behind the caller. ``group``: a process group used by nothing else (None: one rank).

    With a group of their own the ranks meet without disturbing training's collectives. ``on_point`` is told where the
    writer stands.
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
        """Start writing ``job``; the one before must have been collected with ``wait``.

        Without a thread to be had it is written here and now: the other ranks' writers wait for this one's word.
        """
        if self._outcome is not None:
            raise RuntimeError("a checkpoint is in flight: wait for it first")
        self._outcome = outcome = WriteOutcome()
        ready = threading.Event()
        threads = torch.get_num_threads()
        work = self._run if job.awaited else self._run_behind
        thread = threading.Thread(target=work, args=(job, ready, outcome), name="nightjar-checkpoint", daemon=True)
        try:
            thread.start()
            self._thread = thread
        except RuntimeError:
            self._run(job, ready, outcome)
        ready.wait()
        torch.set_num_threads(threads)  # undo what the thread's setting means for threads made later

    def wait(self, timeout: float | None = None) -> WriteOutcome | None:
        """The outcome of the job in flight, once it is there; None where there is none.

        Its thread no longer yields to other programs, where that may be taken back: the caller waits for it.
        TimeoutError after ``timeout`` seconds.
        """
        if self._thread is not None:
            _hurry(self._thread)
            self._thread.join(timeout)
            if self._thread.is_alive():
                raise TimeoutError(f"the checkpoint in flight is not written after {timeout:.1f} s")
        outcome, self._thread, self._outcome = self._outcome, None, None
        return outcome

    def _run_behind(self, job: Job, ready: threading.Event, outcome: WriteOutcome) -> None:
        """As ``_run``, in a thread that takes what training leaves of the cores, where a thread has a priority."""
        if sys.platform == "linux":
            with suppress(OSError):
                os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _LOWEST)
        self._run(job, ready, outcome)

    def _run(self, job: Job, ready: threading.Event, outcome: WriteOutcome) -> None:
        began = time.monotonic()
        # torch's operations in this thread run in it alone: a second team of threads would fight with training's for
        # the cores. The first call makes the setting this thread's own.
        torch.get_num_threads()
        torch.set_num_threads(1)
        ready.set()
        try:
            artifact = write_checkpoint(self.store, job, self.group, self.on_point)
            outcome.is_now(artifact)
            if job.compact is not None:
                outcome.is_now(self._compact(job.compact, artifact))
        except NightjarError as error:  # handed to the training loop, which decides
            outcome.error = error
        except Exception as error:  # of the exchange itself: what fails on one rank comes as one of the family
            outcome.lost = True
            outcome.error = PassingError(f"the ranks lost contact while writing {job.path}: {error}", hint=SLOW)
        if outcome.entry is not None and job.prune is not None and not outcome.lost:
            self._prune(job.prune, outcome.entry, outcome)
        outcome.seconds = time.monotonic() - began

    def _prune(self, prune: Callable[[Entry], tuple[list[str], str]], entry: Entry, outcome: WriteOutcome) -> None:
        """Remove what retention does not need; whatever fails, the checkpoint is committed."""

        try:
            outcome.stay, outcome.note = from_first("pruning checkpoints", lambda: prune(entry), self.group)
        except NightjarError as error:
            outcome.note = f"old checkpoints are kept until the next one: {error.message}"
        except Exception as error:
            outcome.lost, outcome.note = True, f"old checkpoints are kept until the next one: {error}"

    def _compact(self, compact: Callable[[Artifact], Artifact], artifact: Artifact) -> Artifact:
        """The compacted ``artifact``, on every rank; rank 0 does it."""

        done = from_first(f"compacting {artifact.path}", lambda: compact(artifact).to_json(), self.group)
        return parsed_artifact(artifact.path, done)


@dataclass(frozen=True)
class Limits:
    """Seconds: a rank may ``write`` one checkpoint for so long, and may be late by ``slack`` to say how it ended.

    ``slack`` stays below the time limit of training's own process group, which waits for the last rank. ``now``: the
    clock, in seconds, that ``write`` is measured by.
    """

    write: float = 6 * 3600.0
    slack: float = 600.0
    now: Callable[[], float] = time.monotonic


class AsyncSave:
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
