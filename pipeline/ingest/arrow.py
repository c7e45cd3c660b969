"""Arrow batches, of whatever source, as raw frames: maps as lists of pairs, arrays of fixed size as lists."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import polars as pl
import polars.selectors as cs
import pyarrow as pa

from pipeline.core.errors import DataError
from pipeline.ingest.schema import DataSpec

_LISTS = (pa.types.is_list, pa.types.is_large_list, pa.types.is_fixed_size_list)


def frame_of(batch: pa.RecordBatch | pa.Table, columns: Sequence[str]) -> pl.DataFrame:
    """``columns`` of ``batch`` as parsing takes them."""
    named = {name: _pairs(batch.column(name)) for name in columns}
    frame = cast(pl.DataFrame, pl.from_arrow(pa.table(named)))
    return frame.select(columns).with_columns(cs.array().arr.to_list())


def _pairs(column: pa.Array | pa.ChunkedArray) -> pa.Array | pa.ChunkedArray:
    if not pa.types.is_map(column.type):
        return column
    kind = pa.list_(pa.struct([("key", column.type.key_type), ("value", column.type.item_type)]))
    return column.cast(kind)


def is_list(kind: pa.DataType) -> bool:
    """Whether a column of ``kind`` holds lists."""
    return any(test(kind) for test in _LISTS)


def check_types(spec: DataSpec, schema: pa.Schema, label: str) -> None:
    """Raise DataError for a column of the file ``label`` that holds neither values, lists of such nor maps."""
    maps = {feature.column: feature for feature in spec.sparse if feature.maps}
    several = {feature.column: feature for feature in spec.sparse if feature.multi}
    events = set()
    for sequence in spec.sequences:
        events |= {source.column for source in sequence.sources if source.field}
    for column, override in spec.columns.items():
        kind = schema.field(column).type
        if pa.types.is_map(kind) or (is_list(kind) and pa.types.is_struct(kind.value_type)):
            if column in maps:
                continue
            if column in events and is_list(kind):
                _check_fields(spec, column, kind.value_type, label)
                continue
            hint = "write its parts as columns of their own"
            if override.startswith("data.sparse."):
                hint = f"{override.removesuffix('.column')}.holds=map, if its keys are ids and its values weights"
            raise DataError(
                f"{label}: column {column!r} ({override}) holds {kind}, expected one value a row or a list of values",
                hint=hint,
            )
        inner = kind.value_type if is_list(kind) else kind
        if pa.types.is_nested(inner):
            raise DataError(
                f"{label}: column {column!r} ({override}) holds {kind}, expected one value a row or a list of values",
                hint="write its parts as columns of their own",
            )
        if column in maps and is_list(kind) and not several[column].weight_separator:
            raise DataError(
                f"{label}: column {column!r} ({override}) holds {kind}, expected a map of ids to weights",
                hint=f"data.sparse.{maps[column].name}.holds=list",
            )


def _check_fields(spec: DataSpec, column: str, kind: pa.DataType, label: str) -> None:
    types = {field.name: field.type for field in kind}
    for sequence in spec.sequences:
        for source in sequence.sources:
            if source.column != column:
                continue
            if not types:
                raise DataError(
                    f"{label}: column {column!r} (data.sequences.{sequence.name}) holds structs without fields, "
                    f"expected a field {source.field!r}",
                    hint=f"~data.sequences.{sequence.name}",
                )
            if source.field not in types:
                first = next(iter(types))
                expected = f"a field {source.field!r}" if source.field else f"one of them named: {column}.{first}"
                raise DataError(
                    f"{label}: column {column!r} (data.sequences.{sequence.name}) holds structs of {', '.join(types)}, "
                    f"expected {expected}",
                    hint=f"data.sequences.{sequence.name}.features.<name>.column={column}.{first}",
                )
            if pa.types.is_nested(types[source.field]):
                raise DataError(
                    f"{label}: {source.shown} (data.sequences.{sequence.name}) holds {types[source.field]}, expected "
                    "one value an event",
                    hint="write its parts as fields of their own",
                )
