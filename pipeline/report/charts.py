"""The plots of a run's page: curves over training steps, and calibration."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from pipeline import units
from pipeline.records.gate import Curve
from pipeline.records.result import Evaluation
from pipeline.report.page import Figure
from pipeline.report.svg import Axis, Point, ReferenceLine, line_plot, percent_tick, reliability_plot

STEPS = Axis(title="step", from_zero=True, whole=True)
WAIT = Axis(title="wait", from_zero=True, show=percent_tick)


def run_figures(records: Sequence[Mapping[str, Any]], scores: Evaluation, reliability: Curve | None) -> list[Figure]:
    """Plot loss, NE, speed, data wait and learning rate over steps, and calibration; unknown ones are left out."""
    return [
        *_curve(records, "loss", "Training loss", "nats per sample", Axis(title="loss")),
        *_curve(records, "ne_window", "Training NE", "over a window of steps", Axis(title="NE"), _ne_lines(scores)),
        *_validation_plot(records),
        *calibration(reliability),
        *_curve(records, "samples_per_s", "Speed", "samples per second", Axis(title="samples/s", from_zero=True)),
        *_curve(records, "data_wait_share", "Waiting for data", "share of the time", WAIT),
        *_curve(records, "lr", "Learning rate", "dense parts", Axis(title="rate", from_zero=True)),
    ]


def step_points(records: Sequence[Mapping[str, Any]], key: str) -> tuple[Point, ...]:
    """Return (step, value) of each record of ``metrics.jsonl`` that has a figure ``key``."""
    points = []
    for record in records:
        value = record.get(key)
        if units.known(value):
            points.append((float(record["step"]), float(value)))
    return tuple(points)


def _validation_plot(records: Sequence[Mapping[str, Any]]) -> Iterator[Figure]:
    # NE of the validation rows with the best validation marked, and dashed that of the train rows.
    points = step_points(records, "validation_ne")
    if not points:
        return
    last = [record for record in records if units.known(record.get("validation_ne"))][-1]
    step, best = float(last["best_step"]), float(last["best_ne"])
    message = f"best {units.decimal(best)} after step {units.count(step)}"
    count = units.plural(len(points), "validation")
    label = f"NE of validation rows in {count}, {message}; dashed the NE of train rows"
    plot = line_plot(
        points,
        x=STEPS,
        y=Axis(title="NE"),
        label=label,
        beside=step_points(records, "ne_window"),
        marked=((step, best), message),
    )
    yield Figure("Validation NE", f"{message}; dashed: train rows", plot)


def _ne_lines(scores: Evaluation) -> list[ReferenceLine]:
    lines = []
    for value, name in ((scores.ne, "test"), (scores.bayes_ne, "best reachable")):
        if units.known(value):
            lines.append(ReferenceLine(value, f"{name} {units.decimal(value)}"))
    return lines


def _curve(
    records: Sequence[Mapping[str, Any]],
    key: str,
    title: str,
    unit: str,
    axis: Axis,
    references: Sequence[ReferenceLine] = (),
) -> Iterator[Figure]:
    points = step_points(records, key)
    if points:
        last = axis.show(points[-1][1], abs(points[-1][1]) / 1000 or 1.0)
        label = f"{title} ({unit}) over {units.count(points[-1][0])} steps, last {last}"
        yield Figure(title, unit, line_plot(points, x=STEPS, y=axis, references=references, label=label))


def calibration(curve: Curve | None, whose: str = "") -> Iterator[Figure]:
    """Yield the reliability plot of ``curve``, if there is one. ``whose``: the name of the model."""
    if curve is not None and curve.predicted:
        of = f" of the {whose}" if whose else ""
        plot = reliability_plot(
            curve.predicted,
            curve.observed,
            curve.rows,
            x=Axis(title="predicted probability of a click", from_zero=True),
            y=Axis(title="observed", from_zero=True),
            label=f"Observed click rate against predicted probability{of} in {len(curve.predicted)} bins",
        )
        yield Figure(f"Calibration{of}", "observed click rate, 95% intervals", plot)
