"""The results of ``nightjar ckpt`` as text."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from pipeline import units
from pipeline.config.renamed import leaves
from pipeline.records.checkpoint import (
    CheckpointDiff,
    Compacted,
    Exported,
    ListedCheckpoint,
    ShownCheckpoint,
    TableSize,
    Verified,
)
from pipeline.units import text_table

_MOST_CHANGES = 40


def _pairs(pairs: Mapping[str, str]) -> str:
    width = max(map(len, pairs))
    return "\n".join(f"{name.ljust(width)}  {value}" for name, value in pairs.items())


def _steps(names: Sequence[str]) -> str:
    """The steps of checkpoints with these names."""
    return ", ".join(name.removeprefix("step-").lstrip("0") or "0" for name in names) or units.ABSENT


def _type(record: ListedCheckpoint | ShownCheckpoint) -> str:
    """The type in the glossary's words; manifests call a delta a difference."""
    return "delta" if record.type == "difference" else record.type


def listing(records: Sequence[ListedCheckpoint]) -> str:
    """``nightjar ckpt ls``."""
    if not records:
        return "no checkpoints"
    rows = [
        [
            f"{r.run}/{r.name}",
            units.count(r.step),
            _type(r),
            _steps(r.parents),
            "+".join(r.codings),
            units.count(r.rows),
            units.size(r.bytes),
            units.percent(r.share),
            units.duration(r.age_seconds),
            _steps(r.rests),
        ]
        for r in records
    ]
    head = ("checkpoint", "step*", "type", "on", "coding", "rows*", "size*", "of full*", "age*", "rest on it")
    total = sum(r.bytes or 0 for r in records)
    lines = [text_table(head, rows), f"{units.plural(len(records), 'checkpoint')}, {units.size(total)}"]
    lines += [f"damaged: {r.path}/{r.problem}" for r in records if r.problem]
    return "\n".join([*lines, *(f"set aside: {r.path}: {r.why}" for r in records if r.why is not None)])


def details(record: ShownCheckpoint) -> str:
    """``nightjar ckpt show``."""
    position, config = record.position, record.config
    facts = {
        "checkpoint": record.path,
        "step": f"{units.count(record.step)}, {units.count(position.get('samples'))} samples",
        "position": f"epoch {position.get('epoch')}, next global batch {units.count(position.get('next_batch'))}",
        "type": _type(record) + (f" on {', '.join(record.parents)}" if record.parents else ""),
        "size": f"{units.size(record.bytes)}, {units.percent(record.share)} of a full fp32 checkpoint",
        "restores": str(record.summary.get("restores", 0)),
        "key": record.key,
        "inputs": ", ".join(f"{name} {key}" for name, key in record.inputs.items()),
        "dense part": units.size(record.dense_bytes),
        "age": units.duration(record.age_seconds),
    }
    rows = [
        [
            name,
            units.count(t.rows),
            units.count(t.dim),
            units.count(t.rows_stored),
            units.percent(t.rows_stored / max(1, t.rows)),
            units.size(t.bytes),
            "+".join(t.codings),
        ]
        for name, t in record.tables.items()
    ]
    head = ("table", "rows*", "dim*", "rows stored*", "share*", "size*", "coding")
    shown: dict[str, Any] = {name: config[name] for name in ("seed", "model", "train", "checkpoint") if name in config}
    settings = "\n".join(f"  {path}: {value}" for path, value in leaves(shown).items())
    return f"{_pairs(facts)}\n\n{text_table(head, rows)}\n\nsettings (all: --json)\n{settings}"


def verified(result: Verified) -> str:
    """``nightjar ckpt verify``."""
    read = f"{units.plural(result.files, 'file')}, {units.size(result.bytes)} read"
    if result.whole:
        return f"{result.checkpoint} is whole: {read}"
    lines = [f"  {d.checkpoint}/{d.file} {d.problem}" for d in result.damage]
    return "\n".join([f"{result.name} is damaged in {units.plural(len(lines), 'place')} ({read}):", *lines])


def difference(result: CheckpointDiff) -> str:
    """``nightjar ckpt diff``."""
    rows = [
        [
            name,
            units.count(t.rows),
            units.count(t.rows_changed),
            units.percent(t.rows_changed / max(1, t.rows)),
            f"{t.largest:.3g}",
            f"{t.mean:.3g}",
        ]
        for name, t in result.tables.items()
    ]
    parts = [f"from {result.first}\nto   {result.second}"]
    parts.append(text_table(("table", "rows*", "changed*", "share*", "largest*", "mean*"), rows))
    odd = [f"  {n}: {_size(a)} -> {_size(b)}" for n, (a, b) in result.tables_differ.items()]
    if odd:
        parts.append("tables that differ in size\n" + "\n".join(odd))
    dense = [
        [n, units.count(d.values), f"{d.largest:.3g}", f"{d.mean:.3g}"]
        for n, d in result.dense.items()
        if d.values is not None
    ]
    if dense:
        parts.append(text_table(("dense parameter", "values*", "largest*", "mean*"), dense))
    shapes = [f"  {n}: {d.shapes[0]} -> {d.shapes[1]}" for n, d in result.dense.items() if d.shapes is not None]
    if shapes:
        parts.append("dense parameters that differ in shape\n" + "\n".join(shapes))
    changes = [f"  {path}: {a} -> {b}" for path, (a, b) in result.config.items()]
    if changes:
        more = [f"  and {len(changes) - _MOST_CHANGES} more (--json)"] if len(changes) > _MOST_CHANGES else []
        parts.append("settings\n" + "\n".join(changes[:_MOST_CHANGES] + more))
    return "\n\n".join(parts)


def _size(size: TableSize | None) -> str:
    return f"{size.rows:,} x {size.dim}" if size else "absent"


def compacted(result: Compacted) -> str:
    """``nightjar ckpt compact``."""
    if not result.compacted:
        return f"{result.checkpoint} is already a baseline: nothing to do"
    return (
        f"{result.checkpoint} is a baseline now, {units.size(result.bytes)} "
        f"({units.size(result.bytes_before)} before); it was a delta on {', '.join(result.compacted)}"
    )


def collected(result: Mapping[str, Any]) -> str:
    """``nightjar ckpt gc``."""
    verb = "would remove" if result["dry_run"] else "removed"
    lines = [f"{verb} {each['path']}  {units.size(each['bytes'])}  {each['reason']}" for each in result["removed"]]
    kept = [f"keep {each['path']}  {each['reason']}" for each in result["kept"]]
    total = f"{verb} {len(lines)} in all, {units.size(result['bytes'])}; {units.plural(len(kept), 'checkpoint')} kept"
    return "\n".join([*lines, *kept, total])


def exported(result: Exported) -> str:
    """``nightjar ckpt export``."""
    rows = [[f.table, units.count(f.rows), units.count(f.dim), units.size(f.bytes), f.file] for f in result.files]
    return f"{result.checkpoint}\n{text_table(('table', 'rows*', 'dim*', 'size*', 'file'), rows)}"


# By the name of the action.
TEXTS: Mapping[str, Callable[[Any], str]] = {
    "ls": listing,
    "show": details,
    "verify": verified,
    "diff": difference,
    "compact": compacted,
    "gc": collected,
    "export": exported,
}
