"""The results of ``nightjar what-if`` and ``nightjar plan-diff`` as text that fits a terminal and a mail."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any

from pipeline.core import units
from pipeline.core.units import text_table
from pipeline.records.plan import MovedTable, PlanDiff, PlannedCase, PlanSide
from pipeline.report.summary import first_names, paragraph

TIERS = ("hbm", "ddr", "ssd")
MOST_MOVED = 20
MOST_CHANGES = 24
MOST_NAMES = 10
NO_CAUSE = "other tables changed, and this one moved to make or use room"


def comparison(records: Sequence[PlannedCase]) -> str:
    """Return ``nightjar what-if``: a line per combination, the fastest marked ``*``; what does not fit, and why."""
    keys = list(dict.fromkeys(chain.from_iterable(record.settings for record in records)))
    # A tier that no combination uses would be a column of zeros.
    tiers = [tier for tier in TIERS if any((record.tiers or {}).get(f"{tier}_bytes") for record in records)]
    best = min((record.step_ms for record in records if record.step_ms is not None), default=None)
    head = ["", *keys, "fits", "step ms*", "bottleneck"]
    for tier in tiers:
        head.append(f"{tier.upper()}*")
    rows = []
    fitting = []
    # Combinations with the same problem and first remedy share a paragraph.
    numbers: dict[tuple[str | None, str | None], list[str]] = {}
    for number, record in enumerate(records, 1):
        cells = [str(number)]
        for key in keys:
            cells.append(record.settings.get(key, units.ABSENT))
        if record.fits:
            fitting.append(record)
            cells.append("yes")
            # A single combination is not marked.
            if record.step_ms == best and len(records) > 1:
                cells[0] += "*"
        else:
            numbers.setdefault((record.short, record.way_out), []).append(str(number))
            cells.append("refused" if record.problem == "refused" else "no")
        bottleneck = units.ABSENT
        if record.bottleneck:
            bottleneck = f"{_words(record.bottleneck)} {units.decimal(record.bottleneck_ms, 3)}"
        cells += [units.decimal(record.step_ms, 3), bottleneck]
        for tier in tiers:
            size = units.ABSENT
            if record.fits:
                size = units.size((record.tiers or {}).get(f"{tier}_bytes", 0))
            cells.append(size)
        rows.append(cells)
    lines = [text_table(head, rows)]
    for (short, way_out), cases in numbers.items():
        lines += ["", paragraph(f"{first_names(cases, MOST_NAMES)}: {short}")]
        if way_out:
            lines.append(paragraph(f"   first remedy: {way_out}"))

    text = f"{len(fitting)} of {len(records)} fit"
    if best is not None and len(records) > 1:
        best_cases = [record for record in fitting if record.step_ms == best]
        settings = " ".join(f"{key}={value}" for key, value in best_cases[0].settings.items())
        text += f"; * fastest: {settings}"
        if len(best_cases) > 1:
            text += f" and {len(best_cases) - 1} as fast"
    if fitting:
        text += "; bytes: tables, optimizer state and buffers of one batch, all ranks"
    return "\n".join([*lines, "", paragraph(text)])


def _words(name: str) -> str:
    return name.replace("_", " ")


def difference(record: PlanDiff) -> str:
    """Return ``nightjar plan-diff``: both plans; changes of inputs, cost and memory; which tables moved, and why."""
    parts = [f"from {_side(record.first)}\nto   {_side(record.second)}"]
    inputs, tables = [], []
    for path, (old, new) in record.changes.items():
        inputs.append(f"  {path}: {_value(old)} -> {_value(new)}")
    for name, changed in record.own.items():
        pairs = []
        for key, (old, new) in changed.items():
            pairs.append(f"{key} {_value(old)} -> {_value(new)}")
        tables.append(f"  {name}: {', '.join(pairs)}")
    for title, changes, noun in (("inputs that changed", inputs, ""), ("tables that changed", tables, " tables")):
        if not changes:
            continue
        lines = [title]
        for change in changes[:MOST_CHANGES]:
            lines.append(paragraph(change, "    "))
        if len(changes) > MOST_CHANGES:
            lines.append(f"  and {len(changes) - MOST_CHANGES} more{noun} (--json)")
        parts.append("\n".join(lines))

    # Step, phases and memory, before and after.
    rows = [_figure_row("step, ms", record.step_ms, 3)]
    for name, pair in record.phases.items():
        rows.append(_figure_row(f"  {_words(name)}, ms", pair, 3))
    for tier, used in record.memory.items():
        rows.append(_figure_row(f"{tier.upper()} in tables", used.all_bytes, None))
        rows.append(_figure_row("  of the fullest rank", used.fullest_bytes, None))
    parts.append(text_table(("predicted", "from*", "to*", "change*"), rows))
    for names, what in ((record.only_in_first, "gone"), (record.only_in_second, "new")):
        if names:
            count = units.plural(len(names), "table")
            parts.append(paragraph(f"{count} {what}: {first_names(names, MOST_NAMES)}"))
    parts.append(_moves(record))
    return "\n\n".join(parts)


def _side(side: PlanSide) -> str:
    ranks = units.plural(side.world_size, f"{side.device} rank")
    return f"{side.name}: {side.hardware}, {ranks}, {units.plural(side.tables, 'table')}, {units.size(side.bytes)}"


def _value(value: Any) -> str:
    if isinstance(value, list):
        return f"[{', '.join(map(_value, value))}]"
    if value is None:
        return "not set"
    # Integers count as known numbers, too, but ``bool`` does not.
    return f"{value:,.10g}" if units.known(value) else str(value)


def _figure_row(name: str, pair: Sequence[float], digits: int | None) -> list[str]:
    # ``digits`` is None for bytes.
    old, new = pair
    cells = [name]
    for value in pair:
        cells.append(units.size(value) if digits is None else units.decimal(value, digits))
    change = "same"
    if old != new:
        # There is no relative change from 0.
        change = f"{new / old - 1:+.1%}" if old else units.ABSENT
    return [*cells, change]


def _moves(record: PlanDiff) -> str:
    if not record.tables:
        return "no table moved"
    both = units.plural(record.tables_in_both, "table")
    lines = [f"{units.count(len(record.tables))} of {both} moved, {units.size(record.bytes_moved)} to be copied"]
    # Tables that moved alike for the same cause share a paragraph, in the order of the first of each group.
    groups: dict[tuple[Any, ...], dict[str, MovedTable]] = {}
    for name, table in record.tables.items():
        key = (*table.kinds, *table.places, *table.because, name in record.own)
        groups.setdefault(key, {})[name] = table
    rest: list[MovedTable] = []
    for i, group in enumerate(groups.values()):
        if i < MOST_MOVED:
            lines += ["", *_move(group, next(iter(group)) in record.own)]
        else:
            rest += group.values()
    if rest:
        lines += ["", f"and {len(rest)} more, {units.size(sum(table.bytes_moved for table in rest))} (--json)"]
    return "\n".join(lines)


def _move(tables: Mapping[str, MovedTable], changed_itself: bool) -> list[str]:
    # Tables that moved alike: from where to where, the total cost, and why. The reasons are those of the first table.
    names, group = list(tables), list(tables.values())
    first, count = group[0], len(group)
    because = "; ".join(first.because)
    if not changed_itself and (len(first.because) > 1 or first.because != [NO_CAUSE]):
        because = "the inputs above changed, not the table's own"

    costs, hits = [], []
    for side in (0, 1):
        costs.append(units.decimal(sum(table.cost_ms[side] for table in group), 3))
        hits.append(sum(table.hit_rate[side] for table in group) / count)
    cost = f"{costs[0]} -> {costs[1]} ms"
    mean, what = "", "table"
    if count > 1:
        mean, what = "mean ", units.plural(count, "table")
    if hits[0] != hits[1]:
        cost += f", {mean}hit rate {units.percent(hits[0])} -> {units.percent(hits[1])}"
    copied = units.size(sum(table.bytes_moved for table in group))
    size = units.size(sum(table.bytes for table in group))
    parts = [("copied", f"{copied} ({what}: {size}), {cost}"), ("because", because)]

    before, after = first.reasons
    whose = ""
    if any(table.reasons != first.reasons for table in group):
        # The reasons quote figures of the first table, so its name is given.
        whose = f"{names[0]}: "
    if before and before != after:
        parts.append(("was", whose + before))
    if after:
        parts.append(("now" if before != after else "why", whose + after))

    # Show the move from tier to tier. Several tables with different ranks or cached rows are shown without those
    # numbers.
    kind, new_kind = first.kinds
    if all((table.before, table.to) == (first.before, first.to) for table in group):
        move = f"{first.before} -> {first.to}"
    elif kind != new_kind:
        move = f"{kind} -> {new_kind}"
    else:
        move = f"{kind}, other {_words(' and '.join(first.places))}"
    lines = [paragraph(f"{first_names(names, MOST_NAMES)}: {move}", "    ")]
    for word, text in parts:
        if text:
            lines.append(paragraph(f"  {word:<7}  {text}", " " * 11))
    return lines
