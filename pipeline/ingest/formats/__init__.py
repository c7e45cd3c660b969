"""The formats of log files: one module each, one line here, and the name in ``pipeline.config.data.FORMATS``."""

from __future__ import annotations

from pipeline.ingest.formats.avro import Avro
from pipeline.ingest.formats.columnar import Orc, Parquet
from pipeline.ingest.formats.delimited import Criteo, Csv
from pipeline.ingest.formats.file_format import FileFormat
from pipeline.ingest.formats.json_lines import JsonLines

FORMATS: dict[str, FileFormat] = {each.name: each for each in (Criteo(), Csv(), JsonLines(), Parquet(), Orc(), Avro())}
