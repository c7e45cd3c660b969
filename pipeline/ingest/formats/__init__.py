"""The formats of log files: one module each, one line here, and the name in ``pipeline.config.data.FORMATS``."""

from __future__ import annotations

from pipeline.ingest.formats.avro import Avro
from pipeline.ingest.formats.columnar import Orc, Parquet
from pipeline.ingest.formats.delimited import Criteo, Csv
from pipeline.ingest.formats.file_format import FileFormat, LogFile, require_text
from pipeline.ingest.formats.json_lines import JsonLines

__all__ = ["FORMATS", "FileFormat", "LogFile", "format_named", "require_text"]

FORMATS: dict[str, FileFormat] = {each.name: each for each in (Criteo(), Csv(), JsonLines(), Parquet(), Orc(), Avro())}


def format_named(name: str) -> FileFormat:
    """Return the file format that ``data.format`` names (checked: not synthetic, not tables)."""
    return FORMATS[name]
