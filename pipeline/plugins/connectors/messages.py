"""Messages of a stream as blocks of rows: JSON, delimited text or Avro, one row a message."""

from __future__ import annotations

import hashlib
import http.client
import io
import json
import struct
import time
import urllib.error
import urllib.request
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl

from pipeline.config.data import DataConfig
from pipeline.core.errors import ConfigError, DataError, UnreachableError
from pipeline.core.retrying import retried
from pipeline.ingest.formats import FORMATS
from pipeline.ingest.formats.file_format import LogFile
from pipeline.ingest.formats.json_lines import TELLING_LINES, json_frame, object_lines
from pipeline.ingest.schema import DataSpec, require_columns
from pipeline.ingest.sources import RawBlock
from pipeline.ingest.values import Reject
from pipeline.plugins.connectors.options import MESSAGES, REGISTRY, SCHEMA_FILE

REGISTRY_SECONDS = 10.0
# Limit for asking the registry about schema numbers that it does not know and that occur only once in a block.
ASK_SECONDS = 30.0
# The largest schema number: registries use signed integers of 32 bits.
MOST = 2**31 - 1
_TOMBSTONE = "tombstone", "the message has no value (a tombstone)"
_EMPTY = "empty message", "the message is empty"
# The rows, the position of each row's value (from 0 on), and the rejected values, with positions instead of lines.
Rows = tuple[pl.DataFrame, np.ndarray, list[Reject]]
_WRONG = (
    EOFError,
    ValueError,
    LookupError,
    TypeError,
    ArithmeticError,
    AttributeError,
    MemoryError,
    struct.error,
    RecursionError,
)


class Decoder(ABC):
    """Turns the values of messages into rows; picklable."""

    @abstractmethod
    def rows(self, values: Sequence[bytes], spec: DataSpec, label: str) -> Rows:
        """Return the columns of ``spec`` for ``values``, which are messages of the partition ``label``."""

    @abstractmethod
    def sampled(self, values: Sequence[bytes | None]) -> tuple[pl.DataFrame, int]:
        """Return all columns of the values that are rows, and the number of values that are not."""


@dataclass(frozen=True)
class LineDecoder(Decoder):
    """Reads values as lines of the file format ``data.format``, without a header."""

    data: DataConfig

    def rows(self, values: Sequence[bytes], spec: DataSpec, label: str) -> Rows:
        # The text looks like the middle of a file to the format: its first bytes are those of a row.
        text = b"\n" + b"".join(map(_line, values))
        file = LogFile(label=label, data=self.data, spec=spec, block_bytes=len(text) + 1, start=1, first_line=0)
        # The format checks the names of the columns in the first block of a file. Only enough messages show that a name
        # is wrong: a few may all lack a key.
        if len(values) >= TELLING_LINES:
            file = replace(file, start=0, first_line=1)
            text = text[1:]
        frames, lines, rejects = [], [], []
        for block in FORMATS[self.data.format].blocks(io.BytesIO(text), file):
            read = block.read()
            frames.append(read.frame)
            lines.append(read.lines)
            rejects += [replace(reject, line=reject.line - file.first_line) for reject in read.rejects]
        return pl.concat(frames, how="vertical_relaxed"), np.concatenate(lines) - file.first_line, rejects

    def sampled(self, values: Sequence[bytes | None]) -> tuple[pl.DataFrame, int]:
        """Read JSON by its keys, and delimited text by ``data.columns``."""
        lines = [_line(value)[:-1] for value in values if value is not None]
        if self.data.format == "csv":
            raise ConfigError(
                "nightjar init reads messages of JSON or Avro", hint="write your schema by hand: docs/data.md"
            )
        good = list(object_lines(lines, 0))
        text = b"".join(lines[at] + b"\n" for at in good)
        return json_frame(text, None), len(values) - len(good)


def _line(value: bytes) -> bytes:
    # Put ``value`` on one line. Between JSON tokens, a line break is the same as a blank.
    return value.replace(b"\r", b" ").replace(b"\n", b" ") + b"\n"


@dataclass(frozen=True)
class AvroDecoder(Decoder):
    """Reads records of one ``schema`` (JSON), or of a ``registry``'s schemas, whose number is in the first 5 bytes."""

    schema: str
    registry: str

    def rows(self, values: Sequence[bytes], spec: DataSpec, label: str) -> Rows:
        records, good, rejects = list[dict[str, Any]](), list[int](), list[Reject]()
        # Count the messages of each schema number: a number that occurs only once may not be a number at all
        # (``registered``).
        numbers = Counter(map(_number_of, values))
        for at, value in enumerate(values):
            try:
                records.append(self._record(value, lone=numbers[_number_of(value)] == 1))
                good.append(at)
            except _WRONG as error:
                # A plain ValueError has the decoder's own message; other exceptions are shown by their repr.
                reason = str(error) if type(error) is ValueError else repr(error)
                rejects.append(Reject(at, "no Avro record", f"the message is no record of its schema: {reason}"))
        if records:
            require_columns(spec, list(records[0]), label, header=False)
        columns = []
        for name in spec.columns:
            column = [_pairs(record.get(name)) for record in records]
            # Not strict, since a union may be a number in one record and text in the next.
            columns.append(pl.Series(name, column, strict=False))
        return pl.DataFrame(columns), np.array(good, np.int64), rejects

    def sampled(self, values: Sequence[bytes | None]) -> tuple[pl.DataFrame, int]:
        records = []
        for value in values:
            try:
                records.append(self._record(value or b""))
            except _WRONG:
                continue
        return pl.from_dicts(records, infer_schema_length=None), len(values) - len(records)

    def _record(self, value: bytes, *, lone: bool = False) -> dict[str, Any]:
        # ``lone``: no other message of the block has this schema number.
        from fastavro import schemaless_reader

        schema = self.schema
        if self.registry:
            number = _number_of(value)
            if number is None:
                raise ValueError("it does not begin with the number of a schema")
            value = value[5:]
            known = registered(self.registry, number, lone=lone)
            if known is None:
                raise ValueError(f"the registry has no Avro schema of number {number}")
            schema = known
        # fastavro reads only what it needs. Bytes that are left over show that another schema wrote the message.
        stream = io.BytesIO(value)
        record: Any = schemaless_reader(stream, _parsed(schema), None)
        if stream.tell() != len(value):
            raise ValueError(f"{len(value) - stream.tell()} bytes are left over")
        if not isinstance(record, dict):
            raise ValueError("it is no record")
        return record


def _number_of(value: bytes) -> int | None:
    # The registry's wire format is a zero byte, then the schema number as four bytes, most significant first.
    if value[:1] != b"\0" or len(value) < 5:
        return None
    return int.from_bytes(value[1:5], "big")


def _pairs(value: Any) -> Any:
    # Turn a map into a list of pairs, as Arrow does. A struct would have a field for every key of any record.
    if not isinstance(value, dict):
        return value
    return [{"key": key, "value": each} for key, each in value.items()]


@dataclass
class _SchemaRegistry:
    """Cache of a registry: schemas by number, missing numbers, and the seconds spent on lone numbers."""

    schemas: dict[int, str] = field(default_factory=dict)
    missing: set[int] = field(default_factory=set)
    seconds: float = 0.0


_registries: dict[str, _SchemaRegistry] = {}


@lru_cache(maxsize=64)
def _parsed(schema: str) -> Any:
    # Raise DataError if ``schema`` is not Avro, which fastavro reports by errors of several classes.
    from fastavro import parse_schema

    try:
        return parse_schema(json.loads(schema))
    except Exception as error:
        raise DataError(
            f"the messages' schema is no Avro schema: {error}", hint=f"data.options.{SCHEMA_FILE}=<file.avsc>"
        ) from None


def schema_mark(data: DataConfig) -> str:
    """Return the part of a fingerprint that covers ``data.options.schema.file``; "" if there is none."""
    # Schemas of a registry never change, and each message has its schema number, so they need no mark.
    file = data.options.get(SCHEMA_FILE)
    if data.messages != "avro" or file is None:
        return ""
    return f" schema {hashlib.sha256(_schema_of(file).encode()).hexdigest()[:16]}"


def _schema_of(file: str) -> str:
    try:
        # Normalise the JSON, so that the mark does not depend on white space.
        schema = json.dumps(json.loads(Path(file).read_text()))
    except (OSError, ValueError) as error:
        raise DataError(
            f"data.options.{SCHEMA_FILE}={file} is no Avro schema: {error}", hint="a file of JSON"
        ) from None
    _parsed(schema)
    return schema


def registered(registry: str, number: int, *, lone: bool = False) -> str | None:
    """Return the Avro schema of that number; None if the registry has none, or one of another kind.

    Arbitrary bytes may look like any number, and each number would cost a request. Such a number stands out because no
    other message of the block has it, not because it is large: some registries begin to count at 100,001. So ``lone``
    numbers are asked for until negative answers took ``ASK_SECONDS``, and all others always: a schema in use is never
    missed.

    Args:
        registry: The registry's address.
        number: The schema's number.
        lone: No other message of the block has it.

    Raises:
        ValueError: The registry was not asked.
        UnreachableError: It does not answer.
        DataError: It refuses.
    """
    known = _registries.setdefault(registry, _SchemaRegistry())
    if number in known.schemas:
        return known.schemas[number]
    if number in known.missing or number > MOST:
        return None
    if lone and known.seconds > ASK_SECONDS:
        raise ValueError(
            f"the registry is not asked for a schema of number {number}, which no message beside it has: it had none "
            f"of {len(known.missing)} others"
        )
    began = time.perf_counter()
    schema = _asked(registry, number)
    if schema is not None:
        known.schemas[number] = schema
        return schema
    known.missing.add(number)
    if lone:
        known.seconds += time.perf_counter() - began
    return None


def _asked(registry: str, number: int) -> str | None:
    url, hint = f"{registry.rstrip('/')}/schemas/ids/{number}", f"data.options.{REGISTRY}=<its address>"
    try:
        answer = retried(lambda: _fetched(url), f"asking for {url}")
        if answer is None:
            return None
        schema = str(json.loads(answer)["schema"])
        _parsed(schema)
        return schema
    except ConnectionError as error:
        raise UnreachableError(f"the schema registry does not answer at {url}: {error}", hint=hint) from error
    except PermissionError as error:
        raise DataError(f"the schema registry refuses {url}: {error}", hint=hint) from None
    except (LookupError, TypeError, ValueError, DataError):
        # The number belongs to a schema of another kind, such as Protobuf, or the answer is invalid: there is no such
        # Avro schema.
        return None


def _fetched(url: str) -> bytes | None:
    # Return None if the server has nothing at ``url``. Raises ConnectionError and PermissionError.
    try:
        with urllib.request.urlopen(url, timeout=REGISTRY_SECONDS) as answer:
            return bytes(answer.read())
    except urllib.error.HTTPError as error:
        if error.code in (401, 403):
            raise PermissionError(str(error)) from None
        # Time-outs (408) and too many requests (429) are transient. All other 4xx codes mean that there is nothing.
        if 400 <= error.code < 500 and error.code not in (408, 429):
            return None
        raise ConnectionError(str(error)) from error
    except (OSError, http.client.HTTPException) as error:
        raise ConnectionError(str(error)) from error


def decoder_of(data: DataConfig) -> Decoder:
    """Return the decoder that ``data.messages`` names; ConfigError if its library or its schema is missing."""
    kind = data.messages or MESSAGES[0]
    if kind != "avro":
        return LineDecoder(replace(data, format=kind, header=False))
    try:
        import fastavro  # noqa: F401
    except ImportError as error:
        raise ConfigError(
            f"data.messages=avro needs the package fastavro, which cannot be imported: {error}",
            hint="pip install 'nightjar[avro]'",
        ) from None
    file = data.options.get(SCHEMA_FILE)
    schema = _schema_of(file) if file else ""
    return AvroDecoder(schema, data.options.get(REGISTRY, ""))


@dataclass(frozen=True)
class MessageBlock:
    """Unparsed messages of ``file``, a partition, and their ``offsets``."""

    decoder: Decoder
    spec: DataSpec
    file: str
    offsets: np.ndarray
    values: tuple[bytes | None, ...]
    place: str = field(default="")

    def read(self) -> RawBlock:
        """Return the rows, and aside the messages without a value and those that do not parse, by their offsets."""
        filled, values, rejects = list[int](), list[bytes](), list[Reject]()
        for at, value in enumerate(self.values):
            if value is None:
                rejects.append(Reject(int(self.offsets[at]), *_TOMBSTONE))
            elif not value.strip():
                # Hide it from the decoder: a line without a row would shift the numbers of all later lines.
                rejects.append(Reject(int(self.offsets[at]), *_EMPTY))
            else:
                filled.append(at)
                values.append(value)
        if not filled:
            empty = pl.DataFrame({name: pl.Series([], dtype=pl.String) for name in self.spec.columns})
            return RawBlock(frame=empty, file=self.file, lines=self.offsets[:0], rejects=rejects)
        frame, good, bad = self.decoder.rows(values, self.spec, self.file)
        offsets = self.offsets[filled]
        rejects += [replace(reject, line=int(offsets[reject.line])) for reject in bad]
        rejects.sort(key=lambda reject: reject.line)
        return RawBlock(frame=frame, file=self.file, lines=offsets[good], rejects=rejects)
