"""Rows that cannot be trained on: why each is rejected, and the quarantine that lists them."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, BinaryIO

import numpy as np
import polars as pl


@dataclass(frozen=True)
class Reject:
    """A line (1-based) that is no row. ``kind`` groups reasons; ``reason`` is what the quarantine says.

    ``column``: the one that is wrong; "" where it is the line.
    """

    line: int
    kind: str
    reason: str
    column: str = ""


class Rejected:
    """Which rows are out, and why: the first complaint about a row counts."""

    def __init__(self, lines: np.ndarray) -> None:
        self.lines = lines
        self.bad = np.zeros(len(lines), bool)
        self.rejects: list[Reject] = []

    def add(self, mask: np.ndarray, kind: str, reason: Callable[[int], str], column: str = "") -> None:
        """Reject the rows of ``mask`` that are not rejected yet; ``reason`` tells of a row number of the block."""
        if not mask.any():
            return
        for index in np.flatnonzero(mask & ~self.bad):
            self.rejects.append(Reject(int(self.lines[index]), kind, reason(int(index)), column))
        self.bad |= mask

    def add_values(self, wrong: pl.DataFrame, kind: str, reason: Callable[[str | None], str], column: str) -> None:
        """Reject the rows of ``wrong``, columns row and value; ``reason`` tells of the first wrong value of a row."""
        mask = np.zeros(len(self.lines), bool)
        mask[wrong["row"].to_numpy()] = True
        first = dict(zip(wrong["row"].to_list()[::-1], wrong["value"].to_list()[::-1], strict=True))
        self.add(mask, kind, lambda row: reason(first[row]), column)


def shown(value: str | None) -> str:
    """``value`` quoted, as a message shows it: no longer than 60 characters."""
    return "missing" if value is None else repr(value if len(value) <= 60 else value[:57] + "...")


class Quarantine:
    """``quarantine.jsonl``: one JSON object per row that did not parse: file, line, reason."""

    def __init__(self, sink: BinaryIO) -> None:
        self.sink = sink
        self.rows = 0
        self.kinds: Counter[str] = Counter()
        self.columns: Counter[str] = Counter()
        self.examples: dict[str, str] = {}

    def add(self, file: str, rejects: list[Reject]) -> None:
        """Write ``rejects`` of ``file``."""
        lines: list[str] = []
        for reject in rejects:
            self.kinds[reject.kind] += 1
            self.columns[reject.column] += 1
            self.examples.setdefault(reject.kind, f"{file} line {reject.line}: {reject.reason}")
            record: dict[str, Any] = {"file": file, "line": reject.line, "reason": reject.reason}
            lines.append(json.dumps(record, ensure_ascii=False) + "\n")
        self.rows += len(rejects)
        self.sink.write("".join(lines).encode(errors="replace"))
