"""The results of a search: its text, its record with a page, and ``best.yaml``, an experiment with its model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields, is_dataclass
from typing import Any

import yaml
from markupsafe import Markup

from pipeline.config import Config
from pipeline.config.compose.experiment import experiment_file
from pipeline.core import units
from pipeline.core.units import text_table
from pipeline.records.search import DecisionRecord, SearchRecord, search_directory
from pipeline.report.page import Figure, PageTable, from_template, with_meter
from pipeline.report.svg import Axis, PlotCurve, series_plot
from pipeline.store.artifacts import Store
from pipeline.store.manifest import Artifact

BEST, PAGE = "best.yaml", "report.html"

STEPS = Axis(title="step", whole=True)
PROBABILITY = Axis(title="probability", from_zero=True)
MOST_DRAWN = 60  # decisions of a part
MOST_LISTED = 30


def search_text(record: SearchRecord) -> str:
    """Return what the command prints: cost before and after, and by part what was decided."""
    before, after = record.before, record.after
    saved = f"{after.step_ms / before.step_ms:.2f} of before" if before.step_ms else ""
    lines = [
        f"{units.plural(record.steps, 'step')} on {record.rows:,} rows, choices on {record.held_rows:,} others, "
        f"{units.duration(record.seconds)}",
        f"step {units.decimal(after.step_ms, 3)} ms (predicted), {saved}",
        f"tables {units.size(after.total)}, before {units.size(before.total)}",
    ]
    for part in dict.fromkeys(each.part for each in record.decisions.values()):
        lines.append("\n" + _part_text(record, part))
    return "\n".join(lines)


def _part_text(record: SearchRecord, part: str) -> str:
    """Return how many decisions of ``part`` differ from the configuration, and the first of them."""
    own = _of(record, part)
    changed = 0
    rows: list[tuple[str, ...]] = []
    for name, each in own:
        configured = each.choices[0]
        if each.chosen == configured:
            continue
        changed += 1
        # A model with 30 features has 435 pairs, so the terminal shows only the first ones.
        if len(rows) < MOST_LISTED:
            rows.append((name, _shown(each.chosen), _shown(configured), units.decimal(each.probability, 2)))
    text = f"{part}: {changed} of {units.plural(len(own), 'decision')} changed"
    if changed > len(rows):
        text += f", {changed - len(rows)} of them only on the page"
    if rows:
        text += f"\n{text_table(('', 'chosen', 'before', 'probability*'), rows)}"
    return text


def search_page(record: SearchRecord) -> str:
    """Return the page of a search; it needs no other file."""
    before, after = record.before, record.after
    cost = [
        ("Predicted step", f"{before.step_ms:.3f} ms", f"{after.step_ms:.3f} ms", _share(after.step_ms, before.step_ms))
    ]
    for tier in dict.fromkeys([*before.bytes, *after.bytes]):
        old, new = before.bytes.get(tier, 0), after.bytes.get(tier, 0)
        cost.append((f"Tables in {tier.upper()}", units.size(old), units.size(new), _share(new, old)))
    changed = 0
    sections = {}
    for each in record.decisions.values():
        changed += each.chosen != each.choices[0]
        if each.part not in sections:
            sections[each.part] = (each.part, _table(record, each.part), _drawings(record, each.part))
    return from_template(
        "search.html",
        title=f"Nightjar search {record.name}",
        files="search.json",
        heading=f"Search {record.name}",
        about=f"{record.dataset} · seed {record.seed}",
        summary=[
            ("Predicted step", f"{after.step_ms:.3f} ms", f"{before.step_ms:.3f} ms before"),
            ("Tables", units.size(after.total), f"{units.size(before.total)} before"),
            ("Changed", str(changed), f"of {units.plural(len(record.decisions), 'decision')}"),
            ("Undecided", str(len(record.undecided)), "decisions without a preferred choice"),
            ("Duration", units.duration(record.seconds), units.plural(record.steps, "step")),
        ],
        cost=PageTable(("", "Before*", "After*", "Share*"), cost),
        course=_course(record),
        parts=list(sections.values()),
    )


def _share(after: float, before: float) -> str:
    return units.percent(after / before, 0) if before else units.ABSENT


def _shown(choice: object) -> str:
    # Only pairs of features are decided by yes or no; all other choices are widths and numbers of layers.
    if isinstance(choice, bool):
        return "kept" if choice else "dropped"
    return str(choice)


def _of(record: SearchRecord, part: str) -> list[tuple[str, DecisionRecord]]:
    return [(name, each) for name, each in record.decisions.items() if each.part == part]


def _table(record: SearchRecord, part: str) -> PageTable:
    rows = []
    for name, each in _of(record, part):
        probability = with_meter(units.decimal(each.probability, 3), each.probability)
        undecided = "undecided" if name in record.undecided else ""
        rows.append((name, _shown(each.chosen), _shown(each.choices[0]), probability, undecided))
    return PageTable(("Decision", "Chosen", "Configured", "Probability", ""), rows)


def _drawings(record: SearchRecord, part: str) -> list[Figure]:
    """Draw the probabilities of the choices over time, one drawing per decision."""
    steps = [float(point.step) for point in record.points]
    drawings = []
    for name, each in _of(record, part)[:MOST_DRAWN]:
        series = []
        for place, values in enumerate(zip(*each.history, strict=True)):
            series.append(PlotCurve(_shown(each.choices[place]), place, tuple(zip(steps, values, strict=True))))
        choices = ", ".join(map(_shown, each.choices))
        label = f"Probabilities of the choices of {name} over the steps"
        drawings.append(Figure(name, choices, _plot(series, PROBABILITY, label)))
    return drawings


def _course(record: SearchRecord) -> list[Figure]:
    loss: list[tuple[float, float]] = []
    held_loss: list[tuple[float, float]] = []
    costs: list[tuple[float, float]] = []
    temperatures: list[tuple[float, float]] = []
    for point in record.points:
        loss.append((point.step, point.loss))
        temperatures.append((point.step, point.temperature))
        # Both are absent while only the weights learn, so their curves begin later.
        if point.held_loss is not None:
            held_loss.append((point.step, point.held_loss))
        if point.cost is not None:
            costs.append((point.step, point.cost))
    losses = [PlotCurve("training rows", 0, tuple(loss)), PlotCurve("validation rows", 1, tuple(held_loss))]
    cost = [PlotCurve("cost", 2, tuple(costs))]
    temperature = [PlotCurve("temperature", 3, tuple(temperatures))]
    return [
        Figure("Log loss", "sampled architectures", _plot(losses, Axis(title="log loss"), "Log loss over the steps")),
        Figure("Cost term", "as log loss", _plot(cost, Axis(title="log loss"), "Cost term over the steps")),
        Figure("Temperature", "", _plot(temperature, Axis(title="temperature", from_zero=True), "Temperature")),
    ]


def _plot(series: list[PlotCurve], y: Axis, label: str) -> Markup:
    return series_plot(series, x=STEPS, y=y, label=label)


def write_search(store: Store, record: SearchRecord, best: str, key: str) -> Artifact:
    """Commit the record, the page and ``best``, the text of the experiment, in the place of an earlier search.

    ``key``: what equal searches have in common.
    """
    path = search_directory(record.name)
    inputs = {"ingest": record.dataset.rpartition("/")[2]}
    with store.draft(path, kind="search", key=key, config={}, inputs=inputs) as draft:
        draft.write_json(SearchRecord.FILE, record.to_json())
        for name, text in ((BEST, best), (PAGE, search_page(record))):
            with draft.open(name) as sink:
                sink.write(text.encode())
        return draft.commit({"before_ms": record.before.step_ms, "after_ms": record.after.step_ms})


def best_experiment(
    record: SearchRecord, config: Config, found: Config, overrides: Sequence[str], config_dir: str | None
) -> str:
    """Return the text of an experiment: ``overrides``, which compose to ``config``, and the changes in ``found``."""
    about = [
        f"Found by nightjar search (search={record.name}); put it into my/experiment/<name>.yaml:",
        "  nightjar run experiment=<name>",
        f"Predicted: {record.after.step_ms:.3f} ms a step, before {record.before.step_ms:.3f}; tables of "
        f"{record.after.total:,} bytes, before {record.before.total:,}.",
    ]
    head, _, body = experiment_file(overrides, config_dir, about).partition("\n\n")
    settings = _merged(yaml.safe_load(body) or {}, _changes(config, found))
    return f"{head.rstrip()}\n\n{yaml.safe_dump(settings, sort_keys=False, default_flow_style=None, width=120)}"


def _changes(before: Any, after: Any) -> dict[str, Any]:
    """Return what ``after`` has and ``before`` lacks as nested settings; both are groups or dictionaries of them."""
    changes: dict[str, Any] = {}
    formers = _entries(before)
    for name, value in _entries(after).items():
        former = formers.get(name)
        if isinstance(value, Mapping) or is_dataclass(value):
            # Compare a new entry with one at its defaults.
            kind: Any = type(value)
            inner = _changes(kind() if former is None else former, value)
            if inner:
                changes[name] = inner
        elif value != former:
            changes[name] = value
    return changes


def _entries(of: Any) -> Mapping[str, Any]:
    if isinstance(of, Mapping):
        return of
    return {each.name: getattr(of, each.name) for each in fields(of)}


def _merged(settings: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    merged = dict(settings)
    for name, value in changes.items():
        former = merged.get(name)
        # Replace lists as a whole, as Hydra does with an override.
        if isinstance(value, Mapping) and isinstance(former, Mapping):
            value = _merged(former, value)
        merged[name] = value
    return merged
