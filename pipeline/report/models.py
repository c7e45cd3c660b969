"""What ``nightjar models``, ``nightjar predict`` and ``nightjar store gc`` print."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from pipeline import units
from pipeline.records.model_version import ListedModel, ListedVersion, RemovedVersions, ShownVersion
from pipeline.records.runs import Removed, RemovedFromStore


def listing(models: Sequence[ListedModel]) -> str:
    """The versions of every model, oldest first. ``>`` marks the serving one, ``<`` the one a rollback restores."""
    if not models:
        return "no published models in this store; nightjar nightly publishes one"
    lines = []
    for model in models:
        lines += [f"{model.model}: {model.serving or 'nothing'} serves"]
        lines += [f"  {'version':<18} {'age':>12} {'size':>9} {'gate':<6} {'NE':>8} {'calibration':>11}"]
        lines += [_version(each) for each in model.versions]
    return "\n".join(lines)


def _version(each: ListedVersion) -> str:
    mark = ">" if each.serves else "<" if each.previous else " "
    if each.problem:
        return f"{mark} {each.version:<18} {each.problem}"
    summary = each.summary
    gate = "forced" if summary.get("forced") else str(summary.get("verdict", units.ABSENT))
    return (
        f"{mark} {each.version:<18} {units.duration(each.age_seconds):>12} {units.size(each.bytes):>9} "
        f"{gate:<6} {units.decimal(summary.get('ne'), 5):>8} {units.decimal(summary.get('calibration')):>11}"
        + (f"\n    withdrawn: {each.withdrawn}" if each.withdrawn else "")
    )


def details(shown: ShownVersion) -> str:
    """A version: verdict, figures, data, lineage, tables and log."""
    card = shown.card
    lines = [f"{card.model} {card.version}" + (" (serves)" if shown.serves else ""), f"  at {shown.path}"]
    lines.append(f"  made {_when(card.created)}")
    lines += [f"  gate {card.gate.verdict}", *(f"    {reason}" for reason in card.gate.reasons)]
    lines += [f"  withdrawn: {shown.withdrawn}"] if shown.withdrawn else []
    for name, (point, low, high) in card.figures.items():
        lines.append(f"  {name} {point:.5f} [{low:.5f}, {high:.5f}]")
    if card.calibrator is not None:
        lines.append(f"  calibrator {card.calibrator.words}")
    for part, facts in (("data", card.data), ("lineage", card.lineage.to_json())):
        named = {key.replace("_", " "): _fact(value) for key, value in facts.items()}
        lines += [f"  {part}", *(f"    {name}: {text}" for name, text in named.items() if text)]
    tables = card.tables.values()
    size = sum(table.bytes for table in tables)
    coding = "/".join(sorted({table.coding for table in tables}))
    lines.append(f"  {units.plural(len(tables), 'table')} in coding {coding}, {units.size(size)}")
    lines += [f"  {entry.by} {_when(entry.at)}: {entry.reason or 'no reason given'}" for entry in shown.log]
    return "\n".join(lines)


def _fact(value: Any) -> str:
    """A value of the card in words; "" for one that says nothing."""
    if isinstance(value, Mapping):
        return ", ".join(f"{name} {text}" for name, each in value.items() if (text := _fact(each)))
    if isinstance(value, list | tuple):
        return "; ".join(map(_fact, value))
    return "" if value is None else str(value)


def _when(seconds: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(seconds))


TASK_FIGURES = {"ne": "NE", "auc": "AUC", "rmse": "RMSE", "calibration": "calibration"}


def serving(current: Mapping[str, Any]) -> str:
    """What serves now, and what a rollback would restore."""
    before = f"the previous version is {current['previous']}" if current["previous"] else "it is the first one"
    return f"{current['model']}: {current['version']} serves now; {before}"


def removed_versions(result: RemovedVersions) -> str:
    """What ``gc`` removed."""
    if not result.removed:
        return f"{result.model}: nothing to remove"
    verb = "would remove" if result.dry_run else "removed"
    lines = [f"  {each.version}  {units.size(each.bytes)}  {each.reason}" for each in result.removed]
    return "\n".join([f"{result.model}: {verb} {units.plural(len(lines), 'version')}", *lines])


def predicted(done: Mapping[str, Any]) -> str:
    """How many rows were scored, and how good the scores are if the rows have labels."""
    cache = done["cache"]
    lines = [
        f"{done['model']} {done['version']}: {units.count(done['rows'])} rows scored in "
        f"{units.duration(done['seconds'])}, {units.count(done['rows_per_s'])} rows/s"
    ]
    if done["rows_rejected"]:
        lines.append(f"{units.plural(done['rows_rejected'], 'row')} left out; the first: {done['rejected'][0]}")
    if cache["tables_on_disk"]:
        asked = cache["hits"] + cache["misses"]
        share = units.percent(cache["hits"] / asked if asked else 0.0)
        lines.append(
            f"{units.plural(cache['tables_on_disk'], 'table')} on disk: {share} of their rows came from memory"
        )
    if figures := done.get("eval"):
        lines.append(
            f"NE {units.decimal(figures['ne'], 5)}   AUC {units.decimal(figures['auc'], 5)}   "
            f"calibration {units.decimal(figures['calibration'])}"
        )
        lines += [_task_line(name, each) for name, each in figures.get("tasks", {}).items()]
    return "\n".join(lines)


def _task_line(name: str, figures: Mapping[str, Any]) -> str:
    digits = {"calibration": 4}
    shown = [
        f"{title} {units.decimal(figures[key], digits.get(key, 5))}"
        for key, title in TASK_FIGURES.items()
        if key in figures
    ]
    return f"{name}: {'   '.join(shown) or 'no figures'} on {units.count(figures['samples'])} rows with a label"


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
_SINGULARS = {"towers": "towers artifact", "remains": "leftover"}  # the others are those of the kind


def removed_from_store(result: RemovedFromStore) -> str:
    """A line for everything removed, and for what is kept against expectation; then totals, and why the rest stays."""
    verb = "would remove" if result.dry_run else "removed"
    lines = [f"{verb} {each.path}  {units.size(each.bytes)}  {each.reason}" for each in result.removed]
    lines += [f"keep {each.path}  {each.reason}" for each in result.kept if each.path in result.noticed]
    total = f"{verb} {_counted(result.removed)}: {units.size(result.bytes)}"
    lines.append(total if result.removed else "nothing to remove")
    lines.append(f"kept {_counted(result.kept)}, for {units.plural(result.versions, 'version')}")
    young = f"less than {result.keep_days:g} days old (--keep-days)"
    for reason in dict.fromkeys(each.reason for each in result.kept):
        same = [each for each in result.kept if each.reason == reason]
        lines.append(f"  {_counted(same)}: {young if reason == 'young' else reason}")
    return "\n".join(lines)


def _counted(entries: Sequence[Removed]) -> str:
    """``3 datasets, 2 runs``; "nothing" for none."""
    kinds = Counter(each.kind for each in entries)
    shown = [
        f"{units.count(kinds[kind])} {_SINGULARS.get(kind, kind) if kinds[kind] == 1 else nouns}"
        for kind, nouns in _PLURALS.items()
        if kinds[kind]
    ]
    return ", ".join(shown) or "nothing"
