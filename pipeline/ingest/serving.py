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
        """One row of model inputs for each of ``records``; DataError names the first value that cannot be.

        What comes of a record does not depend on the others of its call.
        """
        if all(_alike([record.get(name) for record in records]) for name in self.spec.columns):
            return self._inputs(records, 0)
        return pl.concat([self._inputs([record], at) for at, record in enumerate(records)])

    def _inputs(self, records: Sequence[Mapping[str, Any]], first: int) -> pl.DataFrame:
        raw = pl.DataFrame([self._column(name, records) for name in self.spec.columns])
        parsed = parse(raw, np.arange(first, first + len(records)), self.spec)
        if parsed.rejects:
            bad = parsed.rejects[0]
            raise DataError(f"record {bad.line}: {bad.reason}", hint="a value as it would be in the logs")
        return transform(parsed.frame, self.spec, self.state).drop(LABEL)

    def _column(self, name: str, records: Sequence[Mapping[str, Any]]) -> pl.Series:
        if name == self.spec.label:
            return pl.Series(name, [self.spec.positive] * len(records), dtype=pl.String)
        values = [record.get(name) for record in records]
        text = all(value is None or isinstance(value, str) for value in values)
        made = pl.Series(name, values, dtype=pl.String) if text else pl.Series(name, values, strict=False)
        inner = made.dtype.inner if isinstance(made.dtype, pl.List) else made.dtype
        if inner.is_nested() or inner == pl.Object:
            raise DataError(
                f"a record's {name} holds {inner}, expected a number, a text or a list of such",
                hint="a value as it would be in the logs",
            )
        return made


def _alike(values: Sequence[Any]) -> bool:
    """Whether values, and the elements of lists, are of one type, so that one Series holds all of them as they are."""
    kinds = {type(value) for value in values if value is not None}
    inner = {type(each) for value in values if isinstance(value, list) for each in value if each is not None}
    return len(kinds) <= 1 and len(inner) <= 1
