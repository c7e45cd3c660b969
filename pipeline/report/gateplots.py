"""Plots of the gate's page: calibration of both models, where predictions went, and the change of NE by slice."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from pipeline.report import units
from pipeline.report.charts import calibration
from pipeline.report.page import Figure
from pipeline.report.svg import Axis, Frame, Line, drawing, reference_lines, tag

MODELS = ("candidate", "incumbent")
MOST_SLICES = 60


def gate_figures(record: Mapping[str, Any]) -> list[Figure]:
    """All plots; what is not known is left out."""
    curves = record.get("reliability", {})
    return [
        *(figure for model in MODELS for figure in calibration(curves.get(model), model)),
        *_histogram(record.get("histogram")),
        *_slices(record.get("slices", ())),
    ]


def _histogram(shares: Mapping[str, Any] | None) -> Iterator[Figure]:
    """Shares of rows by prediction: the candidate filled, the incumbent a dashed line."""
    if not shares:
        return
    edges = shares["edges"]
    top = max(max(shares[model]) for model in MODELS if model in shares)
    x = Axis(title="predicted probability of a click", from_zero=True)
    frame = Frame.around([(0.0, 0.0), (edges[-1], top)], x, Axis(title="rows", from_zero=True, show=_percent))
    outlines = {model: _outline(frame, edges, shares[model]) for model in MODELS if model in shares}
    closed = f"{outlines['candidate']} L{frame.place((edges[-1], 0))} L{frame.place((edges[0], 0))} Z"
    body = [*frame.grid(), tag("path", class_="area", d=closed), tag("path", class_="curve", d=outlines["candidate"])]
    unit = "share of rows"
    if "incumbent" in outlines:
        body.append(tag("path", class_="reference", d=outlines["incumbent"]))
        unit += "; dashed: the incumbent"
    yield Figure("Predictions", unit, drawing(body, "Share of rows by predicted probability"))


def _percent(value: float, spread: float) -> str:
    return units.percent(value, 0 if spread >= 0.01 else 1)


def _outline(frame: Frame, edges: Sequence[float], shares: Sequence[float]) -> str:
    return frame.path([(edge, share) for i, share in enumerate(shares) for edge in (edges[i], edges[i + 1])])


def _slices(slices: Sequence[Mapping[str, Any]]) -> Iterator[Figure]:
    """The change of NE of each slice with its interval, in the order of the table."""
    shown = [each for each in slices if "change" in each][:MOST_SLICES]
    if not shown:
        return
    ends = [value for each in shown for value in each["change"]["ne"]]
    corners = [(0.0, min(0.0, *ends)), (len(shown) + 1.0, max(0.0, *ends))]
    x = Axis(title="slice, in the order of the table", whole=True)
    frame = Frame.around(corners, x, Axis(title="change", show=_signed))
    body = [*frame.grid(), *reference_lines(frame, [Line(0.0, "as the incumbent")])]
    for place, each in enumerate(shown, 1):
        point, low, high = each["change"]["ne"]
        text = f"{each['slice']}={each['value']}: {point:+.2%} [{low:+.2%}, {high:+.2%}]"
        body += [frame.whisker(place, low, high), frame.dot((place, point), text)]
    plot = drawing(body, "NE by slice")
    yield Figure("Change of NE by slice", "candidate over incumbent; lower is better", plot)


def _signed(value: float, spread: float) -> str:
    return f"{value:+.{0 if spread >= 0.01 else 1 if spread >= 0.001 else 2}%}"
