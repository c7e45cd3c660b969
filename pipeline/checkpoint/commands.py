"""What ``nightjar ckpt`` does, as functions that return plain data; showing it is another file's business."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from pipeline.checkpoint import quarantine
from pipeline.checkpoint.index import DENSE, committed, entry_of, needed, step_of
from pipeline.checkpoint.reference import candidates, directories, find_checkpoint, newest, run_of, unknown
from pipeline.config.renamed import config_changes
from pipeline.errors import ConfigError
from pipeline.records.checkpoint import (
    CheckpointDiff,
    Compacted,
    Damage,
    DenseDiff,
    ListedCheckpoint,
    ShownCheckpoint,
    StoredTable,
    TableDiff,
    Verified,
)
from pipeline.store.artifacts import Store
from pipeline.store.manifest import MANIFEST, Artifact

Progress = Callable[[int, int], None]


def list_checkpoints(store: Store, run: str | None = None) -> list[ListedCheckpoint]:
    """One record for each committed checkpoint of ``run`` (None: of all runs), oldest step first.

    Damaged ones and those that a training set aside are among them. Raises ConfigError for an unknown run.
    """
    _check_run(store, run)
    listed = []
    for directory in directories(store, run):
        damaged: dict[str, str] = {}
        artifacts = committed(store, directory, damaged)
        entries = {entry.name: entry for entry in map(entry_of, artifacts)}
        records = [ListedCheckpoint(**_record(artifact)) for artifact in artifacts]
        records += [_damaged_record(path, problem) for path, problem in damaged.items()]
        records += [_aside_record(store, each) for each in quarantine.listed(store, directory)]
        for record in sorted(records, key=lambda record: record.step):
            rests = tuple(each.name for each in entries.values() if record.name in needed(each, entries))
            listed.append(replace(record, rests=rests))
    return listed


def _check_run(store: Store, run: str | None) -> None:
    """ConfigError where the store has no such run."""
    known = store.names("runs")
    if run is not None and run not in known:
        raise ConfigError(
            f"no run {run!r} in store {store.url}; available: {', '.join(known) or 'none'}",
            hint="one of these, or --store <URL of its store>",
        )


def _damaged_record(path: str, problem: str) -> ListedCheckpoint:
    return ListedCheckpoint(
        run=run_of(path),
        name=path.rpartition("/")[2],
        path=path,
        step=step_of(path),
        type="damaged",
        problem=f"{MANIFEST} {problem}",
    )


def _aside_record(store: Store, each: quarantine.SetAside) -> ListedCheckpoint:
    age = None if each.created is None else max(0.0, time.time() - each.created)
    return ListedCheckpoint(
        run=run_of(each.path),
        name=each.path.rpartition("/")[2],
        path=each.path,
        step=step_of(each.former),
        type="set aside",
        bytes=quarantine.size(store, each),
        created=each.created,
        age_seconds=age,
        why=each.why,
    )


def _record(artifact: Artifact) -> dict[str, Any]:
    """The fields that a listed and a shown checkpoint share."""
    summary = artifact.summary
    size = sum(entry.bytes for entry in artifact.files.values())
    return {
        "run": run_of(artifact.path),
        "name": artifact.path.rpartition("/")[2],
        "path": artifact.path,
        "step": summary["step"],
        "type": summary["type"],
        "parents": tuple(summary["parents"]),
        "codings": tuple(summary.get("codings", ())),
        "rows": summary["rows"],
        "bytes": size,
        "share": size / max(1, summary["bytes_full"]),
        "created": artifact.created,
        "age_seconds": max(0.0, time.time() - artifact.created),
    }


def show(store: Store, name: str) -> ShownCheckpoint:
    """Everything about one checkpoint: record, position, tables (rows stored, bytes, codings), dense part, settings."""
    from pipeline.checkpoint.integrity import read_verified
    from pipeline.checkpoint.reader import read_index, read_state

    artifact = find_checkpoint(store, name)
    index = read_index(store, artifact)
    tables = {}
    for table, size in index.tables.items():
        extents = [extent for extent in index.files if extent.table == table]
        tables[table] = StoredTable(
            rows=size.rows,
            dim=size.dim,
            rows_stored=sum(e.rows * e.columns for e in extents) // size.dim,
            bytes=sum(artifact.files[e.file].bytes for e in extents),
            files=len(extents),
            codings=tuple(sorted({e.coding for e in extents})),
        )
    read_verified(store, artifact, DENSE)
    return ShownCheckpoint(
        **_record(artifact),
        key=artifact.key,
        inputs=artifact.inputs,
        summary=artifact.summary,
        position=read_state(store, artifact)["train"],
        tables=tables,
        dense_bytes=artifact.files[DENSE].bytes,
        config=artifact.config,
    )


def verify(store: Store, name: str, progress: Progress) -> Verified:
    """Read a checkpoint and its chain.

    Of a run the newest whole one is read, and every manifest that is damaged counts: it may be the newest one's.
    """
    from pipeline.checkpoint.verify import verify as look

    artifacts, damaged = candidates(store, name)
    if not artifacts and not damaged:
        raise unknown(store, name)
    damage, files, size = look(store, artifacts[-1], progress) if artifacts else (list[Damage](), 0, 0)
    named = {each.checkpoint for each in damage if each.file == MANIFEST}
    damage += [Damage(path, MANIFEST, problem) for path, problem in damaged.items() if path not in named]
    checkpoint = artifacts[-1].path if artifacts else newest(damaged)
    return Verified(name=name, checkpoint=checkpoint, whole=not damage, files=files, bytes=size, damage=tuple(damage))


def diff(store: Store, first: str, second: str, progress: Progress) -> CheckpointDiff:
    """How ``second`` differs from ``first``: tables, dense parameters and configuration.

    A table: rows changed (any weight differs), largest and mean absolute difference over all its weights.
    """
    from pipeline.checkpoint.reader import ChainReader

    one, two = find_checkpoint(store, first), find_checkpoint(store, second)
    a, b = ChainReader(store, one), ChainReader(store, two)
    both = [table for table in a.tables if a.tables[table] == b.tables.get(table)]
    total, done = sum(a.tables[table].rows for table in both), 0
    tables: dict[str, TableDiff] = {}
    for table in both:
        changed, largest, summed = 0, 0.0, 0.0
        for left, right in zip(a.windows(table), b.windows(table), strict=True):
            gap = (left.weight - right.weight).abs()
            changed += int((gap.amax(1) > 0).sum())
            largest = max(largest, float(gap.max()))
            summed += float(gap.double().sum())
            done += len(gap)
            progress(done, total)
        rows, dim = a.tables[table].rows, a.tables[table].dim
        mean = summed / max(1, rows * dim)
        tables[table] = TableDiff(rows=rows, rows_changed=changed, largest=largest, mean=mean)
    either = {**a.tables, **b.tables}
    sizes = {table: (a.tables.get(table), b.tables.get(table)) for table in either}
    return CheckpointDiff(
        first=one.path,
        second=two.path,
        steps=(one.summary["step"], two.summary["step"]),
        tables=tables,
        tables_differ={table: pair for table, pair in sizes.items() if pair[0] != pair[1]},
        dense=_diff_dense(store, one, two),
        config=config_changes(one.config, two.config),
    )


def _diff_dense(store: Store, one: Artifact, two: Artifact) -> dict[str, DenseDiff]:
    a, b = _dense(store, one), _dense(store, two)
    diffs: dict[str, DenseDiff] = {}
    for name in {**a, **b}:
        if name not in a or name not in b or a[name].shape != b[name].shape:
            then, now = (list(x[name].shape) if name in x else None for x in (a, b))
            diffs[name] = DenseDiff(shapes=(then, now))
        else:
            gap = (a[name].double() - b[name].double()).abs()
            diffs[name] = DenseDiff(values=gap.numel(), largest=float(gap.max()), mean=float(gap.mean()))
    return diffs


def _dense(store: Store, artifact: Artifact) -> dict[str, Any]:
    from pipeline.checkpoint.container import read_tensors
    from pipeline.checkpoint.integrity import read_verified

    tensors, _ = read_tensors(read_verified(store, artifact, DENSE), f"{artifact.path}/{DENSE}")
    return {name.removeprefix("param/"): value for name, value in tensors.items() if name.startswith("param/")}


def compact(store: Store, name: str, progress: Progress) -> Compacted:
    """Compact a checkpoint's chain."""
    from pipeline.checkpoint.compact import compact as merge

    before = find_checkpoint(store, name)
    after = merge(store, before, progress=progress)
    return Compacted(
        checkpoint=after.path,
        step=after.summary["step"],
        compacted=tuple(before.summary["parents"]),
        bytes_before=sum(entry.bytes for entry in before.files.values()),
        bytes=sum(entry.bytes for entry in after.files.values()),
    )


def gc(
    store: Store, run: str | None, keep_last: int | None, keep_every: int | None, min_age: float, *, dry_run: bool
) -> dict[str, Any]:
    """Remove (or with ``dry_run`` only list) what retention does not need: {"removed", "bytes", "kept", "dry_run"}.

    ``min_age``: seconds that remains must be old.
    """
    from pipeline.checkpoint.retention import collect, sweep

    _check_run(store, run)
    for flag, value in (("--keep-last", keep_last), ("--keep-every", keep_every)):
        if value is not None and value < 1:
            raise ConfigError(f"{flag} is {value}, expected at least 1", hint=f"{flag} 1")
    if not math.isfinite(min_age) or min_age < 0:
        raise ConfigError(f"--min-age is {min_age / 60:g}, expected minutes", hint="--min-age 60")
    going, staying = collect(store, run, keep_last, keep_every, min_age)
    if not dry_run:
        sweep(store, going)
    return {
        "dry_run": dry_run,
        "removed": [each.to_json("path", "bytes", "reason") for each in going],
        "bytes": sum(each.bytes or 0 for each in going),
        "kept": [each.to_json("path", "reason") for each in staying],
    }
