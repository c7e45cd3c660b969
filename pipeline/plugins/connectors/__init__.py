"""Tables and streams that logs are read from: ``SPECS`` lists them. None of their libraries is imported here."""

from __future__ import annotations

from pipeline.plugins.connectors.bigquery import BIGQUERY
from pipeline.plugins.connectors.delta import DELTA
from pipeline.plugins.connectors.iceberg import ICEBERG
from pipeline.plugins.connectors.kafka import KAFKA

SPECS = (DELTA, ICEBERG, BIGQUERY, KAFKA)
