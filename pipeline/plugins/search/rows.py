"""The rows of a search: the train rows of the dataset in two parts, as batches in a training's order."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import torch
from torch import Tensor

from pipeline.core.errors import DataError
from pipeline.store.artifacts import Store
from pipeline.store.manifest import Artifact
from pipeline.training.batches import Batch, BatchReader, RowCounts
from pipeline.training.parquet import DecodedColumns, Ragged, RowGroup, SplitReader, take_each
from pipeline.training.sampler import Order


@dataclass(frozen=True, kw_only=True)
class SearchBatch:
    """Rows of the dataset: dense [B, n]; ids feature by feature with ``lengths`` [F * B] and, in some, weights.

    ``weights`` [B] of sum 1: what each row counts for; 0: padding. ``offset`` [B]: see ``RowCounts.offset``.
    """

    dense: Tensor
    ids: Tensor
    lengths: Tensor
    labels: Tensor
    weights: Tensor
    id_weights: Tensor | None = None
    offset: Tensor | None = None

    @staticmethod
    def of(batch: Batch, counts: RowCounts) -> SearchBatch:
        """Make a search batch of a training's batch."""
        return SearchBatch(
            dense=batch.dense,
            ids=batch.sparse.values(),
            lengths=batch.sparse.lengths(),
            labels=batch.labels,
            weights=batch.weights,
            id_weights=batch.sparse.weights_or_none(),
            offset=counts.offset(batch.extra),
        )


class PartReader(SplitReader):
    """One of two parts of the train rows: ``share`` of every row group is held, drawn by ``seed``.

    ``held`` selects the held rows, else all others. The two parts have no row in common.
    """

    def __init__(self, store: Store, dataset: Artifact, *, share: float, held: bool, seed: int) -> None:
        super().__init__(store, dataset, "train")
        self._whole: dict[tuple[str, int], RowGroup] = {}
        self._picks: dict[tuple[str, int], np.ndarray] = {}
        parts, rows = [], 0
        for number, group in enumerate(self.groups):
            # Both parts draw the same permutation of a group and cut it at the same place, so they share no row.
            mixed = np.random.default_rng([seed, number]).permutation(group.rows)
            cut = round(share * group.rows)
            picks = mixed[:cut] if held else mixed[cut:]
            self._whole[group.file, group.index] = group
            # Sort the rows, since the sampler decides their order.
            self._picks[group.file, group.index] = np.sort(picks)
            if len(picks):
                parts.append(replace(group, rows=len(picks)))
                rows += len(picks)
        self.groups, self.rows = parts, rows

    def read(self, group: RowGroup, into: DecodedColumns, at: int) -> dict[str, Ragged]:
        whole, picks = self._whole[group.file, group.index], self._picks[group.file, group.index]
        # Parquet decodes whole row groups, so all rows are read before those of the other part are dropped.
        decoded = self.allocate(whole.rows)
        decoded.ragged = super().read(whole, decoded, 0)
        kept = take_each(decoded, [picks])[0]
        end = at + group.rows
        into.labels[at:end] = kept.labels
        for target, source in ((into.dense, kept.dense), (into.single, kept.single), (into.extra, kept.extra)):
            target[:, at:end] = source
        return kept.ragged


class SplitBatches:
    """Batches of both parts: ``epochs`` of the rows for the weights, and endless epochs of the held ones.

    ``steps``: the number of batches for the weights.
    """

    def __init__(self, store: Store, dataset: Artifact, order: Order, *, share: float, epochs: int) -> None:
        self.order, self._epochs = order, epochs
        learnt = PartReader(store, dataset, share=share, held=False, seed=order.seed)
        held = PartReader(store, dataset, share=share, held=True, seed=order.seed)
        self._readers = learnt, held
        if not learnt.rows or not held.rows:
            raise DataError(
                f"the dataset has {learnt.rows + held.rows} train rows, of which {held.rows} are to decide and "
                f"{learnt.rows} to train on, expected some of both",
                hint="search.held_share=0.2, and more rows",
            )
        self.steps = epochs * -(-learnt.rows // order.global_batch)
        self.base_rate = learnt.base_rate()
        self.learnt_rows, self.held_rows = learnt.rows, held.rows
        self._counts = RowCounts.of(learnt.schema)

    @contextmanager
    def open(
        self, start: int = 0, held_start: int = 0
    ) -> Iterator[tuple[Iterator[SearchBatch], Iterator[SearchBatch]]]:
        """Yield endless batches for the weights from batch ``start`` on, and held ones from ``held_start`` on."""
        learnt, held = self._readers
        # Allow more epochs than any search has steps, so that the held rows start over as often as needed.
        endless = 1 << 30
        of_rows = partial(SearchBatch.of, counts=self._counts)
        with self._batches(learnt, self._epochs, start) as one, self._batches(held, endless, held_start) as other:
            yield map(of_rows, one), map(of_rows, other)

    def _batches(self, split: SplitReader, epochs: int, start: int) -> BatchReader:
        # The last batch of an epoch may be short, so a position is an epoch and a batch within it.
        each_epoch = -(-split.rows // self.order.global_batch)
        return BatchReader(split, self.order, epochs=epochs, start=divmod(start, each_epoch))


def start_logit(base_rate: float | None) -> float:
    """Return the log odds of ``base_rate``; 0 if it is unknown, or has no odds."""
    if base_rate is None or not 0 < base_rate < 1:
        return 0.0
    return float(torch.tensor(base_rate).logit())
