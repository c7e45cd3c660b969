"""Between training and publishing: the dense part as one module of a single machine; datasets scored by versions."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from pipeline.config import DataConfig, HardwareConfig, ModelConfig
from pipeline.embeddings.widths import Projections, projections
from pipeline.errors import ArtifactError
from pipeline.evaluation.baseline import RowBlock
from pipeline.models import build_model
from pipeline.models.layers import MaxNorm
from pipeline.models.sequences.build import build_sequences
from pipeline.publishing.served import ServedModel
from pipeline.publishing.writing import is_set
from pipeline.records import MISSING_ROW, RESERVED_ROWS, DatasetSchema, Towers
from pipeline.serving.lengths import length_codes
from pipeline.serving.threads import side_by_side
from pipeline.serving.translate import Translation
from pipeline.specs import ModelInputs, task_inputs
from pipeline.towers import layout_of
from pipeline.towers.modules import joined, projected_tower

if TYPE_CHECKING:
    from pipeline.training.parquet import Columns, Group, SplitReader

NONE: Mapping[str, np.ndarray] = MappingProxyType({})
_RANKING, _TOWERS, _NORMALISE, _PROJECT = "head.ranking.", "towers.tower.", "head.normalise.", "head.project."
_HISTORIES = "head.histories.vectors."


@dataclass(frozen=True)
class EventInputs:
    """A sequence: its ``vector`` module, widths of its columns, and the feature (by place) that each shares with."""

    vector: nn.Module
    widths: list[int]
    candidates: list[int | None]


class DensePart(nn.Module):
    """forward(dense [b, n], embeddings [b, F, D]) -> logits [b]: tower modules, if there are some, and ranking model.

    With further tasks the logits are [b, T], the main task's first. Where ``widths`` of the features' embeddings are
    given, these come side by side, [b, sum of widths], and ``project`` or the towers bring them to width D. The same
    arithmetic as in training, on one machine and in float32.
    """

    def __init__(
        self,
        ranking: nn.Module,
        towers: list[tuple[list[int], nn.Module]],
        order: list[int],
        normalise: MaxNorm | None = None,
        widths: list[int] | None = None,
        project: Projections | None = None,
        sequences: list[EventInputs] | None = None,
    ) -> None:
        super().__init__()
        self.ranking = ranking
        self.vectors = nn.ModuleList(each.vector for each in sequences or ())
        self._events = sequences or []
        self.normalise, self.widths, self.project = normalise, widths, project
        self.towers = nn.ModuleList(module for _, module in towers)
        self._places = [places for places, _ in towers]
        self._order = order

    def forward(self, dense: Tensor, embeddings: Tensor, *events: Tensor) -> Tensor:
        """The logits, as the class says. ``events``: of each sequence embeddings [n, w] and samples [n] of events."""
        own = self._sequences(embeddings, events, dense.shape[0]) if self._events else None
        if len(self.towers):
            embeddings = self._in_towers(embeddings, own)
        else:
            if self.project is not None:
                embeddings = self.project(embeddings)
            if own is not None:
                embeddings = torch.cat([embeddings, own], dim=1)
        if self.normalise is not None:
            dense = self.normalise(dense)
        logits: Tensor = self.ranking(dense, embeddings)
        return logits

    def _sequences(self, pooled: Tensor, events: Sequence[Tensor], samples: int) -> Tensor:
        """The vectors of the sequences, [b, S, D]."""
        vectors = [
            vector(
                values.split(each.widths, dim=1), rows,
                [None if place is None else self._taken(pooled, [place]).flatten(1) for place in each.candidates],
                samples,
            )
            for vector, each, values, rows in zip(self.vectors, self._events, events[::2], events[1::2], strict=True)
        ]  # fmt: skip
        return torch.stack(vectors, dim=1)

    def _in_towers(self, embeddings: Tensor, sequences: Tensor | None) -> Tensor:
        """What the towers put out; places behind the features are those of ``sequences``."""
        if self.widths is None:
            every = embeddings if sequences is None else torch.cat([embeddings, sequences], dim=1)
            taken = [every[:, places] for places in self._places]
        else:
            parts = [*embeddings.split(self.widths, dim=1), *(() if sequences is None else sequences.unbind(1))]
            taken = [joined([parts[place] for place in places]) for places in self._places]
        found = joined([module(each) for module, each in zip(self.towers, taken, strict=True)])
        return found[:, self._order] if self._order else found

    def _taken(self, embeddings: Tensor, places: list[int]) -> Tensor:
        """The embeddings of the features at ``places``."""
        if self.widths is None:
            return embeddings[:, places]
        parts = embeddings.split(self.widths, dim=1)
        return joined([parts[place] for place in places])


def dense_part(
    schema: DatasetSchema, towers: Towers, weights: Mapping[str, Tensor],
    *, model: ModelConfig, data: DataConfig, hardware: HardwareConfig, seed: int,
) -> DensePart:  # fmt: skip
    """The dense part of a checkpoint's ``weights`` (by parameter); ArtifactError for weights that do not fit.

    ``seed``: of the weights that these take the place of.
    """
    modules: list[tuple[list[int], nn.Module]] = []
    in_towers: list[str] = []
    vectors, dim = schema.vectors, model.embedding_dim
    widths = {column.name: model.dim_of(column.owner) for column in schema.sparse}
    project = projections(widths, dim, seed)
    if not towers.is_flat:
        layout = layout_of(towers, vectors, hardware.hosts, hardware.ranks_per_host)
        every = widths | {sequence.name: model.embedding_dim for sequence in schema.sequences}
        for number in (number for group in layout.tower_hosts for number in group.towers):
            own = towers.towers[number].features
            chosen = {name: every[name] for name in own}
            module = projected_tower(towers.module, chosen, model.embedding_dim, seed, number, even=project is None)
            _load(module, weights, f"{_TOWERS}{number}.")
            modules.append(([schema.vectors.index(name) for name in own], module))
            in_towers += own
            dim = module.dim
        vectors = vectors if towers.module.by_feature else layout.vectors
    tasks = task_inputs(schema.tasks)
    ranking = build_model(model, ModelInputs(dense=schema.dense, vectors=vectors, dim=dim, seed=seed, tasks=tasks))
    sequences = _sequences(schema, weights, model, seed)
    _load(ranking, weights, _RANKING)
    columns = [column for column, name in enumerate(schema.dense) if name in data.max_normed]
    normalise = MaxNorm(columns) if columns else None
    if normalise is not None:
        _load(normalise, weights, _NORMALISE)
    if project is not None and not modules:
        _load(project, weights, _PROJECT)
    order = [in_towers.index(name) for name in schema.vectors] if modules and towers.module.by_feature else []
    apart = None if project is None else list(widths.values())
    return DensePart(
        ranking, modules, [] if order == sorted(order) else order, normalise, apart, None if modules else project,
        sequences,
    ).eval()  # fmt: skip


def _sequences(
    schema: DatasetSchema, weights: Mapping[str, Tensor], model: ModelConfig, seed: int
) -> list[EventInputs]:
    if not schema.sequences:
        return []
    modules = build_sequences(model, schema, seed)
    _load(modules, weights, _HISTORIES)
    places = {column.name: place for place, column in enumerate(schema.sparse)}
    return [
        EventInputs(
            modules[sequence.name],
            [model.dim_of(column.owner) for column in sequence.columns],
            [places[column.table] if column.table else None for column in sequence.columns],
        )
        for sequence in schema.sequences
    ]


def _load(module: nn.Module, weights: Mapping[str, Tensor], prefix: str) -> None:
    own = {name.removeprefix(prefix): value for name, value in weights.items() if name.startswith(prefix)}
    try:
        module.load_state_dict(own)
    except RuntimeError as error:
        raise ArtifactError(
            f"the checkpoint's dense part does not fit the model: {error}", hint="nightjar train force=true"
        ) from None


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


def row_blocks(split: SplitReader) -> Iterator[RowBlock]:
    """The rows of ``split``, a row group at a time, for the simple model that a first one is measured by."""
    for group in split.groups:
        columns = split.allocate(group.rows)
        columns.ragged = split.read(group, columns, 0)
        ids: dict[str, Any] = {name: columns.single[place] for place, name in enumerate(split.single)}
        for name, each in ((column.name, columns.ragged[column.name]) for column in split.multi):
            ids[name] = (each.values, np.repeat(np.arange(group.rows), np.diff(each.offsets)), each.weights)
        yield RowBlock(columns.labels, columns.dense.T, ids, split.counted_for(columns))


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
    groups: Sequence[Group] | None = None,
) -> DatasetScores:
    """Score the rows of ``split`` with each of ``models``, in one pass, a row group in each of torch's threads.

    ``trained``: of each table a bit for each row that training has moved (``publishing.writing``; None: not known, then
    all but the reserved ones). ``slices``: sparse features whose row numbers are kept. ``groups``: only these row
    groups. The number of threads changes no bit.
    """

    def scored(group: Group) -> DatasetScores:
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
    for each in side_by_side(scored, split.groups if groups is None else groups):
        scores.add(each)
    return scores


def score_columns(
    split: SplitReader, columns: Columns, model: ServedModel, translation: Translation | None = None,
    raw: Mapping[str, np.ndarray] = NONE, unseen: Mapping[str, np.ndarray] = NONE,
) -> np.ndarray:  # fmt: skip
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
            if name in translation.longest:
                ids[name] = ids[name].first(translation.longest[name])
    stacked = np.stack(dense, axis=1) if dense else np.zeros((len(columns.labels), 0), np.float32)
    return model.score(np.ascontiguousarray(stacked), ids)


def _ids(split: SplitReader, columns: Columns, name: str) -> Any:
    return columns.ragged[name] if name in columns.ragged else columns.single[split.single.index(name)]


def _codes(split: SplitReader, columns: Columns, name: str) -> np.ndarray:
    """A number for each row to slice by: its row in the table, of several the first; of a sequence its length."""
    for sequence in split.schema.sequences:
        if sequence.name == name:
            return length_codes(columns, sequence)
    ids = _ids(split, columns, name)
    return ids.values[ids.offsets[:-1]] if name in columns.ragged else ids.copy()


def _count_served(
    split: SplitReader, columns: Columns, trained: Mapping[str, np.ndarray | None], scores: DatasetScores
) -> None:
    for name, moved in trained.items():
        ids = _ids(split, columns, name)
        values = ids.values if name in columns.ragged else ids
        own = values >= RESERVED_ROWS
        served = own if moved is None else own & is_set(moved, values)
        scores.lookups[name] = int((values != MISSING_ROW).sum())
        scores.served[name] = int(served.sum())
