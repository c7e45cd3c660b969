"""Plots of the gate's page: calibration and predictions of both models, and the change of NE by slice."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from pipeline.records import GateRecord, Histogram, Slice
from pipeline.report.charts import calibration
from pipeline.report.page import Figure
from pipeline.report.svg import Axis, Frame, ReferenceLine, drawing, percent_tick, reference_lines, signed_tick, tag

MODELS = {"candidate": "candidate", "uncalibrated": "candidate without its calibrator", "incumbent": "incumbent"}
MOST_SLICES = 60


def gate_figures(record: GateRecord) -> list[Figure]:
    """All plots; unknown ones are left out."""
    curves = record.reliability or {}
    return [
        *(figure for model, words in MODELS.items() for figure in calibration(curves.get(model), words)),
        *_histogram(record.histogram),
        *_slices(record.slices or ()),
    ]


def _histogram(histogram: Histogram | None) -> Iterator[Figure]:
    """Shares of rows by prediction: the candidate filled, the incumbent a dashed line."""
    if histogram is None:
        return
    edges, theirs = histogram.edges, histogram.incumbent
    top = max([*histogram.candidate, *(theirs or ())])
    x = Axis(title="predicted probability of a click", from_zero=True)
    frame = Frame.around([(0.0, 0.0), (edges[-1], top)], x, Axis(title="rows", from_zero=True, show=percent_tick))
    ours = _outline(frame, edges, histogram.candidate)
    closed = f"{ours} L{frame.place((edges[-1], 0))} L{frame.place((edges[0], 0))} Z"
    body = [*frame.grid(), tag("path", class_="area", d=closed), tag("path", class_="curve", d=ours)]
    unit = "share of rows"
    if theirs is not None:
        body.append(tag("path", class_="reference", d=_outline(frame, edges, theirs)))
        unit += "; dashed: the incumbent"
    yield Figure("Predictions", unit, drawing(body, "Share of rows by predicted probability"))


def _outline(frame: Frame, edges: Sequence[float], shares: Sequence[float]) -> str:
    return frame.path([(edge, share) for i, share in enumerate(shares) for edge in (edges[i], edges[i + 1])])


def _slices(slices: Sequence[Slice]) -> Iterator[Figure]:
    """The change of NE of each slice, with its interval, in the order of the table."""
    shown = [(each, each.change.ne) for each in slices if each.change is not None][:MOST_SLICES]
    if not shown:
        return
    ends = [value for _, change in shown for value in change]
    corners = [(0.0, min(0.0, *ends)), (len(shown) + 1.0, max(0.0, *ends))]
    x = Axis(title="slice, in the order of the table", whole=True)
    frame = Frame.around(corners, x, Axis(title="change", show=signed_tick))
    body = [*frame.grid(), *reference_lines(frame, [ReferenceLine(0.0, "as the incumbent")])]
    for place, (each, (point, low, high)) in enumerate(shown, 1):
        text = f"{each.slice}={each.value}: {point:+.2%} [{low:+.2%}, {high:+.2%}]"
        body += [frame.whisker(place, low, high), frame.dot((place, point), text)]
    plot = drawing(body, "NE by slice")
    yield Figure("Change of NE by slice", "candidate over incumbent; lower is better", plot)
