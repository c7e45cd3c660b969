"""The checkpoints of one training run: what to write, when a baseline, what to keep; the training loop's only door."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from pipeline.checkpoint.async_save import AsyncSave, Limits, WriteOutcome
from pipeline.checkpoint.chunks import RowBlock
from pipeline.checkpoint.codings import Codings
from pipeline.checkpoint.collectives import once, patiently, this_rank, together
from pipeline.checkpoint.compact import compact
from pipeline.checkpoint.fault_points import OnPoint, ignore
from pipeline.checkpoint.index import (
    BASELINE,
    DELTA,
    Entry,
    committed,
    entry_of,
    name_of,
    newest_chain,
    parents,
    step_of,
    wants_baseline,
)
from pipeline.checkpoint.quarantine import set_aside, spared
from pipeline.checkpoint.reader import RestoreTarget, restore_newest
from pipeline.checkpoint.retention import HELD, Pruner, pinned_names, remove_uncommitted
from pipeline.checkpoint.save import Job
from pipeline.checkpoint.snapshot import SnapshotBuffers, full_bytes, full_values, take_snapshot
from pipeline.checkpoint.train_state import TrainState, dense_part
from pipeline.config.checkpoint import CheckpointConfig
from pipeline.embeddings.row_access import RowAccess
from pipeline.embeddings.touched import TouchedRows
from pipeline.errors import ArtifactError, DamagedError, PassingError
from pipeline.records.checkpoint import TableSize
from pipeline.store.artifacts import Store
from pipeline.store.manifest import Artifact
from pipeline.units import MIB

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class CheckpointedModel:
    """What is saved and restored: tables, touched marks, dense parameters and their optimizer."""

    rows: RowAccess
    touched: TouchedRows
    dense: dict[str, Tensor]
    optimizer: torch.optim.Optimizer | None


@dataclass(frozen=True, kw_only=True)
class Kind:
    """What a checkpoint is for: see ``Checkpointer.save``. ``prune``: what retention does not need goes behind it."""

    final: bool
    exact: bool
    held: tuple[str, ...]
    prune: bool
    awaited: bool


@dataclass
class CheckpointFigures:
    """What the checkpoints of this session cost. Seconds of training stopped, bytes written by all ranks."""

    count: int = 0
    bytes_written: int = 0
    bytes_full_equivalent: int = 0
    stalled: float = 0.0
    writing: float = 0.0
    skipped: int = 0
    failed: int = 0


@dataclass
class Checkpointer:
    """Takes and restores the checkpoints in ``directory`` of ``store``. All methods are collective.

    ``key``: the training key they belong to. What a published model names stays whatever retention says.
    """

    store: Store
    directory: str
    config: CheckpointConfig
    model: CheckpointedModel
    key: str
    resolved: dict[str, Any]
    inputs: dict[str, str]
    on_point: OnPoint = ignore
    limits: Limits = Limits()

    def __post_init__(self) -> None:
        self._flight = AsyncSave(self.store, self.on_point, self.limits)
        self._pruner = self._new_pruner()
        # Takes the disk's space of tables on SSD too.
        self._buffers, values = SnapshotBuffers(), full_values(self.model.rows)
        if self.config.every_steps is not None or self.config.every_minutes is not None:
            self._buffers.prepare(values)
        self._entries: list[Entry] = []
        self._pending: dict[tuple[str, int, int], Tensor] = {}
        self._codings = Codings(self.config, self.model.rows.rules)
        self.figures = CheckpointFigures()
        self.newest: str | None = None

    def _new_pruner(self) -> Pruner:
        return Pruner(self.store, self.directory, self.config.keep_last, self.config.keep_every, self.on_point)

    def resume(self) -> TrainState | None:
        """Restore the newest whole checkpoint; None where there is none. Restores are counted, to choose the bits."""
        model = self.model
        target = RestoreTarget(model.rows, model.dense, model.optimizer, touched=model.touched, on_point=self.on_point)
        patiently("sweeping uncommitted checkpoints", lambda: self._sweep() if this_rank() == 0 else None)
        damaged: dict[str, str] = {}
        restored = restore_newest(self.store, self.directory, target, damaged)
        if restored is None:
            return None
        artifact, state = restored
        # Deltas after a damaged chain must not rest on it: all that is newer than the restored one is damaged,
        # or rests on what is.
        newer = {name: problem for name, problem in damaged.items() if step_of(name) > state.step}
        entries = patiently("setting damaged checkpoints aside", lambda: self._without(newer))[0]
        self._entries = [Entry.from_json(entry) for entry in entries]
        self.newest = artifact.path
        self._codings.restores = int(artifact.summary.get("restores", 0)) + 1
        return state

    def _without(self, damaged: dict[str, str]) -> list[dict[str, Any]]:
        """Rank 0 sets ``damaged`` aside; the entries of the checkpoints that are left, as plain data."""
        if this_rank() != 0:
            return []
        for line in set_aside(self.store, self.directory, damaged):
            log.warning("%s", line)
        return [entry_of(each).to_json() for each in committed(self.store, self.directory)]

    def _sweep(self) -> None:
        try:
            pins = pinned_names(self.store, self.directory)
        except DamagedError as error:
            log.warning(
                "old checkpoints are kept, because a manifest that may name them cannot be read: %s", error.message
            )
            return
        for line in remove_uncommitted(self.store, self.directory, pins, spared(self.store, self.directory)):
            log.info("%s", line)

    def save(
        self,
        state: TrainState,
        *,
        wait: bool = False,
        final: bool = False,
        timeout: float | None = None,
        exact: bool = False,
        held: Sequence[str] = (),
    ) -> bool:
        """Checkpoint the model at ``state``; returns whether one was taken (False: the last is still being written).

        Training stops for the copy only, or with ``wait`` until the checkpoint is committed. A failed earlier write
        is told and its rows are taken again; a failed write under ``wait`` raises ArtifactError, TimeoutError after
        ``timeout`` seconds. GuardError where a table is not finite. ``final``: the result of the run, a baseline in
        ``final_quantise``, all its tables. ``exact``: a baseline that comes back bit for bit. ``held``: names of
        other checkpoints that stay, because training may go back to them or they join its ensemble.
        """
        began = time.monotonic()
        if not wait and self.config.when_busy == "skip" and self._flight.busy:
            self.figures.skipped += 1
            once(log.warning, "no checkpoint after step %s: the last one is still being written", f"{state.step:,}")
            return False
        self._collect(raising=False, timeout=timeout)
        kind = Kind(final=final, exact=exact, held=tuple(held), prune=timeout is None, awaited=wait)
        self._flight.submit(self._job(state, kind))
        if wait:
            left = None if timeout is None else max(0.0, timeout - (time.monotonic() - began))
            self._finish(state, kind, left)
        self.figures.stalled += time.monotonic() - began
        return True

    def _finish(self, state: TrainState, kind: Kind, timeout: float | None) -> None:
        """Wait until the checkpoint of ``state`` is committed; it is written a second time after a passing fault."""
        try:
            self._collect(raising=True, timeout=timeout)
        except PassingError as error:
            if timeout is not None:
                raise
            once(log.warning, "writing the checkpoint after step %s again: %s", f"{state.step:,}", error.message)
            self._flight.submit(self._job(state, replace(kind, prune=True, awaited=True)))
            self._collect(raising=True)

    def turn_to(self, directory: str) -> None:
        """Write into ``directory`` from now on, a baseline first; what lies in the one before stays as it is."""
        self.directory, self._entries = directory, []
        self._pruner = self._new_pruner()

    def abandon(self) -> None:
        """Let what is in flight end after an error, ``checkpoint.grace_seconds`` at most. Not collective."""
        self._flight.abandon(self.config.grace_seconds)

    def close(self) -> None:
        """Wait for the checkpoint in flight; ArtifactError if it fails."""
        began = time.monotonic()
        self._collect(raising=True)
        self.figures.stalled += time.monotonic() - began

    def _job(self, state: TrainState, kind: Kind) -> Job:
        """Decide what to write and copy it."""
        self.model.touched.unite()
        chain = newest_chain(self._entries)
        baseline = kind.final or kind.exact or wants_baseline(self.config.policy, chain, self.config.max_chain)
        longest = self.config.compact_after
        compacting = not baseline and chain is not None and longest is not None and len(chain.paths) >= longest
        blocks = self._snapshot(None if baseline else self.model.touched)
        self._mark_saved(baseline or compacting)
        tensors, record = dense_part(self.model.dense, self.model.optimizer, state)
        names = () if baseline or chain is None else parents(self.config.policy, chain)
        summary = {
            "step": state.step,
            "samples": state.samples,
            "type": BASELINE if baseline else DELTA,
            "parents": list(names),
            "policy": self.config.policy,
            "restores": self._codings.restores,
            "bytes_full": full_bytes(self.model.rows) + sum(value.nbytes for value in tensors.values()),
            **({HELD: list(kind.held) if len(kind.held) > 1 else kind.held[0]} if kind.held else {}),
        }
        return Job(
            path=f"{self.directory}/{name_of(state.step)}",
            key=self.key,
            config=self.resolved,
            inputs=self.inputs,
            blocks=blocks,
            dense=tensors,
            state=record,
            coding=self._codings.exactly if kind.exact else self._codings.of(blocks, final=kind.final),
            tables={name: TableSize(rows=t.rows, dim=t.dim) for name, t in self.model.rows.tables.items()},
            summary=summary,
            chunk_bytes=int(self.config.chunk_mib * MIB),
            compact=partial(compact, self.store, on_point=self.on_point) if compacting else None,
            prune=partial(self._pruner.prune, list(self._entries), set(kind.held)) if kind.prune else None,
            awaited=kind.awaited,
        )

    def _snapshot(self, touched: TouchedRows | None) -> list[RowBlock]:
        """Copies of rows; GuardError on all ranks where one of them holds a weight that is not finite."""
        blocks: list[RowBlock] = []
        together(
            "copying rows",
            lambda: blocks.extend(take_snapshot(self.model.rows, touched, self._buffers, self.on_point)),
        )
        return blocks

    def _mark_saved(self, baseline: bool) -> None:
        """Clear what the next delta need not hold; kept aside in case this write fails."""
        touched = self.model.touched
        self._pending = {key: touched.mask(key).clone() for key in touched.shards()}
        if baseline or self.config.policy == "consecutive":
            touched.clear()

    def _collect(self, raising: bool, timeout: float | None = None) -> None:
        """Take in how the write in flight ended: count it, or put its rows back and tell."""
        landed = self._flight.land(timeout)
        if landed is None:
            return
        if landed.stuck:  # its thread still reads them
            self._buffers = SnapshotBuffers()
        if landed.entry is None:
            self._put_back(landed, raising)
            return
        stay = landed.stay
        self._entries = [e for e in (*self._entries, landed.entry) if stay is None or e.name in stay]
        self.newest = landed.path
        self.figures.count += 1
        self.figures.bytes_written += landed.bytes
        self.figures.bytes_full_equivalent += landed.bytes_full
        self.figures.writing += landed.seconds
        if landed.error is not None:
            self._mark_again()  # the next delta rests on the former baseline
            text = "checkpoint %s is committed, but not compacted: %s"
            once(log.warning, text, landed.path, landed.error.message)
        if landed.note:
            once(log.warning, "%s", landed.note)

    def _mark_again(self) -> None:
        for key, marks in self._pending.items():
            self.model.touched.mask(key).bitwise_or_(marks)

    def _put_back(self, landed: WriteOutcome, raising: bool) -> None:
        self.figures.failed += 1
        self._mark_again()
        error = landed.error
        assert error is not None  # nothing was committed
        if raising or not isinstance(error, ArtifactError):
            raise error
        once(log.warning, "the checkpoint was not written; its rows go into the next one: %s", error.message)


def latest(store: Store, directory: str) -> Artifact | None:
    """The newest committed checkpoint under ``directory``; None where there is none."""
    artifacts = committed(store, directory)
    return artifacts[-1] if artifacts else None
