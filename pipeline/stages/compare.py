"""Compares runs: their figures, the settings that differ, and paired differences on the same held-out rows."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pipeline.config.gate import GateConfig
from pipeline.config.renamed import parse_recorded
from pipeline.core.errors import ArtifactError, ConfigError
from pipeline.records.dataset import LABEL
from pipeline.records.gate import GateRecord, Interval
from pipeline.records.record import read
from pipeline.records.result import Result
from pipeline.records.runs import RunChange, RunLine, RunsComparison, RunSlice, run_directory
from pipeline.specs.gate_check import ScoredRows, SliceColumn
from pipeline.stages.release_gate import LOGITS, read_logits, slice_names
from pipeline.store.artifacts import Store

# The name and place of a run are not settings to compare.
NO_SETTING = ("run", "store", "launch.run_id")
Settings = dict[str, Any]


def run_names(store: Store) -> list[str]:
    """Return the runs of ``store`` that have a result, in the order of their names."""
    return [name for name in store.names("runs") if store.exists(f"{run_directory(name)}/{Result.FILE}")]


def run_line(store: Store, run: str) -> RunLine:
    """Return the figures of ``run``; ArtifactError, which lists the existing runs, if it has no result."""
    path = f"{run_directory(run)}/{Result.FILE}"
    if not store.exists(path):
        known = ", ".join(run_names(store)) or "none"
        raise ArtifactError(f"no run {run!r} in store {store.url}; runs: {known}", hint="--store <its store>")
    result = read(Result, store, path)
    # No record says when a run ended, so the time of its newest artifact in the store is used.
    created = []
    for stage in result.stages.values():
        artifact = store.find(stage.artifact) if stage.artifact else None
        if artifact is not None:
            created.append(artifact.created)
    return replace(RunLine.of(result, max(created, default=None)), run=run)


def compare_runs(
    store: Store,
    runs: Sequence[str],
    *,
    slices: Sequence[str] = (),
    gate: GateConfig | None = None,
    seed: int = 0,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> RunsComparison:
    """Compare ``runs`` with the first of them.

    Args:
        slices: Sparse features by whose values the rows are also judged.
        gate: Confidence, replicates, blocks and sizes of slices.

    Raises:
        ConfigError: There are fewer than two runs, or the dataset lacks a feature.
        ArtifactError: A run has no result.
    """
    names = list(dict.fromkeys(runs))
    if len(names) < 2:
        raise ConfigError(
            f"compare takes two runs or more, got {', '.join(names) or 'none'}", hint="nightjar runs ls lists them"
        )
    gate = gate or GateConfig()
    lines = tuple(run_line(store, name) for name in names)
    reference = _ReferenceRun(store, names[0], slices, gate, seed)
    changes = []
    for done, name in enumerate(names[1:]):
        progress(done, len(names) - 1)
        changes.append(reference.compare(name))
    progress(1, 1)
    return RunsComparison(
        runs=lines,
        settings=differing([settings_of(store, name) for name in names]),
        changes=tuple(changes),
        confidence=gate.confidence,
    )


def ne_change(store: Store, run: str, other: str, *, gate: GateConfig | None = None, seed: int = 0) -> Interval | None:
    """Return the change of NE from ``run`` to ``other``, as a share of the first, paired row by row.

    Their datasets may differ, as they do if a feature is left out, as long as their held-out rows are the same.

    Returns:
        The interval; None if the rows differ, or one of the runs has no predictions.
    """
    return _ReferenceRun(store, run, (), gate or GateConfig(), seed).ne_change(other)


def settings_of(store: Store, run: str) -> Settings:
    """Return the settings of ``run`` by dotted name, from its ``config.yaml``; none if it has no such file."""
    path = f"{run_directory(run)}/config.yaml"
    if not store.exists(path):
        return {}
    with store.open(path) as source:
        tree = parse_recorded(source.read().decode())
    settings = _flat(tree)
    for name in NO_SETTING:
        settings.pop(name, None)
    return settings


def _flat(tree: Any, prefix: str = "") -> Settings:
    if not isinstance(tree, Mapping) or not tree:
        return {prefix: tree}
    flat: Settings = {}
    for name, value in tree.items():
        flat |= _flat(value, f"{prefix}.{name}" if prefix else str(name))
    return flat


def differing(runs: Sequence[Settings]) -> dict[str, list[Any]]:
    """Find the settings that are not the same in all of ``runs``.

    Returns:
        By name, a value for each run; None if it is not set.
    """
    different = {}
    for name in dict.fromkeys(chain.from_iterable(runs)):
        values = [settings.get(name) for settings in runs]
        if any(value != values[0] for value in values):
            different[name] = values
    return different


class _ReferenceRun:
    """The held-out rows of the first run, and its model's predictions for them."""

    def __init__(self, store: Store, run: str, slices: Sequence[str], gate: GateConfig, seed: int) -> None:
        from pipeline.serving.scores import feature_codes
        from pipeline.training.parquet import SplitReader

        self.store, self.gate, self.seed = store, gate, seed
        self.result = read(Result, store, f"{run_directory(run)}/{Result.FILE}")
        self.problem = self._problem(self.result)
        if self.problem is not None:
            return
        dataset = store.get(self.result.artifact("ingest") or "", "ingest")
        split = SplitReader(store, dataset, "test")
        known = [column.name for column in split.schema.sparse] + [each.name for each in split.schema.sequences]
        unknown = sorted(set(slices) - set(known))
        if unknown:
            raise ConfigError(
                f"no sparse feature {unknown[0]!r} in {dataset.path}; it has {', '.join(known)}",
                hint=f"--slices {known[0]}" if known else "",
            )
        self.labels, self.weights = split.column(LABEL), split.row_weights()
        # A feature of several ids gives the first one, a sequence the number of its events.
        codes = feature_codes(split, list(slices))
        self.slices = {}
        for name in slices:
            names = slice_names(store, dataset, split.schema, name)
            self.slices[name] = SliceColumn(codes=np.concatenate(codes[name]), names=names)
        scores = self.result.eval
        self.groups = None
        if scores is not None and scores.group_by is not None:
            self.groups = split.number_ids(scores.group_by)
        self.logits = self._logits(self.result)

    def compare(self, run: str) -> RunChange:
        """Compare ``run`` with this one, row by row."""
        result = read(Result, self.store, f"{run_directory(run)}/{Result.FILE}")
        problem = self.problem or self._problem(result)
        if problem is None and result.artifact("ingest") != self.result.artifact("ingest"):
            problem = f"other held-out rows: dataset {_dataset(result)}, not {_dataset(self.result)}"
        if problem is not None:
            return RunChange(run=run, problem=problem)
        record = self._measure(result)
        if record.change is None:
            return RunChange(run=run, problem="predictions that are not finite")
        slices = []
        for each in record.slices or ():
            # A slice with too few rows has no interval.
            if each.change is not None:
                slices.append(
                    RunSlice(slice=each.slice, value=each.value, rows=each.rows, clicks=each.clicks, change=each.change)
                )
        gauc = None if record.gauc is None else record.gauc.change
        return RunChange(run=run, rows=record.rows, change=record.change, gauc=gauc, slices=tuple(slices) or None)

    def ne_change(self, run: str) -> Interval | None:
        """Return the change of NE to ``run``; None unless it was evaluated on rows with the same labels in order."""
        from pipeline.training.parquet import SplitReader

        path = f"{run_directory(run)}/{Result.FILE}"
        result = Result(run=run, status="failed")
        if self.store.exists(path):
            result = read(Result, self.store, path)
        if self.problem is not None or self._problem(result) is not None:
            return None
        if result.artifact("ingest") != self.result.artifact("ingest"):
            dataset = self.store.get(result.artifact("ingest") or "", "ingest")
            labels = SplitReader(self.store, dataset, "test").column(LABEL)
            if not np.array_equal(labels, self.labels):
                return None
        change = self._measure(result).change
        if change is None:
            return None
        return change.ne

    def _measure(self, result: Result) -> GateRecord:
        from pipeline.evaluation.gate.measure import measure

        scored = ScoredRows(
            labels=self.labels,
            candidate=self._logits(result),
            incumbent=self.logits,
            slices=self.slices,
            weights=self.weights,
            users=self.groups,
        )
        return measure(scored, self.gate, self.seed)

    def _problem(self, result: Result) -> str | None:
        # Says why the predictions of ``result`` cannot be read; None if they can.
        for stage in ("ingest", "evaluate"):
            path = result.artifact(stage)
            artifact = self.store.find(path) if path else None
            if artifact is None:
                return f"run {result.run} has no artifact of {stage}"
            if stage == "evaluate" and LOGITS not in artifact.files:
                return f"the evaluation of run {result.run} kept no predictions: an earlier release made it"
        return None

    def _logits(self, result: Result) -> NDArray[np.float32]:
        # Returns the main task's logits of the held-out rows.
        logits = read_logits(self.store, self.store.get(result.artifact("evaluate") or "", "evaluate"))
        return np.ascontiguousarray(logits if logits.ndim == 1 else logits[:, 0])


def _dataset(result: Result) -> str:
    # Returns the name, and the first digits of the key.
    _, name, key = ("/" + (result.artifact("ingest") or "")).rsplit("/", 2)
    return f"{name}/{key[:8]}"
