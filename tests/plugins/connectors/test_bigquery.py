"""BigQuery's Storage Read API, spoken by a gRPC server in this process: sessions, streams, snapshot times."""

from __future__ import annotations

import socket
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, date, datetime, timedelta

import grpc
import polars as pl
import pyarrow as pa
import pytest
from google.cloud.bigquery_storage_v1 import types

from pipeline.config import DedupeConfig, SparseFeature, SplitConfig, WatermarkConfig
from pipeline.core.errors import ConfigError, DataError, UnreachableError
from pipeline.ingest.days import day_state
from pipeline.ingest.stage import raw_fingerprint
from pipeline.plugins.connectors import bigquery_table
from pipeline.plugins.init.sample import read_sample
from tests.ingest.test_formats import log
from tests.plugins.connectors import test_delta
from tests.plugins.connectors.test_delta import DAY, of_days, pinned

SERVICE = "google.cloud.bigquery.storage.v1.BigQueryRead"
BEFORE, NOON = datetime(2026, 1, 1, tzinfo=UTC), "2026-02-02T12:00:00Z"


class Server:
    """Tables by name, each in states from some time on; every stream breaks once after its first batch."""

    def __init__(self) -> None:
        self.tables: dict[str, list[tuple[datetime, pl.DataFrame]]] = {}
        self.sessions, self.streams, self.broken, self.breaks = [], {}, set(), True
        self.patience: list[float] = []  # seconds that clients wait for a session
        self.server = grpc.server(ThreadPoolExecutor(4))
        methods = {
            "CreateReadSession": grpc.unary_unary_rpc_method_handler(
                self.create, types.CreateReadSessionRequest.deserialize, types.ReadSession.serialize
            ),
            "ReadRows": grpc.unary_stream_rpc_method_handler(
                self.read, types.ReadRowsRequest.deserialize, types.ReadRowsResponse.serialize
            ),
        }
        self.server.add_generic_rpc_handlers([grpc.method_handlers_generic_handler(SERVICE, methods)])
        self.port = self.server.add_insecure_port("127.0.0.1:0")
        self.server.start()

    def create(self, request, context):
        wanted = request.read_session
        self.patience.append(context.time_remaining())
        _, project, _, dataset, _, table = wanted.table.split("/")
        states = self.tables.get(f"{project}.{dataset}.{table}")
        if states is None:
            context.abort(grpc.StatusCode.NOT_FOUND, f"Not found: Table {project}:{dataset}.{table}")
        at = wanted.table_modifiers.snapshot_time
        frame = next((frame for since, frame in reversed(states) if since <= at), None)
        if frame is None:
            context.abort(grpc.StatusCode.INVALID_ARGUMENT, "Invalid snapshot time: before the table's history")
        frame = self.selected(frame, wanted.read_options)
        schema = frame.to_arrow().schema
        self.sessions.append(wanted)
        size = max(-(-frame.height // request.max_stream_count), 1)
        names = []
        for number, rows in enumerate(frame.iter_slices(size) if frame.height else ()):
            names.append(f"sessions/{len(self.sessions)}/streams/{number}")
            self.streams[names[-1]] = rows.to_arrow().cast(schema)
        return types.ReadSession(
            name=f"sessions/{len(self.sessions)}",
            streams=[types.ReadStream(name=name) for name in names],
            arrow_schema=types.ArrowSchema(serialized_schema=schema.serialize().to_pybytes()),
            estimated_row_count=frame.height,
            estimated_total_bytes_scanned=frame.height * 50,
        )

    def selected(self, frame: pl.DataFrame, options) -> pl.DataFrame:
        if where := options.row_restriction:
            utc = frame.with_columns(pl.col(pl.Datetime("us", "UTC")).dt.replace_time_zone(None))
            keep = utc.with_row_index("row_").sql(f"SELECT row_ FROM self WHERE {_polars(where)}")["row_"]
            frame = frame[keep.to_list()]
        return frame.select(list(options.selected_fields) or frame.columns)

    def read(self, request, context):
        table = self.streams[request.read_stream]
        for number, batch in enumerate(table.slice(request.offset).combine_chunks().to_batches(max_chunksize=50)):
            if number == 1 and self.breaks and request.read_stream not in self.broken:
                self.broken.add(request.read_stream)
                context.abort(grpc.StatusCode.UNAVAILABLE, "the connection broke")
            data = types.ArrowRecordBatch(serialized_record_batch=batch.serialize().to_pybytes(), row_count=len(batch))
            yield types.ReadRowsResponse(arrow_record_batch=data, row_count=len(batch))


def _polars(where: str) -> str:
    return where.replace("`", '"').replace("AS DATETIME", "AS TIMESTAMP").replace("+00:00", "")


@pytest.fixture(scope="module")
def running():
    server = Server()
    yield server
    server.server.stop(0)


@pytest.fixture
def server(running):
    running.patience.clear()
    running.tables, running.sessions, running.broken = {"shop.ads.clicks": [(BEFORE, log())]}, [], set()
    return running


def config(server, **changes):
    options = {"endpoint": f"127.0.0.1:{server.port}", "credentials": "anonymous", **changes.pop("options", {})}
    fields = {"path": "shop.ads.clicks", "kind": "bigquery", "options": options, "snapshot": NOON, **changes}
    return test_delta.config(**fields)


@pytest.mark.parametrize("streams", [1, 3])
def test_the_dataset_is_that_of_the_same_rows_in_parquet(run_ingest, tmp_path, monkeypatch, server, streams):
    monkeypatch.setattr(bigquery_table, "MOST_STREAMS", streams)
    monkeypatch.setattr("pipeline.ingest.file_source.BLOCK_UNIT", 2000)
    log().write_parquet(tmp_path / "log.parquet")
    dataset = run_ingest(config(server))
    assert dataset.checksums == run_ingest(test_delta.config(tmp_path / "log.parquet", "parquet")).checksums
    assert len(server.broken) == streams, "streams that broke were taken up where they broke"
    assert dataset.summary["snapshot"] == "shop.ads.clicks as of 2026-02-02T12:00:00+00:00"
    assert sorted(server.sessions[-1].read_options.selected_fields) == ["b", "c", "label", "n", "t", "x"]


@pytest.mark.parametrize(
    "changes",
    [
        {"dedupe": DedupeConfig(key="n")},
        {"timestamp": "time", "split": SplitConfig(by="time", test_share=0.3)},
        {"day": "2026-01-30..2026-02-01", "day_column": "date", "dedupe": DedupeConfig(key="n")},
    ],
)
def test_passes_before_the_first_one_read_the_session_of_all_columns(run_ingest, tmp_path, server, changes):
    server.tables["shop.ads.clicks"] = [(BEFORE, of_days())]
    of_days().write_parquet(tmp_path / "log.parquet")
    expected = run_ingest(test_delta.config(tmp_path / "log.parquet", "parquet", **changes))
    dataset = run_ingest(config(server, **changes))
    assert dataset.summary.get("rows_repeated") == expected.summary.get("rows_repeated")
    assert dataset.all_rows.sort(pl.all()).equals(expected.all_rows.sort(pl.all()))
    # One to learn the types, and one for each day: another session may deal the rows to its streams differently.
    assert len(server.sessions) == 1 + max(len(config(server, **changes).data.days), 1)


LATER = [pl.Datetime("us"), pl.String, "packed"]  # the clauses of a time without a zone, of a day as text, as a number


@pytest.mark.parametrize(
    "kind",
    [pl.Date, pl.Datetime("us", "UTC"), "epoch", *(pytest.param(kind, marks=pytest.mark.slow) for kind in LATER)],
)
def test_a_day_is_a_row_restriction(run_ingest, tmp_path, server, kind):
    frame, day = of_days(), {"day": "2026-01-31", "timestamp": "time"}
    if kind == pl.Date:
        day = {"day": "2026-01-31", "day_column": "date"}
    elif kind == "packed":
        frame = frame.with_columns(pl.col("time").dt.strftime("%Y%m%d").cast(pl.Int64))
    elif kind == "epoch":
        frame = frame.with_columns(pl.col("time").dt.epoch("s"))
    elif kind == pl.String:
        frame = frame.with_columns(pl.col("time").dt.strftime("%Y-%m-%d %H:%M:%S"))
    else:
        frame = frame.with_columns(pl.col("time").cast(kind))
    server.tables["shop.ads.clicks"] = [(BEFORE, frame)]
    frame.filter(date=date(2026, 1, 31)).write_parquet(tmp_path / "2026-01-31.parquet")
    expected = run_ingest(test_delta.config(tmp_path / "{day}.parquet", "parquet", **day))
    dataset = run_ingest(config(server, **day))
    assert dataset.all_rows.equals(expected.all_rows)
    assert dataset.summary["rows"] == 200 and dataset.summary["rows_other_days"] == 0


def test_rows_that_come_later_are_not_in_it(run_ingest, tmp_path, server):
    settings = config(server, snapshot=None, day="2026-01-30", day_column="date")
    server.tables["shop.ads.clicks"] = [(BEFORE, of_days())]
    expected = run_ingest(settings)
    later = datetime(2026, 1, 31, 3, 0, 1, tzinfo=UTC)  # a second after it is read as of

    def commit():
        server.tables["shop.ads.clicks"].append((later, of_days().head(70)))

    dataset = pinned(tmp_path, settings, commit)
    assert {name: file.checksum for name, file in dataset.files.items()} == expected.checksums
    assert dataset.summary["snapshot"] == "shop.ads.clicks as of 2026-01-31T03:00:00+00:00"
    assert raw_fingerprint(settings.data) == "bigquery shop.ads.clicks at 2026-01-31T03:00:00+00:00"
    six = config(server, snapshot=None, day="2026-01-30", day_column="date", options={"settled_hours": "6"})
    assert run_ingest(six).summary["rows"] == 70


def test_a_day_waits_until_it_is_settled(server):
    today = datetime.now(UTC).date()
    settings = config(server, snapshot=None, day=str(today), day_column="date", options={"settled_hours": "48"})
    assert "which is to come" in day_state(settings.data, today).missing[0]
    old = config(server, snapshot=None, day=str(DAY), day_column="date")
    server.tables["shop.ads.clicks"] = [(BEFORE, of_days())]
    assert day_state(old.data, DAY).complete
    assert day_state(old.data, DAY + timedelta(days=9)).missing == ["there are no rows of it in shop.ads.clicks"]


def test_what_is_not_there_is_told(run_ingest, server):
    with pytest.raises(DataError, match="Not found: Table shop:ads.views"):
        run_ingest(config(server, path="shop.ads.views"))
    with pytest.raises(DataError, match=r"has no column 'u' \(data.sparse.u.column\)"):
        run_ingest(config(server, sparse={"u": SparseFeature()}))
    with pytest.raises(DataError, match="cannot be read as it was then: .* before the table's history") as told:
        run_ingest(config(server, snapshot="2025-01-01T00:00:00Z"))
    assert "seven days" in told.value.hint
    for changes, words in [
        ({"path": "clicks"}, "expected <project>.<dataset>.<table>"),
        ({"snapshot": "yesterday"}, "expected a time"),
        ({"snapshot": None}, "neither data.day nor data.snapshot says as of when"),
        ({"options": {"settled_hours": "soon"}}, "expected hours"),
        ({"options": {"credentials": "mine"}}, "expected anonymous or nothing"),
        ({"options": {"endpiont": "x"}}, "data.options has 'endpiont', expected some of: project"),
        ({"watermark": WatermarkConfig(later_rows=True)}, "does not tell"),
        ({"messages": "csv"}, "has rows, not messages"),
    ]:
        with pytest.raises(ConfigError, match=words):
            run_ingest(config(server, **changes))


@pytest.mark.measures
def test_a_service_that_does_not_answer_is_not_waited_for_longer_than_a_minute(run_ingest, server, monkeypatch):
    run_ingest(config(server))
    assert bigquery_table.SECONDS == 60
    assert server.patience and max(server.patience) < 70  # gRPC rounds up; the client's own limit is ten minutes
    monkeypatch.setattr(bigquery_table, "SECONDS", 0.5)
    with socket.socket() as nobody:  # it has the port, and does not listen
        nobody.bind(("127.0.0.1", 0))
        with pytest.raises(UnreachableError, match="BigQuery does not answer: Timeout of 0.5s exceeded"):
            run_ingest(config(server, options={"endpoint": f"127.0.0.1:{nobody.getsockname()[1]}"}))


def test_a_sample_for_init(server):
    server.tables["shop.ads.clicks"] = [(BEFORE, log())]
    options = dict(config(server).data.options)
    sample = read_sample("bigquery:shop.ads.clicks", options)
    assert sample.frame.columns == log().columns and sample.total == 600
    assert pa.table(sample.frame.to_arrow()).num_rows == 600
