"""Connector ``kafka``: a topic, of which a day is a range of offsets; read by confluent-kafka (the extra kafka)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pipeline.core.errors import ConfigError
from pipeline.plugins.connectors.options import CONFIG_FILE, MESSAGES, REGISTRY, SCHEMA_FILE, SERVERS
from pipeline.specs.connector import Connector, Snapshot

if TYPE_CHECKING:
    from pipeline.config.data import DataConfig


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
        """Brokers are named, and what a message of this kind needs."""
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
        """The ranges of offsets."""
        from pipeline.plugins.connectors.kafka_topic import open_topic

        snapshot: Any = open_topic(data, mark)
        return snapshot


KAFKA = Kafka()
