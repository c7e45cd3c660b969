"""A study as text, and its ``report.html``: trials, the best so far, which settings matter, and the Pareto front."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from typing import Any

from markupsafe import Markup

from pipeline.core import units
from pipeline.core.units import text_table
from pipeline.records.study import BROKEN, DONE, PRUNED, Dimension, StudyLine, StudyShown, TrialRecord
from pipeline.report.page import Figure, PageTable, from_template, pill, with_meter
from pipeline.report.svg import Axis, Point, scatter_plot

NE = Axis(title="validation NE")
FACTS = ("NE*", "AUC*", "test NE*", "test AUC*", "step (predicted)*", "tables*", "steps*")


def studies_listing(lines: Sequence[StudyLine]) -> str:
    """``nightjar tune ls``: a line a study."""
    if not lines:
        return "no studies"
    head = ("study", "begun", "trials*", "done*", "pruned*", "failed*", "running*", "best*", "NE*")
    rows = [
        (
            each.study,
            time.strftime("%Y-%m-%d %H:%M", time.gmtime(each.created)),
            str(sum(each.trials.values())),
            *(str(each.trials.get(state, 0)) for state in (DONE, PRUNED, BROKEN, "running")),
            units.count(each.best),
            units.decimal(each.ne, 5),
        )
        for each in lines
    ]
    return text_table(head, rows)


def study_text(shown: StudyShown) -> str:
    """``nightjar tune show``: the trials, best first, and what follows from them."""
    keys = list(shown.study.space)
    head = ("trial*", "state", *(f"{key}*" for key in keys), *FACTS)
    rows = [(str(each.number), each.state, *_cells(each, keys)) for each in _ordered(shown)]
    parts = [text_table(head, rows), _saved(shown)]
    if shown.importance:
        shares = (f"{key} {units.percent(share, 0)}" for key, share in shown.importance.items())
        parts.append(f"importance: {', '.join(shares)}")
    if shown.best_trial is not None:
        parts.append(f"best: trial {shown.best}, {' '.join(shown.best_trial.overrides)}")
        parts += [choice(shown)] if choice(shown) else []
    return "\n\n".join(parts)


def study_page(shown: StudyShown) -> str:
    """``report.html`` of a study."""
    study, best, keys = shown.study, shown.best_trial, list(shown.study.space)
    rows = [
        (str(each.number), pill(each.state, each.state), *_cells(each, keys), each.error or "")
        for each in _ordered(shown)
    ]
    spaces = [(key, _space(each)) for key, each in study.space.items()]
    shares = [(key, with_meter(units.percent(share), share)) for key, share in (shown.importance or {}).items()]
    return from_template(
        "study.html",
        title=f"Nightjar: study {study.study}",
        files="study.json and trials/*.json",
        heading=f"Study {study.study}",
        about=" ".join(study.overrides),
        summary=_summary(shown),
        best=[] if best is None else best.overrides,
        saved=_saved(shown),
        choice=choice(shown),
        trials=PageTable(("Trial*", "State", *(f"{key}*" for key in keys), *FACTS, "Error~"), rows),
        importance=PageTable(("Setting", "Importance"), shares),
        space=PageTable(("Setting", "Range~"), spaces),
        figures_=[each for each in (_history(shown), *_fronts(shown)) if each is not None],
    )


def choice(shown: StudyShown) -> str:
    """What the lowest NE is worth beside that of the settings as they were; "" where nothing is known."""
    if shown.lowest is None or shown.gain is None or not math.isfinite(shown.gain[1]):
        return ""
    lower, error = (units.decimal(each, 5) for each in shown.gain)
    by = f"lower by {lower} than with the settings as they were, with a standard error of {error}"
    if shown.lowest == shown.best:
        return f"Its validation NE is {by}."
    return f"The validation NE of trial {shown.lowest} is {by}: that may be chance, so the settings stay the best."


def front(points: Sequence[Point]) -> list[Point]:
    """The Pareto front of ``points``: those that no other one is below in both coordinates, by rising x."""
    kept: list[Point] = []
    for point in sorted(set(points)):
        if not kept or point[1] < kept[-1][1]:
            kept.append(point)
    return kept


def _ordered(shown: StudyShown) -> list[TrialRecord]:
    """Finished trials, best first, then the others by their number."""
    return sorted(
        shown.trials, key=lambda each: (each.state != DONE, (each.state == DONE and each.ne) or 0, each.number)
    )


def _cells(trial: TrialRecord, keys: Sequence[str]) -> list[str]:
    steps = f"{units.count(trial.steps)} of {units.count(trial.steps_total)}"
    return [
        *(_value(trial.parameters.get(key)) for key in keys),
        units.decimal(trial.ne, 5),
        units.decimal(trial.auc, 5),
        units.decimal(trial.test_ne, 5),
        units.decimal(trial.test_auc, 5),
        f"{units.decimal(trial.step_ms, 2)} ms" if trial.step_ms is not None else units.ABSENT,
        units.size(trial.table_bytes),
        steps,
    ]


def _value(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


def _space(dimension: Dimension) -> str:
    if dimension.kind == "choice":
        return ", ".join(dimension.choices or ())
    whole = "whole numbers" if dimension.kind == "int" else "numbers"
    by = ", by their logarithm" if dimension.log else f", in steps of {dimension.step:g}" if dimension.step else ""
    return f"{whole} from {dimension.low:g} to {dimension.high:g}{by}"


def _saved(shown: StudyShown) -> str:
    done, whole = units.count(shown.steps), units.count(shown.steps_in_full)
    share = 1 - shown.steps / shown.steps_in_full if shown.steps_in_full else 0.0
    return f"{done} steps trained, of {whole} had every trial trained in full: {units.percent(share)} saved"


def _summary(shown: StudyShown) -> list[tuple[str, str, str]]:
    best, states = shown.best_trial, [each.state for each in shown.trials]
    cards = [
        ("Trials", str(len(states)), f"{states.count(DONE)} done, {states.count(PRUNED)} pruned"),
        ("Steps", units.count(shown.steps), f"of {units.count(shown.steps_in_full)} in full"),
    ]
    if best is not None:
        cards = [
            ("Best validation NE", units.decimal(best.ne, 5), f"trial {best.number}"),
            ("Its test AUC", units.decimal(best.test_auc, 5), f"NE {units.decimal(best.test_ne, 5)}"),
            *cards,
        ]
    return cards


def _history(shown: StudyShown) -> Figure | None:
    """NE by trial, and a line through the best so far."""
    known = [each for each in shown.trials if each.ne is not None]
    points = [((float(each.number), float(each.ne or 0)), f"{_named(each)}, {each.state}") for each in known]
    best: list[Point] = []
    for each in known:
        if each.state == DONE and (not best or float(each.ne or 0) < best[-1][1]):
            best += [
                (float(each.number), best[-1][1] if best else float(each.ne or 0)),
                (float(each.number), each.ne or 0),
            ]
    plot = scatter_plot(
        points,
        joined=best,
        x=Axis(title="trial", whole=True, from_zero=True),
        y=NE,
        label=f"Validation NE of {len(points)} trials, and the best so far",
    )
    return Figure("Optimization history", "validation NE by trial; dashed: the best so far", plot) if points else None


def _fronts(shown: StudyShown) -> list[Figure]:
    """NE against what the plan predicts of each finished trial: time of a step, bytes of the tables."""
    costs = (("step_ms", "predicted step", "ms", 1.0), ("table_bytes", "tables", "MiB", 2.0**20))
    figures = []
    for name, title, unit, scale in costs:
        known = [
            ((getattr(each, name) / scale, float(each.ne)), _named(each))
            for each in shown.trials
            if each.state == DONE and each.ne is not None and getattr(each, name) is not None
        ]
        best = front([point for point, _ in known])
        label = f"Validation NE against {title} of {len(known)} trials, {len(best)} of them on the Pareto front"
        plot: Markup = scatter_plot(known, joined=best, x=Axis(title=f"{title}, {unit}"), y=NE, label=label)
        if known:
            figures.append(Figure(f"NE and {title}", "dashed: the Pareto front", plot))
    return figures


def _named(trial: TrialRecord) -> str:
    return f"trial {trial.number}: NE {units.decimal(trial.ne, 5)}, {' '.join(trial.overrides)}"
