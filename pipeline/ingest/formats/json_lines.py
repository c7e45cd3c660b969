"""JSON lines: an object a line. A key that a line lacks is missing in that row, as null is."""

from __future__ import annotations

import contextlib
import io
import json
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import BinaryIO

import numpy as np
import polars as pl

from pipeline.ingest.formats.file_format import FileFormat, LineReader, LogFile
from pipeline.ingest.schema import DataSpec, require_columns
from pipeline.ingest.sources import Block, RawBlock
from pipeline.ingest.text import LINE_TOO_LONG, TOO_LONG, looks_packed
from pipeline.ingest.values import Reject, by_halves, elements_of, is_of_rows, not_read, nulls, strings_of

# A first block of fewer lines does not show that a name is wrong, because all of its rows may lack the key.
TELLING_LINES = 1000
# Minimum share of lines with values of the usual kinds for the other lines to count as broken.
USUAL = 0.995
_BOOLEANS = ("true", "false")
_NO_OBJECT = "no JSON object"
_HALF_CHARACTER = re.compile("[\ud800-\udfff]")


class JsonLines(FileFormat):
    """A row is a line that holds one JSON object."""

    name, by_line = "jsonl", True

    def blocks(self, stream: BinaryIO, file: LogFile) -> Iterator[Block]:
        """Yield blocks of lines that are yet to be taken apart."""
        unseen = not file.start
        for data, line in LineReader(stream, file).blocks():
            if unseen and not data.startswith(TOO_LONG):
                _require_keys(data, file)
                unseen = False
            yield JsonBlock(
                data=data,
                file=file.label,
                first_line=line,
                columns=tuple(file.stored_spec.columns),
                lists=list_columns(file.stored_spec),
                place=file.place,
            )


@dataclass(frozen=True)
class Several:
    """A column whose fields hold several values: a string is divided by ``separator``, and stays whole without one.

    ``weight_separator``: divides a key from its value in a column of maps; None for lists.
    """

    separator: str | None
    maps: bool = False
    weight_separator: str | None = None


def list_columns(spec: DataSpec) -> dict[str, Several]:
    """Return the columns that only features with several values read."""
    several = {}
    single = {spec.label, spec.day_column, spec.timestamp, spec.hour_column, spec.row_weight}
    for sparse in spec.sparse:
        if sparse.multi:
            several[sparse.column] = Several(sparse.separator, sparse.maps, sparse.weight_separator)
            single |= set(sparse.cross[1:])
        else:
            single |= {sparse.column, *sparse.cross}
    for sparse in spec.sparse:
        if sparse.weights:
            several[sparse.weights] = Several(sparse.separator)
    for dense in spec.dense:
        if dense.vector:
            several[dense.column] = Several(dense.separator)
        else:
            single.add(dense.column)
    for sequence in spec.sequences:
        for source in sequence.sources:
            several[source.column] = Several(source.separator)
    for task in spec.tasks:
        single.add(task.column)
    # A column that anything reads as one value a row is not divided.
    for column in set(several) & single:
        del several[column]
    return several


def _require_keys(data: bytes, file: LogFile) -> None:
    columns = list(file.stored_spec.columns)
    keys = []
    for name in columns:
        # Search for the key as it is written. If it has characters that writers may escape, any text may be the key.
        plain = name.isascii() and not set(name) & set('"\\/')
        written = f'"{name}"' if plain else '"'
        if written.encode() in data:
            keys.append(name)
    missing = set(columns) - set(keys)
    if file.stored_spec.label not in missing and (not missing or data.count(b"\n") < TELLING_LINES):
        return
    first = pl.DataFrame()
    # The first line may not be an object.
    with contextlib.suppress(pl.exceptions.PolarsError):
        first = json_frame(data[: data.find(b"\n") + 1], None)
    others = [name for name in first.columns if name not in keys]
    require_columns(file.stored_spec, keys + others, file.label, header=False)


@dataclass(frozen=True, kw_only=True)
class JsonBlock:
    """Whole lines of one file, the first of them ``first_line``, that are yet to be read as objects.

    ``columns``: the keys that are wanted. ``lists``: those that hold several values a row. ``place``: see
    ``RawBlock``.
    """

    data: bytes
    file: str
    first_line: int
    columns: tuple[str, ...]
    lists: dict[str, Several]
    place: str = ""

    def read(self) -> RawBlock:
        """Return the rows as strings and lists of strings, without the other lines. Numbers are as written."""
        try:
            return self._read()
        except (Exception, pl.exceptions.PanicException) as error:
            if not is_of_rows(error):
                raise
        # The parser met a limit of its own, which costs only the lines that exceed it.
        lines = [line + b"\n" for line in self.data.split(b"\n")[:-1]]
        parts, rejects = list[RawBlock](), list[Reject]()

        def read(start: int, stop: int) -> RawBlock:
            return replace(self, data=b"".join(lines[start:stop]), first_line=self.first_line + start)._read()

        for start, found in by_halves(read, len(lines)):
            if isinstance(found, BaseException):
                rejects.append(not_read(self.first_line + start, found))
                continue
            parts.append(found)
            rejects += found.rejects
        if not parts:
            return replace(replace(self, data=b"")._read(), rejects=rejects)
        columns = []
        for name in self.columns:
            columns.append(self._concat_column([part.frame[name] for part in parts]))
        numbers = np.concatenate([part.lines for part in parts])
        return replace(parts[0], frame=pl.DataFrame(columns), lines=numbers, rejects=rejects)

    def _concat_column(self, parts: list[pl.Series]) -> pl.Series:
        # Joins one key of all parts, typed as if they had been read as one. Where one part has lists, text is divided
        # into lists in the others too; where one has text, JSON's true and false are 1 and 0 in the others.
        parts = list(filter(len, parts)) or parts[:1]
        if len({part.dtype for part in parts}) == 1:
            return pl.concat(parts, rechunk=True)
        several = self.lists.get(parts[0].name)
        if several is None or not any(part.dtype == pl.List for part in parts):
            return pl.concat(map(strings_of, parts), rechunk=True)
        lists = []
        for part in parts:
            if part.dtype != pl.List:
                text = part.cast(pl.String)
                empty = nulls(pl.List(pl.String), len(text))
                part = elements_of(text, several.separator).zip_with(text.is_not_null(), empty)
            lists.append(part)
        return pl.concat(lists, rechunk=True)

    def _read(self) -> RawBlock:
        lines = self.data.split(b"\n")[:-1]
        good: Sequence[int] = range(len(lines))
        rejects: list[Reject] = []
        data, frame = self.data, None
        # Polars skips blank lines, and then the numbers of rows and lines would differ.
        if all(map(bytes.strip, lines)):
            with contextlib.suppress(pl.exceptions.PolarsError, OSError):
                frame = json_frame(data, self.columns)
        if frame is None or frame.height != len(lines):
            good = list(object_lines(lines, 0))
            for number in sorted(set(range(len(lines))) - set(good)):
                rejects.append(Reject(self.first_line + number, *_why(lines[number])))
            data = b"".join(lines[number] + b"\n" for number in good)
            frame = json_frame(data, self.columns)
        if frame.height != len(good):
            raise ValueError(f"{len(good)} lines are read as {frame.height} rows")
        if self.lists and b"\\" in data:
            # Polars gives the text of arrays and objects without their escapes.
            frame = frame.with_columns(_with_escapes(data, frame[name]) for name in self.lists)
        return RawBlock(
            frame=frame.select(_typed(frame[name], data, self.lists.get(name)) for name in self.columns),
            file=self.file,
            lines=self.first_line + np.array(good, np.int64),
            rejects=rejects,
            place=self.place,
        )


def json_frame(data: bytes, columns: tuple[str, ...] | None) -> pl.DataFrame:
    """Read the objects of ``data``: the text of each of ``columns``, or all keys as polars types them (None)."""
    # Polars would unpack the bytes, and then they are not rows. A line may begin like this by chance, so callers handle
    # the error like any error of Polars, and try fewer lines.
    if looks_packed(data):
        raise pl.exceptions.ComputeError("the text begins like a compressed file")
    schema = None if columns is None else dict.fromkeys(columns, pl.String)
    if not data.strip():
        return pl.DataFrame(schema=schema)
    return pl.read_ndjson(io.BytesIO(data), schema=schema, infer_schema_length=None)


def of_usual_kinds(data: bytes) -> tuple[pl.DataFrame, bytes]:
    """Read the objects of ``data``, all keys as polars types them; returns them and their lines.

    Those with a value of another kind than nearly all lines have are left out: a list in a column of objects, or text
    in one of lists, leaves polars without a type, or with text for the column.
    """
    try:
        frame = json_frame(data, None)
        texts = frame.select(pl.col(pl.String).str.contains(r"^[\[{]").any())
        if not any(texts.row(0)):
            return frame, data
    except pl.exceptions.PolarsError:
        frame = None
    lines = data.split(b"\n")[:-1]
    kinds = list(map(_kinds, lines))
    counts = Counter[tuple[str, type]]()
    for of_line in kinds:
        counts.update(of_line.items())
    # Go in rising order, so that the most common kind of a key is the one that stays.
    usual = {}
    for (name, kind), _ in reversed(counts.most_common()):
        usual[name] = kind
    good = []
    for line, of_line in zip(lines, kinds, strict=True):
        if all(usual[name] == kind for name, kind in of_line.items()):
            good.append(line)
    if frame is not None and len(good) < USUAL * len(lines):
        # The column is meant to have both.
        return frame, data
    data = b"\n".join([*good, b""])
    return json_frame(data, None), data


def _kinds(line: bytes) -> dict[str, type]:
    # Returns the kind of each key of an object that has a value: list, dict, or str for all others.
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        return {}
    kinds = {}
    for name, value in record.items():
        if value is not None:
            kinds[name] = type(value) if isinstance(value, (list, dict)) else str
    return kinds


def object_lines(lines: list[bytes], first: int) -> Iterator[int]:
    """Yield the numbers, from ``first``, of the ``lines`` that are objects: halves are tried until they all are."""
    filled = list(filter(bytes.strip, lines))
    if not filled:
        return
    read = 0
    if len(filled) == len(lines):
        data = b"\n".join([*lines, b""])
        # Bytes that begin like a compressed file raise OSError.
        with contextlib.suppress(pl.exceptions.PolarsError, OSError):
            if not looks_packed(data):
                read = pl.read_ndjson(io.BytesIO(data), schema={"": pl.String}).height
    if read == len(lines):
        yield from range(first, first + len(lines))
    elif len(lines) > 1:
        half = len(lines) // 2
        yield from object_lines(lines[:half], first)
        yield from object_lines(lines[half:], first + half)


def _why(line: bytes) -> tuple[str, str]:
    if not line.strip():
        return "empty line", "the line is empty"
    if line == TOO_LONG:
        return LINE_TOO_LONG
    try:
        line.decode()
    except UnicodeDecodeError:
        return "invalid UTF-8", "the line is not valid UTF-8"
    return _NO_OBJECT, f"the line is {_NO_OBJECT}: it begins with {line[:40].decode(errors='replace')!r}"


def _typed(text: pl.Series, data: bytes, several: Several | None) -> pl.Series:
    # Types `text` of one key: lists and maps where they are asked for, 1 and 0 for JSON's true and false.
    if several is not None and several.maps:
        pairs = [_pairs(value, several) if value is not None else None for value in text]
        return pl.Series(text.name, pairs, dtype=pl.List(pl.Struct({"key": pl.String, "value": pl.String})))
    if several is not None and text.str.starts_with("[").any():
        return _lists(text, several.separator)
    spelt = text.is_in(_BOOLEANS)
    if spelt.any() and (spelt | text.is_null()).all():
        try:
            return pl.read_ndjson(io.BytesIO(data), schema={text.name: pl.Boolean})[text.name]
        except pl.exceptions.PolarsError:
            # The values are strings that spell the words.
            return text
    if not spelt.any():
        return text
    return with_ones(text, data)


def with_ones(text: pl.Series, data: bytes) -> pl.Series:
    """Return ``text`` of one key of every object of ``data``, with 1 and 0 for JSON's true and false, not strings."""
    lines, values = data.split(b"\n"), text.to_list()
    for number in text.is_in(_BOOLEANS).arg_true():
        value = None
        # A line that is nested too deep keeps the word.
        with contextlib.suppress(ValueError, RecursionError):
            value = json.loads(lines[number]).get(text.name)
        if isinstance(value, bool):
            values[number] = str(int(value))
    return pl.Series(text.name, values, dtype=pl.String)


def _with_escapes(data: bytes, read: pl.Series) -> pl.Series:
    # Returns the values `read` of a key of every object of `data`; of lines with escapes, arrays and objects as JSON.
    values = []
    for line, text in zip(data.split(b"\n")[:-1], read, strict=True):
        if b"\\" in line:
            # A value with a number that is too long, or nested too deep, is no list.
            with contextlib.suppress(ValueError, RecursionError):
                text = _text(json.loads(line).get(read.name))
        values.append(text)
    return pl.Series(read.name, values, dtype=pl.String)


def _pairs(value: str, several: Several) -> list[dict[str, str | None]]:
    if value.startswith("{"):
        with contextlib.suppress(ValueError, RecursionError):
            # Pairs keep a key that occurs twice, and numbers stay as they are written.
            pairs = json.loads(value, object_pairs_hook=list, parse_float=str, parse_int=str)
            return [{"key": _text(key), "value": _text(weight)} for key, weight in pairs]
    divided = list[dict[str, str | None]]()
    for part in value.split(several.separator or ","):
        key, mark, weight = part.partition(several.weight_separator or ":")
        divided.append({"key": key, "value": weight if mark else None})
    return divided


def _text(value: object) -> str | None:
    if value is None:
        return None
    if not isinstance(value, str):
        # A number or a nested value is one id: its JSON text.
        return json.dumps(value)
    if value.isascii():
        return value
    # Half of a surrogate pair, which text may not hold, becomes \0, as in Polars.
    return _HALF_CHARACTER.sub("\0", value)


def _lists(text: pl.Series, separator: str | None) -> pl.Series:
    is_array = text.str.starts_with("[").fill_null(True)
    arrays = text.set(~is_array, None)
    try:
        decoded = arrays.str.json_decode(pl.List(pl.String))
    except pl.exceptions.PolarsError:
        # Some text only begins like an array: it is divided like other text, or is one element.
        lists: list[list[str | None] | None] = []
        for value in arrays:
            elements: list[str | None] | None = None
            if value is not None:
                elements = list(value.split(separator)) if separator else [value]
                # A number of more than 4,300 digits raises ValueError, too.
                with contextlib.suppress(ValueError, RecursionError):
                    elements = list(map(_text, json.loads(value)))
            lists.append(elements)
        decoded = pl.Series(text.name, lists, dtype=pl.List(pl.String))
    return decoded.zip_with(is_array, elements_of(text, separator))
