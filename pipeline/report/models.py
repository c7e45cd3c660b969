"""What ``nightjar models``, ``nightjar predict`` and ``nightjar store gc`` print."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from pipeline.core import units
from pipeline.records.model_version import ListedModel, RemovedVersions, ShownVersion
from pipeline.records.runs import Removed, RemovedFromStore


def listing(models: Sequence[ListedModel]) -> str:
    """List the versions of every model, oldest first. ``>`` marks the serving one, ``<`` what a rollback restores."""
    if not models:
        return "no published models in this store; nightjar nightly publishes one"
    lines = []
    for model in models:
        lines.append(f"{model.model}: {model.serving or 'nothing'} serves")
        lines.append(f"  {'version':<18} {'age':>12} {'size':>9} {'gate':<6} {'NE':>8} {'calibration':>11}")
        for version in model.versions:
            mark = " "
            if version.serves:
                mark = ">"
            elif version.previous:
                mark = "<"
            name = f"{mark} {version.version:<18}"
            if version.problem:
                lines.append(f"{name} {version.problem}")
                continue
            summary = version.summary
            gate = str(summary.get("verdict", units.ABSENT))
            if summary.get("forced"):
                gate = "forced"
            figures = f"{units.decimal(summary.get('ne'), 5):>8} {units.decimal(summary.get('calibration')):>11}"
            age, size = units.duration(version.age_seconds), units.size(version.bytes)
            lines.append(f"{name} {age:>12} {size:>9} {gate:<6} {figures}")
            if version.withdrawn:
                lines.append(f"    withdrawn: {version.withdrawn}")
    return "\n".join(lines)


def details(shown: ShownVersion) -> str:
    """Describe a version: verdict, figures, data, lineage, tables and log."""
    card = shown.card
    title = f"{card.model} {card.version}"
    if shown.serves:
        title += " (serves)"
    elif shown.withdrawn:
        title += " (withdrawn)"
    lines = [title, f"  at {shown.path}", f"  made {_when(card.created)}"]
    # The card is sealed, so its verdict stays what it was. Later events come first.
    if shown.withdrawn:
        lines.append(f"  withdrawn: {shown.withdrawn}")
    lines += [f"  gate {card.gate.verdict}", *(f"    {reason}" for reason in card.gate.reasons)]
    for name, (point, low, high) in card.figures.items():
        lines.append(f"  {name} {point:.5f} [{low:.5f}, {high:.5f}]")
    if card.calibrator is not None:
        lines.append(f"  calibrator {card.calibrator.words}")
    for part, facts in (("data", card.data), ("lineage", card.lineage.to_json())):
        lines.append(f"  {part}")
        for key, value in facts.items():
            if text := _fact(value):
                lines.append(f"    {key.replace('_', ' ')}: {text}")
    tables = card.tables.values()
    size, codings = 0, set()
    for table in tables:
        size += table.bytes
        codings.add(table.coding)
    lines.append(f"  {units.plural(len(tables), 'table')} in coding {'/'.join(sorted(codings))}, {units.size(size)}")
    for entry in shown.log:
        lines.append(f"  {entry.by} {_when(entry.at)}: {entry.reason or 'no reason given'}")
    return "\n".join(lines)


def _fact(value: Any) -> str:
    # Return a value of the card in words, or "" if it says nothing.
    if isinstance(value, Mapping):
        parts = []
        for name, part in value.items():
            if text := _fact(part):
                parts.append(f"{name} {text}")
        return ", ".join(parts)
    if isinstance(value, list | tuple):
        return "; ".join(map(_fact, value))
    return "" if value is None else str(value)


def _when(seconds: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(seconds))


# Title and number of decimals. Calibrations change by more than the other figures.
TASK_FIGURES = {"ne": ("NE", 5), "auc": ("AUC", 5), "rmse": ("RMSE", 5), "calibration": ("calibration", 4)}


def serving(current: Mapping[str, Any]) -> str:
    """Say what serves now, and what a rollback would restore."""
    before = "it is the first one"
    if current["previous"]:
        before = f"the previous version is {current['previous']}"
    return f"{current['model']}: {current['version']} serves now; {before}"


def removed_versions(result: RemovedVersions) -> str:
    if not result.removed:
        return f"{result.model}: nothing to remove"
    verb = "would remove" if result.dry_run else "removed"
    lines = [f"{result.model}: {verb} {units.plural(len(result.removed), 'version')}"]
    for entry in result.removed:
        lines.append(f"  {entry.version}  {units.size(entry.bytes)}  {entry.reason}")
    return "\n".join(lines)


def predicted(done: Mapping[str, Any]) -> str:
    """Say how many rows were scored, and how good the scores are if the rows have labels."""
    cache = done["cache"]
    took = f"{units.duration(done['seconds'])}, {units.count(done['rows_per_s'])} rows/s"
    lines = [f"{done['model']} {done['version']}: {units.count(done['rows'])} rows scored in {took}"]
    if done["rows_rejected"]:
        lines.append(f"{units.plural(done['rows_rejected'], 'row')} left out; the first: {done['rejected'][0]}")
    if cache["tables_on_disk"]:
        share = units.percent(cache["hits"] / max(1, cache["hits"] + cache["misses"]))
        tables = units.plural(cache["tables_on_disk"], "table")
        lines.append(f"{tables} on disk: {share} of their rows came from memory")
    if figures := done.get("eval"):
        ne, auc = units.decimal(figures["ne"], 5), units.decimal(figures["auc"], 5)
        lines.append(f"NE {ne}   AUC {auc}   calibration {units.decimal(figures['calibration'])}")
        for name, task in figures.get("tasks", {}).items():
            shown = []
            for key, (title, digits) in TASK_FIGURES.items():
                if key in task:
                    shown.append(f"{title} {units.decimal(task[key], digits)}")
            rows = f"{units.count(task['samples'])} rows with a label"
            lines.append(f"{name}: {'   '.join(shown) or 'no figures'} on {rows}")
    return "\n".join(lines)


_PLURALS = {
    "dataset": "datasets",
    "run": "runs",
    "plan": "plans",
    "towers": "towers artifacts",
    "study": "studies",
    "search": "searches",
    "unfinished search": "unfinished searches",
    "remains": "leftovers",
}
# The remaining singulars are the names of the kinds.
_SINGULARS = {"towers": "towers artifact", "remains": "leftover"}


def removed_from_store(result: RemovedFromStore) -> str:
    """List everything removed, and what is kept against expectation; then totals, and why the rest stays."""
    verb = "would remove" if result.dry_run else "removed"
    lines = []
    for entry in result.removed:
        lines.append(f"{verb} {entry.path}  {units.size(entry.bytes)}  {entry.reason}")
    for entry in result.kept:
        # List only entries that you may have expected to be removed; the rest is counted below.
        if entry.path in result.noticed:
            lines.append(f"keep {entry.path}  {entry.reason}")
    if result.removed:
        lines.append(f"{verb} {_counts(result.removed)}: {units.size(result.bytes)}")
    else:
        lines.append("nothing to remove")
    lines.append(f"kept {_counts(result.kept)}, for {units.plural(result.versions, 'version')}")
    by_reason: dict[str, list[Removed]] = {}
    for entry in result.kept:
        by_reason.setdefault(entry.reason, []).append(entry)
    for reason, entries in by_reason.items():
        if reason == "young":
            reason = f"less than {result.keep_days:g} days old (--keep-days)"
        lines.append(f"  {_counts(entries)}: {reason}")
    return "\n".join(lines)


def _counts(entries: Sequence[Removed]) -> str:
    # Example: "3 datasets, 2 runs".
    kinds = Counter(entry.kind for entry in entries)
    parts = []
    for kind, plural in _PLURALS.items():
        count = kinds[kind]
        if count:
            noun = plural if count != 1 else _SINGULARS.get(kind, kind)
            parts.append(f"{units.count(count)} {noun}")
    return ", ".join(parts) or "nothing"
