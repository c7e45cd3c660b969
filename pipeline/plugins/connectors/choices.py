"""Tables and streams that logs are read from, as choices of ``data.format``: their options and checks."""

from __future__ import annotations

import re
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

from pipeline.core.errors import ConfigError
from pipeline.plugins.connectors.options import ANONYMOUS, CONFIG_FILE, MESSAGES, REGISTRY, SCHEMA_FILE, SERVERS
from pipeline.specs.connector import Connector, Snapshot

if TYPE_CHECKING:
    from pipeline.config.data import DataConfig

# Every configuration imports this file, so a connector's library is imported only when a snapshot is opened.

_BIGQUERY_TABLE = re.compile(r"[^.`]+\.[^.`]+\.[^.`]+")
_TIME = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ")


class Delta(Connector):
    """``data.path`` is the table's folder, on a disk or an object store."""

    name = "delta"
    doc = "a Delta Lake table at `data.path`; `data.options` are its storage options."
    extra, package, module = "delta", "deltalake", "deltalake"
    on_disk = True

    def opened(self, data: DataConfig, mark: str) -> Snapshot:
        from pipeline.plugins.connectors.delta_table import open_table

        return open_table(data, mark)


DELTA = Delta()


class Iceberg(Connector):
    """``data.path`` is <catalog>.<namespace>.<table>; the catalog is one of pyiceberg's own configuration file."""

    name = "iceberg"
    doc = (
        "an Iceberg table, `data.path` is <catalog>.<namespace>.<table>; `data.options` are properties of the catalog "
        "besides those of `.pyiceberg.yaml`."
    )
    extra, package, module = "iceberg", "pyiceberg", "pyiceberg"

    def check(self, data: Any, path: str) -> None:
        if data.path.count(".") < 2 or "" in data.path.split("."):
            raise ConfigError(
                f"{path}.path is {data.path!r}, expected <catalog>.<namespace>.<table>",
                hint=f"{path}.path=default.ads.clicks, with the catalog's name in .pyiceberg.yaml",
            )

    def opened(self, data: DataConfig, mark: str) -> Snapshot:
        from pipeline.plugins.connectors.iceberg_table import open_table

        return open_table(data, mark)


ICEBERG = Iceberg()


class BigQuery(Connector):
    """``data.path`` is <project>.<dataset>.<table>, read as it was at one time."""

    name = "bigquery"
    doc = (
        "a BigQuery table, `data.path` is <project>.<dataset>.<table>, as it was `settled_hours` after the end of "
        "`data.day`, or at `data.snapshot`."
    )
    extra, package, module = "bigquery", "google-cloud-bigquery-storage", "google.cloud.bigquery_storage_v1"
    options = {
        "project": "the project that pays for reading; that of the table by default",
        "settled_hours": "hours after the end of a day at which its rows are complete; 3 by default",
        "endpoint": "host:port of another server, such as an emulator",
        "credentials": "anonymous, for an emulator: no credentials and no TLS",
    }

    def check(self, data: Any, path: str) -> None:
        if not _BIGQUERY_TABLE.fullmatch(data.path):
            raise ConfigError(
                f"{path}.path is {data.path!r}, expected <project>.<dataset>.<table>",
                hint=f"{path}.path=shop.ads.clicks",
            )
        if data.snapshot is not None and not _TIME.fullmatch(data.snapshot):
            raise ConfigError(
                f"{path}.snapshot is {data.snapshot!r}, expected a time", hint=f"{path}.snapshot=2026-02-01T03:00:00Z"
            )
        hours = data.options.get("settled_hours", "3")
        if not re.fullmatch(r"\d+(\.\d+)?", hours):
            raise ConfigError(f"{path}.options.settled_hours is {hours!r}, expected hours", hint="settled_hours=3")
        if data.options.get("credentials", ANONYMOUS) != ANONYMOUS:
            raise ConfigError(
                f"{path}.options.credentials is something else, expected {ANONYMOUS} or nothing",
                hint="without it, Google's application default credentials are used",
            )
        if data.watermark.later_rows:
            raise ConfigError(
                f"{path}.watermark.later_rows is true, which the Storage Read API does not tell",
                hint=f"{path}.options.settled_hours: how long after its end a day is complete",
            )

    def latest(self, data: DataConfig) -> Snapshot:
        """Return the table as it was a minute ago."""
        now = datetime.now(UTC) - timedelta(minutes=1)
        return self.open(replace(data, day=None, snapshot=now.strftime("%Y-%m-%dT%H:%M:%SZ")))

    def opened(self, data: DataConfig, mark: str) -> Snapshot:
        from pipeline.plugins.connectors.bigquery_table import BigQuerySnapshot

        return BigQuerySnapshot(data)


BIGQUERY = BigQuery()


class Kafka(Connector):
    """``data.path`` is the topic, ``data.messages`` says what a message is."""

    name = "kafka"
    doc = (
        "a topic, `data.path`; `data.options` are properties of librdkafka (`bootstrap.servers` at least), "
        "`config.file` (a file of more of them, such as passwords), and `schema.file` or `schema.registry.url` of Avro."
    )
    extra, package, module = "kafka", "confluent-kafka", "confluent_kafka"
    by_day = True
    messages = MESSAGES

    def check(self, data: Any, path: str) -> None:
        options = data.options
        if SERVERS not in options and CONFIG_FILE not in options:
            raise ConfigError(
                f"{path}.options names no brokers of topic {data.path}",
                hint=f"'{path}.options={{{SERVERS}: \"broker:9092\"}}'",
            )
        kind = data.messages or self.messages[0]
        if kind == "csv" and not data.columns:
            raise ConfigError(
                f"{path}.messages is csv and {path}.columns is empty: the fields of a message have no names",
                hint=f"{path}.columns=[<name of each field, in order>]",
            )
        if kind == "avro" and SCHEMA_FILE not in options and REGISTRY not in options:
            raise ConfigError(
                f"{path}.messages is avro, but {path}.options says nothing of the schema",
                hint=f"'+{path}.options.{{{SCHEMA_FILE}: <file.avsc>}}', or {REGISTRY}",
            )

    def opened(self, data: DataConfig, mark: str) -> Snapshot:
        from pipeline.plugins.connectors.kafka_topic import open_topic

        return open_topic(data, mark)


KAFKA = Kafka()
