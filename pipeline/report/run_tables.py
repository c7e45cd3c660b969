"""Tables of a run's page and sentences beside them: stages, plan, data, phases, tasks, configuration."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import islice
from typing import Any

from markupsafe import Markup

from pipeline.core import units
from pipeline.records.plan import Plan
from pipeline.records.result import (
    Evaluation,
    IngestPart,
    Milliseconds,
    PlanPart,
    PredictionPart,
    StageOutcome,
    TablePlace,
    TrainPart,
)
from pipeline.report.page import COLOURS, PageTable, pill, with_meter, with_swatch, words
from pipeline.report.summary import prediction_rows
from pipeline.report.svg import tag
from pipeline.store.artifacts import Store
from pipeline.store.manifest import Artifact

MOST_TABLES = 200
# Parts of the configuration that the page shows. Only plain values of data are shown, since its feature list is long.
SHOWN_CONFIG = ("seed", "data", "model", "hardware", "plan", "partition", "train", "checkpoint", "evaluate")


def stages_table(stages: Mapping[str, StageOutcome]) -> PageTable:
    total = sum(stage.seconds for stage in stages.values())
    rows = []
    for index, (name, stage) in enumerate(stages.items()):
        status = stage.status
        took = share = units.ABSENT
        if status != "skipped":
            took = units.duration(stage.seconds)
            if total:
                share = units.percent(stage.seconds / total)
        path = tag("code", stage.artifact or units.ABSENT)
        rows.append((with_swatch(index % COLOURS, name), pill(status, status), took, share, path))
    return PageTable(("Stage", "Status", "Time*", "Share*", "Artifact in the store"), rows)


def stages_bar(stages: Mapping[str, StageOutcome]) -> Markup:
    """Draw the time of each stage as one bar; "" if none took any."""
    total = sum(stage.seconds for stage in stages.values())
    if not total:
        return Markup("")
    parts, labels, left = [], [], 0.0
    for index, (name, stage) in enumerate(stages.items()):
        share = stage.seconds / total
        width = 1000 * stage.seconds / total
        if stage.seconds:
            took = units.duration(stage.seconds)
            title = tag("title", f"{name}: {took}, {units.percent(share)}")
            size = {"x": f"{left:.2f}", "width": f"{max(width - 1.5, 1.0):.2f}", "height": 26}
            parts.append(tag("rect", title, class_=f"c{index % COLOURS}", **size))
            labels.append(f"{name} {took}")
        left += width
    attributes = {"viewBox": "0 0 1000 26", "preserveAspectRatio": "none", "role": "img"}
    return tag("svg", *parts, class_="bar", **attributes, aria_label="; ".join(labels))


def plan_table(tables: Mapping[str, TablePlace], plan: Plan | None) -> PageTable:
    """Tabulate the embedding tables and their places, largest first. ``plan`` adds rows, sizes and cost."""
    planned, world, sizes = {}, None, dict.fromkeys(tables, 0)
    if plan is not None:
        planned, world = plan.tables, plan.world_size
        for name in tables.keys() & planned.keys():
            sizes[name] = planned[name].bytes
    # Use 1 if no size is known, since bars are drawn relative to the largest.
    largest = max(sizes.values()) or 1
    rows, reasons = [], []
    for name in sorted(tables, key=lambda name: (-sizes[name], name))[:MOST_TABLES]:
        table = tables[name]
        count = dim = size = cost = units.ABSENT
        reason = ""
        if name in planned:
            known = planned[name]
            count, dim = units.count(known.rows), units.count(known.dim)
            size = with_meter(units.size(known.bytes), known.bytes / largest)
            cost = units.decimal(known.cost_ms, 3)
            reason = known.reason
        place = (table.tier, words(table.sharding), rank_words(table.ranks, world))
        rows.append((name, count, dim, size, *place, cost))
        reasons.append(reason)
    return PageTable(("Table", "Rows*", "Dim*", "Size*", "Tier", "Sharding", "Ranks", "Predicted ms*"), rows, reasons)


def plan_words(part: PlanPart, plan: Plan | None) -> str:
    """Describe the whole plan in a line. ``part``: ``plan`` of ``result.json``."""
    tables = len(part.tables or ())
    sizes = []
    for tier in ("hbm", "ddr", "ssd"):
        if size := (part.tiers or {}).get(f"{tier}_bytes"):
            sizes.append(f"{tier.upper()} {units.size(size)}")
    parts = []
    if plan is not None:
        parts.append(f"planned for {plan.hardware}")
    parts.append(f"{tables} embedding tables")
    if sizes:
        parts.append(f"predicted memory of all ranks {', '.join(sizes)}")
    if units.known(part.predicted_step_ms):
        parts.append(f"predicted step {units.decimal(part.predicted_step_ms, 3)} ms on the slowest rank")
    if tables > MOST_TABLES:
        parts.append(f"the {MOST_TABLES} largest are shown")
    return ", ".join(parts) + "; sizes include the optimizer state."


def rank_words(ranks: Iterable[int] | int, world: int | None) -> str:
    """Write ranks as ``all 8``, ``3`` or ``0-3, 6``."""
    if isinstance(ranks, int):
        return str(ranks)
    ordered = sorted(ranks)
    if world is not None and len(ordered) == world > 1:
        return f"all {world}"
    spans: list[list[int]] = []
    for rank in ordered:
        if spans and rank == spans[-1][1] + 1:
            spans[-1][1] = rank
        else:
            spans.append([rank, rank])
    parts = []
    for first, last in spans:
        if first == last:
            parts.append(str(first))
        else:
            parts.append(f"{first}-{last}")
    return ", ".join(parts) or units.ABSENT


def config_excerpt(text: str) -> list[str]:
    """Cut the blocks SHOWN_CONFIG out of a YAML ``text``; of ``data`` only its plain values."""
    # Cut line by line instead of parsing and dumping, so that the page shows exactly what the file has.
    blocks: dict[str, list[str]] = {}
    name = ""
    for line in text.splitlines():
        if line and not line[0].isspace() and line[0] not in "#-" and ":" in line:
            name = line.partition(":")[0]
            blocks[name] = [line]
        elif name and line.strip():
            plain = line.startswith("  ") and line[2:3] not in (" ", "-", "") and line.partition(":")[2].strip(" {}[]")
            if plain or name != "data":
                blocks[name].append(line)
    return ["\n".join(blocks[name]) for name in SHOWN_CONFIG if name in blocks]


def tasks_table(scores: Evaluation) -> PageTable:
    """Tabulate the figures of the further tasks on test rows."""
    rows = []
    for name, task in (scores.tasks or {}).items():
        cells = [name, task.kind, units.count(task.samples)]
        # A task's kind decides which of these figures it has.
        for value in (task.ne, task.auc, task.rmse, task.unexplained):
            cells.append(units.decimal(value, 5))
        rows.append([*cells, units.decimal(task.calibration)])
    head = ("Task", "Kind", "Rows*", "NE*", "AUC*", "RMSE*", "Unexplained variance*", "Calibration*")
    return PageTable(head, rows)


QUALITY, PROFILE = "quality.json", "profile.json"
MOST_FEATURES, MOST_REASONS = 200, 8
# The meter is full at this PSI.
FULL_METER = 0.5


def read_data(store: Store, dataset: Artifact | None) -> dict[str, Any]:
    """Read quality, profile and bytes of ``dataset``; empty if it has no ``quality.json``."""
    if dataset is None or QUALITY not in dataset.files:
        return {}
    data: dict[str, Any] = {}
    for name in (QUALITY, PROFILE):
        if name in dataset.files:
            data[name] = store.read_json(f"{dataset.path}/{name}")
    data["bytes"] = sum(entry.bytes for entry in dataset.files.values())
    return data


def data_words(part: IngestPart, data: Mapping[str, Any]) -> str:
    """Describe a run's dataset in a line. ``data``: the result of ``read_data``."""
    train = f"{units.count(part.rows_train)} train"
    if part.rows_validation is not None:
        train += f", {units.count(part.rows_validation)} validation"
    parts = [f"{train} and {units.count(part.rows_test)} test rows, {units.size(data['bytes'])} written"]
    if part.split_time:
        parts.append(f"test rows from {part.split_time['test_from']} UTC on")
    if part.rows_gap:
        parts.append(f"{units.count(part.rows_gap)} rows left out before them")
    if part.day:
        parts.append(f"day {part.day}")
    if part.replaces:
        parts.append(f"replaces {part.replaces}")
    for day, rows in (part.rows_late or {}).items():
        parts.append(f"{units.count(rows)} rows kept for {day}")
    for name, rows in (part.rows_freed or {}).items():
        parts.append(f"{units.count(rows)} rows of {name} freed")
    for name, rows in (part.rows_replaced or {}).items():
        parts.append(f"{units.count(rows)} of them replaced in {name}")
    if part.split_by_place:
        parts.append("split by file and row number")
    if against := data[QUALITY]["checks"]["against"]:
        parts.append(f"compared with {against}")
    else:
        parts.append("no previous day to compare with")
    return "; ".join(parts) + "."


def quarantine_table(quarantine: Mapping[str, Any]) -> PageTable:
    """Tabulate reasons and their rows, the most common first."""
    # The dataset's record lists them in that order already.
    rows = []
    for reason, count in islice(quarantine["reasons"].items(), MOST_REASONS):
        rows.append((reason, units.count(count), units.percent(count / quarantine["rows"])))
    return PageTable(("Quarantine reason~", "Rows*", "Share*"), rows)


def features_table(data: Mapping[str, Any]) -> PageTable:
    """Tabulate the features, the largest change first."""
    profile, drift = data.get(PROFILE, {}), data[QUALITY]["checks"]["drift"]
    distribution = data[QUALITY]["distribution"]["features"]
    kinds = dict.fromkeys(profile.get("dense", {}), "dense") | dict.fromkeys(profile.get("sparse", {}), "sparse")
    rows = []
    for name in sorted(kinds, key=lambda name: -drift.get(name, {}).get("psi", 0.0))[:MOST_FEATURES]:
        kind = kinds[name]
        feature = profile[kind][name]
        mean = distinct = units.ABSENT
        if kind == "dense":
            # Numbers are counted in buckets of a sketch, of which there are fewer than values, so no count is shown.
            mean = units.short(feature.get("mean"))
        else:
            distinct = units.count(distribution.get(name, {}).get("distinct"))
        psi = drift.get(name, {}).get("psi")
        change = units.decimal(psi, 3)
        if psi is not None:
            change = with_meter(change, psi / FULL_METER, least=0.0)
        missing = units.percent(feature["missing_share"])
        rows.append((name, kind, missing, mean, distinct, units.count(feature.get("rows")), change))
    return PageTable(("Feature", "Kind", "Missing*", "Mean*", "Distinct*", "Table rows*", "Drift (PSI)*"), rows)


def phase_lines(train: TrainPart) -> list[str]:
    """Return the lines for the end of a run: step, phases and memory, as ``measured (predicted)``."""
    lines = []
    if train.step is not None:
        lines.append(f"step {_ms(train.step, ' predicted')}")
    if train.phases:
        phases = [f"{words(name)} {_ms(part)}" for name, part in train.phases.items()]
        lines.append(f"of it {', '.join(phases)}")
    if memory := train.memory:
        line = f"memory for training {units.size(memory.measured_bytes)} on the fullest rank"
        # Plans predict memory only if they reserve it for training.
        if units.known(memory.predicted_bytes):
            line += f" ({units.size(memory.predicted_bytes)} predicted)"
        lines.append(line)
    return lines


def phases_table(train: TrainPart) -> PageTable:
    """Tabulate the phases of a step, then the whole step and the memory; no rows if nothing was measured."""
    phases = train.phases or {}
    # The longest phase has a full bar. The whole step has no bar.
    longest = 0.0
    for part in phases.values():
        longest = max(longest, part.measured_ms, part.predicted_ms or 0.0)
    steps = [(words(name), part, longest) for name, part in phases.items()]
    if train.step is not None:
        steps.append(("whole step, slowest rank", train.step, 0.0))
    rows = []
    for name, part, full in steps:
        cells = [name]
        for ms in (part.predicted_ms, part.measured_ms):
            text = units.ABSENT
            if units.known(ms):
                text = f"{units.decimal(ms, 3)} ms"
                if full:
                    text = with_meter(text, ms / full)
            cells.append(text)
        rows.append((*cells, _ratio(part.measured_ms, part.predicted_ms)))
    if memory := train.memory:
        sizes = (units.size(memory.predicted_bytes), units.size(memory.measured_bytes))
        ratio = _ratio(memory.measured_bytes, memory.predicted_bytes)
        rows.append(("memory of the fullest rank", *sizes, ratio))
    return PageTable(("Phase", "Predicted*", "Measured*", "Measured / predicted*"), rows)


def prediction_table(part: PredictionPart | None) -> PageTable:
    """Tabulate a sealed prediction: seconds by stage and in all, a step, memory; no rows where nothing was compared."""
    rows: list[tuple[str, ...]] = []
    if part is not None and part.seconds:
        stages, total, others = prediction_rows(part)
        rows = [*stages, total, *others]
    return PageTable(("", "Predicted*", "Measured*", "Off by*"), rows)


def prediction_words(part: PredictionPart | None) -> str:
    """Say which seal the run was compared with, or why it was not; "" if none was sealed."""
    if part is None:
        return ""
    text = f"Sealed before the run in {part.sealed}, SHA-256 {part.sha256}"
    if part.problem:
        return f"{text}; not compared: {part.problem}"
    return f"{text}."


def _ms(part: Milliseconds, word: str = "") -> str:
    text = f"{units.decimal(part.measured_ms, 2)} ms"
    if units.known(part.predicted_ms):
        text += f" ({units.decimal(part.predicted_ms, 2)}{word})"
    return text


def _ratio(measured: object, predicted: object) -> str:
    # There is no ratio to a predicted time of 0.
    if not units.known(measured) or not units.known(predicted) or not predicted:
        return units.ABSENT
    return units.decimal(measured / predicted, 2)
