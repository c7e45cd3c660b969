"""Tracker ``ledger``: one line for each run and night in ``ledger.jsonl`` of the working directory."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pipeline.specs.tracker import RunTracking, Tracker

FILE = Path("ledger.jsonl")


class Ledger(Tracker):
    """Appends what has ended; it needs no package."""

    name = "ledger"
    doc = "one line a run and a night in ledger.jsonl."

    def run(self, track: Any, store: Any, run: str, model: str) -> RunTracking:
        """Begin to track a run."""
        return LedgerRun(run, model)

    def night(self, track: Any, store: Any, record: Any) -> None:
        """Write the outcome of a night."""
        append({"night": record.date, "outcome": record.outcome})


class LedgerRun(RunTracking):
    """A run of ``model``."""

    def __init__(self, run: str, model: str) -> None:
        self.name, self.model = run, model
        self.steps = 0

    def records(self, records: Sequence[Mapping[str, Any]]) -> None:
        """Remember how far training came: all records so far are passed each time."""
        self.steps = max((record["step"] for record in records), default=0)

    def ended(self, result: Any, settings: Mapping[str, Any]) -> None:
        """Write how the run ended."""
        append({"run": self.name, "model": self.model, "status": result.status, "steps": self.steps})


def append(line: dict[str, Any]) -> None:
    """Append a line to the ledger."""
    with FILE.open("a") as file:
        file.write(json.dumps(line) + "\n")


LEDGER = Ledger()
