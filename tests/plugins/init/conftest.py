"""The runner of ingestion's tests, for schemas that are drafted."""

from tests.ingest.conftest import run_ingest

__all__ = ["run_ingest"]
