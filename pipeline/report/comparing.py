"""``nightjar compare`` and ``nightjar runs ls`` as text, and ``compare.html``."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

from pipeline import units
from pipeline.records.gate import Figures, Interval
from pipeline.records.runs import RunChange, RunLine, RunsComparison
from pipeline.report.charts import STEPS
from pipeline.report.page import COLOURS, Figure, PageTable, from_template, pill, with_swatch
from pipeline.report.svg import Axis, PlotCurve, series_plot
from pipeline.units import text_table

MOST_SETTINGS = 40
CURVES = (
    ("ne_window", "Training NE", "over a window of steps", Axis(title="NE")),
    ("validation_ne", "Validation NE", "at each validation", Axis(title="NE")),
    ("samples_per_s", "Speed", "samples per second", Axis(title="samples/s", from_zero=True)),
)


def runs_listing(lines: Sequence[RunLine]) -> str:
    """``nightjar runs ls``: a line a run."""
    if not lines:
        return "no runs"
    head = ("run", "status", "finished", "dataset", "NE*", "AUC*", "calibration*", "gate", "seconds*")
    rows = [
        (
            each.run,
            each.status,
            _when(each.finished),
            _short(each.dataset),
            units.decimal(each.ne, 5),
            units.decimal(each.auc, 5),
            units.decimal(each.calibration),
            each.verdict or units.ABSENT,
            units.decimal(each.seconds, 1),
        )
        for each in lines
    ]
    return text_table(head, rows)


def comparison_text(record: RunsComparison) -> str:
    """``nightjar compare``: figures, differences with their intervals, slices, settings."""
    parts = [text_table(*_figures(record))]
    parts += [_change_text(each, record) for each in record.changes]
    if record.settings:
        head = ("setting", *(each.run for each in record.runs))
        rows = [(name, *map(_value, values)) for name, values in list(record.settings.items())[:MOST_SETTINGS]]
        more = len(record.settings) - len(rows)
        parts.append(text_table(head, rows) + (f"\nand {more} more (--json)" if more else ""))
    else:
        parts.append("the runs have the same settings")
    return "\n\n".join(parts)


def comparison_page(record: RunsComparison, curves: Mapping[str, Sequence[Mapping[str, Any]]]) -> str:
    """The page of a comparison. ``curves``: the records of ``metrics.jsonl`` by run."""
    names = [each.run for each in record.runs]
    head, rows = _figures(record)
    shown = [
        (with_swatch(place % COLOURS, row[0]), pill(line.status, line.status), *row[2:])
        for place, (row, line) in enumerate(zip(rows, record.runs, strict=True))
    ]
    settings = [(name, *map(_value, values)) for name, values in record.settings.items()]
    stages = list(dict.fromkeys(name for each in record.runs for name in each.stages or {}))
    seconds = [(each.run, *(units.duration((each.stages or {}).get(name)) for name in stages)) for each in record.runs]
    return from_template(
        "compare.html",
        title=f"Nightjar: {' and '.join(names)}",
        heading=f"{units.plural(len(names), 'run')} compared",
        about=", ".join(names),
        runs=PageTable([f"{name[0].upper()}{name[1:]}" for name in head], shown),
        marked=_on_same_rows(record),
        first=names[0],
        confidence=units.percent(record.confidence, 0),
        changes=PageTable(("Run", "Rows*", "NE*", "AUC*", "Calibration*", "Result~"), _change_rows(record)),
        problems=[f"{each.run}: {each.problem}" for each in record.changes if each.problem],
        slices=PageTable(("Run", "Slice", "Value", "Rows*", "Clicks*", "NE*", "Result~"), _slice_rows(record)),
        curves=_curves(names, curves),
        stages=PageTable(("Run", *(f"{name}*" for name in stages)), seconds),
        settings=PageTable(("Setting", *names), settings),
    )


def _on_same_rows(record: RunsComparison) -> bool:
    """Whether all runs were evaluated on the same rows, so that one has the lowest NE."""
    pairs = zip(record.runs[1:], record.changes, strict=True)
    return all(change.change is not None or not units.known(line.ne) for line, change in pairs)


def _figures(record: RunsComparison) -> tuple[Sequence[str], list[Sequence[str]]]:
    lines = record.runs
    head = (
        "run",
        "status",
        "NE*",
        "AUC*",
        "log loss*",
        "calibration*",
        "samples/s*",
        "seconds*",
        "tables*",
        "checkpoints*",
        "gate",
    )
    known = [each.ne for each in lines if units.known(each.ne)] if _on_same_rows(record) else []
    best = min(known, default=None)
    rows = [
        (
            each.run,
            each.status,
            f"{units.decimal(each.ne, 5)}{'*' if each.ne is not None and each.ne == best else ' '}",
            units.decimal(each.auc, 5),
            units.decimal(each.logloss),
            units.decimal(each.calibration),
            units.count(each.samples_per_s),
            units.decimal(each.seconds, 1),
            units.size(each.table_bytes),
            units.size(each.checkpoint_bytes),
            each.verdict or units.ABSENT,
        )
        for each in lines
    ]
    return head, list(rows)


def _change_text(each: RunChange, record: RunsComparison) -> str:
    first = record.runs[0].run
    if each.change is None:
        return f"{each.run} beside {first}: {each.problem}"
    own = each.change
    lines = [
        f"{each.run} beside {first}, on the same {units.count(each.rows)} rows "
        f"({units.percent(record.confidence, 0)} intervals):",
        f"  NE          {_signed(own.ne, percent=True)}: {_verdict(own.ne)}",
        f"  AUC         {_signed(own.auc)}",
        f"  calibration {_signed(own.calibration)}",
    ]
    sure = [part for part in each.slices or () if _verdict(part.change.ne) != "not significant"]
    lines += [
        f"  {part.slice}={units.printable(part.value)} ({units.count(part.rows)} rows): "
        f"NE {_signed(part.change.ne, percent=True)}, {_verdict(part.change.ne)}"
        for part in sure
    ]
    if each.slices:
        lines.append(
            f"  {len(each.slices) - len(sure)} of {units.plural(len(each.slices), 'slice')} are not significant"
        )
    return "\n".join(lines)


def _change_rows(record: RunsComparison) -> list[Sequence[str]]:
    return [(each.run, units.count(each.rows), *_cells(each.change)) for each in record.changes if each.change]


def _cells(change: Figures) -> Sequence[str]:
    parts = (_signed(change.ne, percent=True), _signed(change.auc), _signed(change.calibration))
    return (*parts, _verdict(change.ne))


def _slice_rows(record: RunsComparison) -> list[Sequence[str]]:
    return [
        (
            each.run,
            part.slice,
            part.value,
            units.count(part.rows),
            units.count(part.clicks),
            _signed(part.change.ne, percent=True),
            _verdict(part.change.ne),
        )
        for each in record.changes
        for part in each.slices or ()
    ]


def _curves(names: Sequence[str], curves: Mapping[str, Sequence[Mapping[str, Any]]]) -> list[Figure]:
    figures = []
    for key, title, unit, axis in CURVES:
        series = [
            PlotCurve(
                name,
                place % COLOURS,
                tuple((float(r["step"]), float(r[key])) for r in curves[name] if units.known(r.get(key))),
            )
            for place, name in enumerate(names)
        ]
        if any(each.points for each in series):
            label = f"{title} ({unit}) of {', '.join(names)} over steps"
            figures.append(Figure(title, unit, series_plot(series, x=STEPS, y=axis, label=label)))
    return figures


def _verdict(ne: Interval) -> str:
    """Which of two models is better in NE; beyond doubt only where the interval leaves out zero."""
    return "better" if ne.high < 0 else "worse" if ne.low > 0 else "not significant"


def _signed(value: Interval, percent: bool = False) -> str:
    """``+0.12% [-0.03%, +0.27%]``."""
    point, low, high = (f"{each:+.3%}" if percent else f"{each:+.5f}" for each in (value.point, value.low, value.high))
    return f"{point} [{low}, {high}]"


def _value(value: Any) -> str:
    text = "not set" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _when(seconds: float | None) -> str:
    return time.strftime("%Y-%m-%d %H:%M", time.gmtime(seconds)) if seconds is not None else units.ABSENT


def _short(path: str | None) -> str:
    """A dataset's name with the first digits of its key."""
    name, _, key = (path or units.ABSENT).rpartition("/")
    return f"{name}/{key[:8]}" if name else key
