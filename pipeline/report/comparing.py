"""``nightjar compare`` and ``nightjar runs ls`` as text, and ``compare.html``."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from itertools import islice
from typing import Any

from pipeline.core import units
from pipeline.core.units import text_table
from pipeline.records.gate import Interval
from pipeline.records.runs import RunChange, RunLine, RunsComparison
from pipeline.report.charts import STEPS, step_points
from pipeline.report.page import COLOURS, Figure, PageTable, from_template, pill, with_swatch
from pipeline.report.svg import Axis, PlotCurve, series_plot

MOST_SETTINGS = 40
CURVES = (
    ("ne_window", "Training NE", "over a window of steps", Axis(title="NE")),
    ("validation_ne", "Validation NE", "at each validation", Axis(title="NE")),
    ("samples_per_s", "Speed", "samples per second", Axis(title="samples/s", from_zero=True)),
)


def runs_listing(lines: Sequence[RunLine]) -> str:
    """Return ``nightjar runs ls``: a line a run."""
    if not lines:
        return "no runs"
    head = ("run", "status", "finished", "dataset", "NE*", "AUC*", "calibration*", "gate", "seconds*")
    rows = []
    for line in lines:
        finished = units.ABSENT
        if line.finished is not None:
            finished = time.strftime("%Y-%m-%d %H:%M", time.gmtime(line.finished))
        # Show a dataset's name with the first digits of its key.
        dataset, _, key = (line.dataset or units.ABSENT).rpartition("/")
        if dataset:
            key = f"{dataset}/{key[:8]}"
        figures = (units.decimal(line.ne, 5), units.decimal(line.auc, 5), units.decimal(line.calibration))
        ended = (line.verdict or units.ABSENT, units.decimal(line.seconds, 1))
        rows.append((line.run, line.status, finished, key, *figures, *ended))
    return text_table(head, rows)


def comparison_text(record: RunsComparison) -> str:
    """Return ``nightjar compare``: figures, differences with their intervals, slices, settings."""
    parts = [text_table(*_figures(record))]
    for change in record.changes:
        parts.append(_change_text(change, record))
    if not record.settings:
        parts.append("the runs have the same settings")
        return "\n\n".join(parts)
    head = ["setting"]
    for line in record.runs:
        head.append(line.run)
    rows = []
    for name, values in islice(record.settings.items(), MOST_SETTINGS):
        rows.append((name, *map(_value, values)))
    text = text_table(head, rows)
    if len(record.settings) > len(rows):
        text += f"\nand {len(record.settings) - len(rows)} more (--json)"
    return "\n\n".join([*parts, text])


def comparison_page(record: RunsComparison, curves: Mapping[str, Sequence[Mapping[str, Any]]]) -> str:
    """Return the page of a comparison. ``curves``: the records of ``metrics.jsonl`` by run."""
    names = []
    # Show a column for each stage that any run has, in the order of their first appearance.
    stages: dict[str, None] = {}
    for line in record.runs:
        names.append(line.run)
        stages.update(dict.fromkeys(line.stages or {}))
    head, rows = _figures(record)
    titles = []
    for name in head:
        # Do not use ``capitalize``, which would turn NE into Ne.
        titles.append(f"{name[0].upper()}{name[1:]}")
    runs, seconds = [], []
    for place, (row, line) in enumerate(zip(rows, record.runs, strict=True)):
        runs.append((with_swatch(place % COLOURS, row[0]), pill(line.status, line.status), *row[2:]))
        took = line.stages or {}
        seconds.append((line.run, *(units.duration(took.get(name)) for name in stages)))
    settings = [(name, *map(_value, values)) for name, values in record.settings.items()]
    grouped = any(compared.gauc is not None for compared in record.changes)
    change_head = ["Run", "Rows*", "NE*", "AUC*", "Calibration*", "Result~"]
    if grouped:
        change_head.insert(4, "GAUC*")
    changes: list[Sequence[str]] = []
    slices: list[Sequence[str]] = []
    problems = []
    for compared in record.changes:
        if compared.problem:
            problems.append(f"{compared.run}: {compared.problem}")
        if change := compared.change:
            figures = [_signed(change.ne, percent=True), _signed(change.auc), _signed(change.calibration)]
            if grouped:
                # Not every run has a group with rows of both classes.
                figures.insert(2, units.ABSENT)
                if compared.gauc is not None:
                    figures[2] = _signed(compared.gauc)
            changes.append((compared.run, units.count(compared.rows), *figures, _verdict(change.ne)))
        for part in compared.slices or ():
            counts = (units.count(part.rows), units.count(part.clicks))
            ne = (_signed(part.change.ne, percent=True), _verdict(part.change.ne))
            slices.append((compared.run, part.slice, part.value, *counts, *ne))
    plots = []
    for key, title, unit, axis in CURVES:
        series = []
        for place, name in enumerate(names):
            series.append(PlotCurve(name, place % COLOURS, step_points(curves[name], key)))
        if any(curve.points for curve in series):
            label = f"{title} ({unit}) of {', '.join(names)} over steps"
            plots.append(Figure(title, unit, series_plot(series, x=STEPS, y=axis, label=label)))
    return from_template(
        "compare.html",
        title=f"Nightjar: {' and '.join(names)}",
        heading=f"{units.plural(len(names), 'run')} compared",
        about=", ".join(names),
        runs=PageTable(titles, runs),
        marked=_on_same_rows(record),
        first=names[0],
        confidence=units.percent(record.confidence, 0),
        changes=PageTable(change_head, changes),
        problems=problems,
        slices=PageTable(("Run", "Slice", "Value", "Rows*", "Clicks*", "NE*", "Result~"), slices),
        curves=plots,
        stages=PageTable(("Run", *(f"{name}*" for name in stages)), seconds),
        settings=PageTable(("Setting", *names), settings),
    )


def _on_same_rows(record: RunsComparison) -> bool:
    # The lowest NE is marked only then. A run without an NE cannot be the lowest, so it may lack a comparison.
    pairs = zip(record.runs[1:], record.changes, strict=True)
    return all(change.change is not None or not units.known(line.ne) for line, change in pairs)


def _figures(record: RunsComparison) -> tuple[Sequence[str], list[Sequence[str]]]:
    grouped = any(line.gauc is not None for line in record.runs)
    head = ["run", "status", "NE*", "AUC*", "log loss*", "calibration*"]
    if grouped:
        head.insert(4, "GAUC*")
    head += ["samples/s*", "seconds*", "tables*", "checkpoints*", "gate"]
    best = None
    if _on_same_rows(record):
        best = min((line.ne for line in record.runs if units.known(line.ne)), default=None)
    rows: list[Sequence[str]] = []
    for line in record.runs:
        mark = "*" if line.ne is not None and line.ne == best else " "
        cells = [line.run, line.status, units.decimal(line.ne, 5) + mark, units.decimal(line.auc, 5)]
        if grouped:
            cells.append(units.decimal(line.gauc, 5))
        cells += [units.decimal(line.logloss), units.decimal(line.calibration)]
        cells += [units.count(line.samples_per_s), units.decimal(line.seconds, 1)]
        cells += [units.size(line.table_bytes), units.size(line.checkpoint_bytes)]
        rows.append([*cells, line.verdict or units.ABSENT])
    return head, rows


def _change_text(compared: RunChange, record: RunsComparison) -> str:
    first, change = record.runs[0].run, compared.change
    if change is None:
        return f"{compared.run} beside {first}: {compared.problem}"
    lines = [
        f"{compared.run} beside {first}, on the same {units.count(compared.rows)} rows "
        f"({units.percent(record.confidence, 0)} intervals):",
        f"  NE          {_signed(change.ne, percent=True)}: {_verdict(change.ne)}",
        f"  AUC         {_signed(change.auc)}",
        f"  calibration {_signed(change.calibration)}",
    ]
    if compared.gauc is not None:
        # GAUC comes before the calibration, as in the table of figures.
        lines.insert(-1, f"  GAUC        {_signed(compared.gauc)}")
    slices = compared.slices or ()
    unsure = 0
    for part in slices:
        verdict = _verdict(part.change.ne)
        if verdict == "not significant":
            unsure += 1
            continue
        name = f"{part.slice}={units.printable(part.value)} ({units.count(part.rows)} rows)"
        lines.append(f"  {name}: NE {_signed(part.change.ne, percent=True)}, {verdict}")
    if slices:
        lines.append(f"  {unsure} of {units.plural(len(slices), 'slice')} are not significant")
    return "\n".join(lines)


def _verdict(ne: Interval) -> str:
    # A change is beyond doubt only if its interval leaves out zero.
    if ne.high < 0:
        return "better"
    if ne.low > 0:
        return "worse"
    return "not significant"


def _signed(value: Interval, percent: bool = False) -> str:
    # Example: +0.12% [-0.03%, +0.27%].
    kind = "+.3%" if percent else "+.5f"
    return f"{value.point:{kind}} [{value.low:{kind}}, {value.high:{kind}}]"


def _value(value: Any) -> str:
    text = str(value)
    if value is None:
        text = "not set"
    elif isinstance(value, bool):
        text = text.lower()
    if len(text) > 60:
        text = f"{text[:57]}..."
    return text
