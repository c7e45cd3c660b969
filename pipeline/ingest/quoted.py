"""Records of delimited text that go over several lines: a quoted field may hold line breaks.

A line with an odd number of quotes opens a quoted field that it does not close, or closes one. It is the first line of
a record if the text up to the end of the next such line is one record, with as many fields as there are columns, and
no longer than LONGEST; else a quote in it is a stray one, which costs that line alone. So what is a record depends on
what follows its first line and on nothing before it, and on no cut of the file.
"""

from __future__ import annotations

import csv
import io
from dataclasses import dataclass

import numpy as np

NEWLINE = 10
# Bytes of a record of several lines.
LONGEST = 1 << 17


@dataclass(frozen=True, kw_only=True)
class TextLayout:
    """How the fields of a line lie: all ``names`` in order, one-byte ``separator``, ``quote`` or None.

    ``numbers``: names of those that may be read as Float64, an empty one as null.
    """

    names: tuple[str, ...]
    separator: str
    quote: str | None
    numbers: frozenset[str] = frozenset()

    def quotes(self, block: bytes) -> bool:
        """Whether a quote is in ``block``."""
        return self.quote is not None and self.quote.encode() in block


@dataclass(frozen=True)
class Records:
    """Where the records of whole lines end. ``ends``: the place of each one's line end, int64, rising.

    ``open``: where a line begins that may go on behind the end of the block; None where none does. ``strays``: places
    of lines with a stray quote.
    """

    ends: np.ndarray
    open: int | None
    strays: tuple[int, ...] = ()


def records(block: bytes, layout: TextLayout) -> Records:
    """The records of ``block``, whole lines that begin with a record."""
    data = np.frombuffer(block, np.uint8)
    ends = np.flatnonzero(data == NEWLINE)
    if not layout.quotes(block):
        return Records(ends, None)
    marks = np.flatnonzero(data == ord(layout.quote or '"'))
    odd = np.flatnonzero(np.diff(np.searchsorted(marks, ends), prepend=0) & 1)
    if not len(odd):
        return Records(ends, None)
    starts = np.concatenate([[0], ends[:-1] + 1])
    inner, at = np.zeros(len(ends), bool), 0
    strays: list[int] = []
    while at < len(odd):
        first = int(starts[odd[at]])
        if at + 1 == len(odd):
            goes_on = len(block) - first <= LONGEST
            return Records(ends[~inner], first if goes_on else None, (*strays, first))
        last = int(odd[at + 1])
        if is_record(block[first : int(ends[last])], layout):
            inner[odd[at] : last] = True
            at += 2
        else:
            strays.append(first)
            at += 1
    return Records(ends[~inner], None, tuple(strays))


def is_record(text: bytes, layout: TextLayout) -> bool:
    """Whether ``text``, of several lines, is one record with a field for every column."""
    if len(text) > LONGEST:
        return False
    lines = io.StringIO(text.decode(errors="replace"), newline="")
    try:
        rows = list(csv.reader(lines, delimiter=layout.separator, quotechar=layout.quote, strict=True))
    except csv.Error:
        return False
    return len(rows) == 1 and len(rows[0]) == len(layout.names)


def line_ends(block: bytes, layout: TextLayout) -> bytes:
    """``block`` with the ends of its records, but not breaks inside of quotes, as newlines alone."""
    if not layout.quotes(block):
        return block.replace(b"\r\n", b"\n")
    data = np.frombuffer(block, np.uint8)
    ends = records(block, layout).ends
    ends = ends[ends > 0]
    return np.delete(data, ends[data[ends - 1] == ord("\r")] - 1).tobytes()
