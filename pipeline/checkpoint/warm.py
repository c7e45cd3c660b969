"""Warm start: a new training begins with tables (and the dense part) of another checkpoint, as far as they fit.

Tables may be renamed, missing or of another size: rows that the checkpoint does not have keep their initial values, and
rows that the model does not have are left out. The position in the data starts anew.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch

from pipeline.checkpoint.collectives import retry_on_all_ranks
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
from pipeline.config.sequences import event_feature
from pipeline.core.errors import ArtifactError, ConfigError
from pipeline.embeddings.tables import TableSpec
from pipeline.records.checkpoint import TableSize
from pipeline.records.dataset import DatasetSchema
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
    """Fill ``target``, whose values are initial ones, from ``artifact``. Collective.

    Args:
        tables_only: Whether dense parameters and their optimizer keep their initial values.
        rename: {table in the checkpoint: table of the model}.
        partly: Whether dense parameters that the checkpoint lacks or has in another shape, as between a flat model and
            one with towers, keep their initial values.
        towers: The model's towers, as in TrainState. Parameters of a tower that had other features in the checkpoint
            keep their initial values too.
        order: The order of features, as in TrainState.

    Returns:
        Lines that say what was taken and what was left.

    Raises:
        ConfigError: A rename names no table, dense parameters or embedding dimensions do not fit, or features are in
            another order.
        ArtifactError: The checkpoint is damaged.
    """
    lines: list[str] = []

    def read() -> None:
        # Drop what a try that failed on another rank has left.
        lines.clear()
        chain = restore_order(store, artifact)
        stored = read_index(store, chain[-1]).tables
        source_of = match_tables(stored, target.rows.tables, rename or {})
        names = {source: table for table, source in source_of.items()}
        for checkpoint in chain:
            put_rows(store, checkpoint, read_index(store, checkpoint), target, names)
        lines.extend(_describe_tables(stored, target.rows.tables, source_of))
        if tables_only:
            lines.append("dense parameters and their optimizer keep their initial values")
        else:
            former = read_state(store, artifact)["train"].get("order", {})
            check_order(former, order or {}, artifact.path, rename, ", or checkpoint.init_tables_only=true")
            lines.extend(_load_dense(store, artifact, target, partly, towers or {}))

    retry_on_all_ranks(f"starting from {artifact.path}", read)
    return lines


def match_tables(stored: dict[str, TableSize], tables: dict[str, TableSpec], rename: dict[str, str]) -> dict[str, str]:
    """Map the tables of the model to those of the checkpoint, if in both, after ``rename``; ConfigError if impossible.

    ``rename`` is {table of the checkpoint: table of the model}.
    """
    for then, now in rename.items():
        if then not in stored:
            raise ConfigError(
                f"checkpoint.rename names table {then!r}, which the checkpoint does not have; "
                f"it has: {', '.join(stored)}",
                hint=_rename_hint(rename, without=then),
            )
        if now not in tables:
            raise ConfigError(
                f"checkpoint.rename gives table {then!r} the name {now!r}, which the model does not have; "
                f"it has: {', '.join(tables)}",
                hint=_rename_hint({**rename, then: next(iter(tables))}),
            )
    source_of: dict[str, str] = {}
    # Renamed tables come first: where two would have the same name, the renamed one gets it.
    for then in sorted(stored, key=lambda name: name not in rename):
        now = rename.get(then, then)
        if now not in tables or (now in source_of and then not in rename):
            continue
        if now in source_of:
            raise ConfigError(
                f"checkpoint.rename gives {source_of[now]!r} and {then!r} the same name {now!r}",
                hint=_rename_hint(rename, without=then),
            )
        if stored[then].dim != tables[now].dim:
            raise ConfigError(
                f"table {now!r} has {stored[then].dim} columns in the checkpoint, {tables[now].dim} in the model",
                hint=f"++model.tables.{now}.dim={stored[then].dim}",
            )
        source_of[now] = then
    return source_of


def _rename_hint(rename: dict[str, str], without: str | None = None) -> str:
    # The text is as typed in a shell, where braces and spaces need the quotes.
    names = ", ".join(f"{old}: {new}" for old, new in rename.items() if old != without)
    return f"'checkpoint.rename={{{names}}}'"


def _describe_tables(
    stored: dict[str, TableSize], tables: dict[str, TableSpec], source_of: dict[str, str]
) -> list[str]:
    lines, whole = [], []
    for name, table in tables.items():
        if name not in source_of:
            lines.append(f"table {name}: not in the checkpoint, keeps its initial values")
            continue
        source = source_of[name]
        rows = stored[source].rows
        if (rows, source) == (table.rows, name):
            whole.append(rows)
            continue
        line = f"table {name}"
        if name != source:
            line += f" (was {source})"
        line += f": {min(rows, table.rows):,} rows loaded"
        if table.rows > rows:
            line += f", {table.rows - rows:,} new ones keep their initial values"
        if table.rows < rows:
            line += f", {rows - table.rows:,} left out"
        lines.append(line)
    if whole:
        lines.insert(0, f"{len(whole)} tables loaded unchanged, {sum(whole):,} rows")
    for name in stored:
        if name not in source_of.values():
            lines.append(f"table {name} of the checkpoint: not loaded")
    return lines


def feature_order(schema: DatasetSchema) -> dict[str, list[str]]:
    """Return the features by group of ``data``, in the order in which a model of ``schema`` takes them."""
    order = {"dense": list(schema.dense), "sparse": [column.name for column in schema.sparse]}
    if schema.sequences:
        order["sequences"] = [sequence.name for sequence in schema.sequences]
    for sequence in schema.sequences:
        # The embeddings of an event's features lie side by side.
        start = event_feature(sequence.name, "")
        order[f"sequences.{sequence.name}.features"] = [column.name.removeprefix(start) for column in sequence.columns]
    return order


def check_order(
    former: Mapping[str, list[str]],
    order: Mapping[str, list[str]],
    path: str,
    rename: Mapping[str, str] | None = None,
    remedy: str = ", and nightjar ingest force=true, which makes the dataset anew",
) -> None:
    """Raise ConfigError if features are in another order than those of the checkpoint at ``path``.

    The model's layers identify features by position, so a new feature may only take the place of one that is gone.

    Args:
        former: The order that the checkpoint records, as in TrainState.
        order: That of the model, in the same form.
        rename: {table of the checkpoint: table of the model}.
        remedy: The end of the hint, after the order that the checkpoint needs.
    """
    names = rename or {}
    for group, now in order.items():
        then = [names.get(name, name) for name in former.get(group, now)]
        # Layers for another number of features have other shapes, which ``restore_dense`` reports.
        if len(then) != len(now):
            continue
        moved = [place for place, name in enumerate(now) if name in then and name != then[place]]
        if not moved:
            continue
        added = iter([name for name in now if name not in then])
        wanted = [name if name in now else next(added) for name in then]
        raise ConfigError(
            f"data.{group} has the features of checkpoint {path} in another order: feature {moved[0] + 1} was "
            f"{then[moved[0]]!r}, is {now[moved[0]]!r}, and the dense part tells them apart by their places",
            hint=f"data.{group} in the order {', '.join(wanted)}{remedy}",
        )


def _load_dense(
    store: Store, artifact: Artifact, target: RestoreTarget, partly: bool, towers: dict[str, list[str]]
) -> list[str]:
    state = read_state(store, artifact)

    # 1. If only a part fits, load that part, and start the optimizer fresh, since its state belongs to another model.
    moved = []
    for start, features in state["train"].get("towers", {}).items():
        if towers.get(start, features) != features:
            moved.append(start)
    if partly or moved:
        stored = read_dense(store, artifact)
        fitting, initial, left_out = [], [], []
        for name, parameter in target.dense.items():
            fits = name in stored and stored[name].shape == parameter.shape
            if fits and not name.startswith(tuple(moved)):
                fitting.append(name)
            else:
                initial.append(f"parameter {name}: keeps its initial values")
        for name in stored:
            if name not in target.dense:
                left_out.append(f"parameter {name} of the checkpoint: not loaded")
        if initial or left_out:
            for name in fitting:
                target.dense[name].copy_(stored[name])
            counts = f"{len(fitting)} of {len(target.dense)} parameters loaded"
            return [f"dense part: {counts}, the optimizer starts fresh", *initial, *left_out]

    # 2. Another optimizer class starts fresh, and the settings of its groups are always the run's own.
    optimizer, record = target.optimizer, state["optimizer"]
    same = optimizer is not None and record is not None and record["class"] == type(optimizer).__name__
    groups = []
    if optimizer is not None:
        # Keep copies, because loading the state overwrites the settings.
        groups = [dict(group) for group in optimizer.param_groups]
    try:
        restore_dense(store, artifact, target if same else replace(target, optimizer=None))
    except ArtifactError as error:
        if error.hint != OTHER_MODEL:
            raise
        raise ConfigError(error.message, hint="checkpoint.init_tables_only=true loads only the tables") from None
    if optimizer is not None:
        for group, settings in zip(optimizer.param_groups, groups, strict=True):
            group.update({name: value for name, value in settings.items() if name != "params"})
    what = "and their optimizer loaded" if same else "loaded, their optimizer starts fresh"
    return [f"dense part: all {len(target.dense)} parameters {what}"]
