"""The checkpoints of one training run: what to write, when to write a baseline, and what to keep.

The training loop uses this module only. A guided walk through the chain of checkpoints begins here:

1. Lookups in training mode mark the rows that they touch (``embeddings/touched.py``).
2. ``Checkpointer.save`` decides between baseline and delta, and copies rows (``row_copies``) while training waits.
3. ``async_save`` runs the write behind training; ``save`` writes the files and commits them. ``codings`` says in how
   many bits: by default few, so a training that is resumed from such a checkpoint continues from rounded rows.
   Checkpoints that training goes back to or publishes are exact, and ``checkpoint.final_quantise`` codes the last one.
4. ``compact`` turns a long chain into a baseline, and ``retention`` removes what is not needed any more.
5. ``Checkpointer.resume`` goes the other way: ``reader`` applies a chain, baseline first (restore).

``training/checkpoints.py`` says when a checkpoint is due and what it has besides rows. ``stages/train.py`` names the
directory by the key of the continuation, and so decides which checkpoints a training finds again.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from pipeline.checkpoint.async_save import AsyncSave, Limits
from pipeline.checkpoint.chunks import RowBlock
from pipeline.checkpoint.codings import Codings
from pipeline.checkpoint.collectives import log_on_rank0, retry_on_all_ranks, run_on_all_ranks, this_rank
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
from pipeline.checkpoint.row_copies import CopyBuffers, copy_rows, full_bytes, full_values
from pipeline.checkpoint.save import Job
from pipeline.checkpoint.train_state import TrainState, dense_part
from pipeline.config.checkpoint import CheckpointConfig
from pipeline.core.errors import ArtifactError, DamagedError, PassingError
from pipeline.core.units import MIB
from pipeline.embeddings.row_access import RowAccess
from pipeline.embeddings.touched import TouchedRows
from pipeline.records.checkpoint import TableSize
from pipeline.store.artifacts import Store
from pipeline.store.manifest import Artifact

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class CheckpointedModel:
    """What is saved and restored: tables, touched marks, dense parameters and their optimizer."""

    rows: RowAccess
    touched: TouchedRows
    dense: dict[str, Tensor]
    optimizer: torch.optim.Optimizer | None


@dataclass
class CheckpointFigures:
    """The cost of this run's checkpoints: seconds of training stopped, bytes written by all ranks."""

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

    ``key``: the training key they belong to. ``resolved``: the training's whole configuration, and ``inputs``: the keys
    of its dataset and plan, which manifests record. What a published model names stays whatever retention says.
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
        self._async_save = AsyncSave(self.store, self.on_point, self.limits)
        # Committed checkpoints, oldest step first.
        self._entries: list[Entry] = []
        self.turn_to(self.directory)
        self._buffers = CopyBuffers()
        # Sizing the copies also takes the disk space for copies of tables on SSD.
        values = full_values(self.model.rows)
        if self.config.every_steps is not None or self.config.every_minutes is not None:
            self._buffers.prepare(values)
        # Touched marks of the copy in flight, in case its write fails.
        self._pending: dict[tuple[str, int, int], Tensor] = {}
        self._codings = Codings(self.config, self.model.rows.rules)
        self.figures = CheckpointFigures()
        self.newest: str | None = None

    def resume(self) -> TrainState | None:
        """Restore the newest whole checkpoint; None if there is none. Restores are counted, to choose the bits."""
        # 1. Remove what killed writers left, unless a manifest that may name it cannot be read.
        retry_on_all_ranks("sweeping uncommitted checkpoints", self._sweep)

        # 2. Restore the newest checkpoint that is whole, skipping damaged ones.
        model = self.model
        target = RestoreTarget(model.rows, model.dense, model.optimizer, touched=model.touched, on_point=self.on_point)
        damaged: dict[str, str] = {}
        restored = restore_newest(self.store, self.directory, target, damaged)
        if restored is None:
            return None
        artifact, state = restored

        # 3. Set damaged checkpoints aside, so that no delta rests on them: everything newer than the restored one is
        # damaged, or rests on a damaged one.
        newer = {name: problem for name, problem in damaged.items() if step_of(name) > state.step}
        records = retry_on_all_ranks("setting damaged checkpoints aside", lambda: self._set_aside(newer))[0]
        self._entries = [Entry.from_json(record) for record in records]
        self.newest = artifact.path
        self._codings.restores = int(artifact.summary.get("restores", 0)) + 1
        return state

    def _sweep(self) -> None:
        if this_rank() != 0:
            return
        try:
            pins = pinned_names(self.store, self.directory)
        except DamagedError as error:
            log.warning(
                "old checkpoints are kept, because a manifest that may name them cannot be read: %s", error.message
            )
            return
        for line in remove_uncommitted(self.store, self.directory, pins, spared(self.store, self.directory)):
            log.info("%s", line)

    def _set_aside(self, damaged: dict[str, str]) -> list[dict[str, Any]]:
        # Returns the entries of the remaining checkpoints, as plain data: rank 0 sets them aside and its list counts.
        if this_rank() != 0:
            return []
        for line in set_aside(self.store, self.directory, damaged):
            log.warning("%s", line)
        return [entry_of(artifact).to_json() for artifact in committed(self.store, self.directory)]

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
        """Checkpoint the model at ``state``. Training stops only for the copy, unless it is to wait.

        Args:
            state: The position and state of training.
            wait: Return only once the checkpoint is committed; it is written a second time after a passing fault.
            final: Write the result of the run: a baseline of all tables in ``final_quantise``.
            timeout: Seconds to wait for the write in flight and, with ``wait``, for this one.
            exact: Write a baseline that a restore reproduces bit for bit.
            held: Names of other checkpoints that stay, because training may go back to them or they join its ensemble.

        Returns:
            Whether a checkpoint was taken. False: the last one is still being written, and ``when_busy`` is ``skip``.

        Raises:
            GuardError: A weight or an optimizer state is not finite.
            ArtifactError: With ``wait``, the write failed. Without it, the failure is logged and the next delta has the
                rows.
            TimeoutError: The write has not ended after ``timeout`` seconds.
        """
        began = time.monotonic()
        if not wait and self.config.when_busy == "skip" and self._async_save.any_rank_busy():
            self.figures.skipped += 1
            log_on_rank0(
                log.warning, "no checkpoint after step %s: the last one is still being written", f"{state.step:,}"
            )
            return False

        # 1. Let the write in flight end first: whether its rows are stored decides which rows a delta holds.
        self._collect(raising=False, timeout=timeout)

        # A save with a deadline, such as one before the machine goes away, leaves pruning to a later one.
        has_deadline = timeout is not None

        # 2. Copy the rows while training stands still; the rest is done while it continues.
        copy_model = partial(self._copy_model_into_job, state, final=final, exact=exact, held=held)
        self._async_save.submit(copy_model(prune=not has_deadline, awaited=wait))

        # 3. Wait until the checkpoint is committed, but only if the caller asks for it.
        if wait:
            # The copy, and the wait for an earlier write, have used up part of the timeout.
            left = None if timeout is None else max(0.0, timeout - (time.monotonic() - began))
            try:
                self._collect(raising=True, timeout=left)
            except PassingError as error:
                if left is not None:
                    raise
                log_on_rank0(
                    log.warning, "writing the checkpoint after step %s again: %s", f"{state.step:,}", error.message
                )
                self._async_save.submit(copy_model(prune=True, awaited=True))
                self._collect(raising=True)
        self.figures.stalled += time.monotonic() - began
        return True

    def turn_to(self, directory: str) -> None:
        """Write into ``directory`` from now on, beginning with a baseline; the former directory stays as it is."""
        self.directory = directory
        self._entries = []
        self._pruner = Pruner(self.store, directory, self.config.keep_last, self.config.keep_every, self.on_point)

    def abandon(self) -> None:
        """Let a write in flight end after an error, for at most ``checkpoint.grace_seconds``. Not collective."""
        self._async_save.abandon(self.config.grace_seconds)

    def close(self) -> None:
        """Wait for the checkpoint in flight; ArtifactError if it fails."""
        began = time.monotonic()
        self._collect(raising=True)
        self.figures.stalled += time.monotonic() - began

    def _copy_model_into_job(
        self, state: TrainState, *, final: bool, exact: bool, held: Sequence[str], prune: bool, awaited: bool
    ) -> Job:
        config, model = self.config, self.model
        model.touched.unite()

        # 1. Choose baseline or delta. A delta that makes its chain too long is compacted into a baseline after its
        # commit.
        chain = newest_chain(self._entries)
        baseline = final or exact or wants_baseline(config.policy, chain, config.max_chain)
        compacting = False
        if not baseline and chain is not None and config.compact_after is not None:
            compacting = len(chain.names) >= config.compact_after

        # 2. Copy the rows. If one rank holds a value that is not finite, all raise before anything is written.
        blocks: list[RowBlock] = []
        rows = None if baseline else model.touched
        run_on_all_ranks(
            "copying rows", lambda: blocks.extend(copy_rows(model.rows, rows, self._buffers, self.on_point))
        )

        # 3. Clear the marks that the next delta need not hold. One-shot deltas hold all rows changed since the
        # baseline.
        self._pending = {key: model.touched.mask(key).clone() for key in model.touched.shards()}
        if baseline or compacting or config.policy == "consecutive":
            model.touched.clear()

        # 4. Describe the checkpoint.
        tensors, record = dense_part(model.dense, model.optimizer, state)
        rests_on: tuple[str, ...] = ()
        if not baseline and chain is not None:
            rests_on = parents(config.policy, chain)
        tables = {}
        for name, table in model.rows.tables.items():
            tables[name] = TableSize(rows=table.rows, dim=table.dim)
        summary: dict[str, Any] = {
            "step": state.step,
            "samples": state.samples,
            "type": BASELINE if baseline else DELTA,
            "parents": list(rests_on),
            "policy": config.policy,
            "restores": self._codings.restores,
            "bytes_full": full_bytes(model.rows) + sum(value.nbytes for value in tensors.values()),
        }
        if held:
            # A single name is recorded as a string, as in earlier releases.
            summary[HELD] = list(held) if len(held) > 1 else held[0]
        coding = self._codings.of(blocks, final=final)
        if exact:
            coding = self._codings.exactly

        # 5. Define rank 0's work after the commit. The pruner gets copies, because the next save changes the originals.
        compact_chain = partial(compact, self.store, on_point=self.on_point) if compacting else None
        prune_old = partial(self._pruner.prune, list(self._entries), set(held)) if prune else None
        return Job(
            path=f"{self.directory}/{name_of(state.step)}",
            key=self.key,
            config=self.resolved,
            inputs=self.inputs,
            blocks=blocks,
            dense=tensors,
            state=record,
            coding=coding,
            tables=tables,
            summary=summary,
            chunk_bytes=int(config.chunk_mib * MIB),
            compact=compact_chain,
            prune=prune_old,
            awaited=awaited,
        )

    def _collect(self, raising: bool, timeout: float | None = None) -> None:
        outcome = self._async_save.land(timeout)
        if outcome is None:
            return
        if outcome.stuck:
            # The stuck thread still reads the old buffers.
            self._buffers = CopyBuffers()

        # After a failure, mark these rows as touched again, so that the next delta has them. Either nothing was
        # committed, or the checkpoint was not compacted, and the next delta rests on the former baseline.
        if outcome.error is not None:
            for key, marks in self._pending.items():
                self.model.touched.mask(key).bitwise_or_(marks)
        if outcome.entry is None:
            self.figures.failed += 1
            error = outcome.error
            assert error is not None
            if raising or not isinstance(error, ArtifactError):
                raise error
            log_on_rank0(
                log.warning, "the checkpoint was not written; its rows go into the next one: %s", error.message
            )
            return

        self._entries.append(outcome.entry)
        if outcome.stay is not None:
            self._entries = [entry for entry in self._entries if entry.name in outcome.stay]
        self.newest = outcome.path
        self.figures.count += 1
        self.figures.bytes_written += outcome.bytes
        self.figures.bytes_full_equivalent += outcome.bytes_full
        self.figures.writing += outcome.seconds
        if outcome.error is not None:
            text = "checkpoint %s is committed, but not compacted: %s"
            log_on_rank0(log.warning, text, outcome.path, outcome.error.message)
        if outcome.note:
            log_on_rank0(log.warning, "%s", outcome.note)


def latest(store: Store, directory: str) -> Artifact | None:
    """Return the newest committed checkpoint under ``directory``; None if there is none."""
    artifacts = committed(store, directory)
    return artifacts[-1] if artifacts else None
