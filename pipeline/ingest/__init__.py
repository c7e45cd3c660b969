"""Ingestion: raw click logs to a dataset of Parquet files, with profile, vocabularies and quarantine.

Names are imported on first use: the id mappings in this package are read with every configuration, without polars.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pipeline.ingest.days import DayState, day_dataset, day_state, previous_dataset
    from pipeline.ingest.record_transform import RecordInputs, RecordTransform
    from pipeline.ingest.sources import answering
    from pipeline.ingest.stage import ingest, raw_fingerprint

_HOMES = {
    "DayState": "days", "day_dataset": "days", "day_state": "days", "previous_dataset": "days",
    "RecordInputs": "record_transform", "RecordTransform": "record_transform",
    "answering": "sources", "ingest": "stage", "raw_fingerprint": "stage",
}  # fmt: skip

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


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
