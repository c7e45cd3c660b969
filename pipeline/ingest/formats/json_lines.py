"""JSON lines: an object a line. A key that a line lacks is missing in that row, as null is."""

from __future__ import annotations

import contextlib
import io
import itertools
import json
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import BinaryIO

import numpy as np
import polars as pl

from pipeline.ingest.formats.file_format import FileFormat, LineReader, LogFile
from pipeline.ingest.rejects import Reject, by_halves, is_of_rows, not_read
from pipeline.ingest.schema import DataSpec, require_columns
from pipeline.ingest.sources import Block, RawBlock
from pipeline.ingest.text import LINE_TOO_LONG, TOO_LONG, looks_packed
from pipeline.ingest.values import nulls, strings_of

# A first block of fewer lines does not tell that a key is a wrong name: the file's rows may all lack it.
TELLING_LINES = 1000
USUAL = 0.995  # of the lines have values of the usual kinds where the others are taken for broken
_BOOLEANS = ("true", "false")
_NO_OBJECT = "no JSON object"
_HALF_CHARACTER = re.compile("[\ud800-\udfff]")


class JsonLines(FileFormat):
    """A row is a line that holds one JSON object."""

    name, by_line = "jsonl", True

    def blocks(self, stream: BinaryIO, file: LogFile) -> Iterator[Block]:
        """Lines that are yet to be taken apart."""
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

    ``weight_separator``: of a column of maps, between a key and its value; None where it holds lists.
    """

    separator: str | None
    maps: bool = False
    weight_separator: str | None = None


def list_columns(spec: DataSpec) -> dict[str, Several]:
    """Columns that only features with several values read."""
    several = {
        each.column: Several(each.separator, each.maps, each.weight_separator) for each in spec.sparse if each.multi
    }
    several |= {each.weights: Several(each.separator) for each in spec.sparse if each.weights}
    several |= {each.column: Several(each.separator) for each in spec.dense if each.vector}
    several |= {each.column: Several(each.separator) for group in spec.sequences for each in group.sources}
    one = {spec.label, spec.day_column, spec.timestamp, spec.hour_column, spec.row_weight}
    one |= {each.column for each in spec.dense if not each.vector} | {task.column for task in spec.tasks}
    one |= {name for each in spec.sparse for name in (each.cross[1:] if each.multi else (each.column, *each.cross))}
    return {column: kind for column, kind in several.items() if column not in one}


def _require_keys(data: bytes, file: LogFile) -> None:
    keys = [name for name in file.stored_spec.columns if _written(name) in data]
    missing = set(file.stored_spec.columns) - set(keys)
    if file.stored_spec.label in missing or (missing and data.count(b"\n") >= TELLING_LINES):
        known = pl.DataFrame()
        with contextlib.suppress(pl.exceptions.PolarsError):  # a first line that is no object
            known = json_frame(data[: data.find(b"\n") + 1], None)
        require_columns(
            file.stored_spec, [*keys, *(name for name in known.columns if name not in keys)], file.label, header=False
        )


def _written(name: str) -> bytes:
    # `name` as a key, up to characters that writers may escape.
    plain = name.isascii() and not set(name) & set('"\\/')
    return f'"{name}"'.encode() if plain else b'"'


@dataclass(frozen=True, kw_only=True)
class JsonBlock:
    """Whole lines of one file, the first of them ``first_line``, that are yet to be read as objects.

    ``columns``: the keys that are wanted. ``lists``: those that hold several values a row. ``place``: as of
    ``RawBlock``.
    """

    data: bytes
    file: str
    first_line: int
    columns: tuple[str, ...]
    lists: dict[str, Several]
    place: str = ""

    def read(self) -> RawBlock:
        """The rows as strings and lists of strings, the other lines aside. Numbers are as written."""
        try:
            return self._read()
        except (Exception, pl.exceptions.PanicException) as error:
            if not is_of_rows(error):
                raise
        return self._read_others()  # a limit of a parser's own: it costs the lines that meet it

    def _read_others(self) -> RawBlock:
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
        columns = [self._joined([part.frame[name] for part in parts]) for name in self.columns]
        numbers = np.concatenate([part.lines for part in parts])
        return replace(parts[0], frame=pl.DataFrame(columns), lines=numbers, rejects=rejects)

    def _joined(self, parts: list[pl.Series]) -> pl.Series:
        # One key of all parts, typed as if they had been read as one.
        # Where one part has lists, text is divided into lists in the others too; where one has text, JSON's true and
        # false are 1 and 0 in the others.
        parts = [part for part in parts if len(part)] or parts[:1]
        several, kinds = self.lists.get(parts[0].name), {part.dtype for part in parts}
        if len(kinds) == 1:
            return pl.concat(parts, rechunk=True)
        if several is not None and any(part.dtype == pl.List for part in parts):
            parts = [
                part if part.dtype == pl.List else _listed(part.cast(pl.String), several.separator) for part in parts
            ]
        else:
            parts = [strings_of(part) for part in parts]
        return pl.concat(parts, rechunk=True)

    def _read(self) -> RawBlock:
        lines = self.data.split(b"\n")[:-1]
        good: Sequence[int] = range(len(lines))
        rejects: list[Reject] = []
        data, frame = self.data, None
        if all(map(bytes.strip, lines)):
            with contextlib.suppress(pl.exceptions.PolarsError, OSError):
                frame = json_frame(data, self.columns)
        if frame is None or frame.height != len(lines):
            good, rejects = self._sift(lines)
            data = b"".join(lines[number] + b"\n" for number in good)
            frame = json_frame(data, self.columns)
        if frame.height != len(good):
            raise ValueError(f"{len(good)} lines are read as {frame.height} rows")
        if self.lists and b"\\" in data:  # Polars gives the text of arrays and objects without their escapes
            frame = frame.with_columns(_escaped(data, frame[name]) for name in self.lists)
        return RawBlock(
            frame=frame.select(_typed(frame[name], data, self.lists.get(name)) for name in self.columns),
            file=self.file,
            lines=self.first_line + np.array(good, np.int64),
            rejects=rejects,
            place=self.place,
        )

    def _sift(self, lines: list[bytes]) -> tuple[Sequence[int], list[Reject]]:
        good = list(object_lines(lines, 0))
        bad = sorted(set(range(len(lines))) - set(good))
        return good, [Reject(self.first_line + number, *_why(lines[number])) for number in bad]


def json_frame(data: bytes, columns: tuple[str, ...] | None) -> pl.DataFrame:
    """The objects of ``data``: the text of each of ``columns``, or all keys as polars types them (None)."""
    if looks_packed(data):
        raise pl.exceptions.ComputeError("the text begins like a compressed file")
    schema = None if columns is None else dict.fromkeys(columns, pl.String)
    if not data.strip():
        return pl.DataFrame(schema=schema)
    return pl.read_ndjson(io.BytesIO(data), schema=schema, infer_schema_length=None)


def of_usual_kinds(data: bytes) -> tuple[pl.DataFrame, bytes]:
    """The objects of ``data``, all keys as polars types them, and their lines.

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
    counts = Counter(itertools.chain.from_iterable(each.items() for each in kinds))
    usual = {name: kind for (name, kind), _ in reversed(counts.most_common())}
    good = [line for line, each in zip(lines, kinds, strict=True) if all(usual[name] == each[name] for name in each)]
    if frame is not None and len(good) < USUAL * len(lines):
        return frame, data  # a column that is meant to have both
    data = b"".join(line + b"\n" for line in good)
    return json_frame(data, None), data


def _kinds(line: bytes) -> dict[str, type]:
    # Of each key of an object that has a value: list, dict, or str for all others.
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        return {}
    kinds = {name: type(value) if isinstance(value, (list, dict)) else str for name, value in record.items()}
    return {name: kind for name, kind in kinds.items() if record[name] is not None}


def _is_read(data: bytes, lines: int) -> bool:
    # Whether polars takes `data` for one object a line.
    if looks_packed(data):
        return False
    try:
        return pl.read_ndjson(io.BytesIO(data), schema={"": pl.String}).height == lines
    except (pl.exceptions.PolarsError, OSError):  # OSError: bytes that begin like a compressed file
        return False


def object_lines(lines: list[bytes], first: int) -> Iterator[int]:
    """Numbers of those of ``lines``, counted from ``first``, that are objects: halves are tried until they all are."""
    filled = [line for line in lines if line.strip()]
    if not filled:
        return
    if len(filled) == len(lines) and _is_read(b"\n".join(lines) + b"\n", len(lines)):
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
    # `text` of one key: lists and maps where they are asked for, 1 and 0 for JSON's true and false.
    if several is not None and several.maps:
        return _maps(text, several)
    if several is not None and text.str.starts_with("[").any():
        return _lists(text, several.separator)
    spelt = text.is_in(_BOOLEANS)
    if spelt.any() and (spelt | text.is_null()).all():
        try:
            return pl.read_ndjson(io.BytesIO(data), schema={text.name: pl.Boolean})[text.name]
        except pl.exceptions.PolarsError:
            return text  # strings that spell the words
    return with_ones(text, data) if spelt.any() else text


def with_ones(text: pl.Series, data: bytes) -> pl.Series:
    """``text`` of one key of every object of ``data``, 1 and 0 for JSON's true and false, which no strings are."""
    lines, values = data.split(b"\n"), text.to_list()
    for number in text.is_in(_BOOLEANS).arg_true():
        value = None
        with contextlib.suppress(ValueError, RecursionError):  # what is nested too deep keeps the word
            value = json.loads(lines[number]).get(text.name)
        if isinstance(value, bool):
            values[number] = str(int(value))
    return pl.Series(text.name, values, dtype=pl.String)


def _escaped(data: bytes, read: pl.Series) -> pl.Series:
    # The values `read` of a key of every object of `data`; of lines with escapes, arrays and objects as JSON.
    lines = zip(data.split(b"\n")[:-1], read, strict=True)
    values = [_unescaped(line, read.name, text) if b"\\" in line else text for line, text in lines]
    return pl.Series(read.name, values, dtype=pl.String)


def _unescaped(line: bytes, name: str, read: str | None) -> str | None:
    with contextlib.suppress(ValueError, RecursionError):  # a number too long, or what is nested too deep, is no list
        return _text(json.loads(line).get(name))
    return read


def _maps(text: pl.Series, several: Several) -> pl.Series:
    kind = pl.List(pl.Struct({"key": pl.String, "value": pl.String}))
    pairs = [None if value is None else _pairs(value, several) for value in text]
    return pl.Series(text.name, pairs, dtype=kind)


def _pairs(value: str, several: Several) -> list[dict[str, str | None]]:
    if value.startswith("{"):
        with contextlib.suppress(ValueError, RecursionError):
            pairs = json.loads(value, object_pairs_hook=list, parse_float=str, parse_int=str)
            return [{"key": _text(key), "value": _text(weight)} for key, weight in pairs]
    parts = (part.partition(several.weight_separator or ":") for part in value.split(several.separator or ","))
    return [{"key": key, "value": weight if mark else None} for key, mark, weight in parts]


def _text(value: object) -> str | None:
    # A value as text; half of a character, which no text may hold, is \0, as polars has it.
    if not isinstance(value, str):
        return None if value is None else json.dumps(value)
    return value if value.isascii() else _HALF_CHARACTER.sub("\0", value)


def _lists(text: pl.Series, separator: str | None) -> pl.Series:
    array = text.str.starts_with("[").fill_null(True)
    arrays = text.set(~array, None)
    try:
        decoded = arrays.str.json_decode(pl.List(pl.String))
    except pl.exceptions.PolarsError:  # a string that begins like an array
        decoded = pl.Series(text.name, [_array(value, separator) for value in arrays], dtype=pl.List(pl.String))
    return decoded.zip_with(array, _divided(text, separator))


def _divided(text: pl.Series, separator: str | None) -> pl.Series:
    return text.str.split(separator) if separator else text.reshape((-1, 1)).arr.to_list()


def _listed(text: pl.Series, separator: str | None) -> pl.Series:
    return _divided(text, separator).zip_with(text.is_not_null(), nulls(pl.List(pl.String), len(text)))


def _array(value: str | None, separator: str | None) -> list[str | None] | None:
    if value is None:
        return None
    try:
        return [_text(element) for element in json.loads(value)]
    except (ValueError, RecursionError):  # ValueError: of a number of more than 4,300 digits, too
        return list(value.split(separator)) if separator else [value]
