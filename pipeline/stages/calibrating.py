"""The calibrating part of the publish stage: some of the held-out rows fit the calibrator, the others are judged."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from pipeline.config import Config
from pipeline.records.dataset import LABEL, SPLIT_HOUR
from pipeline.records.gate import Calibrated
from pipeline.records.model_version import CalibrationCurve, CalibratorRecord
from pipeline.specs.label_kind import LABEL_KINDS, MAIN_TASK

if TYPE_CHECKING:
    from pipeline.training.parquet import SplitReader


@dataclass(frozen=True)
class FittedCalibrator:
    """A calibrator, the candidate's ``logits`` of all rows with it, and the rows [n] that it was not fitted on.

    Where logits are not finite, which the gate holds, it has no curves and was fitted on no rows.
    """

    record: CalibratorRecord
    logits: NDArray[np.float32]
    others: NDArray[np.bool_]

    @property
    def about(self) -> Calibrated | None:
        """What the gate's record says of it, without figures."""
        main = self.record.curves.get(MAIN_TASK)
        if main is None:
            return None
        values = len(main.shifts or ()) if self.record.slices else None
        return Calibrated(
            method=self.record.method, rows=main.rows, clicks=main.clicks, slices=self.record.slices, values=values
        )


def calibrator_of(
    config: Config, split: SplitReader, logits: NDArray[np.float32], codes: dict[str, list[NDArray[np.integer]]]
) -> FittedCalibrator | None:
    """The calibrator of a model that gives the rows of ``split`` these ``logits`` ([n], or [n, T] of several tasks).

    ``codes``: rows of the table of the slices' feature. None where none is asked for. A further task has no curve where
    the rows to fit on are of one class; DataError where they are so for the main one.
    """
    from pipeline.evaluation.calibration_curves import calibrated, fit_curve

    settings, spec = config.publish.calibrator, config.publish.calibrator.spec
    if spec is None:
        return None
    bare = CalibratorRecord(method=spec.name, share=settings.share, slices=settings.slices)
    if not np.isfinite(logits).all():
        return FittedCalibrator(bare, logits, np.ones(len(logits), bool))
    slices = None if settings.slices is None else np.concatenate(codes[settings.slices])
    hours = split.column(SPLIT_HOUR) if config.data.split.by == "hours" else None
    chosen = chosen_rows(split, settings.share, config.seed, hours)
    weights, columns = split.row_weights(), logits[:, None] if logits.ndim == 1 else logits
    curves = dict[str, CalibrationCurve]()
    for place, (name, labels) in enumerate(_labels(split).items()):
        rows = np.flatnonzero(chosen & np.isfinite(labels))
        if name != MAIN_TASK and len(np.unique(labels[rows])) < 2:
            continue
        curves[name] = fit_curve(
            spec,
            labels[rows],
            columns[rows, place],
            None if weights is None else weights[rows],
            None if slices is None else slices[rows],
            settings.slice_values,
        )
    record = replace(bare, curves=curves)
    ids = {} if settings.slices is None else {settings.slices: slices}
    tasks = [task.name for task in split.schema.tasks]
    return FittedCalibrator(record, calibrated(record, tasks, logits, ids), ~chosen)


def _labels(split: SplitReader) -> dict[str, NDArray[np.float32]]:
    """Labels [n] of every task in the order of the logits, NaN where missing; all NaN for one without classes."""
    further, none = split.labels(), np.full(split.rows, np.nan, np.float32)
    classes = {task.name: LABEL_KINDS.get(task.kind).classes for task in split.schema.tasks}
    return {MAIN_TASK: split.column(LABEL), **{name: further[name] if classes[name] else none for name in classes}}


def chosen_rows(
    split: SplitReader, share: float, seed: int, hours: NDArray[np.floating] | None = None
) -> NDArray[np.bool_]:
    """The rows [n] of ``split`` that the calibrator is fitted on: about ``share`` of them.

    ``hours`` [n]: those of test rows that are the last hours of a day. The first of these hours fit the curve, so that
    it is judged as it will serve, by what comes later. Without hours, or of one alone: rows by a hash of ``seed`` and
    number.
    """
    if hours is None or not len(hours) or hours.min() == hours.max():
        return _by_hash(split, share, seed)
    values, counts = np.unique(hours, return_counts=True)
    before = np.cumsum(counts)[:-1] / len(hours)  # the share of rows in an hour and those before it
    return np.asarray(hours <= values[int(np.argmin(np.abs(before - share)))])


def _by_hash(split: SplitReader, share: float, seed: int) -> NDArray[np.bool_]:
    """SplitMix64's finaliser (Steele et al. 2014) of the rows' numbers, so that neighbours fall independently."""
    numbers = [np.arange(group.first, group.first + group.rows, dtype=np.uint64) for group in split.groups]
    mixed = np.concatenate([np.zeros(0, np.uint64), *numbers])
    with np.errstate(over="ignore"):
        mixed = (mixed + np.uint64(seed % 2**32 + 1) * np.uint64(2**32)) * np.uint64(0x9E3779B97F4A7C15)
        mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    mixed ^= mixed >> np.uint64(31)
    return np.asarray((mixed >> np.uint64(32)) < np.uint64(round(share * 2.0**32)))
