"""The results of ``nightjar what-if`` and ``nightjar plan-diff`` as text that fits a terminal and a mail."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from typing import Any

from pipeline import units
from pipeline.records.plan import MovedTable, PlanDiff, PlannedCase, PlanSide
from pipeline.units import text_table

WIDTH = 80
TIERS = ("hbm", "ddr", "ssd")
MOST_MOVED = 20
MOST_CHANGES = 24
MOST_NAMES = 10
NO_CAUSE = "other tables changed, and this one moved to make or use room"


def comparison(records: Sequence[PlannedCase]) -> str:
    """``nightjar what-if``: one line per combination, the fastest marked ``*``; below, what does not fit and why."""
    keys = list(dict.fromkeys(key for record in records for key in record.settings))
    tiers = [tier for tier in TIERS if any(_tier(record, tier) for record in records)]
    best = min((record.step_ms for record in records if record.step_ms is not None), default=None)
    head = ["", *keys, "fits", "step ms*", "bottleneck", *(f"{tier.upper()}*" for tier in tiers)]
    rows = [
        [
            f"{number}{'*' if record.fits and record.step_ms == best and len(records) > 1 else ''}",
            *(record.settings.get(key, units.ABSENT) for key in keys),
            "yes" if record.fits else "refused" if record.problem == "refused" else "no",
            units.decimal(record.step_ms, 3),
            f"{_words(record.bottleneck)} {units.decimal(record.bottleneck_ms, 3)}"
            if record.bottleneck
            else units.ABSENT,
            *(units.size(_tier(record, tier)) if record.fits else units.ABSENT for tier in tiers),
        ]
        for number, record in enumerate(records, 1)
    ]
    lines = [text_table(head, rows)]
    for (short, way_out), numbers in _problems(records).items():
        lines += ["", _wrapped(f"{_joined(numbers)}: {short}")]
        lines += [_wrapped(f"   first remedy: {way_out}")] if way_out else []
    return "\n".join([*lines, "", _verdict(records, best)])


def _problems(records: Sequence[PlannedCase]) -> dict[tuple[str | None, str | None], list[str]]:
    """Numbers of the combinations that do not fit, by problem and first remedy."""
    numbers: dict[tuple[str | None, str | None], list[str]] = {}
    for number, record in enumerate(records, 1):
        if not record.fits:
            numbers.setdefault((record.short, record.way_out), []).append(str(number))
    return numbers


def _joined(names: Sequence[str]) -> str:
    more = f" and {len(names) - MOST_NAMES} more" if len(names) > MOST_NAMES else ""
    return ", ".join(names[:MOST_NAMES]) + more


def _words(name: str) -> str:
    return name.replace("_", " ")


def _tier(record: PlannedCase, tier: str) -> int:
    return (record.tiers or {}).get(f"{tier}_bytes", 0)


def _verdict(records: Sequence[PlannedCase], best: float | None) -> str:
    fits = sum(record.fits for record in records)
    text = f"{fits} of {len(records)} fit"
    if best is not None and len(records) > 1:
        winner, *equal = [record for record in records if record.fits and record.step_ms == best]
        text += f"; * fastest: {' '.join(f'{key}={value}' for key, value in winner.settings.items())}"
        text += f" and {len(equal)} as fast" if equal else ""
    text += "; bytes: tables, optimizer state and buffers of one batch, all ranks" if fits else ""
    return _wrapped(text)


def difference(record: PlanDiff) -> str:
    """``nightjar plan-diff``: both plans; changes of inputs, cost and memory; which tables moved, and why."""
    parts = [
        f"from {_side(record.first)}\nto   {_side(record.second)}",
        _changes(record.changes),
        _changed_tables(record.own),
        _figures(record),
        _only(record.only_in_first, "gone"),
        _only(record.only_in_second, "new"),
        _moves(record),
    ]
    return "\n\n".join(part for part in parts if part)


def _side(side: PlanSide) -> str:
    ranks = units.plural(side.world_size, f"{side.device} rank")
    return f"{side.name}: {side.hardware}, {ranks}, {units.plural(side.tables, 'table')}, {units.size(side.bytes)}"


def _changes(changes: Mapping[str, Sequence[Any]]) -> str:
    if not changes:
        return ""
    lines = [_wrapped(f"  {path}: {_value(old)} -> {_value(new)}", "    ") for path, (old, new) in changes.items()]
    more = [f"  and {len(lines) - MOST_CHANGES} more (--json)"] if len(lines) > MOST_CHANGES else []
    return "\n".join(["inputs that changed", *lines[:MOST_CHANGES], *more])


def _value(value: Any) -> str:
    if isinstance(value, list):
        return f"[{', '.join(map(_value, value))}]"
    return "not set" if value is None else f"{value:,.10g}" if units.known(value) else str(value)


def _changed_tables(own: Mapping[str, Mapping[str, Sequence[Any]]]) -> str:
    """Tables whose own inputs changed."""
    if not own:
        return ""
    lines = [f"  {name}: {_pairs(changed)}" for name, changed in own.items()]
    more = [f"  and {len(lines) - MOST_CHANGES} more tables (--json)"] if len(lines) > MOST_CHANGES else []
    return "\n".join(["tables that changed", *(_wrapped(line, "    ") for line in lines[:MOST_CHANGES]), *more])


def _pairs(changed: Mapping[str, Sequence[Any]]) -> str:
    return ", ".join(f"{key} {_value(old)} -> {_value(new)}" for key, (old, new) in changed.items())


def _figures(record: PlanDiff) -> str:
    """Step, phases and memory, before and after."""
    rows = [_row("step, ms", record.step_ms, 3)]
    rows += [_row(f"  {_words(name)}, ms", pair, 3) for name, pair in record.phases.items()]
    for tier, used in record.memory.items():
        rows.append(_row(f"{tier.upper()} in tables", used.all_bytes, None))
        rows.append(_row("  of the fullest rank", used.fullest_bytes, None))
    return text_table(("predicted", "from*", "to*", "change*"), rows)


def _row(name: str, pair: Sequence[float], digits: int | None) -> list[str]:
    """A figure before and after, with so many ``digits``; None: as bytes."""
    old, new = pair
    shown = [units.size(value) if digits is None else units.decimal(value, digits) for value in pair]
    change = f"{new / old - 1:+.1%}" if old else units.ABSENT
    return [name, *shown, "same" if old == new else change]


def _only(names: Sequence[str], words: str) -> str:
    return _wrapped(f"{units.plural(len(names), 'table')} {words}: {_joined(names)}") if names else ""


def _moves(record: PlanDiff) -> str:
    moved = record.tables
    if not moved:
        return "no table moved"
    both = units.plural(record.tables_in_both, "table")
    lines = [f"{units.count(len(moved))} of {both} moved, {units.size(record.bytes_moved)} to be copied"]
    groups = _alike(moved, record.own)
    for names in groups[:MOST_MOVED]:
        lines += ["", *_move({name: moved[name] for name in names}, names[0] in record.own)]
    if rest := [moved[name] for names in groups[MOST_MOVED:] for name in names]:
        lines += ["", f"and {len(rest)} more, {units.size(sum(table.bytes_moved for table in rest))} (--json)"]
    return "\n".join(lines)


def _alike(moved: Mapping[str, MovedTable], own: Mapping[str, Any]) -> list[list[str]]:
    """Names of the tables that moved alike for the same cause, in the order of the first of each group."""
    groups: dict[tuple[Any, ...], list[str]] = {}
    for name, table in moved.items():
        groups.setdefault((*table.kinds, *table.places, *table.because, name in own), []).append(name)
    return list(groups.values())


def _move(tables: Mapping[str, MovedTable], own: bool) -> list[str]:
    """Tables that moved alike: from where to where, the total cost, and why. The reasons are those of the first."""
    names, group = list(tables), list(tables.values())
    first = group[0]
    shared = len(first.because) > 1 or first.because != [NO_CAUSE]
    because = "; ".join(first.because) if own or not shared else "the inputs above changed, not the table's own"
    old, new = (units.decimal(sum(table.cost_ms[side] for table in group), 3) for side in (0, 1))
    cost = f"{old} -> {new} ms"
    hits = [sum(table.hit_rate[side] for table in group) / len(group) for side in (0, 1)]
    if hits[0] != hits[1]:
        cost += f", {'mean ' * (len(group) > 1)}hit rate {units.percent(hits[0])} -> {units.percent(hits[1])}"
    copied, size = (units.size(sum(getattr(table, key) for table in group)) for key in ("bytes_moved", "bytes"))
    before, after = first.reasons
    whose = f"{names[0]}: " if any(table.reasons != first.reasons for table in group) else ""
    parts = [
        ("copied", f"{copied} ({units.plural(len(group), 'table') if len(group) > 1 else 'table'}: {size}), {cost}"),
        ("because", because),
        ("was", whose + before if before and before != after else ""),
        ("now" if before != after else "why", whose + after if after else ""),
    ]
    title = _wrapped(f"{_joined(names)}: {_way(group)}", "    ")
    return [title, *(_wrapped(f"  {word:<7}  {text}", " " * 11) for word, text in parts if text)]


def _way(group: Sequence[MovedTable]) -> str:
    """From where to where; for several tables with different ranks or cached rows, without those numbers."""
    first = group[0]
    if all((table.before, table.to) == (first.before, first.to) for table in group):
        return f"{first.before} -> {first.to}"
    old, new = first.kinds
    return f"{old} -> {new}" if old != new else f"{old}, other {_words(' and '.join(first.places))}"


def _wrapped(text: str, indent: str = "   ") -> str:
    return textwrap.fill(text, WIDTH, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)
