"""Sections of the HTML report that are tables: stages, plan, figures, configuration."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from html import escape
from typing import Any

from pipeline.records import Plan, TablePlan
from pipeline.report import units

COLOURS = 6
MOST_TABLES = 200
# Parts of the configuration worth a glance; the data's feature list is long, so only its own values are shown.
SHOWN_CONFIG = ("seed", "data", "model", "hardware", "plan", "partition", "train", "checkpoint", "evaluate")


def stages_section(stages: Mapping[str, Mapping[str, Any]]) -> str:
    """Where the time went: a bar of stages in their order and a table below it."""
    if not stages:
        return ""
    seconds = {name: float(stage.get("seconds") or 0.0) for name, stage in stages.items()}
    total = sum(seconds.values())
    rows = []
    for index, (name, stage) in enumerate(stages.items()):
        status = str(stage.get("status", units.ABSENT))
        skipped = status == "skipped"
        rows.append(
            f'<tr><td><svg class="swatch" aria-hidden="true"><rect class="c{index % COLOURS}" width="11" height="11"/>'
            f'</svg>{escape(name)}</td><td><span class="pill {escape(status)}">{escape(status)}</span></td>'
            + number(units.ABSENT if skipped else units.duration(seconds[name]))
            + number(units.ABSENT if skipped or not total else units.percent(seconds[name] / total))
            + f"<td><code>{escape(str(stage.get('artifact') or units.ABSENT))}</code></td></tr>"
        )
    head = head_cells(("Stage", "Status", "Time*", "Share*", "Artifact in the store"))
    return section("Stages", _stage_bar(seconds, total) + scroll_table(head, rows))


def _stage_bar(seconds: Mapping[str, float], total: float) -> str:
    if not total:
        return ""
    parts, left = [], 0.0
    for index, (name, value) in enumerate(seconds.items()):
        width = 1000 * value / total
        if value:
            title = f"{name}: {units.duration(value)}, {units.percent(value / total)}"
            parts.append(
                f'<rect class="c{index % COLOURS}" x="{left:.2f}" width="{max(width - 1.5, 1.0):.2f}" height="26">'
                f"<title>{escape(title)}</title></rect>"
            )
        left += width
    label = "; ".join(f"{name} {units.duration(value)}" for name, value in seconds.items() if value)
    return (
        f'<svg class="bar" viewBox="0 0 1000 26" preserveAspectRatio="none" role="img" '
        f'aria-label="{escape(label)}">{"".join(parts)}</svg>'
    )


def plan_section(
    part: Mapping[str, Any], plan: Plan | None, page: str = "", problem: str = "", towers: str = ""
) -> str:
    """The embedding tables and where each went, largest first; ``plan`` (plan.json) adds rows, sizes and cost.

    ``page``, ``towers``: relative URLs of the plan's and the towers' own pages, "" where there is none; ``problem``:
    why ``plan`` could not be read.
    """
    tables: Mapping[str, Mapping[str, Any]] = part.get("tables", {})
    if not tables:
        return ""
    known = plan.tables if plan is not None else {}
    sizes = {name: table_bytes(known[name]) if name in known else 0 for name in tables}
    order = sorted(tables, key=lambda name: (-sizes[name], name))
    largest, world = max(sizes.values()) or 1, plan.world_size if plan is not None else None
    rows = [
        _plan_row(name, tables[name], known.get(name), sizes[name] / largest, world) for name in order[:MOST_TABLES]
    ]
    head = head_cells(("Table", "Rows*", "Dim*", "Size*", "Tier", "Sharding", "Ranks", "Predicted ms*"))
    words = _plan_words(part, plan, len(order))
    if page:
        words += f' <a href="{escape(page)}">Memory, phases and reasons: the plan\'s own page.</a>'
    if towers:
        words += f' <a href="{escape(towers)}">Which features share a tower, and why: the towers\' own page.</a>'
    said = f"<p>Sizes and costs are missing: {escape(problem)}</p>" if problem else ""
    return section("Plan", f'{said}<p class="muted small">{words}</p>{scroll_table(head, rows)}')


def table_bytes(table: TablePlan) -> int:
    """Bytes of one copy of the table with its optimizer state, fp32."""
    return table.bytes


def _plan_words(part: Mapping[str, Any], plan: Plan | None, tables: int) -> str:
    tiers = part.get("tiers", {})
    sizes = [
        f"{tier.upper()} {units.size(tiers[f'{tier}_bytes'])}"
        for tier in ("hbm", "ddr", "ssd")
        if tiers.get(f"{tier}_bytes")
    ]
    said = [f"{tables} embedding tables"]
    if sizes:
        said.append(f"predicted memory of all ranks {', '.join(sizes)}")
    if plan is not None:
        said.insert(0, f"planned for {plan.hardware}")
    if units.known(part.get("predicted_step_ms")):
        said.append(f"predicted step {units.decimal(part['predicted_step_ms'], 3)} ms on the slowest rank")
    if tables > MOST_TABLES:
        said.append(f"the {MOST_TABLES} largest are shown")
    return escape(", ".join(said) + "; a table's size counts its optimizer state.")


def _plan_row(name: str, table: Mapping[str, Any], known: TablePlan | None, share: float, world: int | None) -> str:
    meter = (
        f'<svg class="meter" viewBox="0 0 100 8" preserveAspectRatio="none" aria-hidden="true">'
        f'<rect width="{max(100 * share, 1):.1f}" height="8"/></svg>'
    )
    reason = f' title="{escape(known.reason)}"' if known is not None else ""
    return (
        f"<tr{reason}><td>{escape(name)}</td>"
        + number(units.count(known.rows if known else None))
        + number(units.count(known.dim if known else None))
        + f'<td class="number">{units.size(table_bytes(known)) + meter if known else units.ABSENT}</td>'
        + f"<td>{escape(str(table.get('tier', units.ABSENT)))}</td>"
        + f"<td>{escape(str(table.get('sharding', units.ABSENT)).replace('_', ' '))}</td>"
        + f"<td>{escape(rank_words(table.get('ranks', []), world))}</td>"
        + number(units.decimal(known.cost_ms if known else None, 3))
        + "</tr>"
    )


def rank_words(ranks: Iterable[int] | int, world: int | None) -> str:
    """``all 8``, ``3`` or ``0-3, 6``."""
    if isinstance(ranks, int):
        return str(ranks)
    found = sorted(ranks)
    if world is not None and len(found) == world > 1:
        return f"all {world}"
    spans: list[list[int]] = []
    for rank in found:
        if spans and rank == spans[-1][1] + 1:
            spans[-1][1] = rank
        else:
            spans.append([rank, rank])
    return ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in spans) or units.ABSENT


def facts(title: str, pairs: Sequence[tuple[str, str]]) -> str:
    """A section of names and values."""
    if not pairs:
        return ""
    items = "".join(f"<div><dt>{escape(name)}</dt><dd>{escape(value)}</dd></div>" for name, value in pairs)
    return section(title, f'<dl class="facts">{items}</dl>')


def config_section(text: str) -> str:
    """The parts of the resolved ``config.yaml`` one wants to see beside the figures."""
    blocks = [f"<pre>{escape(block)}</pre>" for block in config_excerpt(text)]
    if not blocks:
        return ""
    note = '<p class="muted small">An excerpt; the whole resolved configuration is config.yaml beside this page.</p>'
    return section("Configuration", f'{note}<div class="columns">{"".join(blocks)}</div>')


def config_excerpt(text: str) -> list[str]:
    """Top-level blocks SHOWN_CONFIG of a YAML ``text``; of ``data`` only plain values, of others everything."""
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


def section(title: str, body: str) -> str:
    """A card with a heading; ``body`` is HTML."""
    return f"<section><h2>{escape(title)}</h2>{body}</section>"


def head_cells(names: Sequence[str]) -> str:
    """Table headings; ``*`` marks a column of numbers."""
    return "".join(
        f'<th class="number">{escape(name[:-1])}</th>' if name.endswith("*") else f"<th>{escape(name)}</th>"
        for name in names
    )


def number(text: str) -> str:
    """A table cell that is flush right."""
    return f'<td class="number">{escape(text)}</td>'


def scroll_table(head: str, rows: Sequence[str]) -> str:
    """A table of HTML cells that scrolls sideways where the page is narrow."""
    return f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>{"".join(rows)}</tbody></table></div>'
