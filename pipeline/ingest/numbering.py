"""Numbers of the lines of files that are read in parts: of a later part they are known once those before it are."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from pipeline.ingest.blocks import Counted
from pipeline.ingest.sources import Source


class Numbering:
    """Lines of its file before each part, as far as its blocks were counted, in order; remembered for another count."""

    def __init__(self) -> None:
        self._before: dict[int, int] = {}  # of a part
        self._lines: dict[str, int] = {}  # of a file so far
        self._part, self._shift = -1, 0

    def start(self, parts: Sequence[Source]) -> list[Source]:
        """``parts``, which are counted now, numbered as far as that is known."""
        self._lines, self._part = {}, -1
        return [part.numbered(self._before.get(number, 0)) for number, part in enumerate(parts)]

    def numbered(self, number: int, part: Source, counted: Counted) -> Counted:
        """What was counted of the next block, of ``part``, with the rejects' lines as the file has them."""
        if number != self._part:
            before = self._lines.get(counted.file, 0) if part.is_later else 0
            self._part, self._shift = number, before - self._before.get(number, 0)
            self._before[number] = before
        self._lines[counted.file] = self._lines.get(counted.file, part.lines_before) + counted.lines
        if not self._shift or not counted.rejects:
            return counted
        rejects = [replace(reject, line=reject.line + self._shift) for reject in counted.rejects]
        return replace(counted, rejects=rejects)
