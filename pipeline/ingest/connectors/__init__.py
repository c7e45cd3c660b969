"""Tables and streams that logs are read from: ``SPECS`` lists them. None of their libraries is imported here."""

from __future__ import annotations

from pipeline.ingest.connectors.delta import DELTA
from pipeline.ingest.connectors.iceberg import ICEBERG

SPECS = (DELTA, ICEBERG)
