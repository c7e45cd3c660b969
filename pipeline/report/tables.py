"""Tables of a run's page (stages and plan), and the excerpt of its configuration."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from markupsafe import Markup

from pipeline import units
from pipeline.records import Evaluation, Plan, PlanPart, StageOutcome, TablePlace, TablePlan
from pipeline.report.page import COLOURS, PageTable, pill, with_meter, with_swatch, words
from pipeline.report.svg import tag

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
