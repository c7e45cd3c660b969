"""The results of ``nightjar ckpt`` as text."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from pipeline.config.renamed import leaves
from pipeline.core import units
from pipeline.core.units import text_table
from pipeline.records.checkpoint import (
    CheckpointDiff,
    Compacted,
    Exported,
    ListedCheckpoint,
    ShownCheckpoint,
    Verified,
)

_MOST_CHANGES = 40


def _steps(names: Sequence[str]) -> str:
    numbers = []
    for name in names:
        # Step 0, the state before training, has only zeros in its name.
        numbers.append(name.removeprefix("step-").lstrip("0") or "0")
    return ", ".join(numbers) or units.ABSENT


def _type(record: ListedCheckpoint | ShownCheckpoint) -> str:
    # Use the glossary's word; manifests call a delta a difference.
    return "delta" if record.type == "difference" else record.type


def listing(records: Sequence[ListedCheckpoint]) -> str:
    """Format ``nightjar ckpt ls``."""
    if not records:
        return "no checkpoints"
    rows = []
    for record in records:
        cells = [f"{record.run}/{record.name}", units.count(record.step), _type(record), _steps(record.parents)]
        cells += ["+".join(record.codings), units.count(record.rows), units.size(record.bytes)]
        cells += [units.percent(record.share), units.duration(record.age_seconds), _steps(record.rests)]
        rows.append(cells)
    head = ("checkpoint", "step*", "type", "on", "coding", "rows*", "size*", "of full*", "age*", "rest on it")
    total, lines, set_aside = 0, [text_table(head, rows)], []
    for record in records:
        # The size of a damaged checkpoint is unknown.
        total += record.bytes or 0
        if record.problem:
            lines.append(f"damaged: {record.path}/{record.problem}")
        if record.why is not None:
            set_aside.append(f"set aside: {record.path}: {record.why}")
    lines.insert(1, f"{units.plural(len(records), 'checkpoint')}, {units.size(total)}")
    return "\n".join(lines + set_aside)


def details(record: ShownCheckpoint) -> str:
    """Format ``nightjar ckpt show``."""
    position = record.position
    kind = _type(record)
    if record.parents:
        kind += f" on {', '.join(record.parents)}"
    facts = {
        "checkpoint": record.path,
        "step": f"{units.count(record.step)}, {units.count(position.get('samples'))} samples",
        "position": f"epoch {position.get('epoch')}, next global batch {units.count(position.get('next_batch'))}",
        "type": kind,
        "size": f"{units.size(record.bytes)}, {units.percent(record.share)} of a full fp32 checkpoint",
        "restores": str(record.summary.get("restores", 0)),
        "key": record.key,
        "inputs": ", ".join(f"{name} {key}" for name, key in record.inputs.items()),
        "dense part": units.size(record.dense_bytes),
        "age": units.duration(record.age_seconds),
    }
    lines, rows = [], []
    for name, value in facts.items():
        lines.append(f"{name:<10}  {value}")
    for name, table in record.tables.items():
        counts = (units.count(table.rows), units.count(table.dim), units.count(table.rows_stored))
        share = units.percent(table.rows_stored / max(1, table.rows))
        rows.append([name, *counts, share, units.size(table.bytes), "+".join(table.codings)])
    head = ("table", "rows*", "dim*", "rows stored*", "share*", "size*", "coding")
    lines += ["", text_table(head, rows), "", "settings (all: --json)"]
    for name in ("seed", "model", "train", "checkpoint"):
        if name in record.config:
            for path, value in leaves({name: record.config[name]}).items():
                lines.append(f"  {path}: {value}")
    return "\n".join(lines)


def verified(result: Verified) -> str:
    """Format ``nightjar ckpt verify``."""
    read = f"{units.plural(result.files, 'file')}, {units.size(result.bytes)} read"
    if result.whole:
        return f"{result.checkpoint} is whole: {read}"
    lines = [f"{result.name} is damaged in {units.plural(len(result.damage), 'place')} ({read}):"]
    for damage in result.damage:
        lines.append(f"  {damage.checkpoint}/{damage.file} {damage.problem}")
    return "\n".join(lines)


def difference(result: CheckpointDiff) -> str:
    """Format ``nightjar ckpt diff``."""
    parts = [f"from {result.first}\nto   {result.second}"]
    rows = []
    for name, table in result.tables.items():
        counts = (units.count(table.rows), units.count(table.rows_changed))
        share = units.percent(table.rows_changed / max(1, table.rows))
        rows.append([name, *counts, share, f"{table.largest:.3g}", f"{table.mean:.3g}"])
    parts.append(text_table(("table", "rows*", "changed*", "share*", "largest*", "mean*"), rows))
    if result.tables_differ:
        lines = ["tables that differ in size"]
        for name, sizes in result.tables_differ.items():
            # One of the checkpoints may not have the table.
            shown = ["absent", "absent"]
            for side, size in enumerate(sizes):
                if size:
                    shown[side] = f"{size.rows:,} x {size.dim}"
            lines.append(f"  {name}: {shown[0]} -> {shown[1]}")
        parts.append("\n".join(lines))
    dense, shapes = [], []
    for name, parameter in result.dense.items():
        if parameter.values is not None:
            dense.append([name, units.count(parameter.values), f"{parameter.largest:.3g}", f"{parameter.mean:.3g}"])
        if parameter.shapes is not None:
            shapes.append(f"  {name}: {parameter.shapes[0]} -> {parameter.shapes[1]}")
    if dense:
        parts.append(text_table(("dense parameter", "values*", "largest*", "mean*"), dense))
    if shapes:
        parts.append("dense parameters that differ in shape\n" + "\n".join(shapes))
    changes = []
    for path, (old, new) in result.config.items():
        changes.append(f"  {path}: {old} -> {new}")
    if len(changes) > _MOST_CHANGES:
        changes[_MOST_CHANGES:] = [f"  and {len(changes) - _MOST_CHANGES} more (--json)"]
    if changes:
        parts.append("settings\n" + "\n".join(changes))
    return "\n\n".join(parts)


def compacted(result: Compacted) -> str:
    """Format ``nightjar ckpt compact``."""
    if not result.compacted:
        return f"{result.checkpoint} is already a baseline: nothing to do"
    return (
        f"{result.checkpoint} is a baseline now, {units.size(result.bytes)} "
        f"({units.size(result.bytes_before)} before); it was a delta on {', '.join(result.compacted)}"
    )


def collected(result: Mapping[str, Any]) -> str:
    """Format ``nightjar ckpt gc``."""
    verb = "would remove" if result["dry_run"] else "removed"
    lines = []
    for removed in result["removed"]:
        lines.append(f"{verb} {removed['path']}  {units.size(removed['bytes'])}  {removed['reason']}")
    for kept in result["kept"]:
        lines.append(f"keep {kept['path']}  {kept['reason']}")
    total = f"{verb} {len(result['removed'])} in all, {units.size(result['bytes'])}"
    return "\n".join([*lines, f"{total}; {units.plural(len(result['kept']), 'checkpoint')} kept"])


def exported(result: Exported) -> str:
    """Format ``nightjar ckpt export``."""
    rows = []
    for file in result.files:
        rows.append([file.table, units.count(file.rows), units.count(file.dim), units.size(file.bytes), file.file])
    return f"{result.checkpoint}\n{text_table(('table', 'rows*', 'dim*', 'size*', 'file'), rows)}"


# The texts by the name of the action.
TEXTS: Mapping[str, Callable[[Any], str]] = {
    "ls": listing,
    "show": details,
    "verify": verified,
    "diff": difference,
    "compact": compacted,
    "gc": collected,
    "export": exported,
}
