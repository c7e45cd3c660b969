"""The plots of the HTML report: curves over training steps, and calibration."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from pipeline.report import units
from pipeline.report.svg import Axis, Line, Point, line_plot, reliability_plot

STEPS = Axis(title="step", from_zero=True, whole=True)


def plots_section(
    records: Sequence[Mapping[str, Any]], scores: Mapping[str, Any], reliability: Mapping[str, list[Any]] | None
) -> str:
    """Loss, NE, speed, data wait and learning rate over steps, and calibration; "" where nothing is known."""
    figures = [
        _curve(records, "loss", "Training loss", "nats per sample", Axis(title="loss")),
        _curve(records, "ne_window", "Training NE", "over a window of steps", Axis(title="NE"), _ne_lines(scores)),
        _reliability(reliability),
        _curve(records, "samples_per_s", "Speed", "samples per second", Axis(title="samples/s", from_zero=True)),
        _curve(records, "data_wait_share", "Waiting for data", "share of the time", _share_axis()),
        _curve(records, "lr", "Learning rate", "dense parts", Axis(title="rate", from_zero=True)),
    ]
    found = "".join(figures)
    return f'<section><h2>Training and calibration</h2><div class="plots">{found}</div></section>' if found else ""


def _share_axis() -> Axis:
    def show(value: float, spread: float) -> str:
        return units.percent(value, 0 if spread >= 0.01 else 1 if spread >= 0.001 else 2)

    return Axis(title="wait", from_zero=True, show=show)


def _ne_lines(scores: Mapping[str, Any]) -> list[Line]:
    """Where the held-out rows ended, and the best that is reachable there."""
    lines = []
    if units.known(scores.get("ne")):
        lines.append(Line(scores["ne"], f"held-out {units.decimal(scores['ne'])}"))
    if units.known(scores.get("bayes_ne")):
        lines.append(Line(scores["bayes_ne"], f"best reachable {units.decimal(scores['bayes_ne'])}"))
    return lines


def _curve(
    records: Sequence[Mapping[str, Any]], key: str, title: str, unit: str, axis: Axis, references: Sequence[Line] = ()
) -> str:
    points: list[Point] = [(float(r["step"]), float(r[key])) for r in records if units.known(r.get(key))]
    if not points:
        return ""
    last = axis.show(points[-1][1], abs(points[-1][1]) / 1000 or 1.0)
    label = f"{title} ({unit}) over {units.count(points[-1][0])} steps, last {last}"
    return _figure(title, unit, line_plot(points, x=STEPS, y=axis, references=references, label=label))


def _reliability(curve: Mapping[str, list[Any]] | None) -> str:
    if not curve or not curve.get("predicted"):
        return ""
    plot = reliability_plot(
        curve["predicted"], curve["observed"], curve["rows"],
        x=Axis(title="predicted probability of a click", from_zero=True), y=Axis(title="observed", from_zero=True),
        label=f"Observed click rate against predicted probability in {len(curve['predicted'])} bins",
    )  # fmt: skip
    return _figure("Calibration", "observed click rate, 95% intervals", plot)


def _figure(title: str, unit: str, plot: str) -> str:
    return f"<figure><figcaption>{escape(title)} <span>{escape(unit)}</span></figcaption>{plot}</figure>"
