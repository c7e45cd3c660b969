"""The page of a verdict as HTML, with its plots, as Markdown, and as text, from ``gate.json``."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

from pipeline.core import units
from pipeline.records.ensemble import ServingCost
from pipeline.records.error_budget import ErrorBudget
from pipeline.records.gate import HOLD, Beside, Check, GateRecord, Histogram, Importance, Interval, Slice
from pipeline.report.charts import calibration
from pipeline.report.page import Figure, PageTable, from_template, markdown_items, pill
from pipeline.report.summary import WIDTH, wrapped
from pipeline.report.svg import Axis, Frame, ReferenceLine, drawing, percent_tick, reference_lines, signed_tick, tag

MODELS = {"candidate": "candidate", "uncalibrated": "candidate without its calibrator", "incumbent": "incumbent"}
MOST_SLICES = 60
# Rows of the table of importance, which lists the largest first.
MOST_FEATURES = 50
# At most this many slices are named in a sentence.
MOST_NAMED = 10
# The smallest change of coverage that is shown.
LEAST_CHANGE = 0.01
GATE_PAGE, GATE_TEXT = "gate.html", "gate.md"
# Name, title, and how ``_interval`` writes a change: that of NE is relative, the others are differences.
FIGURES = (("ne", "NE", "%"), ("auc", "AUC", "+"), ("calibration", "calibration", "+"))
_SLICE = "slice: "
# Pill, Markdown and word of a result, by the index that ``_answer`` returns.
_ANSWERS = (("failed", "**failed**", "failed"), ("skipped", "warning", "warning"), ("done", "passed", "passed"))


def gate_figures(record: GateRecord) -> list[Figure]:
    """Return all plots; unknown ones are left out."""
    figures: list[Figure] = []
    for model, title in MODELS.items():
        figures += calibration((record.reliability or {}).get(model), title)
    if record.histogram is not None:
        figures.append(_prediction_histogram(record.histogram))
    slices: list[Slice] = []
    for row in record.slices or ():
        # Slices without a change, as without an incumbent, cannot be drawn.
        if row.change is not None and len(slices) < MOST_SLICES:
            slices.append(row)
    if slices:
        figures.append(_slice_plot(slices))
    return figures


def _prediction_histogram(histogram: Histogram) -> Figure:
    # Plot the shares of rows by prediction: the candidate filled, the incumbent as a dashed line.
    edges, incumbent = histogram.edges, histogram.incumbent
    top = max([*histogram.candidate, *(incumbent or ())])
    x = Axis(title="predicted probability", from_zero=True)
    frame = Frame.around([(0.0, 0.0), (edges[-1], top)], x, Axis(title="rows", from_zero=True, show=percent_tick))
    outline = _outline(frame, edges, histogram.candidate)
    closed = f"{outline} L{frame.place((edges[-1], 0))} L{frame.place((edges[0], 0))} Z"
    body = [*frame.grid(), tag("path", class_="area", d=closed), tag("path", class_="curve", d=outline)]
    unit = "share of rows"
    if incumbent is not None:
        body.append(tag("path", class_="reference", d=_outline(frame, edges, incumbent)))
        unit += "; dashed: the incumbent"
    return Figure("Predictions", unit, drawing(body, "Share of rows by predicted probability"))


def _outline(frame: Frame, edges: Sequence[float], shares: Sequence[float]) -> str:
    corners = []
    for (left, right), share in zip(pairwise(edges), shares, strict=False):
        corners += [(left, share), (right, share)]
    return frame.path(corners)


def _slice_plot(slices: Sequence[Slice]) -> Figure:
    # Plot the change of NE of each slice with its interval, in the order of the table.
    changes, ends = [], list[float]()
    for row in slices:
        if row.change is not None:
            changes.append(row.change.ne)
            ends += row.change.ne
    # The axis always includes zero, to show whether an interval contains it.
    corners = [(0.0, min(0.0, *ends)), (len(slices) + 1.0, max(0.0, *ends))]
    x = Axis(title="slice, in the order of the table", whole=True)
    frame = Frame.around(corners, x, Axis(title="change", show=signed_tick))
    frame = replace(frame, x_ticks=[tick for tick in frame.x_ticks if 1 <= tick <= len(slices)])
    body = [*frame.grid(), *reference_lines(frame, [ReferenceLine(0.0, "as the incumbent")])]
    for place, (row, (point, low, high)) in enumerate(zip(slices, changes, strict=True), 1):
        text = f"{row.slice}={row.value}: {point:+.2%} [{low:+.2%}, {high:+.2%}]"
        body += [frame.whisker(place, low, high), frame.dot((place, point), text)]
    plot = drawing(body, "NE by slice")
    return Figure("Change of NE by slice", "candidate over incumbent; lower is better", plot)


def gate_page(record: GateRecord, files: str = "gate.json") -> str:
    """Return the page as HTML, which names ``files`` beside it, if any. Unknown parts are left out."""
    verdict, checks = record.verdict, []
    for check in _checks(record):
        kind, _, word = _ANSWERS[_answer(check)]
        checks.append((pill(kind, word), check.name, check.words))
    return from_template(
        "gate.html",
        title=f"Gate: {verdict} {_model(record)}",
        files=files,
        heading=_model(record) or "Gate",
        about=_sentence(record),
        verdict=pill(verdict, verdict),
        held=verdict == HOLD,
        reasons=record.reasons,
        warnings=record.warnings,
        summary=_cards(record),
        compared=_comparison(record),
        plots=gate_figures(record),
        checks=PageTable(("Result", "Check", "Details~"), checks),
        slices=_slices(record.slices or ()),
        tasks=_tasks(record),
        importance=_importance(record, record.importance, "Feature"),
        towers=_importance(record, record.tower_importance, "Tower"),
        coverage=_coverage(record),
    )


def gate_markdown(record: GateRecord) -> str:
    """Return the same as Markdown without plots, for a ticket or a chat."""
    lines = [f"# Gate: {record.verdict}", "", _sentence(record), ""]
    lines += [*markdown_items("", record.reasons), *markdown_items("warning: ", record.warnings)]
    if record.candidate is not None:
        lines += [*_plain_table(_figures(record)), ""]
        if record.gauc is not None:
            lines += [_explain_gauc(record), ""]
    if record.cost is not None:
        lines += [f"An ensemble of {units.count(record.cost.members)} members: {_cost_words(record.cost)}.", ""]
    if record.budget is not None:
        lines += [units.for_chat(_explain_budget(record.budget)), ""]
    if record.calibrated is not None:
        lines += [f"The calibrator is {record.calibrated.words}.", "", *_plain_table(_calibrated(record)), ""]
    if record.tasks:
        lines += [*_plain_table(_tasks(record)), ""]
    if others := _other_models(record):
        lines += [*_markdown_table(("other model", "NE", "change to the candidate"), others), ""]
    checks = []
    for check in _checks(record):
        checks.append([_ANSWERS[_answer(check)][1], check.name, check.words])
    lines += [*_markdown_table(("result", "check", "details"), checks), ""]
    if record.importance:
        lines += [*_plain_table(_importance(record, record.importance, "feature")), ""]
    if record.slices:
        table = _slices(record.slices)
        head = []
        for name in table.head:
            # Do not use ``_plain_table``, which would turn NE into ne.
            if name != "NE*":
                name = name[0].lower() + name[1:]
            head.append(name.rstrip("*"))
        lines += [*_markdown_table(head, table.rows), ""]
    return "\n".join(lines)


def gate_text(record: GateRecord) -> str:
    """Return verdict, reasons, warnings and figures as text, for a terminal."""
    lines = wrapped("gate", record.verdict, _sentence(record), *record.reasons)
    for warning in record.warnings:
        lines += wrapped("", f"warning: {warning}")
    if record.candidate is not None:
        table = _figures(record)
        lines += ["", units.text_table(list(map(str.lower, table.head)), table.rows)]
        if record.gauc is not None:
            lines += ["", *textwrap.wrap(_explain_gauc(record), WIDTH)]
    if record.budget is not None:
        lines += ["", *textwrap.wrap(_explain_budget(record.budget), WIDTH)]
    return "\n".join(map(str.rstrip, lines))


def _plain_table(table: PageTable) -> list[str]:
    return _markdown_table([name.rstrip("*").lower() for name in table.head], table.rows)


def _model(record: GateRecord) -> str:
    return f"{record.model} {record.version}".strip()


def _sentence(record: GateRecord) -> str:
    comparison = "no incumbent, absolute checks only"
    if record.incumbent_version:
        comparison = f"beside the incumbent {record.incumbent_version}"
    return f"{_model(record) or 'candidate'} on {units.count(record.rows)} test rows, {comparison}"


def _cards(record: GateRecord) -> list[tuple[str, str, str]]:
    cards: list[tuple[str, str, str]] = []
    if record.candidate is None:
        return cards
    for title, figure, *others in _figures(record).rows:
        under = "no incumbent"
        if others:
            incumbent, change = others
            under = f"incumbent {incumbent}, {change.split(' ')[0]}"
        # ``capitalize`` would turn NE into Ne.
        if not title[0].isupper():
            title = title.capitalize()
        # A card has no room for the interval.
        cards.append((title, figure.split(" ")[0], under))
    if power := record.power:
        under = "of NE"
        if power.rows_needed is not None:
            under += f"; the limit is {power.limit:.2%}"
            if power.rows_needed > record.rows:
                under += f", and detecting that takes {units.count(power.rows_needed)} rows"
        cards.append(("Minimum detectable change", f"{power.resolved:+.2%}", under))
    if budget := record.budget:
        cards.append(("Error budget spent", f"{budget.spent:.2g}", budget.words))
    if shift := record.shift:
        cards.append(("Prediction shift", units.decimal(shift.psi, 3), f"PSI; KS {units.decimal(shift.ks, 3)}"))
    if coverage := record.coverage:
        mean = sum(coverage.values()) / len(coverage)
        cards.append(("Id coverage", units.percent(mean), "share of lookups with a trained row"))
    if serving := record.serving:
        under = f"change of NE as served; largest difference {units.decimal(serving.largest_difference)}"
        cards.append(("Training-serving skew", f"{100 * serving.gap:+.3f}%", under))
    if cost := record.cost:
        cards.append(("Ensemble", f"{units.count(cost.members)} members", _cost_words(cost)))
    return cards


def _cost_words(cost: ServingCost) -> str:
    text = f"{units.size(cost.bytes)} of tables, one member {units.size(cost.bytes_of_one)}"
    text += f"; {cost.row_us:.1f} microseconds a row"
    if cost.row_us_of_incumbent is not None:
        text += f", the incumbent's {cost.row_us_of_incumbent:.1f}"
    return text


def _interval(values: Interval | None, signed: str = "") -> str:
    # Example: 0.7411 [0.7380, 0.7442]. With ``signed``, + adds the sign and % writes per cent with the sign.
    if values is None or not units.known(values.point):
        return units.ABSENT
    kind = {"": ".4f", "+": "+.4f", "%": "+.2%"}[signed]
    return f"{values.point:{kind}} [{values.low:{kind}}, {values.high:{kind}}]"


def _figures(record: GateRecord) -> PageTable:
    # Show the candidate's figures and, with an incumbent, also its figures and the changes.
    head, rows = ["Figure", "Candidate*"], []
    if record.incumbent is not None:
        head += ["Incumbent*", "Change*"]
    for name, title, signed in FIGURES:
        cells = [title, _interval(getattr(record.candidate, name))]
        if record.incumbent is not None:
            change = _interval(getattr(record.change, name, None), signed)
            cells += [_interval(getattr(record.incumbent, name)), change]
        rows.append(cells)
    if record.gauc is not None and record.gauc.candidate is not None:
        cells = ["GAUC", _interval(record.gauc.candidate)]
        if record.incumbent is not None:
            cells += [_interval(record.gauc.incumbent), _interval(record.gauc.change, "+")]
        rows.append(cells)
    return PageTable(head, rows)


def _calibrated(record: GateRecord) -> PageTable:
    # Compare the candidate without and with its calibrator; there are no rows if it has none.
    rows = []
    if record.calibrated is not None and record.calibrated.before is not None and record.candidate is not None:
        for name, title, _ in FIGURES:
            before, after = getattr(record.calibrated.before, name), getattr(record.candidate, name)
            rows.append([title, _interval(before), _interval(after)])
    return PageTable(("Figure", "Without the calibrator*", "With it*"), rows)


def _comparison(record: GateRecord) -> dict[str, Any] | None:
    if record.candidate is None:
        return None
    title, paired = "The candidate on test rows", ""
    if record.incumbent is not None:
        title = "Candidate and incumbent on the same rows"
        paired = "; both models are compared on the same resampled rows"
    sentences = [f"The brackets hold {units.percent(record.confidence, 0)} confidence intervals{paired}."]
    if gauc := _explain_gauc(record):
        sentences.append(gauc)
    if record.budget is not None:
        sentences.append(_explain_budget(record.budget))
    calibrator = ""
    if record.calibrated is not None:
        calibrator = f"The calibrator is {record.calibrated.words}."
    return {
        "title": title,
        "models": _figures(record),
        "calibrated": _calibrated(record),
        "calibrator": calibrator,
        "others": PageTable(("Other model", "NE*", "Change of NE to the candidate*"), _other_models(record)),
        "text": " ".join(sentences),
    }


def _explain_budget(budget: ErrorBudget) -> str:
    text = (
        f"A model that is worse by more than the limit passes this look with a probability of {budget.alpha:.2g} at "
        f"most; {budget.words}."
    )
    if budget.not_covered:
        names = ", ".join(budget.not_covered[:MOST_NAMED])
        if len(budget.not_covered) > MOST_NAMED:
            names += f" and {len(budget.not_covered) - MOST_NAMED:,} more"
        text += f" The budget does not cover slices with too few rows: {names}."
    return text


def _explain_gauc(record: GateRecord) -> str:
    if record.gauc is None or record.gauc.candidate is None:
        return ""
    users, rows = record.gauc.counted, units.count(record.gauc.rows)
    return f"GAUC is the mean AUC within each of {users} with rows of both classes, weighted by their {rows} rows."


def _other_models(record: GateRecord) -> list[list[str]]:
    # Show name, NE and change to the candidate for the best of the last versions and the logistic regression.
    models: list[tuple[str, Beside | None]] = []
    if record.best is not None:
        models.append((f"best of the last versions: {record.best.version}", record.best))
    models.append(("logistic regression", record.baseline))
    rows = []
    for name, model in models:
        if model is not None and model.change is not None:
            rows.append([name, _interval(model.ne), _interval(model.change, "%")])
    return rows


def _answer(check: Check) -> int:
    # Return the index in ``_ANSWERS``.
    if not check.passed:
        return 0
    if check.warned:
        return 1
    return 2


def _checks(record: GateRecord) -> list[Check]:
    # List failed checks first, then warnings. Slices that passed share one line here, and have their own table.
    shown, passed_slices = [], 0
    for check in record.checks:
        if check.passed and check.name.startswith(_SLICE):
            passed_slices += 1
        else:
            shown.append(check)
    if passed_slices:
        words = f"{units.plural(passed_slices, 'check')} of slices passed; their figures are in the table of slices"
        shown.append(Check("slices", "gate.slices", True, words))
    return sorted(shown, key=_answer)


def _slices(slices: Sequence[Slice]) -> PageTable:
    compared = any(row.incumbent is not None for row in slices)
    head, rows = ["Slice", "Rows*", "NE*", "Calibration*"], []
    if compared:
        head[3:3] = ["Incumbent*", "Change of NE*"]
    for row in slices:
        cells = [f"{row.slice}={row.value}", units.count(row.rows), _interval(row.candidate.ne)]
        if compared:
            cells += [units.ABSENT] * 2
            if row.incumbent is not None:
                cells[-2] = _interval(row.incumbent.ne)
            if row.change is not None:
                cells[-1] = _interval(row.change.ne, "%")
        rows.append([*cells, _interval(row.candidate.calibration)])
    return PageTable(head, rows)


def _tasks(record: GateRecord) -> PageTable:
    rows = []
    for name, task in (record.tasks or {}).items():
        ne = (_interval(task.candidate), _interval(task.incumbent), _interval(task.change, "%"))
        rows.append((name, units.count(task.rows), task.figure, *ne, _interval(task.auc), _interval(task.calibration)))
    head = ("Task", "Rows*", "Figure", "Candidate*", "Incumbent*", "Change*", "AUC*", "Calibration*")
    return PageTable(head, rows)


def _importance(record: GateRecord, importance: Mapping[str, Importance] | None, what: str) -> PageTable:
    # List features, or towers, by importance, or by its change if the incumbent's was recorded when it was published.
    importance = importance or {}
    before: Mapping[str, Importance] = {}
    if record.former is not None:
        before = record.former.importance or {}
    changes = {name: importance[name].rise - before[name].rise for name in importance if name in before}
    order = sorted(importance, key=lambda name: -abs(changes.get(name, importance[name].rise)))
    rows = []
    for name in order[:MOST_FEATURES]:
        cells = [name, _rise(importance[name])]
        if name in changes:
            cells += [_rise(before[name]), f"{changes[name]:+.4f}"]
        elif changes:
            cells += ["", ""]
        rows.append(cells)
    head = [what, "Increase of NE*"]
    if changes:
        head += ["Incumbent, when published*", "Change*"]
    return PageTable(head, rows)


def _rise(importance: Importance) -> str:
    return f"{importance.rise:+.4f} ± {importance.error:.4f}"


def _coverage(record: GateRecord) -> list[tuple[str, str]]:
    before, pairs = {}, []
    if record.former is not None:
        before = record.former.coverage
    for name, share in sorted(record.coverage.items(), key=lambda item: item[1]):
        text = units.percent(share)
        former = before.get(name)
        if former is not None and abs(former - share) >= LEAST_CHANGE:
            text += f" ({units.percent(former)} before)"
        pairs.append((name, text))
    return pairs


def _markdown_table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    lines = [f"| {' | '.join(head)} |", f"|{'---|' * len(head)}"]
    for row in rows:
        cells = []
        for cell in row:
            # A vertical bar would end the cell.
            cells.append(units.for_chat(units.printable(cell.replace("|", "/"), 200)))
        lines.append(f"| {' | '.join(cells)} |")
    return lines
