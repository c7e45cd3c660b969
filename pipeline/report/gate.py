"""The page of a verdict as HTML, with its plots, and as Markdown, from ``gate.json``."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from pipeline import units
from pipeline.records.ensemble import ServingCost
from pipeline.records.gate import HOLD, Check, GateRecord, Histogram, Importance, Interval, RowsPower, Slice
from pipeline.report.charts import calibration
from pipeline.report.page import Figure, PageTable, from_template, pill
from pipeline.report.svg import Axis, Frame, ReferenceLine, drawing, percent_tick, reference_lines, signed_tick, tag

MODELS = {"candidate": "candidate", "uncalibrated": "candidate without its calibrator", "incumbent": "incumbent"}
MOST_SLICES = 60


def gate_figures(record: GateRecord) -> list[Figure]:
    """All plots; unknown ones are left out."""
    curves = record.reliability or {}
    return [
        *(figure for model, words in MODELS.items() for figure in calibration(curves.get(model), words)),
        *_histogram(record.histogram),
        *_slice_plot(record.slices or ()),
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


def _slice_plot(slices: Sequence[Slice]) -> Iterator[Figure]:
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


GATE_PAGE, GATE_TEXT = "gate.html", "gate.md"
FIGURES = (("ne", "NE"), ("auc", "AUC"), ("calibration", "calibration"))
_SLICE = "slice: "
MOST_FEATURES = 50  # in the table of importance, which begins with the largest
LEAST_CHANGE = 0.01  # smallest change of coverage that is shown
# Pill, Markdown and word of a result, by the index that ``_answer`` returns.
_ANSWERS = (("failed", "**failed**", "failed"), ("skipped", "warning", "warning"), ("done", "passed", "passed"))


def gate_page(record: GateRecord) -> str:
    """The page as HTML. Unknown parts are left out."""
    verdict = record.verdict
    return from_template(
        "gate.html",
        title=f"Gate: {verdict} {_model(record)}",
        files="gate.json",
        heading=_model(record) or "Gate",
        about=_sentence(record),
        verdict=pill(verdict, verdict),
        held=verdict == HOLD,
        reasons=record.reasons,
        warnings=record.warnings,
        summary=_cards(record),
        compared=_compared_models(record),
        plots=gate_figures(record),
        checks=_checks_table(_checks(record)),
        slices=_slices(record.slices or ()),
        tasks=_tasks(record),
        importance=_importance(record, record.importance, "Feature"),
        towers=_importance(record, record.tower_importance, "Tower"),
        coverage=_coverage(record),
    )


def gate_markdown(record: GateRecord) -> str:
    """The same as Markdown without plots, for a ticket or a chat."""
    lines = [f"# Gate: {record.verdict}", "", _sentence(record), ""]
    lines += [*(f"- {units.for_chat(reason)}" for reason in record.reasons), ""] if record.reasons else []
    lines += [*(f"- warning: {units.for_chat(words)}" for words in record.warnings), ""] if record.warnings else []
    if figures := _figure_rows(record):
        head = ("figure", "candidate", *(("incumbent", "change") if record.incumbent is not None else ()))
        lines += [*_markdown_table(head, figures), ""]
    if record.cost is not None:
        lines += [f"An ensemble of {units.count(record.cost.members)} members: {_cost_words(record.cost)}.", ""]
    if record.calibrated is not None:
        lines += [f"The calibrator is {record.calibrated.words}.", ""]
        lines += [*_markdown_table(("figure", "without the calibrator", "with it"), _calibrated_rows(record)), ""]
    if record.tasks:
        tasks = _tasks(record)
        lines += [*_markdown_table([name.rstrip("*").lower() for name in tasks.head], tasks.rows), ""]
    if others := _other_models(record):
        lines += [*_markdown_table(("other model", "NE", "change to the candidate"), others), ""]
    rows = [[_ANSWERS[_answer(check)][1], check.name, check.words] for check in _checks(record)]
    lines += [*_markdown_table(("result", "check", "details"), rows), ""]
    if record.importance:
        worth = _importance(record, record.importance, "feature")
        lines += [*_markdown_table([name.rstrip("*").lower() for name in worth.head], worth.rows), ""]
    if record.slices:
        compared = _compared(record.slices)
        head = ("slice", "rows", "NE", *(("incumbent", "change of NE") if compared else ()), "calibration")
        lines += [*_markdown_table(head, [_slice_cells(each, compared) for each in record.slices]), ""]
    return "\n".join(lines)


def _model(record: GateRecord) -> str:
    return f"{record.model} {record.version}".strip()


def _sentence(record: GateRecord) -> str:
    against = record.incumbent_version
    beside = f"beside the incumbent {against}" if against else "no incumbent, absolute checks only"
    return f"{_model(record) or 'candidate'} on {units.count(record.rows)} test rows, {beside}"


def _cards(record: GateRecord) -> list[tuple[str, str, str]]:
    figures: list[tuple[str, str, str]] = []
    if record.candidate is None:
        return figures
    for title, ours, *others in _figure_rows(record):
        under = f"incumbent {others[0]}, {others[1].split(' ')[0]}" if others else "no incumbent"
        figures.append((title if title[0].isupper() else title.capitalize(), ours.split(" ")[0], under))
    if power := record.power:
        figures.append(("Minimum detectable change", f"{power.resolved:+.2%}", _rows_that_tell(record.rows, power)))
    if shift := record.shift:
        figures.append(("Prediction shift", units.decimal(shift.psi, 3), f"PSI; KS {units.decimal(shift.ks, 3)}"))
    if coverage := record.coverage:
        mean = sum(coverage.values()) / len(coverage)
        figures.append(("Id coverage", units.percent(mean), "share of lookups with a trained row"))
    if serving := record.serving:
        message = f"change of NE as served; largest difference {units.decimal(serving.largest_difference)}"
        figures.append(("Training-serving skew", f"{100 * serving.gap:+.3f}%", message))
    if cost := record.cost:
        figures.append(("Ensemble", f"{units.count(cost.members)} members", _cost_words(cost)))
    return figures


def _cost_words(cost: ServingCost) -> str:
    """Bytes of tables and time a row, beside those of one member and of the incumbent."""
    beside = "" if cost.row_us_of_incumbent is None else f", the incumbent's {cost.row_us_of_incumbent:.1f}"
    size = f"{units.size(cost.bytes)} of tables, one member {units.size(cost.bytes_of_one)}"
    return f"{size}; {cost.row_us:.1f} microseconds a row{beside}"


def _rows_that_tell(rows: int, power: RowsPower) -> str:
    needed, limit = power.rows_needed, f"{power.limit:.2%}"
    if needed is None:
        return "of NE"
    return f"of NE; the limit is {limit}" + (f", for {units.count(needed)} rows" if needed > rows else "")


def _interval(values: Interval | None, signed: str = "") -> str:
    """``0.7411 [0.7380, 0.7442]``. ``signed``: + adds the sign, % writes per cent with the sign."""
    if values is None or not units.known(values.point):
        return units.ABSENT
    kind = {"": ".4f", "+": "+.4f", "%": "+.2%"}[signed]
    point, low, high = (format(value, kind) for value in values)
    return f"{point} [{low}, {high}]"


def _figure_rows(record: GateRecord) -> list[list[str]]:
    """Title and figure of the candidate; with an incumbent, also its figure and the change."""
    if record.candidate is None:
        return []
    rows = [[title, _interval(getattr(record.candidate, name))] for name, title in FIGURES]
    if record.incumbent is not None:
        for cells, (name, _) in zip(rows, FIGURES, strict=True):
            change = _interval(getattr(record.change, name, None), "%" if name == "ne" else "+")
            cells += [_interval(getattr(record.incumbent, name)), change]
    return rows


def _calibrated_rows(record: GateRecord) -> list[list[str]]:
    """Title and figure of the candidate without its calibrator and with it; none where it has none."""
    before, after = None if record.calibrated is None else record.calibrated.before, record.candidate
    if before is None or after is None:
        return []
    return [[title, _interval(getattr(before, name)), _interval(getattr(after, name))] for name, title in FIGURES]


def _compared_models(record: GateRecord) -> dict[str, Any] | None:
    """The candidate's figures, and those of the incumbent and of other models."""
    if record.candidate is None:
        return None
    compared = record.incumbent is not None
    head = ("Figure", "Candidate*", *(("Incumbent*", "Change*") if compared else ()))
    paired = "; both models are compared on the same resampled rows" if compared else ""
    title = "Candidate and incumbent on the same rows" if compared else "The candidate on test rows"
    return {
        "title": title,
        "models": PageTable(head, _figure_rows(record)),
        "calibrated": PageTable(("Figure", "Without the calibrator*", "With it*"), _calibrated_rows(record)),
        "calibrator": f"The calibrator is {record.calibrated.words}." if record.calibrated is not None else "",
        "others": PageTable(("Other model", "NE*", "Change of NE to the candidate*"), _other_models(record)),
        "text": f"The brackets hold {units.percent(record.confidence, 0)} confidence intervals{paired}.",
    }


def _other_models(record: GateRecord) -> list[list[str]]:
    """Name, NE and change to the candidate for the best of the last versions and the logistic regression."""
    best = f"best of the last versions: {record.best.version}" if record.best is not None else ""
    named = ((best, record.best), ("logistic regression", record.baseline))
    return [
        [name, _interval(each.ne), _interval(each.change, "%")]
        for name, each in named
        if each is not None and each.change is not None
    ]


def _answer(check: Check) -> int:
    """Index in ``_ANSWERS``: 0 failed, 1 passed with a warning, 2 passed."""
    return 0 if not check.passed else 1 if check.warned else 2


def _checks(record: GateRecord) -> list[Check]:
    """Failed checks first, then warnings. Slices that passed are only in their own table."""
    shown = [check for check in record.checks if not (check.passed and check.name.startswith(_SLICE))]
    return sorted(shown, key=_answer)


def _checks_table(checks: Sequence[Check]) -> PageTable:
    answers = [_ANSWERS[_answer(check)] for check in checks]
    rows = [(pill(a[0], a[2]), check.name, check.words) for a, check in zip(answers, checks, strict=True)]
    return PageTable(("Result", "Check", "Details~"), rows)


def _compared(slices: Sequence[Slice]) -> bool:
    return any(each.incumbent is not None for each in slices)


def _slice_cells(each: Slice, compared: bool) -> list[str]:
    theirs = _interval(each.incumbent.ne if each.incumbent is not None else None)
    change = _interval(each.change.ne if each.change is not None else None, "%")
    return [
        f"{each.slice}={each.value}",
        units.count(each.rows),
        _interval(each.candidate.ne),
        *((theirs, change) if compared else ()),
        _interval(each.candidate.calibration),
    ]


def _slices(slices: Sequence[Slice]) -> PageTable:
    compared = _compared(slices)
    head = ("Slice", "Rows*", "NE*", *(("Incumbent*", "Change of NE*") if compared else ()), "Calibration*")
    return PageTable(head, [_slice_cells(each, compared) for each in slices])


def _tasks(record: GateRecord) -> PageTable:
    """Figures of the further tasks."""
    head = ("Task", "Rows*", "Figure", "Candidate*", "Incumbent*", "Change*", "AUC*", "Calibration*")
    rows = [
        (
            name,
            units.count(each.rows),
            each.figure,
            _interval(each.candidate),
            _interval(each.incumbent),
            _interval(each.change, "%"),
            _interval(each.auc),
            _interval(each.calibration),
        )
        for name, each in (record.tasks or {}).items()
    ]
    return PageTable(head, rows)


def _importance(record: GateRecord, worth: Mapping[str, Importance] | None, what: str) -> PageTable:
    """The features, or towers, by importance; beside the incumbent's when it was published, by the change."""
    before = (record.former.importance if record.former is not None else None) or {}
    compared = any(name in before for name in worth or ())
    head = (what, "Increase of NE*", *(("Incumbent, when published*", "Change*") if compared else ()))
    changes = {name: each.rise - before[name].rise for name, each in (worth or {}).items() if name in before}
    order = sorted((worth or {}).items(), key=lambda item: -abs(changes.get(item[0], item[1].rise)))
    rows = []
    for name, each in order:
        cells = [name, _rise(each)]
        if compared:
            cells += [_rise(before[name]), f"{changes[name]:+.4f}"] if name in changes else ["", ""]
        rows.append(cells)
    return PageTable(head, rows[:MOST_FEATURES])


def _rise(each: Importance) -> str:
    return f"{each.rise:+.4f} ± {each.error:.4f}"


def _coverage(record: GateRecord) -> list[tuple[str, str]]:
    before = record.former.coverage if record.former is not None else {}
    pairs = []
    for name, share in sorted(record.coverage.items(), key=lambda item: item[1]):
        then = before.get(name)
        moved = then is not None and abs(then - share) >= LEAST_CHANGE
        pairs.append((name, units.percent(share) + (f" ({units.percent(then)} before)" if moved else "")))
    return pairs


def _markdown_table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    lines = [f"| {' | '.join(head)} |", f"|{'---|' * len(head)}"]
    shown = [[units.for_chat(units.printable(cell.replace("|", "/"), 200)) for cell in row] for row in rows]
    return lines + [f"| {' | '.join(cells)} |" for cells in shown]
