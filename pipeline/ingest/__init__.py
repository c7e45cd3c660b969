"""Ingestion: raw click logs to a dataset of Parquet files, with profile, vocabularies and quarantine."""

from pipeline.ingest.stage import ingest, raw_fingerprint

__all__ = ["ingest", "raw_fingerprint"]
