"""``attention.json``: what the events of an example row weigh in the trained model, by their names."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from pipeline.config import Config
from pipeline.config.sequences import AGE, event_feature
from pipeline.records.dataset import MISSING_ROW, TRANSFORMS, UNSEEN_ROW, DatasetSchema, SequenceGroup
from pipeline.store.artifacts import Store
from pipeline.store.manifest import Artifact

if TYPE_CHECKING:
    from pipeline.training.parquet import SplitReader
    from pipeline.training.predict import EventAttention

ATTENTION = "attention.json"


def attention_json(config: Config, store: Store, dataset: Artifact, seen: dict[str, EventAttention]) -> dict[str, Any]:
    """By sequence: the row, its target, and for each event its names, its age in seconds and its weight.

    Reads the row's group of the test split, and the vocabularies of the tables.
    """
    from pipeline.training.parquet import SplitReader

    split = SplitReader(store, dataset, "test")
    bins = store.read_json(f"{dataset.path}/{TRANSFORMS}").get("sequences", {}).get("groups", {})
    sequences = {each.name: each for each in split.schema.sequences}
    return {
        name: _one(config, split, sequences[name], each, bins.get(name, {}).get("age_bins", 0))
        for name, each in seen.items()
    }


def _one(
    config: Config, split: SplitReader, sequence: SequenceGroup, seen: EventAttention, bins: int
) -> dict[str, Any]:
    ids = _ids_of(split, seen.row)
    age = event_feature(sequence.name, AGE)
    names = {
        column.name.removeprefix(f"{sequence.name}__"): _names(split, column.owner, ids[column.name])
        for column in sequence.columns
        if column.name != age
    }
    ages = _ages(_names(split, age, ids[age]), bins) if age in ids and bins else [None] * len(seen.weights)
    target = config.data.sequences[sequence.name].target
    return {
        "row": seen.row,
        "target": _target(split, target, ids),
        "target_weight": seen.target,
        "events": [
            {"names": {column: each[place] for column, each in names.items()}, "age": ages[place], "weight": weight}
            for place, weight in enumerate(seen.weights.tolist())
        ],
    }


def _target(split: SplitReader, target: str | None, ids: dict[str, list[int]]) -> dict[str, str] | None:
    if target is None:
        return None
    return {target: ", ".join(_names(split, _owner(split.schema, target), ids[target]))}


def _owner(schema: DatasetSchema, feature: str) -> str:
    return next(column.owner for column in schema.sparse if column.name == feature)


def _ids_of(split: SplitReader, row: int) -> dict[str, list[int]]:
    """The table rows of every id column of row ``row`` of the split."""
    group = next(each for each in split.groups if each.first <= row < each.first + each.rows)
    into, at = split.allocate(group.rows), row - group.first
    ragged = split.read(group, into, 0)
    single = {name: [int(into.single[place, at])] for place, name in enumerate(split.single)}
    return single | {
        name: each.values[each.offsets[at] : each.offsets[at + 1]].tolist() for name, each in ragged.items()
    }


def _names(split: SplitReader, table: str, rows: list[int]) -> list[str]:
    """The ids that have these ``rows`` of ``table``; without a vocabulary the numbers of the rows."""
    import pyarrow.parquet as pq

    names = {MISSING_ROW: "(missing)", UNSEEN_ROW: "(rare or new)"}
    path = f"vocab/{table}.parquet"
    if path in split.dataset.files:
        with split.store.open(f"{split.dataset.path}/{path}") as source:
            known = pq.read_table(source, columns=["row", "id"], filters=[("row", "in", [-1, *rows])]).to_pydict()
        names |= dict(zip(known["row"], known["id"], strict=True))
    return [str(names.get(row, f"row {row}")) for row in rows]


def _ages(names: list[str], bins: int) -> list[float | None]:
    """Seconds in the middle of bins of ages, whose ids are their numbers; None for a missing one."""
    from pipeline.ingest.event_columns import OLDEST

    step = math.log1p(OLDEST) / bins
    return [math.expm1((int(name) + 0.5) * step) if name.isdecimal() else None for name in names]
