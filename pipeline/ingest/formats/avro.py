"""Apache Avro: files of records in compressed blocks, read record by record by fastavro and handed on in batches."""

from __future__ import annotations

import contextlib
import itertools
import struct
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from lzma import LZMAError
from types import ModuleType
from typing import Any, BinaryIO

import pyarrow as pa

from pipeline.config.data import DataConfig
from pipeline.core.errors import ConfigError
from pipeline.ingest.formats.columnar import WHOLE, Columnar, Part

# Rows of a batch.
ROWS = 1 << 14
_PLAIN = {
    "null": pa.null(),
    "boolean": pa.bool_(),
    "int": pa.int32(),
    "long": pa.int64(),
    "float": pa.float32(),
    "double": pa.float64(),
    "bytes": pa.binary(),
    "string": pa.string(),
    "enum": pa.string(),
    "fixed": pa.binary(),
}
# Types of what fastavro returns: times in UTC, and local ones without a zone.
_LOGICAL = {
    "date": pa.date32(),
    "uuid": pa.string(),
    **dict.fromkeys(("timestamp-millis", "timestamp-micros", "timestamp-nanos"), pa.timestamp("us", "UTC")),
    **dict.fromkeys(("local-timestamp-millis", "local-timestamp-micros"), pa.timestamp("us")),
    **dict.fromkeys(("time-millis", "time-micros"), pa.time64("us")),
}
_NUMBERS = {"int", "long", "float", "double"}
# Errors of decoding bytes that are not Avro.
_DAMAGED = (
    EOFError,
    ValueError,
    TypeError,
    LookupError,
    ArithmeticError,
    AttributeError,
    MemoryError,
    struct.error,
    zlib.error,
    LZMAError,
    RecursionError,
    NotImplementedError,
    pa.ArrowException,
)


class Avro(Columnar):
    """Apache Avro object container files."""

    name = "avro"

    def schema(self, stream: BinaryIO) -> pa.Schema:
        with _decoding():
            return arrow_schema(_reader(stream).writer_schema)

    def batches(
        self, stream: BinaryIO, columns: list[str], block_bytes: int, part: Part = WHOLE
    ) -> Iterator[pa.RecordBatch]:
        """Yield records of as many of the file's blocks as are needed; the file is never in memory as a whole."""
        with _decoding():
            reader = _reader(stream)
            kinds = arrow_schema(reader.writer_schema)
            if set(columns) < set(kinds.names):
                # Skipping the other columns is cheaper than decoding them.
                reader = _reader(stream, columns)
            records = iter(reader)
            wanted = pa.schema(list(map(kinds.field, columns)))
        while True:
            # The yield is outside, because what the caller raises is no fault of the file.
            with _decoding():
                rows = list(itertools.islice(records, ROWS))
                if not rows:
                    return
                batch = record_batch(rows, wanted)
            yield batch

    def rows(self, stream: BinaryIO, data: DataConfig, enough: int) -> int:
        """Count rows by the headers of the file's blocks."""
        with _decoding():
            return sum(block.num_records for block in fastavro().block_reader(stream))


def fastavro() -> ModuleType:
    """Import the library; ConfigError if it is not installed."""
    # fastavro is an optional dependency, which logs of other formats do not need.
    try:
        import fastavro as library
    except ImportError as error:
        raise ConfigError(
            f"an Avro file needs fastavro, which cannot be imported: {error}", hint="pip install 'nightjar[avro]'"
        ) from None
    return library


def _reader(stream: BinaryIO, columns: list[str] | None = None) -> Any:
    # Returns a reader of all records in `stream`; of their `columns` alone if that is enough to know their types.
    library = fastavro()
    stream.seek(0)
    reader = library.reader(stream)
    if columns is None:
        return reader
    # fastavro marks a parsed schema with keys of its own: it would not parse a copy with these marks again.
    part = {name: value for name, value in reader.writer_schema.items() if not name.startswith("__")}
    part["fields"] = [field for field in part["fields"] if field["name"] in columns]
    # A type may be defined in a column that is left out and only named in one that stays: then all are decoded.
    with contextlib.suppress(library.schema.SchemaParseException, library.schema.UnknownType):
        library.parse_schema(part)
        stream.seek(0)
        return library.reader(stream, part)
    stream.seek(0)
    return library.reader(stream)


@contextmanager
def _decoding() -> Iterator[None]:
    # Turns errors of bytes that are not Avro into an EOFError, as for any file that is cut off or damaged.
    try:
        yield
    except Exception as error:
        if not (isinstance(error, _DAMAGED) or type(error).__module__.startswith("fastavro.")):
            # fastavro's own errors, such as of an invalid schema, have no common class, so their module tells.
            raise
        words = str(error) or type(error).__name__
        if isinstance(error, ValueError) and "install" in words:
            raise ConfigError(
                f"the Avro file's codec is missing: {words}", hint="pip install cramjam zstandard"
            ) from None
        raise EOFError(words) from None


def arrow_schema(schema: Any) -> pa.Schema:
    """Return the columns of a file whose records are of the Avro ``schema``; a record inside of it is a struct."""
    if not isinstance(schema, Mapping) or schema.get("type") != "record":
        raise ValueError("its values are no records")
    named: dict[str, Any] = {}
    return pa.schema([(field["name"], _kind(field["type"], named, ())) for field in schema["fields"]])


def _kind(schema: Any, named: dict[str, Any], inside: tuple[str, ...]) -> pa.DataType:
    # Returns the Arrow type of values of `schema`; `named`: types that have names; `inside`: records it is part of.
    if isinstance(schema, list):
        return _union([part for part in schema if part != "null"], named, inside)
    if isinstance(schema, str):
        if schema in _PLAIN:
            return _PLAIN[schema]
        return _kind(named[schema], named, inside)
    kind = schema["type"]
    if "name" in schema:
        named[schema["name"]] = schema
    if isinstance(kind, (list, dict)):
        return _kind(kind, named, inside)
    logical = schema.get("logicalType")
    if logical == "decimal":
        return pa.decimal128(max(int(schema["precision"]), 1), int(schema.get("scale", 0)))
    if logical in _LOGICAL:
        return _LOGICAL[logical]
    if kind == "array":
        return pa.list_(_kind(schema["items"], named, inside))
    if kind == "map":
        return pa.map_(pa.string(), _kind(schema["values"], named, inside))
    if kind == "record":
        if schema["name"] in inside:
            # A recursive record cannot be a column.
            return pa.struct([])
        within = (*inside, schema["name"])
        return pa.struct([(field["name"], _kind(field["type"], named, within)) for field in schema["fields"]])
    return _kind(kind, named, inside)


def _union(parts: list[Any], named: dict[str, Any], inside: tuple[str, ...]) -> pa.DataType:
    # Returns the one type besides null. Several types become numbers, or the text of their values.
    if not parts:
        return pa.null()
    # Every part is visited in any case: it may define a type that a later column names.
    kinds = [_kind(part, named, inside) for part in parts]
    if len(kinds) == 1:
        return kinds[0]
    if all(isinstance(part, str) and part in _NUMBERS for part in parts):
        return pa.int64() if set(parts) <= {"int", "long"} else pa.float64()
    if any(map(pa.types.is_nested, kinds)):
        # A union with records or arrays cannot be a column. An empty struct stands for that, as above.
        return pa.struct([])
    return pa.string()


def record_batch(rows: list[dict[str, Any]], schema: pa.Schema) -> pa.RecordBatch:
    """Convert ``rows`` to Arrow; what a union of several types holds becomes text."""
    columns = []
    for field in schema:
        values = [row[field.name] for row in rows]
        if pa.types.is_string(field.type):
            for place, value in enumerate(values):
                if value is None or isinstance(value, str):
                    continue
                if isinstance(value, bytes):
                    values[place] = value.decode()
                else:
                    # True and false become 1 and 0, as in columns of booleans.
                    values[place] = str(int(value)) if isinstance(value, bool) else str(value)
        elif pa.types.is_map(field.type):
            # Arrow takes pairs, fastavro returns dictionaries.
            values = [None if value is None else list(value.items()) for value in values]
        columns.append(pa.array(values, field.type))
    return pa.RecordBatch.from_arrays(columns, schema=schema)
