"""Sequences on the page of a run: how many events rows have, and what the events of an example row weigh."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from markupsafe import Markup

from pipeline import units
from pipeline.records.dataset import SequenceProfile
from pipeline.report.page import Figure
from pipeline.report.svg import Axis, Frame, drawing, percent_tick, tag, ticks

BAR = 1000  # width of a bar's picture
MOST_EVENTS, MOST_LETTERS = 40, 36  # bars of an example row, of more the newest; of an event's names
HOURS = ((86_400 * 365.25, "years"), (86_400, "days"), (3600, "hours"), (60, "minutes"), (1, "seconds"))


def sequence_figures(
    profiles: Mapping[str, SequenceProfile], attention: Mapping[str, Mapping[str, Any]]
) -> list[Figure]:
    """For each sequence the histogram of its lengths, and the weights of the events of one row; what is known."""
    return [
        each
        for name in dict.fromkeys([*profiles, *attention])
        for each in (
            _lengths(name, profiles[name]) if name in profiles else None,
            _weights(name, attention[name]) if attention.get(name, {}).get("events") else None,
        )
        if each is not None
    ]


def _lengths(name: str, profile: SequenceProfile) -> Figure | None:
    """Shares of the train rows by their number of events."""
    total, width = sum(profile.rows_by_length), profile.events_per_bin
    if not total:
        return None
    spans = [(0, 0)] + [(1 + width * at, width * (at + 1)) for at in range(len(profile.rows_by_length) - 1)]
    shares = [rows / total for rows in profile.rows_by_length]
    last = max(spans[-1][1], 1)
    x, y = Axis(title="events", whole=True), Axis(title="share of rows", from_zero=True, show=percent_tick)
    marks = [tick for tick in ticks(0, last, about=6, whole=True) if tick <= last]
    frame = Frame(x, y, marks, ticks(0.0, max(shares)), -0.5, last + 0.5)
    body = frame.grid()
    for (low, high), share in zip(spans, shares, strict=True):
        left, right, top = frame.x(low - 0.4), frame.x(high + 0.4), frame.y(share)
        words = f"{_span(low, high)}: {units.percent(share)} of the train rows"
        size = {"x": f"{left:.2f}", "y": f"{top:.1f}", "width": f"{max(right - left, 0.5):.2f}"}
        body.append(tag("rect", tag("title", words), class_="c0", **size, height=f"{frame.bottom - top:.1f}"))
    message = f"mean {profile.mean:.1f}, 99th percentile {profile.p99}, longest {profile.longest}"
    return Figure(f"Events of {name}", message, drawing(body, f"Train rows by their events of {name}, {message}"))


def _span(low: int, high: int) -> str:
    if low == high:
        return "no events" if high == 0 else units.plural(high, "event")
    return f"{low} to {high} events"


def _weights(name: str, example: Mapping[str, Any]) -> Figure:
    """A bar for each event, the newest first."""
    events: Sequence[Mapping[str, Any]] = list(reversed(example["events"]))
    shown = [(_event(event), float(event["weight"])) for event in events[:MOST_EVENTS]]
    if example.get("target_weight") is not None:
        shown.insert(0, ("the target itself", float(example["target_weight"])))
    top = max((abs(weight) for _, weight in shown), default=0.0) or 1.0
    rows = [_bar(words, weight, top) for words, weight in shown]
    if len(events) > MOST_EVENTS:
        rows.append(tag("div", f"and {units.plural(len(events) - MOST_EVENTS, 'older event')}", class_="rank"))
    return Figure(f"Attention weights of {name}", _whose(example), tag("div", *rows, class_="stacked-bars"))


def _whose(example: Mapping[str, Any]) -> str:
    target = example.get("target") or {}
    shown = ", ".join(f"{feature} {value}" for feature, value in target.items())
    of = f" with {shown}" if shown else ""
    return f"test row {units.count(example['row'])}{of}, newest first"


def _event(event: Mapping[str, Any]) -> str:
    words = ", ".join(str(value) for value in event["names"].values())
    words = words if len(words) <= MOST_LETTERS else f"{words[: MOST_LETTERS - 2]}.."
    return words if event.get("age") is None else f"{words}, {_ago(float(event['age']))}"


def _ago(seconds: float) -> str:
    """An age in its largest unit."""
    size, unit = next(((size, unit) for size, unit in HOURS if seconds >= size), HOURS[-1])
    return f"{units.short(round(seconds / size, 1))} {unit} before"


def _bar(words: str, weight: float, top: float) -> Markup:
    """A row of the figure; a weight below 0 has another colour."""
    value = units.decimal(weight, 3)
    size = {"width": f"{max(BAR * abs(weight) / top, 2):.1f}", "height": 16}
    attributes = {"viewBox": f"0 0 {BAR} 16", "preserveAspectRatio": "none", "role": "img"}
    filled = tag("rect", class_="c3" if weight < 0 else "c0", **size)
    picture = tag(
        "svg",
        tag("title", f"{words}: {value}"),
        filled,
        class_="stacked-bar",
        aria_label=f"{words}: {value}",
        **attributes,
    )
    return tag("div", words, class_="rank") + picture + tag("div", value, class_="number")
