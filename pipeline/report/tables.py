"""Tables of a run's page and sentences beside them: stages, plan, data, phases, tasks, configuration."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from markupsafe import Markup

from pipeline import units
from pipeline.records.plan import Plan, TablePlan
from pipeline.records.result import Evaluation, IngestPart, Milliseconds, PlanPart, StageOutcome, TablePlace, TrainPart
from pipeline.report.page import COLOURS, PageTable, pill, with_meter, with_swatch, words
from pipeline.report.svg import tag
from pipeline.store.artifacts import Store
from pipeline.store.manifest import Artifact

MOST_TABLES = 200
# Parts of the configuration worth a glance. Of data, whose feature list is long, only plain values are shown.
SHOWN_CONFIG = ("seed", "data", "model", "hardware", "plan", "partition", "train", "checkpoint", "evaluate")


def stages_table(stages: Mapping[str, StageOutcome]) -> PageTable:
    """The stages with their times and artifacts."""
    seconds = _seconds(stages)
    total = sum(seconds.values())
    rows = []
    for index, (name, stage) in enumerate(stages.items()):
        status = stage.status
        took, share = units.ABSENT, units.ABSENT
        if status != "skipped":
            took = units.duration(seconds[name])
            share = units.percent(seconds[name] / total) if total else units.ABSENT
        path = tag("code", stage.artifact or units.ABSENT)
        rows.append((with_swatch(index % COLOURS, name), pill(status, status), took, share, path))
    return PageTable(("Stage", "Status", "Time*", "Share*", "Artifact in the store"), rows)


def _seconds(stages: Mapping[str, StageOutcome]) -> dict[str, float]:
    return {name: stage.seconds for name, stage in stages.items()}


def stages_bar(stages: Mapping[str, StageOutcome]) -> Markup:
    """The time of each stage as one bar; "" if none took any."""
    seconds = _seconds(stages)
    total = sum(seconds.values())
    if not total:
        return Markup("")
    parts, left = [], 0.0
    for index, (name, value) in enumerate(seconds.items()):
        width = 1000 * value / total
        if value:
            title = tag("title", f"{name}: {units.duration(value)}, {units.percent(value / total)}")
            size = {"x": f"{left:.2f}", "width": f"{max(width - 1.5, 1.0):.2f}", "height": 26}
            parts.append(tag("rect", title, class_=f"c{index % COLOURS}", **size))
        left += width
    label = "; ".join(f"{name} {units.duration(value)}" for name, value in seconds.items() if value)
    attributes = {"viewBox": "0 0 1000 26", "preserveAspectRatio": "none", "role": "img", "aria-label": label}
    return tag("svg", *parts, class_="bar", **attributes)


def plan_table(tables: Mapping[str, TablePlace], plan: Plan | None) -> PageTable:
    """The embedding tables and their places, largest first. ``plan`` adds rows, sizes and cost."""
    known = plan.tables if plan is not None else {}
    sizes = {name: known[name].bytes if name in known else 0 for name in tables}
    order = sorted(tables, key=lambda name: (-sizes[name], name))[:MOST_TABLES]
    largest, world = max(sizes.values()) or 1, plan.world_size if plan is not None else None
    rows = [_plan_row(name, tables[name], known.get(name), largest, world) for name in order]
    reasons = [known[name].reason if name in known else "" for name in order]
    return PageTable(("Table", "Rows*", "Dim*", "Size*", "Tier", "Sharding", "Ranks", "Predicted ms*"), rows, reasons)


def plan_words(part: PlanPart, plan: Plan | None) -> str:
    """A line about the whole plan. ``part``: ``plan`` of ``result.json``."""
    tiers, tables = part.tiers or {}, len(part.tables or ())
    sizes = [
        f"{tier.upper()} {units.size(tiers[f'{tier}_bytes'])}"
        for tier in ("hbm", "ddr", "ssd")
        if tiers.get(f"{tier}_bytes")
    ]
    parts = [f"planned for {plan.hardware}"] if plan is not None else []
    parts.append(f"{tables} embedding tables")
    if sizes:
        parts.append(f"predicted memory of all ranks {', '.join(sizes)}")
    if units.known(part.predicted_step_ms):
        parts.append(f"predicted step {units.decimal(part.predicted_step_ms, 3)} ms on the slowest rank")
    if tables > MOST_TABLES:
        parts.append(f"the {MOST_TABLES} largest are shown")
    return ", ".join(parts) + "; sizes include the optimizer state."


def _plan_row(
    name: str, table: TablePlace, known: TablePlan | None, largest: int, world: int | None
) -> tuple[str, ...]:
    size = with_meter(units.size(known.bytes), known.bytes / largest) if known else units.ABSENT
    return (
        name,
        units.count(known.rows if known else None),
        units.count(known.dim if known else None),
        size,
        table.tier,
        words(table.sharding),
        rank_words(table.ranks, world),
        units.decimal(known.cost_ms if known else None, 3),
    )


def rank_words(ranks: Iterable[int] | int, world: int | None) -> str:
    """``all 8``, ``3`` or ``0-3, 6``."""
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
    return ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in spans) or units.ABSENT


def config_excerpt(text: str) -> list[str]:
    """The blocks SHOWN_CONFIG of a YAML ``text``; of ``data`` only its plain values."""
    blocks: dict[str, list[str]] = {}
    name = ""
    for line in text.splitlines():
        if line and not line[0].isspace() and line[0] not in "#-" and ":" in line:
            name = line.partition(":")[0]
            blocks[name] = [line]
        elif name and line.strip() and (name != "data" or _is_plain_value(line)):
            blocks[name].append(line)
    return ["\n".join(blocks[name]) for name in SHOWN_CONFIG if name in blocks]


def _is_plain_value(line: str) -> bool:
    return line.startswith("  ") and line[2:3] not in (" ", "-", "") and bool(line.partition(":")[2].strip(" {}[]"))


def tasks_table(scores: Evaluation) -> PageTable:
    """Figures of the further tasks on test rows."""
    head = ("Task", "Kind", "Rows*", "NE*", "AUC*", "RMSE*", "Unexplained variance*", "Calibration*")
    rows = [
        (
            name,
            each.kind,
            units.count(each.samples),
            units.decimal(each.ne, 5),
            units.decimal(each.auc, 5),
            units.decimal(each.rmse, 5),
            units.decimal(each.unexplained, 5),
            units.decimal(each.calibration),
        )
        for name, each in (scores.tasks or {}).items()
    ]
    return PageTable(head, rows)


QUALITY, PROFILE = "quality.json", "profile.json"
MOST_FEATURES, MOST_REASONS = 200, 8
FULL_METER = 0.5  # PSI at which the meter is full


def read_data(store: Store, dataset: Artifact | None) -> dict[str, Any]:
    """Quality, profile and bytes of ``dataset``; empty if it has no ``quality.json``."""
    if dataset is None or QUALITY not in dataset.files:
        return {}
    files = {name: store.read_json(f"{dataset.path}/{name}") for name in (QUALITY, PROFILE) if name in dataset.files}
    return {**files, "bytes": sum(entry.bytes for entry in dataset.files.values())}


def data_words(part: IngestPart, data: Mapping[str, Any]) -> str:
    """A line about a run's dataset. ``data``: from ``read_data``."""
    against = data[QUALITY]["checks"]["against"]
    parts = [
        f"{units.count(part.rows_train)} train{_looked_at(part)} and {units.count(part.rows_test)} test rows, "
        f"{units.size(data['bytes'])} written",
        f"test rows from {part.split_time['test_from']} UTC on" if part.split_time else "",
        f"{units.count(part.rows_gap)} rows left out before them" if part.rows_gap else "",
        f"day {part.day}" if part.day else "",
        f"replaces {part.replaces}" if part.replaces else "",
        *(f"{units.count(rows)} rows kept for {day}" for day, rows in (part.rows_late or {}).items()),
        *(f"{units.count(rows)} rows of {name} freed" for name, rows in (part.rows_freed or {}).items()),
        *(f"{units.count(rows)} of them replaced in {name}" for name, rows in (part.rows_replaced or {}).items()),
        "split by file and row number" if part.split_by_place else "",
        f"compared with {against}" if against else "no previous day to compare with",
    ]
    return "; ".join(text for text in parts if text) + "."


def _looked_at(part: IngestPart) -> str:
    return "" if part.rows_validation is None else f", {units.count(part.rows_validation)} validation"


def quarantine_table(quarantine: Mapping[str, Any]) -> PageTable:
    """Reasons and their rows, the most common first."""
    reasons = list(quarantine["reasons"].items())
    rows = [(reason, units.count(n), units.percent(n / quarantine["rows"])) for reason, n in reasons[:MOST_REASONS]]
    return PageTable(("Quarantine reason~", "Rows*", "Share*"), rows)


def features_table(data: Mapping[str, Any]) -> PageTable:
    """One row per feature, the largest change first."""
    profile, drift = data.get(PROFILE, {}), data[QUALITY]["checks"]["drift"]
    kinds = {name: kind for kind in ("dense", "sparse") for name in profile.get(kind, {})}
    order = sorted(kinds, key=lambda name: -drift.get(name, {}).get("psi", 0.0))[:MOST_FEATURES]
    rows = [_feature(name, kinds[name], profile[kinds[name]][name], data) for name in order]
    return PageTable(("Feature", "Kind", "Missing*", "Mean*", "Distinct*", "Table rows*", "Drift (PSI)*"), rows)


def _feature(name: str, kind: str, profile: Mapping[str, Any], data: Mapping[str, Any]) -> tuple[str, ...]:
    moved = data[QUALITY]["checks"]["drift"].get(name, {}).get("psi")
    shown = units.decimal(moved, 3)
    distinct = data[QUALITY]["distribution"]["features"].get(name, {}).get("distinct")
    return (
        name,
        kind,
        units.percent(profile["missing_share"]),
        units.short(profile.get("mean")) if kind == "dense" else units.ABSENT,
        # Numbers are counted in buckets of a sketch, which are fewer than the values.
        units.count(distinct if kind != "dense" else None),
        units.count(profile.get("rows")),
        with_meter(shown, moved / FULL_METER, least=0.0) if moved is not None else shown,
    )


def phase_lines(train: TrainPart) -> list[str]:
    """Lines for the end of a run: step, phases and memory, as ``measured (predicted)``."""
    lines = []
    if train.step is not None:
        lines.append(f"step {_ms(train.step, ' predicted')}")
    if train.phases:
        lines.append("of it " + ", ".join(f"{words(name)} {_ms(part)}" for name, part in train.phases.items()))
    if memory := train.memory:
        predicted = memory.predicted_bytes
        beside = f" ({units.size(predicted)} predicted)" if units.known(predicted) else ""
        lines.append(f"memory for training {units.size(memory.measured_bytes)} on the fullest rank{beside}")
    return lines


def phases_table(train: TrainPart) -> PageTable:
    """The phases of a step, then the whole step and the memory; no rows if nothing was measured."""
    phases = train.phases or {}
    longest = max((max(part.measured_ms, part.predicted_ms or 0.0) for part in phases.values()), default=0.0)
    rows = [_row(words(name), part, longest) for name, part in phases.items()]
    if train.step is not None:
        rows.append(_row("whole step, slowest rank", train.step, 0.0))
    if memory := train.memory:
        predicted, measured = memory.predicted_bytes, memory.measured_bytes
        sizes = (units.size(predicted), units.size(measured))
        rows.append(("memory of the fullest rank", *sizes, _ratio(measured, predicted)))
    return PageTable(("Phase", "Predicted*", "Measured*", "Measured / predicted*"), rows)


def _row(name: str, part: Milliseconds, longest: float) -> tuple[str, str, str, str]:
    """A phase. Its bars are full at ``longest`` ms; 0: no bars."""
    predicted, measured = part.predicted_ms, part.measured_ms
    return name, _cell(predicted, longest), _cell(measured, longest), _ratio(measured, predicted)


def _cell(ms: object, longest: float) -> str:
    if not units.known(ms):
        return units.ABSENT
    text = f"{units.decimal(ms, 3)} ms"
    return with_meter(text, ms / longest) if longest else text


def _ms(part: Milliseconds, word: str = "") -> str:
    predicted = part.predicted_ms
    beside = f" ({units.decimal(predicted, 2)}{word})" if units.known(predicted) else ""
    return f"{units.decimal(part.measured_ms, 2)} ms{beside}"


def _ratio(measured: object, predicted: object) -> str:
    if not units.known(measured) or not units.known(predicted) or not predicted:
        return units.ABSENT
    return units.decimal(measured / predicted, 2)
