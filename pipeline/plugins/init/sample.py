"""A sample of a log that no schema describes yet: its format, its columns and some of its rows."""

from __future__ import annotations

import csv
import io
import math
import re
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from datetime import date
from fnmatch import translate
from typing import BinaryIO

import numpy as np
import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
from pyarrow import orc

from pipeline.config.data import DataConfig, connector_at
from pipeline.core.errors import DataError
from pipeline.core.units import MIB
from pipeline.ingest.file_source import partition_values
from pipeline.ingest.formats.avro import Avro
from pipeline.ingest.formats.columnar import frame_of
from pipeline.ingest.formats.file_format import BOM, lines_end_with_cr, require_text
from pipeline.ingest.formats.json_lines import object_lines, of_usual_kinds, with_ones
from pipeline.ingest.rawfiles import LogFiles, find_files, is_missing_data
from pipeline.ingest.schema import CRITEO_COLUMNS, is_number
from pipeline.ingest.sources import decompressed, readable
from pipeline.ingest.text import TextLayout, read_lines, records
from pipeline.plugins.init.columns import MISSING_NUMBERS, with_maps
from pipeline.plugins.init.label_choice import is_label_name
from pipeline.specs.connector import Connector

# Rows of a sample, and bytes of text that are read for them.
ROWS = 200_000
BYTES = 64 << 20
# Row groups that are read of all files together.
PARQUET_GROUPS = 8
# Files that are looked into, evenly spread.
FILES = 8
# Lines by which separator, quotes and header are guessed.
_LINES = 200
_SEPARATORS = ("\t", ",", ";", "|")
_ARRAY = re.compile(rb"(\xef\xbb\xbf)?\s*\[\s*[{\]]")
_DAY = re.compile(r"\d{4}-\d\d-\d\d")


@dataclass(frozen=True, kw_only=True)
class TextFormat:
    """How text is laid out: a ``layout``, whether the first line names its columns, blanks around fields."""

    layout: TextLayout
    header: bool
    strip: bool


@dataclass(frozen=True, kw_only=True)
class LogSample:
    """Some ``rows`` of the log at ``path``, in which {day} stands for a day where its files tell one.

    ``frame``: strings if it is delimited text, else whatever the files hold. ``total``: rows of the log,
    estimated. ``bad``: lines of the sample that are no rows. ``kind``: its format; ``text``: how that is laid out, None
    unless delimited. ``day``: the last one that a file's name tells. ``partitions``: columns that folders tell.
    ``options``: how a table or stream is reached.
    """

    path: str
    frame: pl.DataFrame
    total: int
    files: int
    kind: str
    bad: int = 0
    text: TextFormat | None = None
    day: str | None = None
    partitions: tuple[str, ...] = ()
    options: Mapping[str, str] = field(default_factory=dict)

    @property
    def rows(self) -> int:
        return self.frame.height


def read_sample(path: str, options: Mapping[str, str] | None = None) -> LogSample:
    """Read a sample of a log.

    Args:
        path: a file, a directory, a glob, or <connector>:<path>.
        options: the connector's options.

    Raises:
        DataError: if there are no files, no rows, or they are of no known format.
    """
    connector, place = connector_at(path)
    if connector is not None:
        return _sample_table(connector, place, dict(options or {}))
    try:
        files = find_files(path)
    except DataError as error:
        if not is_missing_data(error, path):
            raise
        message = error.message.replace(f"data.path={path}", path)
        raise DataError(message, hint="nightjar init <file, directory or glob>") from None
    chosen = _spread(len(files.paths), FILES)
    with files.fs.open(files.paths[0], "rb") as source:
        start = source.read(4)
    sample = None
    for mark, (kind, read) in _MARKS.items():
        if start.startswith(mark):
            sample = _sample_columns(files, chosen, kind, read)
    if sample is None:
        sample = _sample_text(files, chosen)
    if not sample.rows:
        raise _no_rows(path)
    partitions = []
    for name in partition_values(files.paths[0]):
        if all(name in partition_values(other) for other in files.paths):
            partitions.append(name)
    pattern, day = day_pattern(path, files.paths)
    return replace(sample, path=pattern, day=day, files=len(files.paths), partitions=tuple(partitions))


def _no_rows(path: str) -> DataError:
    return DataError(f"{path} holds no rows, expected some to look at", hint="name a log that is not empty")


def _sample_table(connector: Connector, path: str, options: dict[str, str]) -> LogSample:
    data = DataConfig(name="sample", format=connector.name, path=path, options=options)
    connector.check(data, "data")
    excerpt = connector.latest(data).excerpt(ROWS)
    if not excerpt.frame.height:
        raise _no_rows(path)
    return LogSample(
        path=path,
        frame=excerpt.frame,
        total=excerpt.total,
        files=excerpt.parts,
        kind=connector.name,
        bad=excerpt.bad,
        options=options,
    )


def _spread(count: int, most: int) -> list[int]:
    # Returns at most `most` of the numbers below `count`, evenly spread, because logs are often sorted by time.
    places = np.linspace(0, count - 1, min(count, most)).round()
    return np.unique(places).astype(np.int64).tolist()


def _with_partitions(frame: pl.DataFrame, path: str) -> pl.DataFrame:
    columns = [pl.lit(value, pl.String).alias(name) for name, value in partition_values(path).items()]
    return frame.with_columns(columns)


def _sample_columns(
    files: LogFiles, chosen: list[int], kind: str, read: Callable[[BinaryIO, int], tuple[pa.Table, float]]
) -> LogSample:
    frames, rows, sizes = [], 0.0, 0
    for number in chosen:
        path = files.paths[number]
        with readable(files.labels[number]), files.fs.open(path, "rb") as source:
            table, rows_of_file = read(source, math.ceil(PARQUET_GROUPS / len(chosen)))
        rows += rows_of_file
        sizes += files.fs.size(path)
        frame = frame_of(table, table.column_names)
        frame = frame[_spread(frame.height, ROWS // len(chosen))]
        frames.append(_with_partitions(frame, path))
    # Files of one log may lack columns that others have, or hold numbers of another type.
    frame = pl.concat(frames, how="diagonal_relaxed")
    return LogSample(path="", frame=frame, total=round(rows * files.bytes / max(sizes, 1)), files=0, kind=kind)


# Readers of some pieces of a file. They also return the number of rows of the whole file.


def _read_parquet(source: BinaryIO, pieces: int) -> tuple[pa.Table, float]:
    file = pq.ParquetFile(source)
    return file.read_row_groups(_spread(file.metadata.num_row_groups, pieces)), file.metadata.num_rows


def _read_orc(source: BinaryIO, pieces: int) -> tuple[pa.Table, float]:
    file = orc.ORCFile(source)
    stripes = [file.read_stripe(stripe) for stripe in _spread(file.nstripes, pieces)]
    return pa.Table.from_batches(stripes, file.schema), file.nrows


def _read_avro(source: BinaryIO, pieces: int) -> tuple[pa.Table, float]:
    # Reads the first rows, and estimates the number of all rows by how many bytes these took.
    form, batches, rows = Avro(), [], 0
    schema = form.schema(source)
    for batch in form.batches(source, schema.names, 0):
        batches.append(batch)
        rows += batch.num_rows
        if rows * PARQUET_GROUPS >= ROWS * pieces:
            break
    read = source.tell()
    return pa.Table.from_batches(batches, schema), rows * max(source.seek(0, 2) / max(read, 1), 1.0)


# First bytes of files that are not text, with their format and reader.
_MARKS = {
    b"PAR1": ("parquet", _read_parquet),
    b"ORC": ("orc", _read_orc),
    b"Obj\x01": ("avro", _read_avro),
}


def _sample_text(files: LogFiles, chosen: list[int]) -> LogSample:
    form: TextFormat | None = None
    frames, bad, size_read, kind = [], 0, 0.0, ""
    for number in chosen:
        path, label = files.paths[number], files.labels[number]
        with readable(label), files.fs.open(path, "rb") as source:
            with decompressed(source, path) as stream:
                block, whole = _read_lines(stream, BYTES // len(chosen), label)
            # The share of bytes on disk that were read: the unpacked size is known only at the end of the file.
            share = 1.0
            if not whole:
                share = min(source.tell() / max(files.fs.size(path), 1), 1.0)
        size_read += share * files.fs.size(path)
        if not block:
            # Writers leave empty files where a part of the log had no rows.
            continue
        require_text(block[:8], label)
        if _ARRAY.match(block):
            raise DataError(
                f"{label} is an array of JSON, expected an object a line",
                hint="jq -c '.[]' FILE writes an object a line",
            )
        if block.count(b"\n") == 1 and b"\r" in block:
            raise lines_end_with_cr(f"the lines of {label}", block)
        if not kind:
            # The first file decides the format of all.
            kind = "csv"
            first = block.removeprefix(b"\xef\xbb\xbf").lstrip().partition(b"\n")[0]
            if first.startswith(b"{") and list(object_lines([first], 0)):
                kind = "jsonl"
        if kind == "jsonl":
            lines = block.split(b"\n")[:-1]
            data = b"".join(lines[good] + b"\n" for good in object_lines(lines, 0))
            frame, data = of_usual_kinds(data)
            frame = frame.with_columns(with_ones(values, data) for values in frame.select(pl.col(pl.String)))
            frames.append(_with_partitions(with_maps(frame), path))
            bad += len(lines) - frame.height
            continue
        form = form or text_format(block)
        layout = form.layout
        if form.header:
            header, _, block = block.partition(b"\n")
            layout = _with_names_of(header, layout)
        # The last record may continue beyond the bytes that were read.
        block = block[: records(block, layout).open]
        frame, _, rejects = read_lines(block, 1, layout)
        frames.append(_with_partitions(frame, path))
        bad += len(rejects)
    if not frames:
        return LogSample(path="", frame=pl.DataFrame(), total=0, files=0, kind=kind)
    # Objects of JSON may have different keys, and headers may name other columns, or in another order.
    frame = pl.concat(frames, how="diagonal_relaxed")
    if form is not None and form.strip:
        frame = frame.select(pl.all().str.strip_chars())
    total = round(frame.height * files.bytes / max(size_read, 1.0))
    frame = frame[_spread(frame.height, ROWS)]
    return LogSample(path="", frame=frame, total=total, files=0, kind=kind, bad=bad, text=form)


def _with_names_of(header: bytes, layout: TextLayout) -> TextLayout:
    # Returns the layout of a file by its own first line, as ingestion reads it; ``layout`` itself if that shares no
    # name with it, and so is no header.
    text = header.removeprefix(BOM).decode(errors="replace")
    names = [field.strip() for row in _rows([text], layout.separator) for field in row]
    if len(set(names)) < len(names) or not set(names) & set(layout.names):
        return layout
    return replace(layout, names=tuple(names))


def _read_lines(stream: BinaryIO, size: int, label: str) -> tuple[bytes, bool]:
    # Returns whole lines of the first `size` bytes, and whether that is all; DataError if no line ends there.
    data = b""
    while len(data) < size and (piece := stream.read(size - len(data))):
        data += piece
    whole = not stream.read(1)
    if not whole and b"\n" not in data:
        hint = "a file whose lines end with LF"
        if data.lstrip().startswith(b"["):
            hint = "jq -c '.[]' FILE writes an object a line"
        elif b"\r" in data:
            raise lines_end_with_cr(f"the lines of {label}", data)
        raise DataError(
            f"line 1 of {label} is longer than {len(data) // MIB} MiB, expected a row a line; it begins with "
            f"{data[:40].decode(errors='replace')!r}",
            hint=hint,
        )
    if not whole:
        data = data[: data.rfind(b"\n") + 1]
    if not data.strip():
        return b"", whole
    return data.rstrip(b"\r\n") + b"\n", whole


def text_format(block: bytes) -> TextFormat:
    """Return the layout of the text that begins with ``block``.

    Raises:
        DataError: No separator makes columns of it, or lines come before its header.
    """
    start = block.removeprefix(b"\xef\xbb\xbf").replace(b"\r\n", b"\n")
    text = start[: 1 << 20].decode(errors="replace")
    lines = [line for line in text.split("\n")[:_LINES] if line]
    # Choose the separator that makes the most fields of the most lines.
    separator, width, best = _SEPARATORS[0], 1, -1.0
    for mark in _SEPARATORS:
        divided = _rows(lines, mark)
        if not divided:
            continue
        fields, count = Counter(map(len, divided)).most_common(1)[0]
        # One field a line means that the character does not occur.
        if fields > 1 and count / len(divided) * fields > best:
            separator, width, best = mark, fields, count / len(divided) * fields
    if width < 2:
        first = lines[0] if lines else ""
        raise DataError(
            f"no separator of {', '.join(map(repr, _SEPARATORS))} divides the lines into columns; the first one is "
            f"{first[:60]!r}",
            hint="write your schema by hand: docs/data.md",
        )
    rows, blanks = [], 0
    for row in _rows(lines, separator):
        if len(row) == width:
            stripped = [field.strip() for field in row]
            blanks += sum(field != plain for field, plain in zip(row, stripped, strict=True))
            rows.append(stripped)
    # A tab-separated log has quotes only if one of these lines has: otherwise a later one is plain text.
    quote: str | None = '"'
    if separator == "\t" and not any('"' in line for line in lines):
        quote = None
    header = has_header(rows)
    if header:
        names = rows[0]
        _require_header_first(text.split("\n")[:_LINES], names, separator)
        names = _with_own_names(names)
    elif separator == "\t" and width == len(CRITEO_COLUMNS):
        names, quote = CRITEO_COLUMNS, None
    else:
        names = [f"column_{number + 1}" for number in range(width)]
    layout = TextLayout(names=tuple(names), separator=separator, quote=quote)
    return TextFormat(layout=layout, header=header, strip=blanks > len(rows))


def _require_header_first(lines: list[str], names: list[str], separator: str) -> None:
    # Ingestion takes the first line for the header, so a schema for a log with something before it would not run.
    for number, line in enumerate(lines):
        if [field.strip() for row in _rows([line], separator) for field in row] != names:
            continue
        if number:
            raise DataError(
                f"the names of the columns are in line {number + 1}, expected them in line 1, which is "
                f"{lines[0][:60]!r}",
                hint=f"tail -n +{number + 1} FILE > NEW_FILE leaves out what is before them",
            )
        return


def _rows(lines: list[str], separator: str) -> list[list[str]]:
    # Returns the records of `lines`, each of one or more; plain lines if a stray quote swallows too much.
    text = io.StringIO("\n".join(lines), newline="")
    try:
        return list(csv.reader(text, delimiter=separator))
    except csv.Error:
        return [line.split(separator) for line in lines]


def _with_own_names(names: list[str]) -> list[str]:
    # Returns `names` of a header. Ingestion reads no column by a name that two have, and none without a name.
    own = list[str]()
    for at, name in enumerate(names):
        if not name and "" in names[:at]:
            name = f" again, column {at}"
        elif name in names[:at]:
            raise DataError(
                f"the header names {names.count(name)} columns {name!r}, columns {names.index(name) + 1} and {at + 1}; "
                "expected a name for each",
                hint="rename all but one, in the log",
            )
        own.append(name)
    return own


def has_header(rows: list[list[str]]) -> bool:
    """Whether the first of ``rows`` names the columns.

    Its fields are words, all different, that hardly appear further down. Some may be numbers or alike, if one names
    the label, or if more of them are words above a column of numbers than numbers like those below. A column of row
    numbers may have no name, as pandas writes its index, nor one that is always empty, as a separator at the end of
    each line makes it.
    """
    first, rest = rows[0], rows[1:]
    filled = [name for name in first if name]
    plain = len(set(filled)) == len(filled)
    words, alike, again, label = 0, 0, 0, False
    absent = {"", *MISSING_NUMBERS}
    for at, name in enumerate(first):
        values = [row[at] for row in rest if row[at] not in absent]
        if not name:
            if values and not (len(values) == len(rest) == len(set(values)) and all(map(str.isdecimal, values))):
                return False
            continue
        numbers = list(map(float, filter(is_number, values)))
        if is_number(name):
            plain = False
            alike += bool(numbers) and min(numbers) <= float(name) <= max(numbers)
            continue
        again += name in values
        label |= is_label_name(name) and name not in values and len(set(values)) == 2
        words += bool(numbers) and len(numbers) == len(values) and name not in absent
    return again <= len(first) // 4 and (plain or label or words > alike)


def day_pattern(path: str, names: list[str]) -> tuple[str, str | None]:
    """Return ``path`` with {day} in place of a day, or of a wildcard that stands for days; and the last day."""
    parts = path.rstrip("/").split("/")
    inside = names[-1].split("/")
    if "*" not in path and parts[-1] in inside[:-1]:
        # The path is a folder, so add the parts below it that its last file shows.
        below = inside[len(inside) - inside[::-1].index(parts[-1]) :]
        parts += [part if _DAY.search(part) else "*" for part in below]
    deep = [name.split("/") for name in names if name.count("/") >= len(parts) - 1]
    for at, part in enumerate(parts):
        if _DAY.search(part):
            pattern = f"({_DAY.pattern})".join(map(re.escape, _DAY.split(part)))
            filled = _DAY.sub("{day}", part)
        elif "*" in part:
            pattern, filled = translate(part).replace(".*", "(.*?)", 1), part.replace("*", "{day}", 1)
        else:
            continue
        # Count from the end, because `path` may be relative or begin with a protocol, unlike `names`.
        last = _last_day(re.compile(pattern), [name[at - len(parts)] for name in deep])
        if last is not None:
            return "/".join([*parts[:at], filled, *parts[at + 1 :]]), last
    return path, None


def _last_day(pattern: re.Pattern[str], places: list[str]) -> str | None:
    # Returns the last of the days that `pattern` captures of `places`; None if one of them is no day.
    days = []
    for place in places:
        match = pattern.fullmatch(place)
        if match is None or not _DAY.fullmatch(match[1]):
            return None
        try:
            date.fromisoformat(match[1])
        except ValueError:
            return None
        days.append(match[1])
    return max(days, default=None)
