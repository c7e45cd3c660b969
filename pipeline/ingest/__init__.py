"""Ingestion: raw click logs to a dataset of Parquet files, with profile, vocabularies and quarantine."""
