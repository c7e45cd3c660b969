"""``index.html`` of a store: all nights at a glance. ``nightjar nights ls``: the same as text."""

from __future__ import annotations

import math
import statistics
import time
from collections import Counter
from collections.abc import Callable, Sequence
from datetime import date
from typing import Any
from urllib.parse import quote

from markupsafe import Markup

from pipeline.core import units
from pipeline.core.units import text_table
from pipeline.records.error_budget import SpentBudget
from pipeline.records.gate import Interval
from pipeline.records.night import FAILED, HELD, PUBLISHED, NightLine, ServedVersion, StoreOverview
from pipeline.records.runs import RunLine
from pipeline.report.page import COLOURS, Figure, PageTable, from_template, pill
from pipeline.report.svg import BOTTOM, LEFT, RIGHT, TOP, WIDTH, Axis, Frame, PlotCurve, Point, drawing, tag, ticks
from pipeline.specs import STAGES

STORE_PAGE = "index.html"
# Curves of the plots over nights, for the legend; the points come from each model.
CURVES = (
    PlotCurve("candidate, with its 95% interval", 0, ()),
    PlotCurve("incumbent", 3, ()),
    PlotCurve("baseline, on the first night", 5, ()),
)
# Legends of further marks, by the outcome of the night that shows them.
MARKS = {HELD: "Rings on the curve: nights that the gate held.", FAILED: "Strokes below: failed nights."}
TOOLTIPS = "Point at a night for its figures; they are in the table of nights, too."
# A version's number is shown if the version fills at least this share of the bar.
LEAST_NAMED = 0.06
# Newest rows of the list of versions that served; the bar shows all of them.
MOST_SERVED = 12
MOST_REASON = 240
# A time axis shows days up to this number of days, and months beyond it.
MOST_DAYS = 62
DAY_SECONDS = 86_400.0
_PILLS = {PUBLISHED: "PASS", HELD: "HOLD", FAILED: "failed"}
Figures = Callable[[NightLine], Interval | None]


def store_page(overview: StoreOverview, now: float) -> str:
    """Return the page of a store as HTML: one file, without scripts, whose links are relative to the store.

    Args:
        now: When the page is written, seconds since 1970.
    """
    names = sorted({*overview.served, *(night.model for night in overview.nights)})
    models = []
    for name in names:
        nights = [night for night in overview.nights if night.model == name]
        budget = (overview.budgets or {}).get(name)
        models.append(_model(name, nights, overview.served.get(name, ()), budget, now))
    about = [units.plural(len(overview.nights), "night")]
    if overview.nights_left_out:
        about.append(f"{overview.nights_left_out:,} older ones left out")
    if overview.runs:
        about.append(units.plural(len(overview.runs), "other run"))
    runs_note = ""
    if overview.runs_left_out:
        runs_note = f"And {units.plural(overview.runs_left_out, 'run')} more: nightjar runs ls."
    return from_template(
        "store.html",
        title="Nightjar: all nights",
        heading="All nights",
        about=" · ".join([*about, f"written {_utc(now)}"]),
        problems=overview.problems,
        models=models,
        curves=CURVES,
        stages=[PlotCurve(name, place % COLOURS, ()) for place, name in enumerate(STAGES.names())],
        runs=_runs(overview.runs or ()),
        runs_note=runs_note,
    )


def nights_listing(overview: StoreOverview) -> str:
    """Return ``nightjar nights ls``: a line a night, oldest first, and what serves."""
    if not overview.nights:
        return "no nights"
    priced = any(night.cost is not None for night in overview.nights)
    head = ["night", "model", "outcome", "version", "NE*", "change*", "calibration*", "rows*", "seconds*", "reason"]
    if priced:
        head.insert(-1, "cost*")
    rows = []
    for night in overview.nights:
        seconds = units.ABSENT if night.seconds is None else units.decimal(sum(night.seconds.values()), 1)
        change = units.ABSENT if night.ne_change is None else f"{night.ne_change.point:+.2%}"
        cells = [night.date, night.model, night.outcome, night.version or units.ABSENT]
        cells += [units.decimal(_point(night.ne)), change, units.decimal(_point(night.calibration), 3)]
        cells += [units.count(night.rows), seconds]
        if priced:
            cells.append(_cost(night))
        # Reasons may quote ids and settings, whose control characters must not reach the terminal.
        cells.append(units.printable(_reason(night), 80))
        rows.append(cells)
    lines = [text_table(head, rows)]
    for model, spans in overview.served.items():
        lines.append(f"{model}: {spans[-1].version} serves since {_utc(spans[-1].since)}")
    for model, budget in (overview.budgets or {}).items():
        lines.append(f"{model}: {budget.words}")
    return "\n".join(lines)


def _model(
    name: str, nights: Sequence[NightLine], served: Sequence[ServedVersion], budget: SpentBudget | None, now: float
) -> dict[str, Any]:
    # Collect what the template shows of a model; ``nights`` are sorted oldest first.
    older = ""
    if len(served) > MOST_SERVED:
        older = f"And {units.plural(len(served) - MOST_SERVED, 'earlier change')}, in the bar."
    # Explain only the marks that occur in the plots of this model.
    outcomes = {night.outcome for night in nights}
    marks = [words for outcome, words in MARKS.items() if outcome in outcomes]
    return {
        "name": name,
        "cards": _cards(nights, served, budget),
        "figures": _figures(nights),
        "marks": " ".join([*marks, TOOLTIPS]),
        "served": _served_table(served[-MOST_SERVED:], now),
        "served_bar": _served_bar(served, now),
        "served_names": _served_names(served, now),
        "served_from": _utc(served[0].since) if served else "",
        "served_note": older,
        "nights": _nights_table(nights),
        "nights_note": "Newest first. NE and its change are on the test rows of the night; time is that of the stages.",
    }


def _cards(
    nights: Sequence[NightLine], served: Sequence[ServedVersion], budget: SpentBudget | None
) -> list[tuple[str, str, str]]:
    cards = []
    if served:
        current = served[-1]
        # The number identifies a version; its key would not fit.
        number = current.version.partition("-")[0]
        cards.append(("Serves now", number, f"{current.version}, since {_utc(current.since)}"))
    if budget is not None:
        cards.append(("Error budget spent", f"{budget.spent:.2g}", budget.words))
    if not nights:
        return cards
    last, outcomes = dict[str, str](), Counter[str]()
    judged, times = [], []
    # Amounts of different currencies cannot be added.
    amounts = dict[str, list[float]]()
    for night in nights:
        outcomes[night.outcome] += 1
        # ``nights`` are sorted oldest first, so this keeps the newest night of each outcome.
        last[night.outcome] = night.date
        if night.ne is not None:
            judged.append(night)
        if night.seconds:
            times.append(sum(night.seconds.values()))
        if night.cost is not None:
            amounts.setdefault(night.cost.currency, []).append(night.cost.amount)
    under = f"{outcomes[PUBLISHED]:,} published; {nights[0].date} to {nights[-1].date}"
    cards.append(("Nights", units.count(len(nights)), under))
    for outcome in (HELD, FAILED):
        under = f"last {last[outcome]}" if outcome in last else "none"
        cards.append((outcome.capitalize(), units.count(outcomes[outcome]), under))
    if judged:
        newest = judged[-1]
        under = newest.date
        if newest.ne_change is not None:
            under = f"{newest.date}, {_signed(newest.ne_change)} beside the incumbent"
        cards.append(("NE of the newest", units.decimal(_point(newest.ne)), under))
        calibration = units.decimal(_point(newest.calibration), 3)
        cards.append(("Calibration", calibration, "predicted / observed clicks"))
    if times:
        median = statistics.median(times)
        # Minutes and seconds together would not fit.
        took = f"{median / 60:.0f} min" if 60 <= median < 3600 else units.duration(median)
        cards.append(("Time of a night", took, f"median of the stages; {_span(sum(times))} in all"))
    for currency, of_nights in amounts.items():
        under = f"{currency}, median; {units.money(sum(of_nights))} in all"
        cards.append(("Cost of a night", units.money(statistics.median(of_nights)), under))
    return cards


def _cost(night: NightLine) -> str:
    if night.cost is None:
        return units.ABSENT
    return units.money(night.cost.amount, night.cost.currency)


def _figures(nights: Sequence[NightLine]) -> list[Figure]:
    figures: list[Figure] = []
    curves: list[Figures] = [lambda night: night.ne, lambda night: night.incumbent_ne, lambda night: night.baseline_ne]
    figures += _plot(nights, "NE", "1 is the base rate; lower is better", curves)
    curves = [lambda night: night.calibration, lambda night: night.incumbent_calibration]
    figures += _plot(nights, "Calibration", "predicted / observed clicks; 1 is right", curves)
    return figures + _plot(nights, "Time", "minutes of all stages", [_minutes])


def _minutes(night: NightLine) -> Interval | None:
    if not night.seconds:
        return None
    minutes = sum(night.seconds.values()) / 60
    return Interval(minutes, minutes, minutes)


def _plot(nights: Sequence[NightLine], title: str, unit: str, curves: Sequence[Figures]) -> list[Figure]:
    # The first of ``curves`` is the candidate's, which has a band, the marks of the verdicts and the tooltips.
    points: list[list[tuple[float, Interval]]] = []
    edges: list[float] = []
    for curve in curves:
        found: list[tuple[float, Interval]] = []
        for night in nights:
            value = curve(night)
            # A value that is not finite would leave the plot without a scale.
            if value is not None and math.isfinite(sum(value)):
                found.append((float(_day(night)), value))
                edges += value
        points.append(found)
    if not points[0]:
        return []
    frame = _frame(nights, edges, title)
    body = frame.grid()
    candidate = points[0]
    if any(value.high > value.low for _, value in candidate):
        upper, lower = list[Point](), list[Point]()
        for day, value in candidate:
            upper.append((day, value.high))
            lower.append((day, value.low))
        # The outline runs along the upper ends and back along the lower ones.
        body.append(tag("path", class_="band", d=f"{frame.path([*upper, *reversed(lower)])} Z"))
    # Draw the candidate's curve last, so that it lies above the others.
    for series, found in reversed(list(zip(CURVES, points, strict=False))):
        line = [(day, value.point) for day, value in found]
        if len(line) > 1:
            body.append(tag("path", class_=f"series c{series.colour}", d=frame.path(line)))
        elif line:
            x, y = frame.place(line[0]).split()
            body.append(tag("circle", class_=f"c{series.colour}", cx=x, cy=y, r=3.5))
    return [Figure(title, unit, drawing([*body, *_marks(frame, nights, curves)], f"{title} ({unit}) by night"))]


def _frame(nights: Sequence[NightLine], values: Sequence[float], title: str) -> Frame:
    # The frame covers all nights, so that the plots of a model share one axis.
    first, last = date.fromordinal(_day(nights[0])), date.fromordinal(_day(nights[-1]))
    days = (last - first).days
    if days <= MOST_DAYS:
        # ``-(-a // b)`` rounds up: there is room for about six labels.
        step = max(1, -(-days // 6))
        x_ticks = [float(day) for day in range(first.toordinal(), last.toordinal() + 1, step)]
    else:
        months = []
        for day in range(first.toordinal(), last.toordinal() + 1):
            if date.fromordinal(day).day == 1:
                months.append(float(day))
        x_ticks = months[:: max(1, -(-len(months) // 6))]

    def show(value: float, _: float) -> str:
        day = date.fromordinal(round(value))
        if days <= MOST_DAYS:
            return f"{day.day} {day:%b}"
        return f"{day:%Y}" if day.month == 1 else f"{day:%b}"

    y_axis = Axis(title=title, from_zero=title == "Time")
    y_ticks = ticks(0.0 if y_axis.from_zero else min(values), max(values))
    low, high = first.toordinal() - 0.5, last.toordinal() + 0.5
    return Frame(Axis(title="night", show=show), y_axis, x_ticks, y_ticks, low, high)


def _marks(frame: Frame, nights: Sequence[NightLine], curves: Sequence[Figures]) -> list[Markup]:
    # Mark verdicts that did not publish, and draw for every night an invisible column whose tooltip has the figures.
    names = ("", "incumbent ", "baseline ")
    out = []
    width = max((WIDTH - LEFT - RIGHT) / (frame.x_high - frame.x_low), 0.5)
    for night in nights:
        x = frame.x(_day(night))
        candidate = curves[0](night)
        if night.outcome == HELD and candidate is not None and math.isfinite(candidate.point):
            out.append(tag("circle", class_="held", cx=f"{x:.1f}", cy=f"{frame.y(candidate.point):.1f}", r=3))
        elif night.outcome == FAILED:
            out.append(tag("path", class_="failed", d=f"M{x:.1f} {BOTTOM} v-7"))
        shown = []
        for name, curve in zip(names, curves, strict=False):
            if (value := curve(night)) is not None:
                shown.append(f"{name}{_interval(value)}")
        text = f"{night.date}, {night.outcome}: {', '.join(shown) or 'no figures'}"
        if night.outcome != PUBLISHED and (reason := _reason(night)):
            text += f"; {units.printable(reason, MOST_REASON)}"
        size = {"x": f"{x - width / 2:.1f}", "y": TOP, "width": f"{width:.1f}", "height": BOTTOM - TOP}
        out.append(tag("rect", tag("title", text), class_="hover", **size))
    return out


def _served_bar(served: Sequence[ServedVersion], now: float) -> Markup:
    # Draw a stretch of time for each version, the newest on the right.
    if not served:
        return Markup("")
    begin = served[0].since
    scale = 1000 / max(now - begin, 1.0)
    parts = []
    for place, span in enumerate(served):
        left, right = (span.since - begin) * scale, (min(span.until or now, now) - begin) * scale
        size = {"x": f"{left:.1f}", "width": f"{max(right - left, 0.5):.1f}", "height": 26}
        until = "until now"
        if span.until:
            until = f"to {_utc(span.until)}"
        words = tag("title", f"{span.version}: {_utc(span.since)} {until}")
        # Alternate between two colours, so that neighbours differ.
        parts.append(tag("rect", words, class_=f"c{place % 2}", **size))
    label = f"{units.plural(len(served), 'version')} served since {_utc(begin)}; now {served[-1].version}"
    attributes = {"viewBox": "0 0 1000 26", "preserveAspectRatio": "none", "role": "img", "aria_label": label}
    return tag("svg", *parts, class_="bar", **attributes)


def _served_names(served: Sequence[ServedVersion], now: float) -> list[tuple[str, str]]:
    # Return the share of each stretch of the bar, and the number of its version if there is room for it.
    names = []
    for span in served:
        share = (min(span.until or now, now) - span.since) / max(now - served[0].since, 1.0)
        number = ""
        if share >= LEAST_NAMED:
            number = span.version.partition("-")[0]
        names.append((f"{share:.4f}", number))
    return names


def _served_table(served: Sequence[ServedVersion], now: float) -> PageTable:
    rows = []
    for span in reversed(served):
        since = tag("span", _utc(span.since), class_="word")
        until = tag("span", "now", class_="word")
        if span.until is not None:
            until = tag("span", _utc(span.until), class_="word")
        took = _span((span.until or now) - span.since)
        rows.append((span.version, since, until, took, span.by, span.reason or units.ABSENT))
    return PageTable(("Version", "From", "Until", "For*", "By", "Reason~"), rows)


def _nights_table(nights: Sequence[NightLine]) -> PageTable:
    longest = max((sum((night.seconds or {}).values()) for night in nights), default=0.0) or 1.0
    priced = any(night.cost is not None for night in nights)
    rows, titles = [], []
    for night in reversed(nights):
        pages = night.pages or {}
        seconds = night.seconds or {}
        cells: list[str] = [
            _link(pages.get("night"), night.date),
            pill(_PILLS.get(night.outcome, "idle"), night.outcome),
        ]
        # Show the first reason; the row's tooltip and the page of the night have the others.
        reason = units.ABSENT
        if night.reasons:
            reason = units.printable(night.reasons[0], MOST_REASON)
            if len(night.reasons) > 1:
                reason += f" (and {len(night.reasons) - 1} more)"
        cells += [reason, _link(pages.get("version"), night.version or units.ABSENT), units.decimal(_point(night.ne))]
        change = units.ABSENT
        if night.ne_change is not None:
            change = tag("span", f"{night.ne_change.point:+.2%}", title=_signed(night.ne_change))
        cells += [change, units.decimal(_point(night.calibration), 3), units.count(night.rows)]
        # The time is unknown if no stage has one; 0 seconds would not say so.
        took = units.duration(sum(seconds.values())) if seconds else units.ABSENT
        cells.append(tag("div", took, _stages_bar(seconds, longest)))
        if priced:
            cells.append(_cost(night))
        links = [_link(pages[name], name) for name in ("gate", "run") if name in pages]
        cells.append(tag("div", Markup(" ").join(links) or units.ABSENT))
        rows.append(cells)
        titles.append(_reason(night))
    head = ["Night", "Outcome", "Reason~", "Version", "NE*", "Change of NE*", "Calibration*", "Rows*", "Time by stage*"]
    if priced:
        head.append("Cost*")
    return PageTable([*head, "Pages"], rows, titles)


def _stages_bar(seconds: dict[str, float], longest: float) -> Markup:
    # The bar's length is the night's share of the longest night.
    parts, left = [], 0.0
    for place, name in enumerate(STAGES.names()):
        width = 1000 * seconds.get(name, 0.0) / longest
        if width:
            size = {"x": f"{left:.0f}", "width": f"{max(width, 2):.0f}", "height": 26}
            parts.append(tag("rect", class_=f"c{place % COLOURS}", **size))
        left += width
    if not parts:
        return Markup(units.ABSENT)
    words = ", ".join(f"{name} {units.duration(took)}" for name, took in seconds.items())
    attributes = {"viewBox": "0 0 1000 26", "preserveAspectRatio": "none", "role": "img"}
    return tag("svg", tag("title", words), *parts, class_="bar", **attributes)


def _runs(runs: Sequence[RunLine]) -> PageTable:
    rows = []
    for line in reversed(runs):
        # A run that was refused before its first stage has no page.
        page = f"runs/{line.run}/report.html" if line.stages or line.finished is not None else None
        name = _link(page, line.run)
        finished = units.ABSENT
        if line.finished is not None:
            finished = _utc(line.finished)
        figures = (units.decimal(line.ne), units.decimal(line.auc), units.decimal(line.calibration, 3))
        verdict = line.verdict or units.ABSENT
        rows.append((name, pill(line.status, line.status), finished, *figures, verdict, units.duration(line.seconds)))
    return PageTable(("Run", "Status", "Finished", "NE*", "AUC*", "Calibration*", "Gate", "Time*"), rows)


def _day(night: NightLine) -> int:
    return date.fromisoformat(night.date).toordinal()


def _point(value: Interval | None) -> float | None:
    return None if value is None else value.point


def _reason(night: NightLine) -> str:
    return "; ".join(night.reasons)


def _link(path: str | None, text: str) -> Markup:
    # The page was removed or never written.
    if not path:
        return tag("span", text)
    return tag("a", text, href=quote(path))


def _interval(value: Interval) -> str:
    text = units.decimal(value.point)
    # A figure without an interval, such as a time, has equal ends.
    if value.low != value.high:
        text += f" [{units.decimal(value.low)}, {units.decimal(value.high)}]"
    return text


def _signed(change: Interval) -> str:
    return f"{change.point:+.2%} [{change.low:+.2%}, {change.high:+.2%}]"


def _span(seconds: float) -> str:
    # A version may serve for months, and ``units.duration`` counts at most in hours.
    if seconds < 2 * DAY_SECONDS:
        return units.duration(seconds)
    return f"{seconds / DAY_SECONDS:.1f} days"


def _utc(seconds: float) -> str:
    return f"{time.strftime('%Y-%m-%d %H:%M', time.gmtime(seconds))} UTC"
