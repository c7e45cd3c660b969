"""Scores datasets with versions: for the gate, for the importance of features, and for the cost of an ensemble."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from pipeline.evaluation.baseline import BaselineRows
from pipeline.evaluation.metrics import entropy_of_rate
from pipeline.publishing.served import ServedModel
from pipeline.publishing.served_tables import is_set, record_bytes
from pipeline.records.dataset import MISSING_ROW, RESERVED_ROWS, SequenceGroup
from pipeline.records.ensemble import ServingCost
from pipeline.records.gate import Importance
from pipeline.records.serving import TableLayout
from pipeline.serving.incumbent_features import Translation
from pipeline.serving.scorer import one_thread, run_in_threads

if TYPE_CHECKING:
    from pipeline.training.parquet import DecodedColumns, RowGroup, SplitReader

NONE: Mapping[str, np.ndarray] = MappingProxyType({})


@dataclass
class DatasetScores:
    """The result of a pass over held-out rows.

    Logits by model, codes of sliced features, and by feature the lookups with an id and how many trained rows served.
    """

    logits: dict[str, list[np.ndarray]]
    codes: dict[str, list[np.ndarray]] = field(default_factory=dict)
    lookups: dict[str, int] = field(default_factory=dict)
    served: dict[str, int] = field(default_factory=dict)

    def add(self, following: DatasetScores) -> None:
        """Add the result of the next rows."""
        for arrays, next_arrays in ((self.logits, following.logits), (self.codes, following.codes)):
            for name, parts in next_arrays.items():
                arrays.setdefault(name, []).extend(parts)
        for counts, next_counts in ((self.lookups, following.lookups), (self.served, following.served)):
            for name, count in next_counts.items():
                counts[name] = counts.get(name, 0) + count

    def coverage(self) -> dict[str, float]:
        """Return the share of lookups with an id that trained rows serve, by feature; only of features with such."""
        return {name: self.served[name] / count for name, count in self.lookups.items() if count}


def _decode(split: SplitReader, group: RowGroup) -> DecodedColumns:
    columns = split.allocate(group.rows)
    columns.ragged = split.read(group, columns, 0)
    return columns


def row_blocks(split: SplitReader) -> Iterator[BaselineRows]:
    """Yield the rows of ``split``, a row group at a time, for the simple model that a first one is compared with."""
    for group in split.groups:
        columns = _decode(split, group)
        ids: dict[str, Any] = dict(zip(split.single, columns.single, strict=True))
        for column in split.multi:
            lists = columns.ragged[column.name]
            ids[column.name] = (lists.values, np.repeat(np.arange(group.rows), np.diff(lists.offsets)), lists.weights)
        yield BaselineRows(columns.labels, columns.dense.T, ids, split.counted_for(columns))


def feature_codes(split: SplitReader, features: list[str]) -> dict[str, list[np.ndarray]]:
    """Return for each feature the codes of the rows of ``split``, by which slices are cut: an array per row group.

    A code is the row in the table, the first one if there are several. For sequences see ``length_codes``.
    """
    codes: dict[str, list[np.ndarray]] = {name: [] for name in features}
    if not features:
        return codes
    for group in split.groups:
        columns = _decode(split, group)
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

    The number of threads changes no bit.

    Args:
        split: The rows.
        models: By name, with how rows become those that the model reads.
        trained: For each feature's table a bit per row: whether training has moved it (``publishing.table_writer``).
            None: unknown, so all rows but the reserved ones count as trained.
        slices: Sparse features and sequences whose codes are kept.
        groups: Only these row groups.
    """

    def score_group(group: RowGroup) -> DatasetScores:
        columns = _decode(split, group)
        scores = DatasetScores({})
        for name, (model, translation) in models.items():
            raw = unseen = NONE
            if translation is not None and translation.raw:
                raw = split.raw(group, translation.raw)
            if translation is not None and translation.unseen:
                unseen = split.unseen(group, translation.unseen)
            scores.logits[name] = [score_columns(split, columns, model, translation, raw, unseen)]
        for name in slices:
            scores.codes[name] = [_codes(split, columns, name)]
        for name, moved in trained.items():
            ids = _ids(split, columns, name)
            rows = ids.values if name in columns.ragged else ids
            served = rows >= RESERVED_ROWS
            if moved is not None:
                served &= is_set(moved, rows)
            scores.lookups[name] = int((rows != MISSING_ROW).sum())
            scores.served[name] = int(served.sum())
        return scores

    total = DatasetScores({name: [] for name in models}, {name: [] for name in slices})
    if groups is None:
        groups = split.groups
    for scores in run_in_threads(score_group, groups):
        total.add(scores)
    return total


def score_columns(
    split: SplitReader,
    columns: DecodedColumns,
    model: ServedModel,
    translation: Translation | None = None,
    raw: Mapping[str, np.ndarray] = NONE,
    unseen: Mapping[str, np.ndarray] = NONE,
) -> np.ndarray:
    """Return the logits of decoded rows, which a ``translation`` turns into what the model would have seen.

    ``raw``: raw numbers of the features that are translated from them; ``unseen``: hashes of the ids without a row.
    """
    dense = []
    for name in model.description.dense:
        values = raw[name] if name in raw else columns.dense[split.schema.dense.index(name)]
        dense.append(values if translation is None else translation.values(name, values))
    ids: dict[str, Any] = {}
    for name in (*model.description.sparse, *model.description.event_columns):
        rows: Any = raw[name] if name in raw else _ids(split, columns, name)
        if translation is not None and name in columns.ragged:
            rows = replace(rows, values=translation.rows(name, rows.values, unseen.get(name)))
            if name in translation.longest:
                rows = rows.first(translation.longest[name])
        elif translation is not None:
            rows = translation.rows(name, rows, unseen.get(name))
        ids[name] = rows
    stacked = np.stack(dense, axis=1) if dense else np.zeros((len(columns.labels), 0), np.float32)
    return model.score(np.ascontiguousarray(stacked), ids)


def _ids(split: SplitReader, columns: DecodedColumns, name: str) -> Any:
    return columns.ragged[name] if name in columns.ragged else columns.single[split.single.index(name)]


def _codes(split: SplitReader, columns: DecodedColumns, name: str) -> np.ndarray:
    for sequence in split.schema.sequences:
        if sequence.name == name:
            return length_codes(columns, sequence)
    ids = _ids(split, columns, name)
    return ids.values[ids.offsets[:-1]] if name in columns.ragged else ids.copy()


def length_codes(columns: DecodedColumns, sequence: SequenceGroup) -> np.ndarray:
    """Return a code for each row, by which slices are cut.

    It is 0 without events, else 1 + log2 of their number, rounded down.
    """
    lists = [columns.ragged[column.name] for column in sequence.columns]
    starts, lengths = lists[0].offsets[:-1], np.diff(lists[0].offsets)
    missing = np.all([column.values[starts] == MISSING_ROW for column in lists], axis=0)
    codes: np.ndarray = 1 + np.floor(np.log2(lengths)).astype(np.int64)
    codes[(lengths == 1) & missing] = 0
    return codes


def length_names(sequence: SequenceGroup) -> dict[int, str]:
    """Return the names of the codes of ``length_codes``."""
    names = {0: "(no events)", 1: "1 event"}
    for power in range(1, sequence.max_length.bit_length()):
        most = min(2 ** (power + 1) - 1, sequence.max_length)
        names[power + 1] = f"{2**power} to {most} events"
    return names


# Maximum number of row groups that a sample comes from, because each is decoded as a whole.
MOST_GROUPS = 8
# Rows and tries of ``serving_cost``; the fastest try counts.
_COST_ROWS = 4096
_TRIES = 3


def importance(
    split: SplitReader, model: ServedModel, groups: Mapping[str, Sequence[str]], rows: int, seed: int
) -> dict[str, Importance]:
    """Measure how far NE rises if the values of features are permuted between rows, for each of ``groups``.

    This is permutation importance (Breiman 2001, Random Forests, section 10), on about ``rows`` rows, evenly spread
    over ``split``, with the model as it is served. Features of a group are permuted together.

    Returns:
        The importance of each group, the same for the same ``seed``. Empty if these rows are of one class, or if the
        model gives one of them no finite logit; a group that brings such logits is left out.
    """
    columns = sampled(split, rows)
    labels, weights = columns.labels, split.counted_for(columns)
    counted, rate = np.ones(len(labels)), 0.0
    if weights is not None:
        counted = weights.astype(np.float64)
    if counted.any():
        rate = float((labels * counted).sum() / counted.sum())
    if not 0 < rate < 1:
        return {}
    entropy = entropy_of_rate(rate, np.log, np.log1p)
    order = np.random.default_rng(seed).permutation(len(labels))
    with one_thread():
        losses = _losses(labels, score_columns(split, columns, model))
    if not np.isfinite(losses).all():
        return {}

    def measure_group(features: Sequence[str]) -> Importance | None:
        permuted = _losses(labels, score_columns(split, _permuted(split, columns, features, order), model))
        if not np.isfinite(permuted).all():
            return None
        rises = (permuted - losses) / entropy
        total = counted.sum()
        mean = float((rises * counted).sum() / total)
        error = float(np.sqrt((((rises - mean) * counted) ** 2).sum()) / total)
        return Importance(rise=mean, error=error)

    measured = zip(groups, run_in_threads(measure_group, groups.values()), strict=True)
    return {name: rise for name, rise in measured if rise is not None}


def sampled(split: SplitReader, rows: int) -> DecodedColumns:
    """Decode about ``rows`` rows of ``split``: every n-th of at most ``MOST_GROUPS`` row groups, evenly spread."""
    from pipeline.training.parquet import join, take_each

    count = min(len(split.groups), MOST_GROUPS)
    chosen = [split.groups[i * len(split.groups) // count] for i in range(count)]
    step = max(1, sum(group.rows for group in chosen) // rows)
    parts = []
    for group in chosen:
        parts += take_each(_decode(split, group), [np.arange(0, group.rows, step)])
    return join(parts)


def _permuted(
    split: SplitReader, columns: DecodedColumns, features: Sequence[str], order: NDArray[np.integer]
) -> DecodedColumns:
    # Row i has the values of ``features`` from row order[i].
    dense, single, ragged = columns.dense.copy(), columns.single.copy(), dict(columns.ragged)
    for name in features:
        if name in ragged:
            ragged[name] = ragged[name].take(order)
        elif name in split.single:
            position = split.single.index(name)
            single[position] = single[position][order]
        else:
            position = split.schema.dense.index(name)
            dense[position] = dense[position][order]
    return replace(columns, dense=dense, single=single, ragged=ragged)


def _losses(labels: NDArray[np.floating], logits: NDArray[np.floating]) -> NDArray[np.float64]:
    # Returns the log loss of each row, in nats; with several tasks that of the main one.
    main = (logits if logits.ndim == 1 else logits[:, 0]).astype(np.float64)
    return np.logaddexp(0.0, main) - labels * main


def serving_cost(
    split: SplitReader, models: Mapping[str, tuple[Any, Any]], layouts: Mapping[str, TableLayout], members: int
) -> ServingCost:
    """Measure the cost of scoring with the candidate of ``models``, and with an incumbent that needs no translation."""
    columns = sampled(split, _COST_ROWS)
    row_us = {}
    for name in ("candidate", "incumbent"):
        if name not in models or models[name][1] is not None:
            continue
        seconds = []
        for _ in range(_TRIES):
            began = time.perf_counter()
            score_columns(split, columns, models[name][0])
            seconds.append(time.perf_counter() - began)
        row_us[name] = 1e6 * min(seconds) / max(1, len(columns.labels))
    return ServingCost(
        members=members,
        bytes=sum(table.bytes for table in layouts.values()),
        bytes_of_one=sum(table.rows * record_bytes(table.dim // members, table.coding) for table in layouts.values()),
        row_us=row_us["candidate"],
        row_us_of_incumbent=row_us.get("incumbent"),
    )
