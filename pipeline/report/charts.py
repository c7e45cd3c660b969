"""The plots of a run's page: curves over training steps, calibration, sequences' lengths and attention."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from pipeline.core import units
from pipeline.records.dataset import SequenceProfile
from pipeline.records.gate import Curve
from pipeline.records.result import Evaluation
from pipeline.report.page import Figure
from pipeline.report.svg import (
    BOTTOM,
    Axis,
    Frame,
    Point,
    ReferenceLine,
    drawing,
    line_plot,
    percent_tick,
    reliability_plot,
    tag,
    ticks,
)

STEPS = Axis(title="step", from_zero=True, whole=True)
WAIT = Axis(title="wait", from_zero=True, show=percent_tick)
# Width of a bar's drawing, in the units of its viewBox.
BAR = 1000
# Limits: the newest bars of an example row, and letters of an event's names.
MOST_EVENTS, MOST_LETTERS = 40, 36
AGE_UNITS = ((86_400 * 365.25, "years"), (86_400, "days"), (3600, "hours"), (60, "minutes"), (1, "seconds"))


def run_figures(records: Sequence[Mapping[str, Any]], scores: Evaluation, reliability: Curve | None) -> list[Figure]:
    """Plot loss, NE, speed, data wait and learning rate over steps, and calibration; unknown ones are left out."""
    lines = []
    for value, name in ((scores.ne, "test"), (scores.bayes_ne, "best reachable")):
        if units.known(value):
            lines.append(ReferenceLine(value, f"{name} {units.decimal(value)}"))
    return [
        *_curve(records, "loss", "Training loss", "nats per sample", Axis(title="loss")),
        *_curve(records, "ne_window", "Training NE", "over a window of steps", Axis(title="NE"), lines),
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
    # Plot NE of the validation rows with the best validation marked, and NE of the train rows as a dashed line.
    points = step_points(records, "validation_ne")
    if not points:
        return
    last = next(record for record in reversed(records) if units.known(record.get("validation_ne")))
    step, best = float(last["best_step"]), float(last["best_ne"])
    message = f"best {units.decimal(best)} after step {units.count(step)}"
    count = units.plural(len(points), "validation")
    label = f"NE of validation rows in {count}, {message}; dashed the NE of train rows"
    plot = line_plot(
        points,
        x=STEPS,
        y=Axis(title="NE"),
        label=label,
        dashed=step_points(records, "ne_window"),
        marked=((step, best), message),
    )
    yield Figure("Validation NE", f"{message}; dashed: train rows", plot)


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
            x=Axis(title="predicted probability", from_zero=True),
            y=Axis(title="observed", from_zero=True),
            label=f"Observed rate against predicted probability{of} in {len(curve.predicted)} bins",
        )
        yield Figure(f"Calibration{of}", "observed rate, 95% intervals", plot)


def sequence_figures(
    profiles: Mapping[str, SequenceProfile], attention: Mapping[str, Mapping[str, Any]]
) -> list[Figure]:
    """Draw of each sequence the histogram of its lengths, and the weights of the events of one row; what is known."""
    figures = []
    for name in dict.fromkeys([*profiles, *attention]):
        if name in profiles:
            figures += _length_histogram(name, profiles[name])
        if attention.get(name, {}).get("events"):
            figures.append(_weights(name, attention[name]))
    return figures


def _length_histogram(name: str, profile: SequenceProfile) -> list[Figure]:
    # Plot the shares of the train rows by their number of events.
    total, width = sum(profile.rows_by_length), profile.events_per_bin
    if not total:
        return []
    spans = [(0, 0)]
    for i in range(len(profile.rows_by_length) - 1):
        spans.append((1 + width * i, width * (i + 1)))
    shares = [rows / total for rows in profile.rows_by_length]
    # The first bin counts the rows without events, whatever the width of the others.
    last = max(spans[-1][1], 1)
    x, y = Axis(title="events", whole=True), Axis(title="share of rows", from_zero=True, show=percent_tick)
    marks = [tick for tick in ticks(0, last, about=6, whole=True) if tick <= last]
    frame = Frame(x, y, marks, ticks(0.0, max(shares)), -0.5, last + 0.5)
    body = frame.grid()
    for (low, high), share in zip(spans, shares, strict=True):
        left, right, top = frame.x(low - 0.4), frame.x(high + 0.4), frame.y(share)
        span = f"{low} to {high} events"
        if high == 0:
            span = "no events"
        elif low == high:
            span = units.plural(high, "event")
        words = f"{span}: {units.percent(share)} of the train rows"
        size = {"x": f"{left:.2f}", "y": f"{top:.1f}", "width": f"{max(right - left, 0.5):.2f}"}
        body.append(tag("rect", tag("title", words), class_="c0", **size, height=f"{BOTTOM - top:.1f}"))
    message = f"mean {profile.mean:.1f}, 99th percentile {profile.p99}, longest {profile.longest}"
    return [Figure(f"Events of {name}", message, drawing(body, f"Train rows by their events of {name}, {message}"))]


def _weights(name: str, example: Mapping[str, Any]) -> Figure:
    # Draw a bar for each event, the newest first. The target, if it has a weight, comes before all of them.
    events: Sequence[Mapping[str, Any]] = list(reversed(example["events"]))
    shown = []
    if example.get("target_weight") is not None:
        shown.append(("the target itself", float(example["target_weight"])))
    for event in events[:MOST_EVENTS]:
        shown.append((_event(event), float(event["weight"])))
    top = max((abs(weight) for _, weight in shown), default=0.0) or 1.0
    attributes = {"viewBox": f"0 0 {BAR} 16", "preserveAspectRatio": "none", "role": "img"}
    rows = []
    for words, weight in shown:
        value = units.decimal(weight, 3)
        label = f"{words}: {value}"
        # Weights that do not come from a softmax may be below 0; their bars have another colour.
        colour = "c3" if weight < 0 else "c0"
        filled = tag("rect", class_=colour, width=f"{max(BAR * abs(weight) / top, 2):.1f}", height=16)
        picture = tag("svg", tag("title", label), filled, class_="stacked-bar", aria_label=label, **attributes)
        rows.append(tag("div", words, class_="rank") + picture + tag("div", value, class_="number"))
    if len(events) > MOST_EVENTS:
        rows.append(tag("div", f"and {units.plural(len(events) - MOST_EVENTS, 'older event')}", class_="rank"))
    row = f"test row {units.count(example['row'])}"
    if target := example.get("target"):
        ids = ", ".join(f"{feature} {value}" for feature, value in target.items())
        row += f" with {ids}"
    return Figure(f"Attention weights of {name}", f"{row}, newest first", tag("div", *rows, class_="stacked-bars"))


def _event(event: Mapping[str, Any]) -> str:
    words = ", ".join(map(str, event["names"].values()))
    if len(words) > MOST_LETTERS:
        words = f"{words[: MOST_LETTERS - 2]}.."
    if event.get("age") is None:
        return words
    # Show an age in the largest unit that it fills, or else in the smallest one.
    seconds = float(event["age"])
    size, unit = next((pair for pair in AGE_UNITS if seconds >= pair[0]), AGE_UNITS[-1])
    return f"{words}, {units.short(round(seconds / size, 1))} {unit} before"
