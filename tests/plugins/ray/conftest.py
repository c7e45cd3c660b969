"""The runner of ingestion's tests, for Ray."""

from tests.ingest.conftest import run_ingest

__all__ = ["run_ingest"]
