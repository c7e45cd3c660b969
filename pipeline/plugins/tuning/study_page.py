"""A study as text, and its ``report.html``: trials, the best so far, which settings matter, and the Pareto front."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Sequence

from markupsafe import Markup

from pipeline.core import units
from pipeline.core.units import text_table
from pipeline.records.study import BROKEN, DONE, PRUNED, TRYING, Dimension, StudyLine, StudyShown, TrialRecord
from pipeline.report.page import Figure, PageTable, from_template, pill, with_meter
from pipeline.report.svg import Axis, Point, scatter_plot

NE = Axis(title="validation NE")
FACTS = ("NE*", "AUC*", "test NE*", "test AUC*", "step (predicted)*", "tables*", "steps*")


def studies_listing(lines: Sequence[StudyLine]) -> str:
    """Format ``nightjar tune ls``, one line per study."""
    if not lines:
        return "no studies"
    head = ("study", "begun", "trials*", "done*", "pruned*", "failed*", "running*", "best*", "NE*")
    rows = []
    for each in lines:
        begun = time.strftime("%Y-%m-%d %H:%M", time.gmtime(each.created))
        states = [str(each.trials.get(state, 0)) for state in (DONE, PRUNED, BROKEN, TRYING)]
        all_trials = str(sum(each.trials.values()))
        rows.append((each.study, begun, all_trials, *states, units.count(each.best), units.decimal(each.ne, 5)))
    return text_table(head, rows)


def study_text(shown: StudyShown) -> str:
    """Format ``nightjar tune show``: the trials, best first, and the conclusions."""
    keys = list(shown.study.space)
    head = ("trial*", "state", *(f"{key}*" for key in keys), *FACTS)
    rows = [(str(each.number), each.state, *_figures_of(each, keys)) for each in _ordered(shown)]
    parts = [text_table(head, rows), _saved(shown)]
    if shown.importance:
        shares = [f"{key} {units.percent(share, 0)}" for key, share in shown.importance.items()]
        parts.append(f"importance: {', '.join(shares)}")
    if shown.best_trial is not None:
        parts.append(f"best: trial {shown.best}, {' '.join(shown.best_trial.overrides)}")
        worth = choice(shown)
        if worth:
            parts.append(worth)
    return "\n\n".join(parts)


def study_page(shown: StudyShown) -> str:
    """Return ``report.html`` of a study."""
    study, best, keys = shown.study, shown.best_trial, list(shown.study.space)
    rows = []
    for each in _ordered(shown):
        state = pill(each.state, each.state)
        rows.append((str(each.number), state, *_figures_of(each, keys), each.error or ""))
    spaces = [(key, _range_text(dimension)) for key, dimension in study.space.items()]
    shares = []
    for key, share in (shown.importance or {}).items():
        shares.append((key, with_meter(units.percent(share), share)))
    figures = _fronts(shown)
    history = _history(shown)
    if history is not None:
        figures.insert(0, history)
    return from_template(
        "study.html",
        title=f"Nightjar: study {study.study}",
        files="study.json and trials/*.json",
        heading=f"Study {study.study}",
        about=" ".join(study.overrides),
        summary=_summary(shown),
        best=best.overrides if best is not None else [],
        saved=_saved(shown),
        choice=choice(shown),
        trials=PageTable(("Trial*", "State", *(f"{key}*" for key in keys), *FACTS, "Error~"), rows),
        importance=PageTable(("Setting", "Importance"), shares),
        space=PageTable(("Setting", "Range~"), spaces),
        figures_=figures,
    )


def choice(shown: StudyShown) -> str:
    """Compare the lowest NE with that of the settings as given; "" if nothing is known."""
    if shown.lowest is None or shown.gain is None or not math.isfinite(shown.gain[1]):
        return ""
    lower, error = shown.gain
    lower_text, error_text = units.decimal(lower, 5), units.decimal(error, 5)
    by = f"lower by {lower_text} than with the settings as they were, with a standard error of {error_text}"
    if shown.lowest == shown.best:
        return f"Its validation NE is {by}."
    return f"The validation NE of trial {shown.lowest} is {by}: that may be chance, so the settings stay the best."


def front(points: Sequence[Point]) -> list[Point]:
    """Return the Pareto front of ``points`` by rising x: no other point is below in both coordinates."""
    kept: list[Point] = []
    # By rising x, a point is on the front if it is below all earlier points, of which the last one kept is the lowest.
    for point in sorted(set(points)):
        if not kept or point[1] < kept[-1][1]:
            kept.append(point)
    return kept


def _ordered(shown: StudyShown) -> list[TrialRecord]:
    """Return finished trials, best first, then the others by their number."""

    def rank(trial: TrialRecord) -> tuple[bool, float, int]:
        if trial.state == DONE:
            return False, trial.ne or 0, trial.number
        # A pruned trial's NE comes from fewer steps, so it does not rank the trial.
        return True, 0, trial.number

    return sorted(shown.trials, key=rank)


def _figures_of(trial: TrialRecord, keys: Sequence[str]) -> list[str]:
    """Return the searched settings of ``trial``, and its ``FACTS``."""
    cells = []
    for key in keys:
        value = trial.parameters.get(key)
        cells.append(f"{value:g}" if isinstance(value, float) else str(value))
    for figure in (trial.ne, trial.auc, trial.test_ne, trial.test_auc):
        cells.append(units.decimal(figure, 5))
    step = f"{units.decimal(trial.step_ms, 2)} ms" if trial.step_ms is not None else units.ABSENT
    steps = f"{units.count(trial.steps)} of {units.count(trial.steps_total)}"
    return [*cells, step, units.size(trial.table_bytes), steps]


def _range_text(dimension: Dimension) -> str:
    if dimension.kind == "choice":
        return ", ".join(dimension.choices or ())
    text = "whole numbers" if dimension.kind == "int" else "numbers"
    text += f" from {dimension.low:g} to {dimension.high:g}"
    if dimension.log:
        text += ", by their logarithm"
    elif dimension.step:
        text += f", in steps of {dimension.step:g}"
    return text


def _saved(shown: StudyShown) -> str:
    done, whole = units.count(shown.steps), units.count(shown.steps_in_full)
    share = 1 - shown.steps / shown.steps_in_full if shown.steps_in_full else 0.0
    return f"{done} steps trained, of {whole} had every trial trained in full: {units.percent(share)} saved"


def _summary(shown: StudyShown) -> list[tuple[str, str, str]]:
    cards = []
    best = shown.best_trial
    if best is not None:
        cards.append(("Best validation NE", units.decimal(best.ne, 5), f"trial {best.number}"))
        cards.append(("Its test AUC", units.decimal(best.test_auc, 5), f"NE {units.decimal(best.test_ne, 5)}"))
    states = Counter(trial.state for trial in shown.trials)
    cards.append(("Trials", str(states.total()), f"{states[DONE]} done, {states[PRUNED]} pruned"))
    cards.append(("Steps", units.count(shown.steps), f"of {units.count(shown.steps_in_full)} in full"))
    return cards


def _history(shown: StudyShown) -> Figure | None:
    """Plot NE by trial, and a line through the best so far."""
    points: list[tuple[Point, str]] = []
    best: list[Point] = []
    for each in shown.trials:
        if each.ne is None:
            continue
        at, ne = float(each.number), float(each.ne)
        points.append(((at, ne), f"{_named(each)}, {each.state}"))
        if each.state == DONE and (not best or ne < best[-1][1]):
            # Add two points for each improvement: the line stays at the former best up to this trial, and drops there.
            best.append((at, best[-1][1] if best else ne))
            best.append((at, ne))
    if not points:
        return None
    plot = scatter_plot(
        points,
        joined=best,
        x=Axis(title="trial", whole=True, from_zero=True),
        y=NE,
        label=f"Validation NE of {len(points)} trials, and the best so far",
    )
    return Figure("Optimization history", "validation NE by trial; dashed: the best so far", plot)


def _fronts(shown: StudyShown) -> list[Figure]:
    """Plot NE of finished trials against what the plan predicts: time of a step, bytes of the tables."""
    costs = (("step_ms", "predicted step", "ms", 1.0), ("table_bytes", "tables", "MiB", 2.0**20))
    figures = []
    for name, title, unit, scale in costs:
        known: list[tuple[Point, str]] = []
        for each in shown.trials:
            cost = getattr(each, name)
            if each.state == DONE and each.ne is not None and cost is not None:
                known.append(((cost / scale, float(each.ne)), _named(each)))
        if not known:
            continue
        best = front([point for point, _ in known])
        label = f"Validation NE against {title} of {len(known)} trials, {len(best)} of them on the Pareto front"
        plot: Markup = scatter_plot(known, joined=best, x=Axis(title=f"{title}, {unit}"), y=NE, label=label)
        figures.append(Figure(f"NE and {title}", "dashed: the Pareto front", plot))
    return figures


def _named(trial: TrialRecord) -> str:
    return f"trial {trial.number}: NE {units.decimal(trial.ne, 5)}, {' '.join(trial.overrides)}"
