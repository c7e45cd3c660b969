"""Applies the fitted transform of a dataset to other records, for serving, with the code that made the dataset.

A record is a mapping of raw columns to values, as a row of the logs; its label is not needed.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import polars as pl
from numpy.typing import NDArray

from pipeline.core.errors import DataError
from pipeline.ingest.parse import parse
from pipeline.ingest.schema import DataSpec
from pipeline.ingest.state import read_state, spec_of
from pipeline.ingest.transform_pass import FittedState, transform
from pipeline.records.dataset import LABEL, TRANSFORMS
from pipeline.store.artifacts import Store

_HINT = "a value as it would be in the logs"


class _UnreadableError(Exception):
    """A value that no column can hold; the message says which, and what was expected."""


@dataclass(frozen=True)
class RecordInputs:
    """The result of a call.

    ``inputs``: model inputs of the records that could be read, in their order. ``records`` [rows of ``inputs``]: the
    position of each among the call's records, from 0. ``rejected``: by position, why a record could not be read.
    """

    inputs: pl.DataFrame
    records: NDArray[np.int64]
    rejected: dict[int, str]


class RecordTransform:
    """Makes model inputs of records: the columns of the dataset's Parquet files except for the label."""

    def __init__(self, spec: DataSpec, state: FittedState) -> None:
        self.spec, self.state = spec, state
        self._maps = {feature.column for feature in spec.sparse if feature.maps}
        self._vectors = {feature.column for feature in spec.dense if feature.vector}
        # The fields that are read of a column of structs.
        self._structs: dict[str, set[str]] = {}
        for sequence in spec.sequences:
            for source in sequence.sources:
                if source.field:
                    self._structs.setdefault(source.column, set()).add(source.field)

    @staticmethod
    def read(store: Store, path: str) -> RecordTransform:
        """Read the transform that was fitted for the dataset at ``path``; ArtifactError if there is none."""
        store.get(path, "ingest")
        spec = spec_of(store.read_json(f"{path}/{TRANSFORMS}"))
        return RecordTransform(spec, read_state(store, path, spec))

    def __call__(self, records: Sequence[Mapping[str, Any]]) -> pl.DataFrame:
        """Return one row of model inputs for each of ``records``; DataError names the first value that cannot be read.

        The result for a record does not depend on the others of its call.
        """
        result = self.each(records)
        for at, reason in result.rejected.items():
            raise DataError(f"record {at}: {reason}", hint=_HINT)
        return result.inputs

    def each(self, records: Sequence[Mapping[str, Any]]) -> RecordInputs:
        """Return the model inputs of every record that can be read, and the reason for every other one."""
        mappings = all(isinstance(record, Mapping) for record in records)
        if mappings and all(_one_type(records, name) for name in self.spec.columns):
            # One of the values may be unreadable: which one shows record by record.
            with contextlib.suppress(_UnreadableError):
                return self._inputs(records, 0)
        # One by one is far slower, but the type of one record's value cannot change how another is read.
        inputs, numbers, rejected = [], [], dict[int, str]()
        for number, record in enumerate(records):
            try:
                if not isinstance(record, Mapping):
                    raise _UnreadableError(f"is a {type(record).__name__}, expected a mapping of columns to values")
                part = self._inputs([record], number)
            except _UnreadableError as error:
                part = RecordInputs(self._inputs([], 0).inputs, np.zeros(0, np.int64), {number: str(error)})
            inputs.append(part.inputs)
            numbers.append(part.records)
            rejected |= part.rejected
        return RecordInputs(pl.concat(inputs), np.concatenate(numbers), rejected)

    def _inputs(self, records: Sequence[Mapping[str, Any]], first: int) -> RecordInputs:
        raw = pl.DataFrame([self._column(name, records) for name in self.spec.columns])
        places = np.arange(first, first + len(records))
        parsed = parse(raw, places, self.spec)
        # Places are passed as line numbers, so rejects name them. A row is rejected once, for the first reason.
        rejected = {reject.line: reject.reason for reject in parsed.rejects}
        kept = places[~np.isin(places, list(rejected))]
        return RecordInputs(transform(parsed.frame, self.spec, self.state).drop(LABEL), kept, rejected)

    def _column(self, name: str, records: Sequence[Mapping[str, Any]]) -> pl.Series:
        if name == self.spec.label:
            # Any label will do: it is dropped later, but without one the row would be rejected.
            return pl.Series(name, [self.spec.positive] * len(records), dtype=pl.String)
        values = [record.get(name) for record in records]
        if name in self._maps:
            values = list(map(_pairs, values))
        elif name in self._vectors:
            for at, value in enumerate(values):
                if isinstance(value, np.ndarray):
                    values[at] = value.tolist()
        # Without any value, Polars would make a column of type Null, which is neither text nor numbers.
        text = all(value is None or isinstance(value, str) for value in values)
        dtype = pl.String if text else None
        try:
            made = pl.Series(name, values, dtype=dtype, strict=text)
        except (ValueError, TypeError, OverflowError, pl.exceptions.PolarsError) as error:
            raise _UnreadableError(f"{name} cannot be read: {error}") from None
        inner = made.dtype.inner if isinstance(made.dtype, pl.List) else made.dtype
        if isinstance(inner, pl.Struct) and name in self._structs:
            for field in inner.fields:
                if field.name in self._structs[name] and (field.dtype.is_nested() or field.dtype == pl.Object):
                    raise _UnreadableError(f"{name}.{field.name} holds {field.dtype}, expected a number or a text")
            return made
        if name in self._maps and inner == pl.Struct:
            return made
        if inner.is_nested() or inner == pl.Object:
            raise _UnreadableError(f"{name} holds {inner}, expected a number, a text or a list of such")
        return made


def _pairs(value: Any) -> Any:
    # Returns a mapping of ids to weights as the list of pairs that a column of maps holds; anything else as it is.
    if not isinstance(value, Mapping):
        return value
    pairs = []
    for key, weight in value.items():
        if weight is not None and not isinstance(weight, str):
            weight = f"{weight}"
        pairs.append({"key": str(key), "value": weight})
    return pairs


def _one_type(records: Sequence[Mapping[str, Any]], column: str) -> bool:
    # Whether values of a column, elements of lists and their fields have one type each, so that one Series holds them.
    kinds, elements, fields = set[type](), set[type](), dict[Any, set[type]]()
    for record in records:
        value = record.get(column)
        if value is None:
            continue
        kinds.add(type(value))
        if not isinstance(value, list):
            continue
        for element in value:
            if element is None:
                continue
            elements.add(type(element))
            if isinstance(element, Mapping):
                for name, field in element.items():
                    if field is not None:
                        fields.setdefault(name, set()).add(type(field))
    return len(kinds) <= 1 and len(elements) <= 1 and all(len(types) <= 1 for types in fields.values())
