"""Datasets scored by versions."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import numpy as np

from pipeline.evaluation.baseline import BaselineRows
from pipeline.publishing.served import ServedModel
from pipeline.publishing.served_tables import is_set
from pipeline.records.dataset import MISSING_ROW, RESERVED_ROWS, SequenceGroup
from pipeline.serving.incumbent_features import Translation
from pipeline.serving.scorer import run_in_threads

if TYPE_CHECKING:
    from pipeline.training.parquet import DecodedColumns, RowGroup, SplitReader

NONE: Mapping[str, np.ndarray] = MappingProxyType({})


@dataclass
class DatasetScores:
    """What a pass over held-out rows brought: logits by model, codes of sliced features, lookups and those served by
    trained rows, by feature.
    """

    logits: dict[str, list[np.ndarray]]
    codes: dict[str, list[np.ndarray]] = field(default_factory=dict)
    lookups: dict[str, int] = field(default_factory=dict)
    served: dict[str, int] = field(default_factory=dict)

    def add(self, more: DatasetScores) -> None:
        """Take in those of the next rows."""
        for own, other in ((self.logits, more.logits), (self.codes, more.codes)):
            for name, parts in other.items():
                own.setdefault(name, []).extend(parts)
        for counts, others in ((self.lookups, more.lookups), (self.served, more.served)):
            for name, count in others.items():
                counts[name] = counts.get(name, 0) + count

    def coverage(self) -> dict[str, float]:
        """Share of lookups with an id that a trained row serves, by feature; features without lookups are left out."""
        return {name: self.served[name] / count for name, count in self.lookups.items() if count}


def row_blocks(split: SplitReader) -> Iterator[BaselineRows]:
    """The rows of ``split``, a row group at a time, for the simple model that a first one is measured by."""
    for group in split.groups:
        columns = split.allocate(group.rows)
        columns.ragged = split.read(group, columns, 0)
        ids: dict[str, Any] = {name: columns.single[place] for place, name in enumerate(split.single)}
        for name, each in ((column.name, columns.ragged[column.name]) for column in split.multi):
            ids[name] = (each.values, np.repeat(np.arange(group.rows), np.diff(each.offsets)), each.weights)
        yield BaselineRows(columns.labels, columns.dense.T, ids, split.counted_for(columns))


def feature_codes(split: SplitReader, features: list[str]) -> dict[str, list[np.ndarray]]:
    """A number for each row of ``split`` by feature: its row in the table, of several the first; an array a group."""
    codes: dict[str, list[np.ndarray]] = {name: [] for name in features}
    for group in split.groups if features else ():
        columns = split.allocate(group.rows)
        columns.ragged = split.read(group, columns, 0)
        for name in features:
            codes[name].append(_codes(split, columns, name))
    return codes


def score_dataset(
    split: SplitReader,
    models: Mapping[str, tuple[ServedModel, Translation | None]],
    trained: Mapping[str, np.ndarray | None],
    slices: list[str],
    groups: Sequence[RowGroup] | None = None,
) -> DatasetScores:
    """Score the rows of ``split`` with each of ``models``, in one pass, a row group in each of torch's threads.

    ``trained``: of each table a bit for each row that training has moved (``publishing.writing``; None: not known, then
    all but the reserved ones). ``slices``: sparse features whose row numbers are kept. ``groups``: only these row
    groups. The number of threads changes no bit.
    """

    def scored(group: RowGroup) -> DatasetScores:
        columns, own = split.allocate(group.rows), DatasetScores({})
        columns.ragged = split.read(group, columns, 0)
        for name, (model, translation) in models.items():
            raw = split.raw(group, translation.raw) if translation is not None and translation.raw else {}
            unseen = split.unseen(group, translation.unseen) if translation is not None and translation.unseen else {}
            own.logits[name] = [score_columns(split, columns, model, translation, raw, unseen)]
        own.codes.update({name: [_codes(split, columns, name)] for name in slices})
        _count_served(split, columns, trained, own)
        return own

    scores = DatasetScores({name: [] for name in models}, {name: [] for name in slices})
    for each in run_in_threads(scored, split.groups if groups is None else groups):
        scores.add(each)
    return scores


def score_columns(
    split: SplitReader,
    columns: DecodedColumns,
    model: ServedModel,
    translation: Translation | None = None,
    raw: Mapping[str, np.ndarray] = NONE,
    unseen: Mapping[str, np.ndarray] = NONE,
) -> np.ndarray:
    """Logits of decoded rows, as the other model would have seen them where there is a ``translation``.

    ``raw``: numbers of the features that are translated from these; ``unseen``: hashes of the ids without a row.
    """
    names, wanted = split.schema.dense, model.description.dense
    dense = [raw[name] if name in raw else columns.dense[names.index(name)] for name in wanted]
    ids: dict[str, Any] = {
        name: raw[name] if name in raw else _ids(split, columns, name)
        for name in (*model.description.sparse, *model.description.event_columns)
    }
    if translation is not None:
        dense = [translation.values(name, values) for name, values in zip(wanted, dense, strict=True)]
        for name, each in ids.items():
            moved = translation.rows(name, each.values if name in columns.ragged else each, unseen.get(name))
            ids[name] = replace(each, values=moved) if name in columns.ragged else moved
            if name in columns.ragged and name in translation.longest:
                ids[name] = ids[name].first(translation.longest[name])
    stacked = np.stack(dense, axis=1) if dense else np.zeros((len(columns.labels), 0), np.float32)
    return model.score(np.ascontiguousarray(stacked), ids)


def _ids(split: SplitReader, columns: DecodedColumns, name: str) -> Any:
    return columns.ragged[name] if name in columns.ragged else columns.single[split.single.index(name)]


def _codes(split: SplitReader, columns: DecodedColumns, name: str) -> np.ndarray:
    """A number for each row to slice by: its row in the table, of several the first; of a sequence its length."""
    for sequence in split.schema.sequences:
        if sequence.name == name:
            return length_codes(columns, sequence)
    ids = _ids(split, columns, name)
    return ids.values[ids.offsets[:-1]] if name in columns.ragged else ids.copy()


def _count_served(
    split: SplitReader, columns: DecodedColumns, trained: Mapping[str, np.ndarray | None], scores: DatasetScores
) -> None:
    for name, moved in trained.items():
        ids = _ids(split, columns, name)
        values = ids.values if name in columns.ragged else ids
        own = values >= RESERVED_ROWS
        served = own if moved is None else own & is_set(moved, values)
        scores.lookups[name] = int((values != MISSING_ROW).sum())
        scores.served[name] = int(served.sum())


def length_codes(columns: DecodedColumns, sequence: SequenceGroup) -> np.ndarray:
    """A number for each row, by which slices are cut: 0 without events, else 1 + log2 of their number, rounded down."""
    lists = [columns.ragged[column.name] for column in sequence.columns]
    starts, lengths = lists[0].offsets[:-1], np.diff(lists[0].offsets)
    missing = np.all([each.values[starts] == MISSING_ROW for each in lists], axis=0)
    codes: np.ndarray = 1 + np.floor(np.log2(lengths)).astype(np.int64)
    codes[(lengths == 1) & missing] = 0
    return codes


def length_names(sequence: SequenceGroup) -> dict[int, str]:
    """What the numbers of ``length_codes`` are called."""
    names = {0: "(no events)", 1: "1 event"}
    steps = range(1, sequence.max_length.bit_length())
    return names | {step + 1: f"{2**step} to {min(2 ** (step + 1) - 1, sequence.max_length)} events" for step in steps}
