"""Labels of further tasks and weights of rows: from raw columns to typed ones.

Typed columns: ``task:<name>`` (Float32, null where the row has no label of the task) and ``ROW_WEIGHT`` (Float32).
"""

from __future__ import annotations

import numpy as np
import polars as pl

from pipeline.ingest.rejects import RejectedRows
from pipeline.ingest.sampling import came_with
from pipeline.ingest.schema import CLICKED_LATER, DataSpec
from pipeline.ingest.values import number_of
from pipeline.records.dataset import LABEL, ROW_WEIGHT, task_column
from pipeline.specs.label_kind import MAIN_TASK, TaskSpec


def typed(name: str) -> str:
    """Name of the typed column of task ``name``."""
    return f"task:{name}"


def task_columns(
    raw: pl.DataFrame, texts: dict[str, pl.Series], clicked: pl.Series, spec: DataSpec, rejected: RejectedRows
) -> list[pl.Series]:
    """The typed columns of all further tasks, and of the weights if there are some. ``clicked``: the main label.

    A 0 that was written before the row's click came says nothing of what follows the click: it is missing.
    """
    labels, follow_click = {MAIN_TASK: clicked}, after_click(spec)
    columns = []
    for task in spec.tasks:
        values = task.kind.read(raw[task.column], texts.get(task.column), task, spec, rejected)
        if CLICKED_LATER in raw.columns and task.name in follow_click:
            unknown = (raw[CLICKED_LATER] > 0) & (values == 0)
            values = values.set(unknown.fill_null(False), None)
        if task.given is not None:
            values = _given(values, labels[task.given], task, rejected)
        labels[task.name] = values
        columns.append(values.alias(typed(task.name)))
    if spec.row_weight is not None:
        columns.append(_weights(raw, texts, spec.row_weight, spec, rejected))
    return columns


def after_click(spec: DataSpec) -> list[str]:
    """The further tasks that cannot happen without a click: those given it, and those given one of these."""
    names = [MAIN_TASK]
    # Each is behind the one that it is given.
    for task in spec.tasks:
        if task.given in names:
            names.append(task.name)
    return names[1:]


def _given(values: pl.Series, given: pl.Series, task: TaskSpec, rejected: RejectedRows) -> pl.Series:
    # The labels of a task that cannot happen where `given` is 0: there they are 0, in the whole log (ESMM, 2018).
    never = (given == 0).fill_null(False)
    impossible = (never & (values == 1)).fill_null(False)
    rejected.add(
        impossible.to_numpy(),
        f"{task.column} without {task.given}",
        lambda _: f"{task.column} is {task.positive!r}, but the row has no {task.given} (data.tasks.{task.name}.given)",
        task.column,
    )
    return values.zip_with(~never, pl.Series([0.0], dtype=pl.Float32).new_from_index(0, len(values)))


def _weights(
    raw: pl.DataFrame, texts: dict[str, pl.Series], column: str, spec: DataSpec, rejected: RejectedRows
) -> pl.Series:
    weights = number_of(raw[column], texts.get(column), column, spec, rejected)
    wrong = (weights.is_null() | (weights < 0)).to_numpy()
    rejected.add(
        wrong, f"{column} is no weight", lambda i: f"{column} is {weights[i]}, expected a number from 0 on", column
    )
    return weights.cast(pl.Float32).alias(ROW_WEIGHT)


def stored_columns(frame: pl.DataFrame, spec: DataSpec) -> list[pl.Series]:
    """The columns of a dataset's files for typed rows ``frame``: a missing label is NaN."""
    columns = [frame[typed(task.name)].fill_null(np.nan).alias(task_column(task.name)) for task in spec.tasks]
    if spec.row_weight is not None:
        columns.append(frame[ROW_WEIGHT])
    if spec.sampling.active:
        columns.append(came_with(frame, spec))
    return columns


def labels_of(frame: pl.DataFrame, spec: DataSpec) -> dict[str, np.ndarray]:
    """The labels of transformed rows ``frame`` by task, NaN where missing; the main task comes first."""
    labels = {MAIN_TASK: frame[LABEL].to_numpy()}
    for task in spec.tasks:
        labels[task.name] = frame[task_column(task.name)].to_numpy()
    return labels
