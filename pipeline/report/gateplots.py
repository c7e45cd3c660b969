"""Plots of the gate's page: calibration of both models, where predictions went, and the change of NE by slice."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from pipeline.report import units
from pipeline.report.svg import Axis, Frame, Line, drawing, reference_lines, reliability_plot

MODELS = ("candidate", "incumbent")
MOST_SLICES = 60


def plots(record: Mapping[str, Any]) -> str:
    """The section with all plots; "" where nothing is known."""
    figures = [
        *(_reliability(record, model) for model in MODELS),
        _histogram(record.get("histogram")),
        _slices(record.get("slices", ())),
    ]
    found = "".join(figures)
    return f'<section><h2>Predictions</h2><div class="plots">{found}</div></section>' if found else ""


def _figure(title: str, unit: str, plot: str) -> str:
    return f"<figure><figcaption>{escape(title)} <span>{escape(unit)}</span></figcaption>{plot}</figure>"


def _reliability(record: Mapping[str, Any], model: str) -> str:
    curve = record.get("reliability", {}).get(model)
    if not curve:
        return ""
    plot = reliability_plot(
        curve["predicted"], curve["observed"], curve["rows"],
        x=Axis(title="predicted probability of a click", from_zero=True), y=Axis(title="observed", from_zero=True),
        label=f"Observed click rate against predicted probability of the {model}",
    )  # fmt: skip
    return _figure(f"Calibration of the {model}", "observed click rate, 95% intervals", plot)


def _histogram(shares: Mapping[str, Any] | None) -> str:
    """Shares of rows by prediction: the candidate filled, the incumbent a dashed line."""
    if not shares:
        return ""
    edges = shares["edges"]
    top = max(max(shares[model]) for model in MODELS if model in shares)
    x = Axis(title="predicted probability of a click", from_zero=True)
    frame = Frame.around([(0.0, 0.0), (edges[-1], top)], x, Axis(title="rows", from_zero=True, show=_percent))
    body = frame.grid()
    outlines = {model: _outline(frame, edges, shares[model]) for model in MODELS if model in shares}
    closed = f"{outlines['candidate']} L{frame.place((edges[-1], 0))} L{frame.place((edges[0], 0))} Z"
    body += [f'<path class="area" d="{closed}"/>', f'<path class="curve" d="{outlines["candidate"]}"/>']
    if "incumbent" in outlines:
        body.append(f'<path class="reference" d="{outlines["incumbent"]}"/>')
    label = "Share of rows by predicted probability"
    unit = "share of rows; dashed: the incumbent" if "incumbent" in outlines else "share of rows"
    return _figure("Predictions", unit, drawing(body, label))


def _percent(value: float, spread: float) -> str:
    return units.percent(value, 0 if spread >= 0.01 else 1)


def _outline(frame: Frame, edges: Sequence[float], shares: Sequence[float]) -> str:
    points = [(edge, share) for i, share in enumerate(shares) for edge in (edges[i], edges[i + 1])]
    return " ".join(f"{'L' if index else 'M'}{frame.place(point)}" for index, point in enumerate(points))


def _slices(slices: Sequence[Mapping[str, Any]]) -> str:
    """The change of NE of each slice with its interval, in the order of the table."""
    shown = [each for each in slices if "change" in each][:MOST_SLICES]
    if not shown:
        return ""
    ends = [value for each in shown for value in each["change"]["ne"]]
    corners = [(0.0, min(0.0, *ends)), (len(shown) + 1.0, max(0.0, *ends))]
    x = Axis(title="slice, in the order of the table", whole=True)
    frame = Frame.around(corners, x, Axis(title="change", show=_signed))
    body = [*frame.grid(), *reference_lines(frame, [Line(0.0, "as the incumbent")])]
    for place, each in enumerate(shown, 1):
        point, low, high = each["change"]["ne"]
        text = f"{each['slice']}={each['value']}: {point:+.2%} [{low:+.2%}, {high:+.2%}]"
        body.append(f'<path class="whisker" d="M{frame.place((place, low))} L{frame.place((place, high))}"/>')
        body.append(
            f'<circle class="dot" cx="{frame.x(place):.1f}" cy="{frame.y(point):.1f}" r="3.5">'
            f"<title>{escape(text)}</title></circle>"
        )
    return _figure("Change of NE by slice", "candidate over incumbent; lower is better", drawing(body, "NE by slice"))


def _signed(value: float, spread: float) -> str:
    return f"{value:+.{0 if spread >= 0.01 else 1 if spread >= 0.001 else 2}%}"
