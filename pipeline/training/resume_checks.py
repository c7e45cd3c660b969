"""Checks what a checkpoint allows: another length, another coding of the last one, rows whose ids changed."""

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
from pipeline.training.lr_schedule import cycled, first_cycle, planned_steps, warmup_steps
from pipeline.training.optimizer import steps_before

LENGTH = ("epochs", "max_steps")
_EXACT = "fp32"


def planned_before(train: TrainConfig, then: Mapping[str, Any], rows: int) -> int:
    """Return the steps that were planned when a checkpoint of this training was written.

    Args:
        then: The resolved configuration in the checkpoint's record. All other relevant settings are the same.
    """
    former = then.get("train", {})
    # A setting that the record lacks counts with its present value.
    length = {name: former[name] for name in LENGTH if name in former}
    return planned_steps(replace(train, **length), rows)


def check_length(train: TrainConfig, then: Mapping[str, Any], step: int, total: int, path: str) -> None:
    """Raise ConfigError where checkpoint ``path`` has taken more steps than the ``total`` that are planned now."""
    if step <= total:
        return
    # Name the former settings, or, where none of them has changed, the steps that were taken.
    former = _overrides(_changes(train, then)) or f"train.max_steps={step}"
    raise ConfigError(
        f"{_length(train)} plan {total:,} steps, but this training has already taken {step:,} ({path}), and steps "
        "cannot be undone",
        hint=f"{former} for the training as it is; run=<another name> for one of "
        f"{total:,} steps; or force=true to train this one again from the start",
    )


def check_average(train: TrainConfig, then: Mapping[str, Any], step: int, total: int, rows: int, path: str) -> None:
    """Raise ConfigError where a shortened training would end without the average of its weights.

    The average of a shorter training starts earlier. What checkpoint ``path``, taken after ``step``, missed of it is
    lost.

    Args:
        total: Steps planned now.
        rows: Rows of an epoch.
    """
    before, average = planned_before(train, then, rows), train.average
    if not (average.active and average.use and total < before):
        return
    now, first = steps_before(average, total), steps_before(average, before)
    if now == first or step <= now:
        return
    raise ConfigError(
        f"{_length(train)} plan {total:,} steps with an average of the weights from step {now + 1:,} on, but this "
        f"training was planned with {before:,} and has taken {step:,} ({path}): its average starts with step "
        f"{first + 1:,}",
        hint=f"{_overrides(_changes(train, then))} for the training as it was planned; run=<another name> for one of "
        f"{total:,} steps; or "
        "force=true to train this one again from the start",
    )


def rates_differ(train: TrainConfig, before: int, total: int, step: int, cycle: int | None = None) -> bool:
    """Return whether the steps taken would have had other learning rates if ``total`` steps had been planned.

    Args:
        before: Steps planned when they were taken.
        total: Steps planned now.
        step: Steps taken.
        cycle: Steps after which the schedule restarts; None: it never does.
    """
    if before == total or not step:
        return False
    # Another warm-up gave the first steps other rates, even where the last step's rate is the same.
    if warmup_steps(train, first_cycle(train, before, cycle)) != warmup_steps(train, first_cycle(train, total, cycle)):
        return True
    # The length of a training only changes its last cycle, which is cut short and still falls to its own end.
    last = step - 1
    return cycled(train, last, before, cycle) != cycled(train, last, total, cycle)


def length_line(
    train: TrainConfig, then: Mapping[str, Any], step: int, total: int, rows: int, cycle: int | None = None
) -> str:
    """Return the message that a training resumed at ``step`` now has ``total`` steps; "" where it had as many.

    ``cycle``: steps after which the schedule restarts, whatever the length (None: it never does).
    """
    before = planned_before(train, then, rows)
    if before == total:
        return ""
    moved = []
    for name, old in _changes(train, then).items():
        moved.append(f"train.{name} was {_typed(old)}, is {_typed(getattr(train, name))}")
    line = f"{' and '.join(moved)}: training continues to step {total:,}; {before:,} were planned"
    warm = warmup_steps(train, first_cycle(train, before, cycle))
    average, wanted = train.average, warmup_steps(train, first_cycle(train, total, cycle))
    if step and warm != wanted:
        line += f"; it warmed up for {plural(warm, 'step')}, where {total:,} steps would have had {wanted:,}"
    if average.active and steps_before(average, before) < steps_before(average, total) < step:
        line += (
            f"; the average of the weights has those from step {steps_before(average, before) + 1:,} on, where one of "
            f"{total:,} steps from the start would begin with step {steps_before(average, total) + 1:,}"
        )
    if train.schedule == "constant":
        return line
    # Whatever the length, all cycles but the last one are as they were.
    if cycle is not None and not rates_differ(train, before, total, step, cycle):
        return line
    last = 0.0
    if step:
        last = cycled(train, step - 1, before, cycle)
    if step >= total:
        return f"{line}; the learning rates were {round(last, 3):g} of their peak in the last step, and fall no more"
    return (
        f"{line}; train.schedule={train.schedule} now ends there: the learning rates, {round(last, 3):g} of their peak "
        f"in the last step taken, are {round(cycled(train, step, total, cycle), 3):g} of it in the next one"
    )


def same_coding(checkpoint: CheckpointConfig, then: Mapping[str, Any]) -> bool:
    """Whether configuration ``then`` wrote its last checkpoint in the coding that ``checkpoint`` asks for."""
    return coding_of(checkpoint) == coding_of(_former(then))


def coding_of(checkpoint: CheckpointConfig) -> str:
    """Return the coding of the last checkpoint as part of a file name; equal names mean equal codings."""
    parts = []
    for name in checkpoint.final_settings:
        value = getattr(checkpoint, name)
        # YAML tells 1.0 and 1 apart, but they are one coding.
        if isinstance(value, float):
            value = f"{value:g}"
        parts.append(str(value))
    return "-".join(parts)


def check_finer(checkpoint: CheckpointConfig, then: Mapping[str, Any], path: str) -> None:
    """Raise ConfigError where the last checkpoint ``path`` lacks bits that ``checkpoint`` asks for."""
    former = _former(then)
    lossy = []
    for name in former.final_settings:
        old, new = getattr(former, name), getattr(checkpoint, name)
        if name == "expected_restores":
            # Only the bits that follow from the number of restores count.
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


def _changes(train: TrainConfig, then: Mapping[str, Any]) -> dict[str, Any]:
    changes, former = {}, then.get("train", {})
    for name in LENGTH:
        if name in former and former[name] != getattr(train, name):
            changes[name] = former[name]
    return changes


def _former(then: Mapping[str, Any]) -> CheckpointConfig:
    # A record of another release may have settings that are unknown here; settings that it lacks get their defaults.
    known = asdict(CheckpointConfig()).keys() & then.get("checkpoint", {}).keys()
    return CheckpointConfig(**{name: then["checkpoint"][name] for name in known})


def _length(train: TrainConfig) -> str:
    return _overrides({name: getattr(train, name) for name in LENGTH})


def _overrides(settings: Mapping[str, Any]) -> str:
    return " ".join(f"train.{name}={_typed(value)}" for name, value in settings.items())


def _typed(value: Any) -> str:
    return "null" if value is None else str(value)


def remapped_rows(
    store: Store, init: Artifact, dataset: Artifact, data: DataConfig, checkpoint: CheckpointConfig
) -> dict[str, np.ndarray]:
    """Return {table: global rows, int64 [n]} of ``init`` that belong to another id, or to none, in ``dataset``.

    Only covers tables with a vocabulary: the others keep their rows by the hash. Returns {} where both have the same
    dataset, and where the checkpoint's dataset is gone and ``data.mapping_from`` is null. Raises ArtifactError where it
    is gone and ``data.mapping_from`` names another dataset.
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
    sizes: dict[str, int] = {}
    if then is not None:
        schema = read(DatasetSchema, store, f"{then.path}/schema.json")
        sizes = {column.name: column.rows for column in schema.id_columns}
    changed = {}
    for name in (*data.sparse, *data.event_tables):
        old = former.get(name, name)
        if _vocab(name) not in dataset.files:
            continue
        if then is not None:
            # The old dataset had no vocabulary for this table, so nothing is known about which id had which row.
            if _vocab(old) not in then.files:
                continue
            # The hash's seed is the feature's name, so after a renaming only the ids themselves can be compared.
            column = "hash" if old == name else "id"
            ids, now = _by_row(store, then, old, column, sizes[old]), _by_row(store, dataset, name, column)
            # These rows have another id, or none. Rows beyond the end of ``ids`` were never trained.
            size = min(len(ids), len(now))
            rows = np.concatenate([np.flatnonzero(ids[:size] != now[:size]), np.arange(size, len(ids))])
        elif data.mapping_from == before:
            # The new dataset continued the mapping of the old one, and lists the rows that it freed.
            with store.open(f"{dataset.path}/freed/{name}.parquet") as source:
                rows = np.unique(pq.read_table(source, columns=["row"])["row"].to_numpy())
        else:
            raise ArtifactError(
                f"checkpoint.init_from={checkpoint.init_from} was trained on dataset {before}, which no "
                f"longer exists: the rows of table {name!r} whose ids changed are unknown",
                hint="checkpoint.init_from=null, or a checkpoint of the day before",
            )
        if len(rows):
            changed[name] = rows.astype(np.int64)
    return changed


def _vocab(feature: str) -> str:
    return f"vocab/{feature}.parquet"


def _by_row(store: Store, dataset: Artifact, feature: str, column: str, size: int = 0) -> np.ndarray:
    # Returns the hash (uint64) or id (object) of each row of feature's table, at least ``size`` rows; 0 or None without
    # an id.
    with store.open(f"{dataset.path}/{_vocab(feature)}") as source:
        table = pq.read_table(source, columns=["row", column])
    rows, values = table["row"].to_numpy(), table[column].to_numpy()
    size = max(size, int(rows.max(initial=-1)) + 1)
    by_row: np.ndarray = np.zeros(size, np.uint64)
    if column == "id":
        by_row = np.full(size, None, object)
    by_row[rows] = values
    return by_row
