"""Ingestion: raw click logs to a dataset of Parquet files, with profile, vocabularies and quarantine."""

from pipeline.ingest.days import DayState, day_dataset, day_state, previous_dataset
from pipeline.ingest.serving import RecordInputs, RecordTransform
from pipeline.ingest.sources import answering
from pipeline.ingest.stage import ingest, raw_fingerprint

__all__ = [
    "DayState",
    "RecordInputs",
    "RecordTransform",
    "answering",
    "day_dataset",
    "day_state",
    "ingest",
    "previous_dataset",
    "raw_fingerprint",
]
