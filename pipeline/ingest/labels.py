"""Labels of further tasks, weights of rows, and rows without a click that are left out.

Typed columns: ``task:<name>`` (Float32, null where the row has no label of the task) and ``ROW_WEIGHT`` (Float32).

With a share w of the rows without a click kept, the odds of a click among the kept rows are 1 / w times the true ones
(He et al. 2014, "Practical Lessons from Predicting Clicks on Ads at Facebook", section 6.3).
"""

from __future__ import annotations

import numpy as np
import polars as pl

from pipeline.evaluation.metrics import counted_for
from pipeline.ingest.schema import CLICKED_LATER, DataSpec
from pipeline.ingest.values import RejectedRows, number_of
from pipeline.records.dataset import LABEL, NEGATIVE_RATE, ROW_WEIGHT, task_column
from pipeline.specs.label_kind import MAIN_TASK, TaskSpec

# Sums over train rows: the rows that they stand for, and the clicks of these.
COUNTS_FOR, CLICKS_FOR = "counts_for", "clicks_for"
# The shares that the log names in rows with a click.
OF_CLICKS = "rate_of_clicks"
_MIX = (np.uint64(0x9E3779B97F4A7C15), np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB))


def read_rates(raw: pl.DataFrame, texts: dict[str, pl.Series], spec: DataSpec, rejected: RejectedRows) -> pl.Series:
    """Return the typed column of the share that the log names for each row; rows with no valid share are rejected."""
    # A figure above 1 is no share, perhaps a weight. With 0, a row would stand for infinitely many.
    column = spec.sampling.column or ""
    rates = number_of(raw[column], texts.get(column), column, spec, rejected)
    wrong = (rates.is_null() | (rates <= 0) | (rates > 1)).to_numpy()
    rejected.add(
        wrong, f"{column} is no share", lambda i: f"{column} is {rates[i]}, expected a number above 0 to 1", column
    )
    return rates.cast(pl.Float32).alias(NEGATIVE_RATE)


def kept(hashes: np.ndarray, labels: pl.Series, share: float) -> pl.Series:
    """Choose the rows that stay: all with a click, and of the others the ``share`` with the smallest hashes.

    The hashes are mixed anew, because the split uses them, too.
    """
    mixed = hashes + _MIX[0]
    # SplitMix64's finalizer.
    mixed = (mixed ^ (mixed >> np.uint64(30))) * _MIX[1]
    mixed = (mixed ^ (mixed >> np.uint64(27))) * _MIX[2]
    mixed ^= mixed >> np.uint64(31)
    return (labels > 0) | pl.Series((mixed >> np.uint64(32)) < np.uint64(round(share * 2.0**32)))


def thinned(train: pl.DataFrame, share: float | None) -> pl.DataFrame:
    """Multiply the rate that transformed train rows came with by the ``share`` of rows without a click that stayed."""
    if share is None:
        return train
    return train.with_columns((pl.col(NEGATIVE_RATE) * share).cast(pl.Float32))


def sums(spec: DataSpec) -> dict[str, pl.Expr]:
    """Return what is measured of typed train rows for the true click rate, by name; {} if all rows count alike."""
    before = spec.sampling.known_before
    if not (before or spec.row_weight):
        return {}
    rate, weight = pl.lit(spec.sampling.rate or 1.0), pl.lit(1.0)
    if spec.sampling.column is not None:
        rate = pl.col(NEGATIVE_RATE)
    if spec.row_weight:
        weight = pl.col(ROW_WEIGHT).cast(pl.Float64)
    # All clicks were kept, so a row with one stands for itself, and a row without one also for those left out.
    clicked = pl.col(LABEL) > 0
    expressions = {
        COUNTS_FOR: pl.when(clicked).then(weight).otherwise(weight / rate.cast(pl.Float64)),
        CLICKS_FOR: pl.when(clicked).then(weight).otherwise(0.0),
    }
    if spec.sampling.column:
        expressions[OF_CLICKS] = pl.when(clicked).then(rate.cast(pl.Float64))
    return expressions


def rows_counted_for(frame: pl.DataFrame, spec: DataSpec) -> np.ndarray | None:
    """Return how many rows each transformed row of ``frame`` counts for in figures; None if each counts for itself."""
    if not (spec.sampling.known_before or spec.row_weight):
        return None
    weights = np.ones(frame.height, np.float32)
    if spec.row_weight:
        weights = frame[ROW_WEIGHT].to_numpy()
    if not spec.sampling.known_before:
        return weights
    return counted_for(weights, frame[LABEL].to_numpy(), frame[NEGATIVE_RATE].to_numpy())


def typed(name: str) -> str:
    """Return the name of the typed column of task ``name``."""
    return f"task:{name}"


def task_columns(
    raw: pl.DataFrame, texts: dict[str, pl.Series], clicked: pl.Series, spec: DataSpec, rejected: RejectedRows
) -> list[pl.Series]:
    """Return the typed columns of all further tasks, and of weights if there are some. ``clicked``: the main label.

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
        column = spec.row_weight
        weights = number_of(raw[column], texts.get(column), column, spec, rejected)
        wrong = (weights.is_null() | (weights < 0)).to_numpy()
        rejected.add(
            wrong, f"{column} is no weight", lambda i: f"{column} is {weights[i]}, expected a number from 0 on", column
        )
        columns.append(weights.cast(pl.Float32).alias(ROW_WEIGHT))
    return columns


def after_click(spec: DataSpec) -> list[str]:
    """Return the further tasks that cannot happen without a click: those given it, and those given one of these."""
    names = [MAIN_TASK]
    # Each task comes after the one that it is given.
    for task in spec.tasks:
        if task.given in names:
            names.append(task.name)
    return names[1:]


def _given(values: pl.Series, given: pl.Series, task: TaskSpec, rejected: RejectedRows) -> pl.Series:
    # Returns the labels of a task that cannot happen where `given` is 0: there they are 0, in the whole log (ESMM,
    # 2018).
    never = (given == 0).fill_null(False)
    impossible = (never & (values == 1)).fill_null(False)
    rejected.add(
        impossible.to_numpy(),
        f"{task.column} without {task.given}",
        lambda _: f"{task.column} is {task.positive!r}, but the row has no {task.given} (data.tasks.{task.name}.given)",
        task.column,
    )
    return values.zip_with(~never, pl.Series([0.0], dtype=pl.Float32).new_from_index(0, len(values)))


def stored_columns(frame: pl.DataFrame, spec: DataSpec) -> list[pl.Series]:
    """Return the columns of a dataset's files for typed rows ``frame``: a missing label is NaN."""
    columns = [frame[typed(task.name)].fill_null(np.nan).alias(task_column(task.name)) for task in spec.tasks]
    if spec.row_weight is not None:
        columns.append(frame[ROW_WEIGHT])
    if spec.sampling.column is not None:
        columns.append(frame[NEGATIVE_RATE])
    elif spec.sampling.active:
        # Without a column the share is the same for all rows: the configured one, or 1.
        rate = 1.0 if spec.sampling.rate is None else spec.sampling.rate
        columns.append(pl.Series(NEGATIVE_RATE, [rate], pl.Float32).new_from_index(0, frame.height))
    return columns


def labels_of(frame: pl.DataFrame, spec: DataSpec) -> dict[str, np.ndarray]:
    """Return the labels of transformed rows ``frame`` by task, NaN where missing; the main task comes first."""
    labels = {MAIN_TASK: frame[LABEL].to_numpy()}
    for task in spec.tasks:
        labels[task.name] = frame[task_column(task.name)].to_numpy()
    return labels
