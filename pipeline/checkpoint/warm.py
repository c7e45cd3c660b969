"""Warm start: a new training begins with tables (and the dense part) of another checkpoint, as far as they fit.

Tables may be renamed, missing or of another size: rows that the checkpoint does not have keep their initial values,
rows that the model does not have are left out. The position of the data starts anew.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from pipeline.checkpoint.collectives import patiently
from pipeline.checkpoint.index import restore_order
from pipeline.checkpoint.reader import (
    OTHER_MODEL,
    RestoreTarget,
    put_rows,
    read_dense,
    read_index,
    read_state,
    restore_dense,
)
from pipeline.embeddings.tables import TableSpec
from pipeline.errors import ArtifactError, ConfigError
from pipeline.records.checkpoint import TableSize
from pipeline.store.artifacts import Store
from pipeline.store.manifest import Artifact


@torch.no_grad()
def warm_start(
    store: Store,
    artifact: Artifact,
    target: RestoreTarget,
    *,
    tables_only: bool = False,
    rename: dict[str, str] | None = None,
    partly: bool = False,
    towers: dict[str, list[str]] | None = None,
    order: dict[str, list[str]] | None = None,
) -> list[str]:
    """Fill ``target``, whose values are initial ones, from ``artifact``; lines that say what was taken and what left.

    ``rename``: {table in the checkpoint: table of the model}. ``tables_only``: dense parameters and their optimizer
    keep their initial values. ``partly``: so do dense parameters that the checkpoint lacks or has in another shape, as
    between a flat model and one with towers. ``towers``: the model's, as in TrainState; parameters of a tower that had
    other features in the checkpoint keep their initial values too. ``order``: as in TrainState. Collective.
    Raises ConfigError for a rename that names no table, for dense parameters or embedding dimensions that do not fit
    and for features in another order, ArtifactError for a damaged checkpoint.
    """
    lines: list[str] = []

    def read() -> None:
        """Read the chain once; ``lines`` tells what was taken."""
        lines.clear()  # of a try that failed
        chain = restore_order(store, artifact)
        stored = read_index(store, chain[-1]).tables
        pairs = match_tables(stored, target.rows.tables, rename or {})
        for each in chain:
            put_rows(store, each, read_index(store, each), target, {then: now for now, then in pairs.items()})
        lines.extend(_table_lines(stored, target.rows.tables, pairs))
        if tables_only:
            lines.append("dense parameters and their optimizer keep their initial values")
        else:
            _check_order(store, artifact, order or {})
            lines.extend(_read_dense(store, artifact, target, partly, towers or {}))

    patiently(f"starting from {artifact.path}", read)
    return lines


def match_tables(stored: dict[str, TableSize], tables: dict[str, TableSpec], rename: dict[str, str]) -> dict[str, str]:
    """{table of the model: table of the checkpoint} for those in both, after ``rename``; ConfigError if impossible."""
    for then, now in rename.items():
        if then not in stored:
            raise ConfigError(
                f"checkpoint.rename names table {then!r}, which the checkpoint does not have; "
                f"it has: {', '.join(stored)}",
                hint=_without(rename, then),
            )
        if now not in tables:
            raise ConfigError(
                f"checkpoint.rename gives table {then!r} the name {now!r}, which the model does not have; "
                f"it has: {', '.join(tables)}",
                hint=_rename_hint({**rename, then: next(iter(tables))}),
            )
    pairs: dict[str, str] = {}
    for then in sorted(stored, key=lambda name: name not in rename):
        now = rename.get(then, then)
        if now not in tables or (now in pairs and then not in rename):
            continue
        if now in pairs:
            raise ConfigError(
                f"checkpoint.rename gives {pairs[now]!r} and {then!r} the same name {now!r}",
                hint=_without(rename, then),
            )
        if stored[then].dim != tables[now].dim:
            raise ConfigError(
                f"table {now!r} has {stored[then].dim} columns in the checkpoint, {tables[now].dim} in the model",
                hint=f"++model.tables.{now}.dim={stored[then].dim}",
            )
        pairs[now] = then
    return pairs


def _without(rename: dict[str, str], then: str) -> str:
    return _rename_hint({old: new for old, new in rename.items() if old != then})


def _rename_hint(rename: dict[str, str]) -> str:
    """``rename`` as it is typed in a shell: braces and spaces need the quotes."""
    return f"'checkpoint.rename={{{', '.join(f'{old}: {new}' for old, new in rename.items())}}}'"


def _check_order(store: Store, artifact: Artifact, order: dict[str, list[str]]) -> None:
    """ConfigError where the model takes the same features in another order: its layers tell them apart by place."""
    before = read_state(store, artifact)["train"].get("order", {})
    for group, now in order.items():
        then = before.get(group, now)
        if then != now and sorted(then) == sorted(now):
            at = next(place for place, names in enumerate(zip(then, now, strict=True)) if names[0] != names[1])
            raise ConfigError(
                f"data.{group} has the features of checkpoint {artifact.path} in another order: feature {at + 1} was "
                f"{then[at]!r}, is {now[at]!r}, and the dense part tells them apart by their places",
                hint=f"data.{group} in the order {', '.join(then)}, or checkpoint.init_tables_only=true",
            )


def _read_dense(
    store: Store, artifact: Artifact, target: RestoreTarget, partly: bool, towers: dict[str, list[str]]
) -> list[str]:
    """Take the dense part; another optimizer class starts anew, and its settings are always the run's own."""
    state = read_state(store, artifact)
    record, stored = state["optimizer"], state["train"].get("towers", {})
    same = target.optimizer is not None and record is not None and record["class"] == type(target.optimizer).__name__
    moved = tuple(start for start, features in stored.items() if towers.get(start, features) != features)
    if (partly or moved) and (left := _misfits(store, artifact, target, moved)):
        return _read_some(store, artifact, target, left)
    groups = [dict(group) for group in target.optimizer.param_groups] if target.optimizer is not None else []
    try:
        restore_dense(store, artifact, target if same else replace(target, optimizer=None))
    except ArtifactError as error:
        if error.hint != OTHER_MODEL:
            raise
        raise ConfigError(error.message, hint="checkpoint.init_tables_only=true loads only the tables") from None
    for group, now in zip(target.optimizer.param_groups if target.optimizer is not None else [], groups, strict=True):
        group.update({name: value for name, value in now.items() if name != "params"})
    optimizer = "and their optimizer loaded" if same else "loaded, their optimizer starts fresh"
    return [f"dense part: all {len(target.dense)} parameters {optimizer}"]


def _misfits(store: Store, artifact: Artifact, target: RestoreTarget, moved: tuple[str, ...]) -> list[str]:
    """Names of the dense parameters that one side lacks or has in another shape or starting as ``moved``, in order."""
    stored = {name: tuple(value.shape) for name, value in read_dense(store, artifact).items()}
    now = {name: tuple(value.shape) for name, value in target.dense.items()}
    return [name for name in {**now, **stored} if stored.get(name) != now.get(name) or name.startswith(moved)]


def _read_some(store: Store, artifact: Artifact, target: RestoreTarget, left: list[str]) -> list[str]:
    """Take the dense parameters that fit; their optimizer starts anew, for it has seen another model."""
    stored = read_dense(store, artifact)
    taken = [name for name in target.dense if name not in left]
    for name in taken:
        target.dense[name].copy_(stored[name])
    return [
        f"dense part: {len(taken)} of {len(target.dense)} parameters loaded, the optimizer starts fresh",
        *(f"parameter {name}: keeps its initial values" for name in left if name in target.dense),
        *(f"parameter {name} of the checkpoint: not loaded" for name in left if name not in target.dense),
    ]


def _table_lines(stored: dict[str, TableSize], tables: dict[str, TableSpec], pairs: dict[str, str]) -> list[str]:
    lines, whole = [], []
    for name, table in tables.items():
        if name not in pairs:
            lines.append(f"table {name}: not in the checkpoint, keeps its initial values")
            continue
        source, rows = pairs[name], stored[pairs[name]].rows
        if (rows, source) == (table.rows, name):
            whole.append(rows)
            continue
        line = f"table {name}{'' if name == source else f' (was {source})'}: {min(rows, table.rows):,} rows loaded"
        if table.rows > rows:
            line += f", {table.rows - rows:,} new ones keep their initial values"
        if table.rows < rows:
            line += f", {rows - table.rows:,} left out"
        lines.append(line)
    if whole:
        lines.insert(0, f"{len(whole)} tables loaded unchanged, {sum(whole):,} rows")
    return lines + [f"table {name} of the checkpoint: not loaded" for name in stored if name not in pairs.values()]
