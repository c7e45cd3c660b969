"""The model card as text: verdict, figures, data, lineage, tables and plan of a version."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from pipeline.records.model_version import ModelCard
from pipeline.records.serving import TableLayout

CARD_TEXT = "README.md"
# Tables that the text shows.
_LARGEST = 8


def card_text(card: ModelCard) -> str:
    """Return ``README.md`` of a version."""
    gate = card.gate
    made = time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(card.created))
    lines = [f"# {card.model} {card.version}", "", f"Made {made} by run `{card.lineage.run}`.", ""]
    verdict = f"{gate.verdict} (forced: {gate.forced})" if gate.forced else gate.verdict
    lines += ["## Verdict", "", verdict, ""]
    if gate.reasons:
        lines += [*(f"- {reason}" for reason in gate.reasons), ""]
    lines += ["## Figures on held-out rows, as served", "", "| figure | value | interval |", "|---|---|---|"]
    for name, (point, low, high) in card.figures.items():
        lines.append(f"| {name} | {point:.5f} | {low:.5f} to {high:.5f} |")
    if card.calibrator is not None:
        lines += ["", f"Calibrator: {card.calibrator.words}."]
    lines += ["", "## Data", "", *_facts(card.data), "", "## Lineage", "", *_facts(card.lineage.to_json())]
    lines += ["", "## Tables", "", *_tables(card.tables), "", "## Plan", "", *_facts(card.plan.to_json())]
    lines += ["", "All settings: `config.yaml`. Every file's checksum: `manifest.json`.", ""]
    return "\n".join(lines)


def _facts(record: Mapping[str, Any]) -> list[str]:
    return [f"- {name.replace('_', ' ')}: {value}" for name, value in record.items() if value is not None]


def _tables(tables: Mapping[str, TableLayout]) -> list[str]:
    sizes = {name: table.bytes for name, table in tables.items()}
    total = f"{len(tables)} tables, {sum(sizes.values()):,} bytes"
    lines = [f"{total}; the largest:", "", "| table | rows | width | coding | bytes |", "|---|---|---|---|---|"]
    for name in sorted(tables, key=lambda name: -sizes[name])[:_LARGEST]:
        table = tables[name]
        lines.append(f"| {name} | {table.rows:,} | {table.dim} | {table.coding} | {sizes[name]:,} |")
    return lines
