"""Predicted beside measured: where a training step's time went and what memory it took, as text and for the page."""

from __future__ import annotations

from collections.abc import Mapping
from html import escape
from typing import Any

from pipeline.report import units
from pipeline.report.tables import head_cells, number, scroll_table, section

Figures = Mapping[str, float]
_NOTE = (
    "Phases: ms of a step, the mean over ranks, waiting for data apart; what a rank waits for another counts as "
    "exchange. The step is the slowest rank's."
)


def phase_lines(train: Mapping[str, Any]) -> list[str]:
    """Lines of the table at the end of a run: step, phases and memory, ``measured (predicted)``."""
    lines = []
    if train.get("step"):
        lines.append(f"step {_ms(train['step'], ' predicted')}")
    if train.get("phases"):
        lines.append("of it " + ", ".join(f"{_words(name)} {_ms(part)}" for name, part in train["phases"].items()))
    memory = train.get("memory", {})
    if memory:
        predicted = memory.get("predicted_bytes")
        beside = f" ({units.size(predicted)} predicted)" if units.known(predicted) else ""
        lines.append(f"memory for training {units.size(memory.get('measured_bytes'))} on the fullest rank{beside}")
    return lines


def phases_section(train: Mapping[str, Any]) -> str:
    """The page's table of phases, with the whole step and the memory below; empty where nothing was measured."""
    phases: Mapping[str, Figures] = train.get("phases", {})
    rows = [_row(_words(name), part, phases) for name, part in phases.items()]
    if train.get("step"):
        rows.append(_row("whole step, slowest rank", train["step"], {}))
    if train.get("memory"):
        rows.append(_memory_row(train["memory"]))
    if not rows:
        return ""
    note = f'<p class="muted small">{escape(_NOTE)}</p>' if phases else ""
    names = head_cells(("Phase", "Predicted*", "Measured*", "Measured / predicted*"))
    return section("Predicted and measured", note + scroll_table(names, rows))


def _row(name: str, part: Figures, phases: Mapping[str, Figures]) -> str:
    predicted, measured = part.get("predicted_ms"), part.get("measured_ms")
    longest = max((value for p in phases.values() for value in p.values()), default=0.0)
    return (
        f"<tr><td>{escape(name)}</td>"
        + _cell(_with_unit(predicted), predicted, longest)
        + _cell(_with_unit(measured), measured, longest)
        + number(_ratio(measured, predicted))
        + "</tr>"
    )


def _memory_row(part: Figures) -> str:
    predicted, measured = part.get("predicted_bytes"), part.get("measured_bytes")
    cells = number(units.size(predicted)) + number(units.size(measured)) + number(_ratio(measured, predicted))
    return f"<tr><td>memory of the fullest rank</td>{cells}</tr>"


def _cell(text: str, value: object, longest: float) -> str:
    if not units.known(value) or not longest:
        return number(text)
    bar = (
        f'<svg class="meter" viewBox="0 0 100 8" preserveAspectRatio="none" aria-hidden="true">'
        f'<rect width="{max(100 * value / longest, 1):.1f}" height="8"/></svg>'
    )
    return f'<td class="number">{escape(text)}{bar}</td>'


def _ms(part: Figures, word: str = "") -> str:
    predicted = part.get("predicted_ms")
    beside = f" ({units.decimal(predicted, 2)}{word})" if units.known(predicted) else ""
    return f"{units.decimal(part.get('measured_ms'), 2)} ms{beside}"


def _with_unit(ms: object) -> str:
    return f"{units.decimal(ms, 3)} ms" if units.known(ms) else units.ABSENT


def _ratio(measured: object, predicted: object) -> str:
    if not units.known(measured) or not units.known(predicted) or not predicted:
        return units.ABSENT
    return units.decimal(measured / predicted, 2)


def _words(name: str) -> str:
    return name.replace("_", " ")
