"""The results of ``nightjar what-if`` and ``nightjar plan-diff`` as text that fits a terminal and a mail."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from typing import Any

from pipeline import units
from pipeline.report.text_table import text_table

WIDTH = 80
TIERS = ("hbm", "ddr", "ssd")
MOST_MOVED = 20
MOST_CHANGES = 24
MOST_NAMES = 10
NO_CAUSE = "other tables changed, and this one moved to make or use room"


def comparison(records: Sequence[Mapping[str, Any]]) -> str:
    """``nightjar what-if``: one line a combination, the fastest marked ``*``; below, what does not fit and why."""
    keys = list(dict.fromkeys(key for record in records for key in record["settings"]))
    tiers = [tier for tier in TIERS if any(_tier(record, tier) for record in records)]
    best = min((record["step_ms"] for record in records if record["fits"]), default=None)
    head = ["", *keys, "fits", "step ms*", "bottleneck", *(f"{tier.upper()}*" for tier in tiers)]
    rows = [
        [
            f"{number}{'*' if record['fits'] and record['step_ms'] == best and len(records) > 1 else ''}",
            *(record["settings"].get(key, units.ABSENT) for key in keys),
            "yes" if record["fits"] else "refused" if record.get("problem") == "refused" else "no",
            units.decimal(record.get("step_ms"), 3),
            _bottleneck(record),
            *(units.size(_tier(record, tier)) if record["fits"] else units.ABSENT for tier in tiers),
        ]
        for number, record in enumerate(records, 1)
    ]
    lines = [text_table(head, rows)]
    for numbers, short, way_out in _problems(records):
        lines += ["", _wrapped(f"{numbers}: {short}")]
        lines += [_wrapped(f"   first remedy: {way_out}")] if way_out else []
    return "\n".join([*lines, "", _verdict(records, best)])


def _problems(records: Sequence[Mapping[str, Any]]) -> list[tuple[str, str, str]]:
    """(numbers of the combinations, what is wrong with them, the first remedy), once for equal ones."""
    numbers_by_problem: dict[tuple[str, str], list[int]] = {}
    for number, record in enumerate(records, 1):
        if not record["fits"]:
            numbers_by_problem.setdefault((record["short"], record["way_out"]), []).append(number)
    return [(_joined([*map(str, numbers)]), *problem) for problem, numbers in numbers_by_problem.items()]


def _joined(names: Sequence[str]) -> str:
    more = f" and {len(names) - MOST_NAMES} more" if len(names) > MOST_NAMES else ""
    return ", ".join(names[:MOST_NAMES]) + more


def _tier(record: Mapping[str, Any], tier: str) -> float:
    return record.get("tiers", {}).get(f"{tier}_bytes", 0)


def _bottleneck(record: Mapping[str, Any]) -> str:
    if "bottleneck" not in record:
        return units.ABSENT
    return f"{record['bottleneck'].replace('_', ' ')} {units.decimal(record['bottleneck_ms'], 3)}"


def _verdict(records: Sequence[Mapping[str, Any]], best: float | None) -> str:
    fits = sum(record["fits"] for record in records)
    said = f"{fits} of {len(records)} fit"
    if best is not None and len(records) > 1:
        winner, *equal = [record for record in records if record["fits"] and record["step_ms"] == best]
        said += f"; * fastest: {' '.join(f'{key}={value}' for key, value in winner['settings'].items())}"
        said += f" and {len(equal)} as fast" if equal else ""
    said += "; bytes: tables, optimizer state and buffers of one batch, all ranks" if fits else ""
    return _wrapped(said)


def difference(record: Mapping[str, Any]) -> str:
    """``nightjar plan-diff``: the two plans, what changed of their inputs, cost and memory, and what moved and why."""
    first, second = record["first"], record["second"]
    parts = [
        f"from {_side(first)}\nto   {_side(second)}",
        _changes(record["changes"]),
        _own(record["own"]),
        _figures(record),
        *(_only(record[key], words) for key, words in (("only_in_first", "gone"), ("only_in_second", "new"))),
        _moves(record),
    ]
    return "\n\n".join(part for part in parts if part)


def _side(side: Mapping[str, Any]) -> str:
    ranks = units.plural(side["world_size"], f"{side['device']} rank")
    tables = units.plural(side["tables"], "table")
    return f"{side['name']}: {side['hardware']}, {ranks}, {tables}, {units.size(side['bytes'])}"


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


def _own(own: Mapping[str, Mapping[str, Sequence[Any]]]) -> str:
    """Tables whose own inputs changed."""
    if not own:
        return ""
    lines = [f"  {name}: {_pairs(changed)}" for name, changed in own.items()]
    more = [f"  and {len(lines) - MOST_CHANGES} more tables (--json)"] if len(lines) > MOST_CHANGES else []
    return "\n".join(["tables that changed", *(_wrapped(line, "    ") for line in lines[:MOST_CHANGES]), *more])


def _pairs(changed: Mapping[str, Sequence[Any]]) -> str:
    return ", ".join(f"{key} {_value(old)} -> {_value(new)}" for key, (old, new) in changed.items())


def _figures(record: Mapping[str, Any]) -> str:
    """Step, phases and memory, before and after."""
    rows = [_row("step, ms", record["step_ms"], 3)]
    rows += [_row(f"  {name.replace('_', ' ')}, ms", pair, 3) for name, pair in record["phases"].items()]
    for tier, used in record["memory"].items():
        rows.append(_row(f"{tier.upper()} in tables", used["all_bytes"], None))
        rows.append(_row("  of the fullest rank", used["fullest_bytes"], None))
    return text_table(("predicted", "from*", "to*", "change*"), rows)


def _row(name: str, pair: Sequence[float], digits: int | None) -> list[str]:
    """A figure before and after: with so many ``digits``, or as bytes."""
    old, new = pair
    shown = [units.size(value) if digits is None else units.decimal(value, digits) for value in pair]
    change = f"{new / old - 1:+.1%}" if old else units.ABSENT
    return [name, *shown, "same" if old == new else change]


def _only(names: Sequence[str], words: str) -> str:
    if not names:
        return ""
    return _wrapped(f"{units.plural(len(names), 'table')} {words}: {_joined(names)}")


def _moves(record: Mapping[str, Any]) -> str:
    moved = record["tables"]
    if not moved:
        return "no table moved"
    both = units.plural(record["tables_in_both"], "table")
    lines = [f"{units.count(len(moved))} of {both} moved, {units.size(record['bytes_moved'])} to be copied"]
    groups = _alike(moved, record["own"])
    for names in groups[:MOST_MOVED]:
        lines += ["", *_move({name: moved[name] for name in names}, names[0] in record["own"])]
    rest = [moved[name] for names in groups[MOST_MOVED:] for name in names]
    if rest:
        lines += ["", f"and {len(rest)} more, {units.size(_total(rest, 'bytes_moved'))} (--json)"]
    return "\n".join(lines)


def _alike(moved: Mapping[str, Mapping[str, Any]], own: Mapping[str, Any]) -> list[list[str]]:
    """Names of the tables that moved alike for the same cause, in the order of the first of each group."""
    groups: dict[tuple[Any, ...], list[str]] = {}
    for name, change in moved.items():
        key = (*change["kinds"], *change["places"], *change["because"], name in own)
        groups.setdefault(key, []).append(name)
    return list(groups.values())


def _move(changes: Mapping[str, Mapping[str, Any]], own: bool) -> list[str]:
    """Tables that moved alike: from where to where, at which cost in all, and why; reasons are those of the first."""
    names, group = list(changes), list(changes.values())
    first = group[0]
    shared = len(first["because"]) > 1 or first["because"] != [NO_CAUSE]
    because = "; ".join(first["because"]) if own or not shared else "the inputs above changed, not the table's own"
    old, new = (units.decimal(sum(change["cost_ms"][side] for change in group), 3) for side in (0, 1))
    cost = f"{old} -> {new} ms"
    hits = [sum(change["hit_rate"][side] for change in group) / len(group) for side in (0, 1)]
    if hits[0] != hits[1]:
        cost += f", {'mean ' * (len(group) > 1)}hit rate {units.percent(hits[0])} -> {units.percent(hits[1])}"
    tables = units.plural(len(group), "table") if len(group) > 1 else "table"
    before, after = first["reasons"]
    whose = f"{names[0]}: " if any(change["reasons"] != first["reasons"] for change in group) else ""
    parts = [
        (
            "copied",
            f"{units.size(_total(group, 'bytes_moved'))} ({tables}: {units.size(_total(group, 'bytes'))}), {cost}",
        ),
        ("because", because),
        ("was", whose + before if before and before != after else ""),
        ("now" if before != after else "why", whose + after if after else ""),
    ]
    title = _wrapped(f"{_joined(names)}: {_way(group)}", "    ")
    return [title, *(_wrapped(f"  {word:<7}  {said}", " " * 11) for word, said in parts if said)]


def _way(group: Sequence[Mapping[str, Any]]) -> str:
    """From where to where; of several tables whose ranks or cached rows differ, without those numbers."""
    first = group[0]
    if all((change["from"], change["to"]) == (first["from"], first["to"]) for change in group):
        return f"{first['from']} -> {first['to']}"
    old, new = first["kinds"]
    return f"{old} -> {new}" if old != new else f"{old}, other {' and '.join(first['places']).replace('_', ' ')}"


def _total(changes: Sequence[Mapping[str, Any]], key: str) -> int:
    return sum(change[key] for change in changes)


def _wrapped(text: str, indent: str = "   ") -> str:
    return textwrap.fill(text, WIDTH, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)
