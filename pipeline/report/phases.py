"""Predicted and measured time and memory of a training step, as text and for the page."""

from __future__ import annotations

from pipeline import units
from pipeline.records import Milliseconds, TrainPart
from pipeline.report.page import PageTable, with_meter, words


def phase_lines(train: TrainPart) -> list[str]:
    """Lines for the end of a run: step, phases and memory, as ``measured (predicted)``."""
    lines = []
    if train.step is not None:
        lines.append(f"step {_ms(train.step, ' predicted')}")
    if train.phases:
        lines.append("of it " + ", ".join(f"{words(name)} {_ms(part)}" for name, part in train.phases.items()))
    if memory := train.memory:
        predicted = memory.predicted_bytes
        beside = f" ({units.size(predicted)} predicted)" if units.known(predicted) else ""
        lines.append(f"memory for training {units.size(memory.measured_bytes)} on the fullest rank{beside}")
    return lines


def phases_table(train: TrainPart) -> PageTable:
    """The phases of a step, then the whole step and the memory; no rows if nothing was measured."""
    phases = train.phases or {}
    longest = max((max(part.measured_ms, part.predicted_ms or 0.0) for part in phases.values()), default=0.0)
    rows = [_row(words(name), part, longest) for name, part in phases.items()]
    if train.step is not None:
        rows.append(_row("whole step, slowest rank", train.step, 0.0))
    if memory := train.memory:
        predicted, measured = memory.predicted_bytes, memory.measured_bytes
        sizes = (units.size(predicted), units.size(measured))
        rows.append(("memory of the fullest rank", *sizes, _ratio(measured, predicted)))
    return PageTable(("Phase", "Predicted*", "Measured*", "Measured / predicted*"), rows)


def _row(name: str, part: Milliseconds, longest: float) -> tuple[str, str, str, str]:
    """A phase. Its bars are full at ``longest`` ms; 0: no bars."""
    predicted, measured = part.predicted_ms, part.measured_ms
    return name, _cell(predicted, longest), _cell(measured, longest), _ratio(measured, predicted)


def _cell(ms: object, longest: float) -> str:
    if not units.known(ms):
        return units.ABSENT
    text = f"{units.decimal(ms, 3)} ms"
    return with_meter(text, ms / longest) if longest else text


def _ms(part: Milliseconds, word: str = "") -> str:
    predicted = part.predicted_ms
    beside = f" ({units.decimal(predicted, 2)}{word})" if units.known(predicted) else ""
    return f"{units.decimal(part.measured_ms, 2)} ms{beside}"


def _ratio(measured: object, predicted: object) -> str:
    if not units.known(measured) or not units.known(predicted) or not predicted:
        return units.ABSENT
    return units.decimal(measured / predicted, 2)
