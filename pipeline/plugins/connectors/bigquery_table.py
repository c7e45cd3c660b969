"""A BigQuery table at one time, read through the Storage Read API as streams of Arrow batches.

A read session is of one time, one day (a row restriction) and the columns that are needed.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, date, datetime, timedelta
from functools import cached_property
from typing import Any

import grpc
import numpy as np
import polars as pl
import pyarrow as pa
from google.api_core import exceptions
from google.api_core.retry import Retry, if_exception_type
from google.auth.exceptions import DefaultCredentialsError, RefreshError, TransportError
from google.cloud.bigquery_storage_v1 import BigQueryReadClient
from google.cloud.bigquery_storage_v1.services.big_query_read.transports import BigQueryReadGrpcTransport
from google.cloud.bigquery_storage_v1.types import DataFormat, ReadSession

from pipeline.config.data import DataConfig
from pipeline.core.errors import ConfigError, DataError, UnreachableError
from pipeline.ingest.days import day_number
from pipeline.ingest.formats.columnar import check_types, frame_of
from pipeline.ingest.schema import DataSpec, require_columns
from pipeline.ingest.schema_of_config import data_spec
from pipeline.ingest.sources import Block, RawBlock, Source
from pipeline.ingest.times import SECONDS_PER_HOUR, end_of_day
from pipeline.plugins.connectors.options import ANONYMOUS
from pipeline.specs.connector import Delivery, Excerpt, Snapshot

SECONDS = 60.0  # time limit for the service's answer
MOST_STREAMS = 16
_MESSAGE = [("grpc.max_receive_message_length", -1)]
_PASSING = (exceptions.ServerError, exceptions.TooManyRequests, exceptions.RetryError, TransportError)


def client_of(data: DataConfig) -> BigQueryReadClient:
    """Return a client of the service, or of the ``endpoint`` of ``data.options``."""
    endpoint = data.options.get("endpoint")
    if data.options.get("credentials") == ANONYMOUS:
        # An emulator has no TLS, which the client's default transport requires.
        channel = grpc.insecure_channel(endpoint or "localhost:9060", options=_MESSAGE)
        return BigQueryReadClient(transport=BigQueryReadGrpcTransport(channel=channel))
    settings = {"api_endpoint": endpoint} if endpoint else None
    return BigQueryReadClient(client_options=settings)


@contextmanager
def answering(data: DataConfig) -> Iterator[None]:
    """Turn what the client raises into errors that say what to do."""
    try:
        yield
    except (DefaultCredentialsError, RefreshError) as error:
        raise ConfigError(
            f"there are no valid credentials for {data.path}: {error}", hint="gcloud auth application-default login"
        ) from None
    except (exceptions.NotFound, exceptions.PermissionDenied, exceptions.Unauthenticated) as error:
        raise DataError(
            f"data.path={data.path} cannot be read: {error.message}",
            hint="data.path=<project>.<dataset>.<table>, and the role BigQuery Read Session User",
        ) from None
    except exceptions.BadRequest as error:
        raise DataError(
            f"{data.path} cannot be read as it was then: {error.message}",
            hint="BigQuery keeps seven days of history; data.snapshot=<a later time> reads what the day holds then",
        ) from None
    except _PASSING as error:
        raise UnreachableError(
            f"BigQuery does not answer: {error}", hint="run the same command once it answers"
        ) from error


class BigQuerySnapshot(Snapshot):
    """The table as it was at ``time``."""

    def __init__(self, data: DataConfig) -> None:
        self.data = data
        if data.snapshot is not None:
            self.time = datetime.fromisoformat(data.snapshot)
        elif data.days:
            # A day's rows are complete some hours after its end. The time must not depend on when the table is read, so
            # that the same command has the same key tomorrow.
            hours = float(data.options.get("settled_hours", "3"))
            settled = end_of_day(data.days[-1], data.time_zone) + hours * SECONDS_PER_HOUR
            self.time = datetime.fromtimestamp(settled, UTC)
        else:
            now = datetime.now(UTC).strftime("%Y-%m-%dT%H:00:00Z")
            raise ConfigError(
                f"data.path={data.path} changes, and neither data.day nor data.snapshot says as of when it is read",
                hint=f"data.snapshot={now}, or data.day",
            )
        self.mark = f"bigquery {data.path} at {self.time.isoformat()}"
        self.version = f"{data.path} as of {self.time.isoformat()}"
        self._sessions: dict[date | None, Any] = {}

    def delivery(self, day: date | None) -> Delivery:
        if self.time.timestamp() > time.time():
            # The service refuses a time in the future. A missing part makes the night wait for it.
            missing = f"{self.data.path} is read as of {self.time.isoformat()}, which is to come"
            return Delivery(parts=1, missing=(missing,))
        session = self._session(day)
        return Delivery(parts=len(session.streams), bytes=session.estimated_total_bytes_scanned)

    def sources(self, day: date | None, spec: DataSpec, block_bytes: int) -> list[Source]:
        session = self._session(day)
        # Keep the schema as bytes, taken out of the message once: sources are sent to other processes.
        schema = session.arrow_schema.serialized_schema
        sources: list[Source] = []
        for number, stream in enumerate(session.streams):
            source = StreamSource(
                data=self.data,
                spec=spec,
                stream=stream.name,
                schema=schema,
                block_bytes=block_bytes,
                label=f"{self.data.path}/{number}",
            )
            sources.append(source)
        return sources

    def excerpt(self, rows: int) -> Excerpt:
        session, frames = self._whole, list[pl.DataFrame]()
        schema = _schema(session)
        for stream in session.streams:
            for batch in batches(self.data, stream.name, schema):
                frames.append(frame_of(batch, schema.names))
                if sum(frame.height for frame in frames) >= rows:
                    break
        frame = pl.concat(frames).head(rows) if frames else pl.DataFrame()
        # The service only estimates the number of rows, so more may have been read.
        return Excerpt(frame=frame, total=max(session.estimated_row_count, frame.height), parts=1)

    @cached_property
    def _whole(self) -> Any:
        """A session of one stream of all columns, which gives their types."""
        return self._create(ReadSession.TableReadOptions(), streams=1)

    def _session(self, day: date | None) -> Any:
        # One session for all passes, of all columns of the schema: another one may deal the rows to its streams
        # differently, and a row is known by its stream and its place there.
        if day not in self._sessions:
            spec = data_spec(self.data)
            schema = _schema(self._whole)
            require_columns(spec, schema.names, self.version, header=False)
            check_types(spec, schema, self.version)
            where = restriction(self.data, schema, day) if day is not None else ""
            options = ReadSession.TableReadOptions(selected_fields=list(spec.columns), row_restriction=where)
            self._sessions[day] = self._create(options, MOST_STREAMS)
        return self._sessions[day]

    def _create(self, options: Any, streams: int) -> Any:
        project, dataset, table = (self.data.path or "").split(".")
        wanted = ReadSession(
            table=f"projects/{project}/datasets/{dataset}/tables/{table}",
            data_format=DataFormat.ARROW,
            table_modifiers=ReadSession.TableModifiers(snapshot_time=self.time),
            read_options=options,
        )
        parent = f"projects/{self.data.options.get('project', project)}"
        retry = Retry(predicate=if_exception_type(*_PASSING), timeout=SECONDS)
        with answering(self.data):
            return client_of(self.data).create_read_session(
                parent=parent, read_session=wanted, max_stream_count=streams, retry=retry, timeout=SECONDS
            )


def _schema(session: Any) -> pa.Schema:
    return pa.ipc.read_schema(pa.py_buffer(session.arrow_schema.serialized_schema))


def restriction(data: DataConfig, schema: pa.Schema, day: date) -> str:
    """Return SQL for the rows of ``day``, or "" if the column's type allows none. Ingestion still checks each row."""
    name, one = data.day_column or data.timestamp or "", timedelta(days=1)
    # The condition may let rows of other days through, but must never drop a row of this day.
    kind = schema.field(name).type
    low, high = int(end_of_day(day - one, data.time_zone)), int(end_of_day(day, data.time_zone))
    if pa.types.is_date(kind):
        return f"`{name}` = CAST('{day}' AS DATE)"
    if pa.types.is_timestamp(kind):
        # A time without a zone is already in the log's days. A time with a zone is an instant, whose day depends on
        # ``data.time_zone``.
        start, end, as_type = f"{day} 00:00:00", f"{day + one} 00:00:00", "DATETIME"
        if kind.tz is not None:
            start = f"{datetime.fromtimestamp(low, UTC):%Y-%m-%d %H:%M:%S}+00:00"
            end = f"{datetime.fromtimestamp(high, UTC):%Y-%m-%d %H:%M:%S}+00:00"
            as_type = "TIMESTAMP"
        return f"`{name}` >= CAST('{start}' AS {as_type}) AND `{name}` < CAST('{end}' AS {as_type})"
    packed = str(day).replace("-", "")
    if pa.types.is_string(kind) or pa.types.is_large_string(kind):
        if data.time_format is not None:
            return ""  # such text does not sort by day
        # Texts with different UTC offsets do not sort by time, so with a time zone the range extends by a day on either
        # side.
        around = one if data.time_zone else timedelta()
        return f"(`{name}` >= '{day - around}' AND `{name}` < '{day + one + around}') OR `{name}` = '{packed}'"
    if not pa.types.is_integer(kind):
        return ""
    if data.day_column is not None:
        return f"`{name}` = {day_number(day)} OR `{name}` = {packed}"
    # Match seconds to nanoseconds since 1970. Ingestion tells the unit by the size of the number, as these ranges do.
    ranges = []
    for unit in (1, 10**3, 10**6, 10**9):
        ranges.append(f"(`{name}` >= {low * unit} AND `{name}` < {high * unit})")
    return " OR ".join([*ranges, f"`{name}` = {packed}"])


def batches(data: DataConfig, stream: str, schema: pa.Schema) -> Iterator[pa.RecordBatch]:
    """Yield the batches of a stream, and resume after a broken connection."""
    with answering(data):
        for answer in client_of(data).read_rows(stream, timeout=None):
            yield pa.ipc.read_record_batch(pa.py_buffer(answer.arrow_record_batch.serialized_record_batch), schema)


@dataclass(frozen=True, kw_only=True)
class StreamSource(Source):
    """A stream of a read session."""

    data: DataConfig
    spec: DataSpec
    stream: str
    schema: bytes
    block_bytes: int
    label: str

    def blocks(self) -> Iterator[Block]:
        """Yield rows as they are typed, numbered from 1."""
        schema, waiting, first = pa.ipc.read_schema(pa.py_buffer(self.schema)), list[pa.RecordBatch](), 1
        for batch in batches(self.data, self.stream, schema):
            waiting.append(batch)
            if sum(each.nbytes for each in waiting) >= self.block_bytes:
                block = self._block(waiting, first)
                first, waiting = first + len(block.lines), []
                yield block
        if waiting:
            yield self._block(waiting, first)

    def _block(self, waiting: list[pa.RecordBatch], first: int) -> RawBlock:
        frame = frame_of(pa.Table.from_batches(waiting), list(self.spec.columns))
        return RawBlock(frame=frame, file=self.label, lines=np.arange(first, first + frame.height))
