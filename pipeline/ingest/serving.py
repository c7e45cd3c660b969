"""The fitted transform of a dataset on records outside of it, for serving: the very code that made the dataset.

A record is a mapping of raw columns to values, as a row of the logs; its label is not needed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import polars as pl

from pipeline.artifacts import Store
from pipeline.contracts import LABEL
from pipeline.errors import DataError
from pipeline.ingest.parse import parse
from pipeline.ingest.spec import DataSpec
from pipeline.ingest.state import TRANSFORMS, read_state, spec_of
from pipeline.ingest.transform import State, transform


class RecordTransform:
    """Model inputs of records: the columns of the dataset's Parquet files but for the label."""

    def __init__(self, spec: DataSpec, state: State) -> None:
        self.spec, self.state = spec, state

    @staticmethod
    def read(store: Store, path: str) -> RecordTransform:
        """The transform that was fitted for the dataset at ``path``; ArtifactError where there is none."""
        store.get(path, "ingest")
        spec = spec_of(store.read_json(f"{path}/{TRANSFORMS}"))
        return RecordTransform(spec, read_state(store, path, spec))

    def __call__(self, records: Sequence[Mapping[str, Any]]) -> pl.DataFrame:
        """One row of model inputs for each of ``records``; DataError names the first value that cannot be."""
        raw = pl.DataFrame([self._column(name, records) for name in self.spec.columns])
        parsed = parse(raw, np.arange(len(records)), self.spec)
        if parsed.rejects:
            first = parsed.rejects[0]
            raise DataError(f"record {first.line}: {first.reason}", hint="a value as it would be in the logs")
        return transform(parsed.frame, self.spec, self.state).drop(LABEL)

    def _column(self, name: str, records: Sequence[Mapping[str, Any]]) -> pl.Series:
        if name == self.spec.label:
            return pl.Series(name, [self.spec.positive] * len(records), dtype=pl.String)
        values = [record.get(name) for record in records]
        if any(isinstance(value, str) for value in values) or all(value is None for value in values):
            return pl.Series(name, [None if value is None else str(value) for value in values], dtype=pl.String)
        return pl.Series(name, values, strict=False)
