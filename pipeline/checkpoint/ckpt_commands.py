"""The commands of ``nightjar ckpt`` as functions that return plain data; another module displays it."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from pipeline.checkpoint import quarantine
from pipeline.checkpoint.index import DENSE, committed, entry_of, required_parents, step_of
from pipeline.checkpoint.reference import candidates, directories, find_checkpoint, run_of, unknown
from pipeline.config.renamed import config_changes
from pipeline.core.errors import ConfigError
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
    """Return one record for each committed checkpoint of ``run`` (None: of all runs), oldest step first.

    Damaged ones and those that a training set aside are included. Raises ConfigError for an unknown run.
    """
    _check_run(store, run)
    listed = []
    for directory in directories(store, run):
        damaged: dict[str, str] = {}
        artifacts = committed(store, directory, damaged)
        records = [ListedCheckpoint(**_common_fields(artifact)) for artifact in artifacts]
        for path, problem in damaged.items():
            records.append(
                ListedCheckpoint(
                    run=run_of(path),
                    name=path.rpartition("/")[2],
                    path=path,
                    step=step_of(path),
                    type="damaged",
                    problem=f"{MANIFEST} {problem}",
                )
            )
        for one in quarantine.listed(store, directory):
            age = None
            if one.created is not None:
                # The clock of the machine that set it aside may be ahead of this one's.
                age = max(0.0, time.time() - one.created)
            records.append(
                ListedCheckpoint(
                    run=run_of(one.path),
                    name=one.path.rpartition("/")[2],
                    path=one.path,
                    step=step_of(one.former),
                    type="set aside",
                    bytes=quarantine.size(store, one),
                    created=one.created,
                    age_seconds=age,
                    why=one.why,
                )
            )
        entries = {entry.name: entry for entry in map(entry_of, artifacts)}
        for record in sorted(records, key=lambda record: record.step):
            rests = [name for name, entry in entries.items() if record.name in required_parents(entry, entries)]
            listed.append(replace(record, rests=tuple(rests)))
    return listed


def _check_run(store: Store, run: str | None) -> None:
    known = store.names("runs")
    if run is not None and run not in known:
        raise ConfigError(
            f"no run {run!r} in store {store.url}; available: {', '.join(known) or 'none'}",
            hint="one of these, or --store <URL of its store>",
        )


def _common_fields(artifact: Artifact) -> dict[str, Any]:
    # Returns the fields that a listed and a shown checkpoint share.
    summary = artifact.summary
    size = artifact.total_bytes
    return {
        "run": run_of(artifact.path),
        "name": artifact.name,
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
    """Describe one checkpoint: record, position, tables (rows stored, bytes, codings), dense part, settings."""
    from pipeline.checkpoint.integrity import read_verified
    from pipeline.checkpoint.reader import read_index, read_state

    artifact = find_checkpoint(store, name)
    index = read_index(store, artifact)
    tables = {}
    for table, size in index.tables.items():
        cells = table_bytes = files = 0
        codings = set()
        for extent in index.files:
            if extent.table == table:
                cells += extent.rows * extent.columns
                table_bytes += artifact.files[extent.file].bytes
                files += 1
                codings.add(extent.coding)
        tables[table] = StoredTable(
            rows=size.rows,
            dim=size.dim,
            # A row may be split by columns over several files.
            rows_stored=cells // size.dim,
            bytes=table_bytes,
            files=files,
            codings=tuple(sorted(codings)),
        )
    # A damaged dense part is an error here, too.
    read_verified(store, artifact, DENSE)
    return ShownCheckpoint(
        **_common_fields(artifact),
        key=artifact.key,
        inputs=artifact.inputs,
        summary=artifact.summary,
        position=read_state(store, artifact)["train"],
        tables=tables,
        dense_bytes=artifact.files[DENSE].bytes,
        config=artifact.config,
    )


def verify(store: Store, name: str, progress: Progress) -> Verified:
    """Read a checkpoint and its chain, and find all damage. For a run, the newest whole checkpoint is read."""
    from pipeline.checkpoint.verify import verify as verify_chain

    artifacts, damaged = candidates(store, name)
    if not artifacts and not damaged:
        raise unknown(store, name)
    damage: list[Damage] = []
    files = size = 0
    if artifacts:
        checkpoint = artifacts[-1].path
        damage, files, size = verify_chain(store, artifacts[-1], progress)
    else:
        checkpoint = max(damaged, key=step_of)
    # Every damaged manifest counts, since it may be that of the newest checkpoint.
    reported = {found.checkpoint for found in damage if found.file == MANIFEST}
    for path, problem in damaged.items():
        if path not in reported:
            damage.append(Damage(path, MANIFEST, problem))
    return Verified(name=name, checkpoint=checkpoint, whole=not damage, files=files, bytes=size, damage=tuple(damage))


def diff(store: Store, first: str, second: str, progress: Progress) -> CheckpointDiff:
    """Compare ``second`` with ``first``: tables, dense parameters and configuration.

    For a table, it counts changed rows (any weight differs), with the largest and mean absolute difference of all
    weights.
    """
    from pipeline.checkpoint.reader import ChainReader, read_dense

    one, two = find_checkpoint(store, first), find_checkpoint(store, second)
    a, b = ChainReader(store, one), ChainReader(store, two)
    common = [table for table in a.tables if a.tables[table] == b.tables.get(table)]
    total = sum(a.tables[table].rows for table in common)
    done = 0
    tables: dict[str, TableDiff] = {}
    for table in common:
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
    tables_differ = {}
    for table in {**a.tables, **b.tables}:
        if a.tables.get(table) != b.tables.get(table):
            tables_differ[table] = (a.tables.get(table), b.tables.get(table))

    then, now = read_dense(store, one), read_dense(store, two)
    dense: dict[str, DenseDiff] = {}
    for name in {**then, **now}:
        before = list(then[name].shape) if name in then else None
        after = list(now[name].shape) if name in now else None
        if before != after:
            dense[name] = DenseDiff(shapes=(before, after))
        else:
            gap = (then[name].double() - now[name].double()).abs()
            dense[name] = DenseDiff(values=gap.numel(), largest=float(gap.max()), mean=float(gap.mean()))
    return CheckpointDiff(
        first=one.path,
        second=two.path,
        steps=(one.summary["step"], two.summary["step"]),
        tables=tables,
        tables_differ=tables_differ,
        dense=dense,
        config=config_changes(one.config, two.config),
    )


def compact(store: Store, name: str, progress: Progress) -> Compacted:
    """Compact a checkpoint's chain."""
    from pipeline.checkpoint.compact import compact as compact_chain

    before = find_checkpoint(store, name)
    after = compact_chain(store, before, progress=progress)
    return Compacted(
        checkpoint=after.path,
        step=after.summary["step"],
        compacted=tuple(before.summary["parents"]),
        bytes_before=before.total_bytes,
        bytes=after.total_bytes,
    )


def gc(
    store: Store, run: str | None, keep_last: int | None, keep_every: int | None, min_age: float, *, dry_run: bool
) -> dict[str, Any]:
    """Remove (or with ``dry_run`` only list) what retention does not need: {"removed", "bytes", "kept", "dry_run"}.

    ``min_age``: the least age in seconds of remains that are removed.
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
