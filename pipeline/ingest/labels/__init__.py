"""The kinds of labels of further tasks: ``SPECS`` lists them. No torch, no Polars at import."""

from __future__ import annotations

from pipeline.ingest.labels.binary import BINARY
from pipeline.ingest.labels.count import COUNT
from pipeline.ingest.labels.value import VALUE

SPECS = (BINARY, COUNT, VALUE)
