"""The results of ``nightjar what-if`` and ``nightjar plan-diff`` as text that fits a terminal and a mail."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from typing import Any

from pipeline.report import units
from pipeline.report.checkpoints import table

WIDTH = 80
TIERS = ("hbm", "ddr", "ssd")
MOST_MOVED = 20
MOST_CHANGES = 24
MOST_NAMES = 10
NO_CAUSE = "other tables changed, and this one made room or took it"


def comparison(records: Sequence[Mapping[str, Any]]) -> str:
    """``nightjar what-if``: one line a combination, the quickest marked ``*``; below, what does not fit and why."""
    keys = list(dict.fromkeys(key for record in records for key in record["settings"]))
    tiers = [tier for tier in TIERS if any(_tier(record, tier) for record in records)]
    best = min((record["step_ms"] for record in records if record["fits"]), default=None)
    head = ["", *keys, "fits", "step ms*", "bottleneck", *(f"{tier.upper()}*" for tier in tiers)]
    rows = [
        [
            f"{number}{'*' if record['fits'] and record['step_ms'] == best and len(records) > 1 else ''}",
            *(record["settings"].get(key, units.ABSENT) for key in keys),
            "yes" if record["fits"] else "no",
            units.decimal(record.get("step_ms"), 3),
            _bottleneck(record),
            *(units.size(_tier(record, tier)) if record["fits"] else units.ABSENT for tier in tiers),
        ]
        for number, record in enumerate(records, 1)
    ]
    lines = [table(head, rows)]
    for number, record in enumerate(records, 1):
        if not record["fits"]:
            lines += ["", _wrapped(f"{number}: {record['short']}")]
            lines += [_wrapped(f"   first way out: {record['way_out']}")] if record["way_out"] else []
    return "\n".join([*lines, "", _verdict(records, best)])


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
        winner = next(record for record in records if record["fits"] and record["step_ms"] == best)
        said += f"; * quickest: {' '.join(f'{key}={value}' for key, value in winner['settings'].items())}"
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
    ranks = f"{side['world_size']} {side['device']} rank" + "s" * (side["world_size"] != 1)
    return f"{side['name']}: {side['hardware']}, {ranks}, {side['tables']} tables, {units.size(side['bytes'])}"


def _changes(changes: Mapping[str, Sequence[Any]]) -> str:
    if not changes:
        return ""
    lines = [f"  {path}: {_value(old)} -> {_value(new)}" for path, (old, new) in changes.items()]
    more = [f"  and {len(lines) - MOST_CHANGES} more (--json)"] if len(lines) > MOST_CHANGES else []
    return "\n".join(["inputs that changed", *lines[:MOST_CHANGES], *more])


def _value(value: Any) -> str:
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
    return table(("predicted", "from*", "to*", "change*"), rows)


def _row(name: str, pair: Sequence[float], digits: int | None) -> list[str]:
    """A figure before and after: with so many ``digits``, or as bytes."""
    old, new = pair
    shown = [units.size(value) if digits is None else units.decimal(value, digits) for value in pair]
    change = f"{new / old - 1:+.1%}" if old else units.ABSENT
    return [name, *shown, "same" if old == new else change]


def _only(names: Sequence[str], words: str) -> str:
    if not names:
        return ""
    more = f" and {len(names) - MOST_NAMES} more" if len(names) > MOST_NAMES else ""
    return _wrapped(f"{_plural(len(names), 'table')} {words}: {', '.join(names[:MOST_NAMES])}{more}")


def _moves(record: Mapping[str, Any]) -> str:
    moved = record["tables"]
    if not moved:
        return "no table moved"
    count = record["tables_in_both"]
    lines = [f"{len(moved)} of {_plural(count, 'table')} moved, {units.size(record['bytes_moved'])} to be copied"]
    for name, change in list(moved.items())[:MOST_MOVED]:
        lines += ["", *_move(name, change, name in record["own"])]
    rest = list(moved.values())[MOST_MOVED:]
    if rest:
        lines += ["", f"and {len(rest)} more, {units.size(sum(change['bytes_moved'] for change in rest))} (--json)"]
    return "\n".join(lines)


def _move(name: str, change: Mapping[str, Any], own: bool) -> list[str]:
    old, new = change["cost_ms"]
    before, after = change["reasons"]
    shared = len(change["because"]) > 1 or change["because"] != [NO_CAUSE]
    because = "; ".join(change["because"]) if own or not shared else "the inputs above changed, none of its own"
    cost = f"{units.decimal(old, 3)} -> {units.decimal(new, 3)} ms"
    hits = change["hit_rate"]
    if hits[0] != hits[1]:
        cost += f", hit rate {units.percent(hits[0])} -> {units.percent(hits[1])}"
    return [
        _wrapped(f"{name}: {change['from']} -> {change['to']}", "    "),
        _wrapped(
            f"  copied   {units.size(change['bytes_moved'])} (table: {units.size(change['bytes'])}), {cost}", " " * 11
        ),
        _wrapped(f"  because  {because}", " " * 11),
        *([_wrapped(f"  was      {before}", " " * 11)] if before and before != after else []),
        *([_wrapped(f"  {'now' if before != after else 'why'}      {after}", " " * 11)] if after else []),
    ]


def _plural(number: int, noun: str) -> str:
    return f"{number} {noun}" + "s" * (number != 1)


def _wrapped(text: str, indent: str = "   ") -> str:
    return textwrap.fill(text, WIDTH, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)
