"""Tables and streams that logs are read from: ``SPECS`` lists them. None of their libraries is imported here."""

from __future__ import annotations

from pipeline.plugins.connectors.choices import BIGQUERY, DELTA, ICEBERG, KAFKA

SPECS = (DELTA, ICEBERG, BIGQUERY, KAFKA)
