"""What a checkpoint allows: another length, another coding of the last one, rows whose ids changed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, replace
from typing import Any

import numpy as np
import pyarrow.parquet as pq

from pipeline.checkpoint.quantise import bits_for_restores
from pipeline.config.checkpoint import CheckpointConfig
from pipeline.config.data import DataConfig
from pipeline.config.train import TrainConfig
from pipeline.core.errors import ArtifactError, ConfigError
from pipeline.core.units import plural
from pipeline.records.dataset import DatasetSchema, dataset_path
from pipeline.records.record import read
from pipeline.store.artifacts import Store
from pipeline.store.manifest import Artifact
from pipeline.training.lr_schedule import lr_factor, planned_steps, warmup_steps
from pipeline.training.optimizer import steps_before

LENGTH = ("epochs", "max_steps")
_EXACT = "fp32"


def planned_before(train: TrainConfig, then: Mapping[str, Any], rows: int) -> int:
    """Steps that were planned when a checkpoint of this training was written.

    ``then``: the resolved configuration in the checkpoint's record. All other settings that count are the same.
    """
    return planned_steps(replace(train, **_length(then.get("train", {}))), rows)


def check_length(train: TrainConfig, then: Mapping[str, Any], step: int, total: int, path: str) -> None:
    """Raise ConfigError where checkpoint ``path`` has taken more steps than the ``total`` that are planned now."""
    if step <= total:
        return
    former = " ".join(f"train.{name}={_typed(value)}" for name, value in _changes(train, then).items())
    raise ConfigError(
        f"train.epochs={train.epochs} train.max_steps={_typed(train.max_steps)} plan {total:,} steps, but this "
        f"training has already taken {step:,} ({path}), and steps cannot be undone",
        hint=f"{former or f'train.max_steps={step}'} for the training as it is; run=<another name> for one of "
        f"{total:,} steps; or force=true to train this one again from the start",
    )


def check_average(train: TrainConfig, then: Mapping[str, Any], step: int, total: int, rows: int, path: str) -> None:
    """Raise ConfigError where a training made shorter would end without the average of its weights.

    That of a shorter training starts earlier. What checkpoint ``path``, taken after ``step``, has missed of it is lost.

    Args:
        total: steps planned now.
        rows: rows of an epoch.
    """
    before, average = planned_before(train, then, rows), train.average
    if not (average.active and average.use and total < before):
        return
    now, first = steps_before(average, total), steps_before(average, before)
    if now == first or step <= now:
        return
    former = " ".join(f"train.{name}={_typed(value)}" for name, value in _changes(train, then).items())
    raise ConfigError(
        f"train.epochs={train.epochs} train.max_steps={_typed(train.max_steps)} plan {total:,} steps with an average "
        f"of the weights from step {now + 1:,} on, but this training was planned with {before:,} and has taken "
        f"{step:,} ({path}): its average starts with step {first + 1:,}",
        hint=f"{former} for the training as it was planned; run=<another name> for one of {total:,} steps; or "
        "force=true to train this one again from the start",
    )


def rates_differ(train: TrainConfig, before: int, total: int, step: int, cycle: int | None = None) -> bool:
    """Return whether the steps taken would have had other learning rates if ``total`` steps had been planned.

    Args:
        before: steps that were planned when they were taken.
        total: steps planned now.
        step: steps taken.
        cycle: steps after which the schedule begins anew, whatever the length; None: it spans all.
    """
    if before == total or not step or cycle is not None:
        return False
    last = step - 1
    return warmup_steps(train, before) != warmup_steps(train, total) or lr_factor(train, last, before) != lr_factor(
        train, last, total
    )


def length_line(
    train: TrainConfig, then: Mapping[str, Any], step: int, total: int, rows: int, cycle: int | None = None
) -> str:
    """The line that says that a training resumed at ``step`` now has ``total`` steps; "" where it had as many.

    ``cycle``: steps after which the schedule begins anew, whatever the length (None: it spans all).
    """
    before = planned_before(train, then, rows)
    if before == total:
        return ""
    now = {name: getattr(train, name) for name in LENGTH}
    moved = [f"train.{name} was {_typed(old)}, is {_typed(now[name])}" for name, old in _changes(train, then).items()]
    line = f"{' and '.join(moved)}: training continues to step {total:,}; {before:,} were planned"
    average, warm, wanted = train.average, warmup_steps(train, before), warmup_steps(train, total)
    if cycle is None and step and warm != wanted:
        line += f"; it warmed up for {plural(warm, 'step')}, where {total:,} steps would have had {wanted:,}"
    if average.active and steps_before(average, before) < steps_before(average, total) < step:
        line += (
            f"; the average of the weights has those from step {steps_before(average, before) + 1:,} on, where one of "
            f"{total:,} steps from the start would begin with step {steps_before(average, total) + 1:,}"
        )
    if train.schedule == "constant" or cycle is not None:
        return line
    last = lr_factor(train, step - 1, before) if step else 0.0
    if step >= total:
        return f"{line}; the learning rates were {round(last, 3):g} of their peak in the last step, and fall no more"
    return (
        f"{line}; train.schedule={train.schedule} now ends there: the learning rates, {round(last, 3):g} of their peak "
        f"in the last step taken, are {round(lr_factor(train, step, total), 3):g} of it in the next one"
    )


def same_coding(checkpoint: CheckpointConfig, then: Mapping[str, Any]) -> bool:
    """Whether configuration ``then`` wrote its last checkpoint in the coding that ``checkpoint`` asks for."""
    return coding_of(checkpoint) == coding_of(_former(then))


def coding_of(checkpoint: CheckpointConfig) -> str:
    """The coding of the last checkpoint as part of a file name; equal names mean equal codings."""
    values = [getattr(checkpoint, name) for name in checkpoint.final_settings]
    return "-".join(f"{value:g}" if isinstance(value, float) else str(value) for value in values)


def check_finer(checkpoint: CheckpointConfig, then: Mapping[str, Any], path: str) -> None:
    """Raise ConfigError where the last checkpoint ``path`` lacks bits that ``checkpoint`` asks for."""
    former = _former(then)
    lossy = []
    for name in former.final_settings:
        old, new = getattr(former, name), getattr(checkpoint, name)
        if name == "expected_restores":
            # Only the bits count that follow from it.
            old, new = bits_for_restores(old), bits_for_restores(new)
        if old not in (_EXACT, new):
            lossy.append(name)
    if not lossy:
        return
    old = " ".join(f"checkpoint.{name}={getattr(former, name)}" for name in lossy)
    now = " ".join(f"checkpoint.{name}={getattr(checkpoint, name)}" for name in lossy)
    raise ConfigError(
        f"this training is finished and its last checkpoint {path} was written with {old}: the bits that this rounded "
        f"away are lost, so it cannot be written with {now}",
        hint=f"{old}; or run=<another name>, which trains again",
    )


def _length(settings: Mapping[str, Any]) -> dict[str, Any]:
    return {name: settings[name] for name in LENGTH if name in settings}


def _changes(train: TrainConfig, then: Mapping[str, Any]) -> dict[str, Any]:
    return {name: old for name, old in _length(then.get("train", {})).items() if old != getattr(train, name)}


def _former(then: Mapping[str, Any]) -> CheckpointConfig:
    known = {name: value for name, value in then.get("checkpoint", {}).items() if name in asdict(CheckpointConfig())}
    return CheckpointConfig(**known)


def _typed(value: Any) -> str:
    return "null" if value is None else str(value)


def remapped_rows(
    store: Store, init: Artifact, dataset: Artifact, data: DataConfig, checkpoint: CheckpointConfig
) -> dict[str, np.ndarray]:
    """{table: global rows, int64 [n]} of checkpoint ``init`` that belong to another id, or to none, in ``dataset``.

    Only tables with a vocabulary: the others keep their rows by the hash. {} where both have the same dataset, and
    where the checkpoint's dataset is gone and ``data.mapping_from`` is null. ArtifactError where it is gone and
    ``data.mapping_from`` names another dataset.
    """
    key = init.inputs.get("dataset", "")
    recorded = init.config.get("data", {})
    before = dataset_path(str(recorded.get("name")), key, recorded.get("day"))
    if not key or key == dataset.key:
        return {}
    then = store.find(before)
    if then is None and data.mapping_from is None:
        return {}
    former = {now: old for old, now in checkpoint.rename.items()}
    changed = {}
    sizes = {} if then is None else _table_rows(store, then)
    for name in (column for column in (*data.sparse, *data.event_tables) if _vocab(column) in dataset.files):
        old = former.get(name, name)
        if then is not None and _vocab(old) in then.files:
            # The hash's seed is the feature's name.
            column = "hash" if old == name else "id"
            ids = _by_row(store, then, old, column, sizes[old])
            changed[name] = _differing(ids, _by_row(store, dataset, name, column))
        elif then is None:
            if data.mapping_from != before:
                raise ArtifactError(
                    f"checkpoint.init_from={checkpoint.init_from} was trained on dataset {before}, which no "
                    f"longer exists: the rows of table {name!r} whose ids changed are unknown",
                    hint="checkpoint.init_from=null, or a checkpoint of the day before",
                )
            changed[name] = _freed(store, dataset, name)
    return {name: rows for name, rows in changed.items() if len(rows)}


def _vocab(feature: str) -> str:
    return f"vocab/{feature}.parquet"


def _table_rows(store: Store, dataset: Artifact) -> dict[str, int]:
    schema = read(DatasetSchema, store, f"{dataset.path}/schema.json")
    return {column.name: column.rows for column in schema.id_columns}


def _by_row(store: Store, dataset: Artifact, feature: str, column: str, size: int = 0) -> np.ndarray:
    # Hash (uint64) or id (object) of each row of feature's table, size or more; 0 or None without an id.
    with store.open(f"{dataset.path}/{_vocab(feature)}") as source:
        table = pq.read_table(source, columns=["row", column])
    rows, values = table["row"].to_numpy(), table[column].to_numpy()
    size = max(size, int(rows.max(initial=-1)) + 1)
    by_row = np.zeros(size, np.uint64) if column == "hash" else np.full(size, None, object)
    by_row[rows] = values
    return by_row


def _differing(then: np.ndarray, now: np.ndarray) -> np.ndarray:
    # Rows of then with another value, or none, in now; rows beyond the end of then were never trained.
    size = min(len(then), len(now))
    gone = np.arange(size, len(then))
    return np.concatenate([np.flatnonzero(then[:size] != now[:size]), gone]).astype(np.int64)


def _freed(store: Store, dataset: Artifact, feature: str) -> np.ndarray:
    # The rows of feature that dataset lists as freed when it continued the mapping of the one before.
    with store.open(f"{dataset.path}/freed/{feature}.parquet") as source:
        return np.unique(pq.read_table(source, columns=["row"])["row"].to_numpy()).astype(np.int64)
