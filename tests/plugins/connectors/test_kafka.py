"""Kafka topics on librdkafka's own mock cluster, which speaks the protocol.

The cluster answers no look-up by time, so ``Cluster.by_time`` does it, as a broker finds the first message of a time in
its index. Everything else, retention included, is the cluster's own.
"""

from __future__ import annotations

import io
import json
import threading
from datetime import UTC, date, datetime, timedelta
from http.server import BaseHTTPRequestHandler, HTTPServer

import fastavro
import numpy as np
import polars as pl
import pytest
from confluent_kafka import Consumer, Producer, TopicPartition

from pipeline import cli
from pipeline.config import LabelConfig, SparseFeature, WatermarkConfig
from pipeline.core.errors import ConfigError, DataError, UnreachableError
from pipeline.ingest.days import day_state
from pipeline.ingest.parse import parse
from pipeline.ingest.schema_of_config import data_spec
from pipeline.ingest.stage import raw_fingerprint
from pipeline.plugins.connectors import kafka_topic, messages
from pipeline.plugins.connectors.messages import AvroDecoder, registered
from tests.ingest.conftest import csv_config
from tests.ingest.test_formats import log
from tests.plugins.connectors import test_delta
from tests.plugins.connectors.test_delta import DAY, pinned
from tests.servers import kept_port
from tests.waits import PATIENCE

NIGHT = datetime(2026, 1, 30)
PARTITIONS = 4  # of topics that the mock cluster makes
SCHEMA = {
    "type": "record",
    "name": "click",
    "fields": [
        {"name": "label", "type": "long"},
        {"name": "x", "type": ["null", "double"]},
        {"name": "c", "type": ["null", "string"]},
        {"name": "n", "type": "long"},
        {"name": "b", "type": ["null", "boolean"]},
        {"name": "t", "type": {"type": "array", "items": "long"}},
    ],
}


class Cluster:
    def __init__(self) -> None:
        self.producer = Producer({"test.mock.num.brokers": 1, "log_level": 0})
        brokers = self.producer.list_topics(timeout=PATIENCE).brokers.values()
        self.times = {partition: [] for partition in range(PARTITIONS)}
        self.options = {"bootstrap.servers": ",".join(f"{each.host}:{each.port}" for each in brokers)}

    def send(self, values, partition=None, time=NIGHT, step=timedelta(0)) -> None:
        """``values``, spread over all partitions or to one, ``step`` apart."""
        for at, value in enumerate(values):
            stamp = int((time + at * step).replace(tzinfo=UTC).timestamp() * 1000)
            target = at % PARTITIONS if partition is None else partition
            self.times[target].append(stamp)
            self.producer.produce("clicks", value=value, partition=target, timestamp=stamp)
            if at % 1000 == 999:
                self.producer.poll(0)
        assert self.producer.flush(PATIENCE) == 0

    def by_time(self, consumer, topic, partitions, milliseconds):
        """As ``kafka_topic.first_offsets``."""
        told = []
        for partition in partitions:
            low, _ = consumer.get_watermark_offsets(TopicPartition(topic, partition), timeout=PATIENCE)
            times = enumerate(self.times[partition])
            told.append(next((at for at, stamp in times if at >= low and stamp >= milliseconds), None))
        return told


@pytest.fixture
def cluster(monkeypatch):
    made = Cluster()
    monkeypatch.setattr(kafka_topic, "first_offsets", made.by_time)
    return made


def config(cluster, **changes):
    return test_delta.config(**{"path": "clicks", "kind": "kafka", "options": cluster.options, **changes})


def encoded(frame: pl.DataFrame, kind: str) -> list[bytes]:
    if kind == "jsonl":
        return frame.write_ndjson().encode().splitlines()
    if kind == "csv":
        flat = frame.with_columns(pl.col("t").cast(pl.List(pl.String)).list.join("|"), pl.col("b").cast(pl.Int8))
        return flat.write_csv(include_header=False).encode().splitlines()
    values = []
    for row in frame.iter_rows(named=True):
        fastavro.schemaless_writer(stream := io.BytesIO(), SCHEMA, row)
        values.append(stream.getvalue())
    return values


@pytest.mark.parametrize("kind", ["jsonl", "csv", "avro"])
def test_the_dataset_is_that_of_the_same_rows_in_parquet(run_ingest, tmp_path, monkeypatch, cluster, kind):
    monkeypatch.setattr("pipeline.ingest.file_source.BLOCK_UNIT", 2000)  # many blocks
    log().write_parquet(tmp_path / "log.parquet")
    (tmp_path / "click.avsc").write_text(json.dumps(SCHEMA))
    cluster.send(encoded(log(), kind), partition=1)
    settings = config(
        cluster,
        messages=kind,
        columns=log().columns if kind == "csv" else [],
        options={**cluster.options, "schema.file": str(tmp_path / "click.avsc")},
    )
    dataset = run_ingest(settings)
    assert dataset.checksums == run_ingest(test_delta.config(tmp_path / "log.parquet", "parquet")).checksums
    assert dataset.summary["snapshot"] == "600 offsets of topic clicks: all 0:0-0,1:0-600,2:0-0,3:0-0"


def test_another_schema_of_the_messages_makes_another_dataset(tmp_path, cluster):
    file = tmp_path / "click.avsc"
    file.write_text(json.dumps(SCHEMA))
    cluster.send(encoded(log().head(8), "avro"))
    data = config(cluster, messages="avro", options={**cluster.options, "schema.file": str(file)}).data
    before = raw_fingerprint(data)
    file.write_text(json.dumps(SCHEMA, indent=2))
    assert raw_fingerprint(data) == before
    fields = [{**field, "name": "y"} if field["name"] == "x" else field for field in SCHEMA["fields"]]
    file.write_text(json.dumps({**SCHEMA, "fields": fields}))
    assert raw_fingerprint(data) != before


@pytest.mark.parametrize("text", ['{"type": "record", "name": "r", "fields": [{"name": "label"}]}', "{}", "\xff", "no"])
def test_a_file_that_holds_no_schema_is_named(tmp_path, cluster, text):
    (tmp_path / "click.avsc").write_bytes(text.encode("latin-1"))
    cluster.send([b"\0"])
    options = {**cluster.options, "schema.file": str(tmp_path / "click.avsc")}
    with pytest.raises(DataError, match="is no Avro schema"):
        raw_fingerprint(config(cluster, messages="avro", options=options).data)


def test_maps_of_avro_messages_are_maps():
    fields = [{"name": "label", "type": "int"}, {"name": "m", "type": {"type": "map", "values": "double"}}]
    schema = {"type": "record", "name": "r", "fields": fields}
    values = []
    for row in ({"label": 1, "m": {"a": 1.5, "b": 2.0}}, {"label": 0, "m": {}}):
        fastavro.schemaless_writer(stream := io.BytesIO(), schema, row)
        values.append(stream.getvalue())
    spec = data_spec(csv_config("", dense={}, sparse={"m": SparseFeature(holds="map")}).data)
    frame, _, rejects = AvroDecoder(json.dumps(schema), "").rows(values, spec, "clicks/0")
    parsed = parse(frame, np.arange(2), spec)
    assert not rejects and not parsed.rejects
    assert parsed.frame["id:m"].to_list() == [["a", "b"], []]
    assert parsed.frame["weight:m"].to_list() == [[1.5, 2.0], []]


def days_of_rows(cluster, days=3) -> None:
    """200 messages a day, of all partitions."""
    for day in range(days):
        rows = log().slice(200 * day, 200).with_columns(time=pl.lit(str(NIGHT + timedelta(days=day))))
        cluster.send(encoded(rows, "jsonl"), time=NIGHT + timedelta(days=day), step=timedelta(minutes=7))


def test_a_day_is_a_range_of_offsets_and_days_join(run_ingest, cluster):
    days_of_rows(cluster)
    data = config(cluster, day="2026-01-31").data
    assert raw_fingerprint(data).endswith("clicks; 2026-01-31 0:50-100,1:50-100,2:50-100,3:50-100")
    dataset = run_ingest(config(cluster, day="2026-01-31"))
    assert dataset.summary["rows"] == 200
    ids = [set(log().slice(200 * day, 200)["c"].drop_nulls()) for day in range(3)]
    assert set(dataset.vocab("c")["id"]) <= ids[1]
    assert run_ingest(config(cluster, day="2026-01-30..2026-02-01")).summary["rows"] == 600


def test_what_arrives_after_the_range_was_pinned_is_not_in_it(run_ingest, tmp_path, cluster):
    days_of_rows(cluster)
    for day in ({}, {"day": "2026-02-01"}):
        expected = run_ingest(config(cluster, **day))
        late = encoded(log().head(40), "jsonl")
        dataset = pinned(tmp_path / str(len(day)), config(cluster, **day), lambda late=late: cluster.send(late))
        assert {name: file.checksum for name, file in dataset.files.items()} == expected.checksums


def test_messages_of_another_day_go_to_quarantine_or_are_kept(run_ingest, tmp_path, cluster):
    days_of_rows(cluster, 2)
    late = log().slice(0, 8).with_columns(time=pl.lit("2026-01-30 23:59:00"))
    cluster.send(encoded(late, "jsonl"), time=NIGHT + timedelta(days=1, hours=23, minutes=58))
    settings = {"day": "2026-01-31", "timestamp": "time"}
    dataset = run_ingest(config(cluster, **settings))
    assert dataset.summary["rows"] == 208 and dataset.summary["rows_quarantined"] == 8
    assert {entry["reason"] for entry in dataset.quarantine} == {"the row is of 2026-01-30, expected 2026-01-31"}
    kept = pinned(tmp_path, config(cluster, **settings, late="own_day"), lambda: None)
    assert kept.summary["rows_late"] == {"2026-01-30": 8} and "late/2026-01-30.parquet" in kept.files


def test_the_watermark_waits_for_messages_of_a_later_day(cluster):
    days_of_rows(cluster, 2)

    def state(day):
        return day_state(config(cluster, day=str(day), watermark=WatermarkConfig(later_rows=True)).data, day)

    assert state(DAY).complete
    assert state(date(2026, 1, 31)).missing == ["clicks has no rows of a later day yet"]
    assert state(date(2026, 2, 1)).missing == ["there are no rows of it in clicks"]


def test_a_day_that_is_not_over_is_not_complete(cluster):
    now = datetime.now(UTC) + timedelta(days=1)  # which midnight does not end
    cluster.send(encoded(log().head(40), "jsonl"), time=now)
    state = day_state(config(cluster, day=str(now.date())).data, now.date())
    assert state.missing == [f"{now.date()} is not over yet, and topic clicks still takes messages of it"]


def test_tombstones_and_what_does_not_parse_go_to_quarantine_by_their_offsets(run_ingest, cluster):
    values = encoded(log().head(300), "jsonl")
    bad = {
        3: None,
        40: b"",
        41: b" \n ",
        77: b'{"label": 1',
        120: b"PAR1",
        121: b"\x1f\x8b\xff",
        200: b"[1]",
        299: b'{"label": 7, "x": 1}',
    }
    for at, value in bad.items():
        values[at] = value
    values[5] = b'{\r\n  "label": 1,\n "x": 2.5, "c": "a", "n": 1}'  # one message on several lines
    cluster.send(values, partition=2)
    dataset = run_ingest(config(cluster))
    assert [entry["line"] for entry in dataset.quarantine] == list(bad)
    assert {entry["file"] for entry in dataset.quarantine} == {"clicks/2"}
    reasons = [entry["reason"] for entry in dataset.quarantine]
    assert reasons[0] == "the message has no value (a tombstone)" and reasons[1] == "the message is empty"
    assert dataset.summary["rows"] == 300


def test_a_range_that_retention_removed_is_told(tmp_path, cluster, run_ingest):
    cluster.send(encoded(log(), "jsonl"), partition=0)

    def retained():  # the cluster keeps some MiB of a partition
        cluster.send([b" " * 500_000] * 20, partition=0)

    with pytest.raises(DataError, match=r"messages 0 to \d+ of partition 0 of topic clicks were removed by its ret"):
        pinned(tmp_path, config(cluster), retained)
    with pytest.raises(DataError, match=r"before offset \d+ of partition 0 .* and 2026-01-30 may have begun there"):
        run_ingest(config(cluster, day="2026-01-30"))
    with pytest.raises(DataError, match=r"partition 0 of topic clicks ends at offset \d+, expected 9000"):
        run_ingest(config(cluster, snapshot="0:610-9000"))


def test_offsets_by_hand(run_ingest, cluster):
    cluster.send(encoded(log(), "jsonl"))
    assert run_ingest(config(cluster, snapshot="0:10-60, 3:0-100")).summary["rows"] == 150
    for wrong in ("7:0-10", "0:10-3", "newest", "0:0-1,0:1-2"):
        with pytest.raises(ConfigError):
            run_ingest(config(cluster, snapshot=wrong))


@pytest.fixture
def registry():
    class Registry(BaseHTTPRequestHandler):
        def do_GET(self):
            number = int(self.path.removeprefix("/schemas/ids/"))
            known = {7: json.dumps(SCHEMA), 100_001: json.dumps(SCHEMA), 9: 'syntax = "proto3";'}
            self.send_response(200 if number in known else number if 400 < number < 600 else 404)
            self.end_headers()
            self.wfile.write(json.dumps({"schema": known.get(number)}).encode())

        def log_message(self, *args):
            pass

    server = HTTPServer(("127.0.0.1", 0), Registry)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()


def test_avro_by_a_schema_registry(run_ingest, cluster, registry):
    values = [b"\0\0\0\0\x07" + value for value in encoded(log().head(200), "avro")]
    values[9], values[10] = b"\0\0\0\0\x07\x80", values[10] + b"more"
    values[11], values[12] = values[11][5:], b"\0\0\0\0\x08" + values[12][5:]
    cluster.send(values, partition=0)
    settings = config(cluster, messages="avro", options={**cluster.options, "schema.registry.url": registry})
    dataset = run_ingest(settings)
    assert [entry["line"] for entry in dataset.quarantine] == [9, 10, 11, 12]
    assert "the registry has no Avro schema of number 8" in dataset.quarantine[3]["reason"]
    assert dataset.summary["rows"] == 200


def test_garbage_before_good_messages_costs_only_itself(run_ingest, cluster, registry):
    """Registries of a cloud begin to count at 100,001, far from what was known before."""
    good = [b"\0" + (100_001).to_bytes(4, "big") + value for value in encoded(log().head(50), "avro")]
    bad = [b"\0" + (2**30 + at).to_bytes(4, "big") + b"x" for at in range(150)]
    cluster.send(bad + good, partition=0)
    settings = config(cluster, messages="avro", options={**cluster.options, "schema.registry.url": registry})
    dataset = run_ingest(settings)
    assert dataset.summary["rows_quarantined"] == 150
    assert f"the registry has no Avro schema of number {2**30}" in dataset.quarantine[0]["reason"]


def test_a_registry_is_asked_once_for_a_number_and_not_for_ever_for_those_of_single_messages(monkeypatch):
    asked = []
    monkeypatch.setattr(messages, "_registries", {})
    monkeypatch.setattr(messages, "_asked", lambda registry, number: asked.append(number))
    assert registered("r", 5, lone=True) is registered("r", 5, lone=True) is registered("r", 2**31) is None
    assert asked == [5]
    monkeypatch.setattr(messages, "ASK_SECONDS", -1.0)
    with pytest.raises(ValueError, match="is not asked for a schema of number 6, .* it had none of 1 others"):
        registered("r", 6, lone=True)
    spec = data_spec(csv_config("").data)
    values = [b"\0" + number.to_bytes(4, "big") for number in (6, 8, 8)]
    rejects = AvroDecoder("", "r").rows(values, spec, "clicks/0")[2]
    assert [("is not asked" in reject.reason, "has no Avro schema" in reject.reason) for reject in rejects] == [
        (True, False),
        (False, True),
        (False, True),
    ]
    assert asked == [5, 8], "a schema in use has several messages"


def test_a_schema_registry_that_is_silent_or_refuses_is_told(registry):
    with pytest.raises(DataError, match=r"the schema registry refuses .*/schemas/ids/403: .*403"):
        registered(registry, 403)
    with pytest.raises(UnreachableError, match=r"the schema registry does not answer at .*/schemas/ids/503: .*503"):
        registered(registry, 503)
    assert registered(registry, 9) is None, "a schema of another kind"


def test_settings_and_silence_are_told(run_ingest, cluster, monkeypatch, tmp_path):
    cluster.send(encoded(log(), "jsonl"))
    for changes, words in [
        ({"options": {}}, "names no brokers of topic clicks"),
        ({"messages": "csv"}, "the fields of a message have no names"),
        ({"messages": "avro"}, "says nothing of the schema"),
        ({"options": {**cluster.options, "bootstrap": "x"}}, "do not make a consumer"),
        ({"options": {**cluster.options, "config.file": str(tmp_path / "none")}}, "cannot be read"),
    ]:
        with pytest.raises(ConfigError, match=words):
            run_ingest(config(cluster, **changes))
    with pytest.raises(DataError, match="there is no topic views"):
        run_ingest(config(cluster, path="views"))
    with pytest.raises(DataError, match="none of the 600 rows of clicks could be used"):
        run_ingest(config(cluster, label=LabelConfig(column="u")))
    monkeypatch.setattr(kafka_topic, "SECONDS", 0.5)
    with kept_port() as port, pytest.raises(UnreachableError, match="do not answer"):
        run_ingest(config(cluster, options={"bootstrap.servers": f"127.0.0.1:{port}"}))


def test_passwords_come_from_a_file(run_ingest, cluster, tmp_path):
    cluster.send(encoded(log(), "jsonl"))
    (tmp_path / "client").write_text(f"# ours\nbootstrap.servers={cluster.options['bootstrap.servers']}\n")
    assert run_ingest(config(cluster, options={"config.file": str(tmp_path / "client")})).summary["rows"] == 600


def test_nothing_is_committed(run_ingest, cluster):
    cluster.send(encoded(log(), "jsonl"))
    run_ingest(config(cluster))
    consumer = Consumer({**cluster.options, "group.id": "nightjar"})
    told = consumer.committed([TopicPartition("clicks", 0)], timeout=PATIENCE)
    consumer.close()
    assert told[0].offset < 0


def test_init_reads_messages(cluster, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    cluster.send(
        [
            json.dumps({"clicked": int(i % 5 == 0), "ad": f"a{i % 7}", "price": i % 11 + 0.5}).encode()
            for i in range(1000)
        ]
    )
    option = f"bootstrap.servers={cluster.options['bootstrap.servers']}"
    assert cli.main(["init", "kafka:clicks", "--option", option]) == 0
    text = (tmp_path / "my/data/clicks.yaml").read_text()
    assert "defaults: [kafka]" in text and "bootstrap.servers" in text and "path: clicks" in text
