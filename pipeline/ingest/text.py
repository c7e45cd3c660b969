"""Delimited text: bytes to blocks of whole lines, blocks to frames of strings, bad lines aside.

A record is a line, or several where a quoted field holds line breaks. Blocks are cut between records, and
a stray quote costs one line, not the rest of the file.

A line with an odd number of quotes opens a quoted field that it does not close, or closes one. It is the first line
of a record if the text up to the end of the next such line is one record, with as many fields as there are columns,
and no longer than LONGEST; else a quote in it is a stray one, which costs that line alone. So what is a record
depends on what follows its first line and on nothing before it, and on no cut of the file.
"""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import BinaryIO

import numpy as np
import polars as pl

from pipeline.core.errors import DataError
from pipeline.core.kernels import load_kernels
from pipeline.core.units import MIB
from pipeline.ingest.values import FLOAT32_MAX, Reject, by_halves, is_of_rows, not_read

NEWLINE = 10
# Maximum bytes of a record of several lines.
LONGEST = 1 << 17
# Bytes that are compared at a time, few enough to stay in the cache.
_COUNTED = 1 << 18


@dataclass(frozen=True, kw_only=True)
class TextLayout:
    """How the fields of a line are laid out: all ``names`` in order, one-byte ``separator``, ``quote`` or None.

    ``numbers``: names of those that may be read as Float64, an empty one as null.
    """

    names: tuple[str, ...]
    separator: str
    quote: str | None
    numbers: frozenset[str] = frozenset()

    def quotes(self, block: bytes) -> bool:
        return self.quote is not None and self.quote.encode() in block


@dataclass(frozen=True)
class Records:
    """Where the records of whole lines end. ``ends``: the place of each one's line end, int64, rising.

    ``open``: where a line begins that may continue behind the end of the block; None if none does. ``strays``: places
    of lines with a stray quote.
    """

    ends: np.ndarray
    open: int | None
    strays: tuple[int, ...] = ()


def records(block: bytes, layout: TextLayout) -> Records:
    """Find the records of ``block``, whole lines that begin with a record."""
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
            # What follows the block decides whether its quote is stray, unless the record is too long already.
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


# Bytes of text. A longer line is not a row.
LONGEST_LINE = 128 * MIB
# Stands in blocks for a longer line. No row is like it, because its first byte is in no UTF-8.
TOO_LONG = b"\xffa line too long to hold"
LINE_TOO_LONG = ("line too long", f"the line is longer than {LONGEST_LINE // MIB} MiB")
_TRIMMED = frozenset(b" \t")
# First bytes of what Polars takes for gzip, zlib and Zstandard, and unpacks.
_PACKED = (b"\x1f\x8b", b"x\x01", b"x\x5e", b"x\x9c", b"x\xda", b"\x28\xb5\x2f\xfd")


def header_line(stream: BinaryIO, file: str) -> bytes:
    """Read the next line of ``stream``, the names of the columns; DataError if it is too long to be names."""
    # The limit keeps a file without line ends from being read to its end. One byte more tells a line that is too long.
    line = stream.readline(LONGEST_LINE + 1)
    if len(line) > LONGEST_LINE:
        raise DataError(
            f"the first line of {file} is longer than {LONGEST_LINE // MIB} MiB, expected the names of the columns",
            hint="data.header=false data.columns=[<names>] where the log has no header",
        )
    return line


def text_blocks(
    stream: BinaryIO, block_bytes: int, first_line: int, layout: TextLayout | None = None
) -> Iterator[tuple[bytes, int]]:
    """Yield blocks of whole lines, each with its first line's number; blank lines at the very end are left out.

    ``stream``: buffered, so that only its end is read short. ``layout``: that of records that may go over several
    lines, so that blocks end with one. A line longer than LONGEST_LINE, such as an array of objects in a file of one
    line, is never held whole: ``TOO_LONG`` stands for it.
    """
    carry, line = b"", first_line
    while data := stream.read(block_bytes):
        cut = _cut(data)
        # No line ends here, or only blank ones do.
        if not cut:
            data, carry = carry + data, b""
            cut = _cut(data)
            if not cut and len(data) > LONGEST_LINE and b"\n" not in data:
                # Read on to the end of the line, which is not held, and keep what was read behind it.
                carry = b""
                while data := stream.read(block_bytes):
                    _, end, carry = data.partition(b"\n")
                    if end:
                        break
                yield TOO_LONG + b"\n", line
                line += 1
                continue
        if cut:
            block = b"".join([carry, memoryview(data)[:cut]])
            # Lines are told apart wherever blocks end, so a long first line is left out here as well.
            first_end = block.find(b"\n")
            if first_end > LONGEST_LINE:
                block = TOO_LONG + block[first_end:]
            # The last record of whole lines may continue behind the block.
            whole = len(block)
            if layout is not None and layout.quotes(block):
                open_record = records(block, layout).open
                if open_record is not None:
                    whole = open_record
            if whole:
                yield block[:whole], line
                line += line_count(memoryview(block)[:whole])
            carry = block[whole:]
        carry += data[cut:]
    if carry.strip(b"\r\n"):
        yield carry.rstrip(b"\r\n") + b"\n", line


def _cut(block: bytes) -> int:
    # Returns the bytes up to the end of the last line that is neither partial nor one of the blank ones at the end.
    filled = len(block.rstrip(b"\r\n"))
    end = block.find(b"\n", filled)
    if end < 0 or not filled:
        end = block.rfind(b"\n", 0, filled)
    return end + 1


def read_lines(block: bytes, first_line: int, layout: TextLayout) -> tuple[pl.DataFrame, np.ndarray, list[Reject]]:
    """Return a frame of strings (one column per name), the line number of each row, and the lines left out."""
    if b"\r" in block and not layout.quotes(block):
        block = block.replace(b"\r\n", b"\n")
    elif b"\r" in block:
        # A line break within quotes is text and stays as it is: CR is removed only where a record ends.
        data = np.frombuffer(block, np.uint8)
        ends = records(block, layout).ends
        ends = ends[ends > 0]
        block = np.delete(data, ends[data[ends - 1] == ord("\r")] - 1).tobytes()
    try:
        return _read_lines(block, first_line, layout)
    except (Exception, pl.exceptions.PanicException) as error:
        if not is_of_rows(error):
            raise
    # The parser met a limit of its own, which costs only the records that exceed it.
    return _read_others(block, first_line, layout)


def _read_others(block: bytes, first_line: int, layout: TextLayout) -> tuple[pl.DataFrame, np.ndarray, list[Reject]]:
    # Reads like `read_lines`, in parts, without the records that fail by themselves. Numbers stay text, so that all
    # parts have the same types.
    texts = replace(layout, numbers=frozenset())
    ends = records(block, layout).ends + 1
    pieces = [block[start:end] for start, end in zip([0, *ends[:-1]], ends, strict=True)]
    first = first_line + np.cumsum([0, *map(line_count, pieces)])
    frames, lines, rejects = list[pl.DataFrame](), list[np.ndarray](), list[Reject]()
    halves = by_halves(
        lambda start, stop: _read_lines(b"".join(pieces[start:stop]), int(first[start]), texts), len(pieces)
    )
    for start, found in halves:
        if isinstance(found, BaseException):
            rejects.append(not_read(int(first[start]), found))
            continue
        frames.append(found[0])
        lines.append(found[1])
        rejects += found[2]
    if not frames:
        return _read(b"", texts), np.zeros(0, np.int64), rejects
    return pl.concat(frames, how="vertical_relaxed", rechunk=True), np.concatenate(lines), rejects


def _read_lines(block: bytes, first_line: int, layout: TextLayout) -> tuple[pl.DataFrame, np.ndarray, list[Reject]]:
    frame = _read_clean(block, layout)
    if frame is not None:
        return frame, np.arange(first_line, first_line + frame.height), []
    good, lines, rejects = _sift(block, first_line, layout)
    if looks_packed(good):
        # Polars would take the block for compressed bytes, so it is read behind a row that cannot be mistaken. Python's
        # csv module would read it, too, but its limits on fields would then hold for all rows of the block.
        row = b"0" + layout.separator.encode() * (len(layout.names) - 1) + b"\n"
        frame = _read(row + good, layout)[1:]
    else:
        frame = _read(good, layout)
    if frame.height != len(lines):
        # Polars may have cut quoted text at other places.
        text = io.StringIO(good.decode(), newline="")
        rows = list(csv.reader(text, delimiter=layout.separator, quotechar=layout.quote))
        frame = pl.DataFrame(rows, schema=dict.fromkeys(layout.names, pl.String), orient="row")
    if frame.height != len(lines):
        raise ValueError(f"{len(lines)} records are read as {frame.height} rows")
    return frame, lines, rejects


def looks_packed(block: bytes) -> bool:
    """Whether Polars would take ``block`` for compressed bytes."""
    return block.startswith(_PACKED)


def _read(block: bytes, layout: TextLayout, numbers: frozenset[str] = frozenset()) -> pl.DataFrame:
    schema = {name: pl.Float64 if name in numbers else pl.String for name in layout.names}
    if not block:
        return pl.DataFrame(schema=schema)
    return pl.read_csv(
        block,
        has_header=False,
        schema=schema,
        separator=layout.separator,
        quote_char=layout.quote,
        empty_string_is_null=False,
    )


def _read_clean(block: bytes, layout: TextLayout) -> pl.DataFrame | None:
    # Returns the frame of a block without a flaw, None if any line needs a closer look. Polars reads what the compiled
    # steps do not take apart, such as text that is not ASCII or numbers with exponents. It refuses lines with too many
    # fields and silently fills those with too few. As none has more separators than it should, their total tells
    # whether one has fewer.
    if layout.quotes(block) or looks_packed(block):
        return None
    kernels = load_kernels("fields")
    if kernels is not None:
        as_numbers = [name in layout.numbers for name in layout.names]
        columns = kernels.split(block, ord(layout.separator), as_numbers)
        if columns is not None:
            return pl.DataFrame([pl.Series(name, column) for name, column in zip(layout.names, columns, strict=True)])
    lines = line_count(block)
    if count_byte(block, ord(layout.separator)) != lines * (len(layout.names) - 1):
        return None
    try:
        frame = _read_numbers(block, layout)
        if frame is None:
            frame = _read(block, layout)
    except pl.exceptions.PolarsError:
        return None
    if frame.height != lines:
        return None
    return frame


def _read_numbers(block: bytes, layout: TextLayout) -> pl.DataFrame | None:
    # Returns the frame with its numbers as such; None unless all of them are plain: no blanks, no words, none too
    # large. Polars' CSV reader trims bytes around a number that a cast of the same text refuses. A block that holds one
    # of them is read as text, so that what counts as a number never depends on the other lines of a block.
    trimmed = _TRIMMED - set(layout.separator.encode())
    if not layout.numbers or any(byte in block for byte in trimmed):
        return None
    try:
        frame = _read(block, layout, layout.numbers)
    except pl.exceptions.PolarsError:
        return None
    numbers = pl.col(sorted(layout.numbers))
    for bound in (*frame.select(numbers.min()).row(0), *frame.select(numbers.max()).row(0)):
        if bound is not None and abs(bound) > FLOAT32_MAX:
            return None
    # A number that is not finite shows in its column's sum. NaN is above no bound, so the check above misses it.
    if not all(math.isfinite(total) for total in frame.select(numbers.sum()).row(0)):
        return None
    return frame


def line_count(block: bytes | memoryview) -> int:
    """Count the lines of ``block``."""
    return count_byte(block, NEWLINE)


def count_byte(text: bytes | memoryview, byte: int) -> int:
    """Count how often ``byte`` occurs in ``text``, fast where that is often."""
    kernels = load_kernels("fields")
    if kernels is not None:
        return kernels.count(text, byte)
    # Compare a part at a time, because the comparison makes an array as large as its input.
    count, data = 0, np.frombuffer(text, np.uint8)
    for at in range(0, len(data), _COUNTED):
        count += int(np.count_nonzero(data[at : at + _COUNTED] == byte))
    return count


def _sift(block: bytes, first_line: int, layout: TextLayout) -> tuple[bytes, np.ndarray, list[Reject]]:
    data = np.frombuffer(block, np.uint8)
    ends = records(block, layout).ends
    starts = np.concatenate([[0], ends[:-1] + 1])
    # Line breaks inside of the records before each one, int64.
    breaks = np.searchsorted(np.flatnonzero(data == NEWLINE), ends) - np.arange(len(ends))
    before = np.concatenate([[0], breaks[:-1]])
    separators = data == ord(layout.separator)
    stray = np.zeros(len(ends), bool)
    if layout.quote:
        inside, stray = _quoted(data, starts, ends, separators, ord(layout.quote))
        separators &= ~inside
    fields = np.add.reduceat(separators, starts, dtype=np.int64) + 1
    undecodable = _undecodable(block, data, starts, ends)
    bad = (fields != len(layout.names)) | stray | undecodable | (starts == ends)
    rejects = []
    for index in np.flatnonzero(bad):
        line = int(first_line + index + before[index])
        if starts[index] == ends[index]:
            rejects.append(Reject(line, "empty line", "the line is empty"))
        elif block.startswith(TOO_LONG, starts[index]):
            rejects.append(Reject(line, *LINE_TOO_LONG))
        elif undecodable[index]:
            rejects.append(Reject(line, "invalid UTF-8", "the line is not valid UTF-8"))
        elif stray[index]:
            rejects.append(Reject(line, "stray quote", "a quote is not closed on its line or stands inside a field"))
        else:
            reason = f"{fields[index]} fields, expected {len(layout.names)}"
            rejects.append(Reject(line, "wrong number of fields", reason))
    good = np.flatnonzero(~bad)
    # Join the good lines into one block, copied by runs of neighbours.
    change = np.flatnonzero(np.diff(~bad, prepend=False, append=False))
    runs = [block[starts[first] : ends[stop - 1] + 1] for first, stop in change.reshape(-1, 2)]
    return b"".join(runs), first_line + good + before[good], rejects


def _quoted(
    data: np.ndarray, starts: np.ndarray, ends: np.ndarray, separators: np.ndarray, quote: int
) -> tuple[np.ndarray, np.ndarray]:
    # Returns which bytes lie inside quotes, and which lines have a quote where none may be.
    quotes = data == quote
    seen = np.cumsum(quotes, dtype=np.int64)
    before = seen[starts] - quotes[starts]
    odd = ((seen - np.repeat(before, ends - starts + 1)) & 1).astype(bool)
    opening, closing = quotes & odd, quotes & ~odd
    edge = separators | quotes | (data == NEWLINE)
    after_edge = np.concatenate([[True], edge[:-1]])
    before_edge = np.concatenate([edge[1:], [True]])
    misplaced = (opening & ~after_edge) | (closing & ~before_edge)
    stray = odd[ends] | np.logical_or.reduceat(misplaced, starts)
    return odd, stray


def _undecodable(block: bytes, data: np.ndarray, starts: np.ndarray, ends: np.ndarray) -> np.ndarray:
    bad = np.zeros(len(ends), bool)
    if block.isascii():
        return bad
    # Only lines with a byte above ASCII can fail, and in most logs these are few.
    for index in np.flatnonzero(np.logical_or.reduceat(data >= 0x80, starts)):
        try:
            block[starts[index] : ends[index]].decode()
        except UnicodeDecodeError:
            bad[index] = True
    return bad
