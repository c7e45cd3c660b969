"""Ingestion by workers of Ray, ``ingest.engine=ray``."""
