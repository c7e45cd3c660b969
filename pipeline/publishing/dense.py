"""The dense part of a version: ranking model, towers and sequences as one module of a single machine.

A version holds it twice. ``dense.safetensors`` has its weights and ``dense.json``, beside ``config.yaml``, what they
are weights of: ours is built from these, which are numbers and names and run nothing. ``dense.pt2`` (``program.py``) is
the same module for other programs.

The arithmetic is that of the code which is installed when a version is opened. So a version keeps its logits of a few
made-up rows, the probe, and is refused where they come out otherwise: no gate compares with a model that never served.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.torch import load_file
from safetensors.torch import save as to_safetensors
from torch import Tensor, nn

from pipeline.config.data import DataConfig
from pipeline.config.hardware import HardwareConfig
from pipeline.config.model import ModelConfig
from pipeline.embeddings.widths import Projections, projections
from pipeline.errors import ArtifactError, NightjarError, OtherCodeError
from pipeline.evaluation.ensemble_members import shares
from pipeline.models.build import build_model
from pipeline.models.layers.mlp import MaxNorm
from pipeline.models.sequence_encoders import build_sequences
from pipeline.records.dataset import DatasetSchema
from pipeline.records.serving import DENSE, WEIGHTS, DenseRecord
from pipeline.records.towers import Towers
from pipeline.specs.model import ModelInputs, task_inputs
from pipeline.store.retrying import passes
from pipeline.towers.layout import layout_of
from pipeline.towers.modules import joined as joined_vectors
from pipeline.towers.modules import projected_tower

if TYPE_CHECKING:
    from pipeline.config import Config
    from pipeline.store.artifacts import Draft

CONFIG = "config.yaml"
_RANKING, _TOWERS, _NORMALISE, _PROJECT = "head.ranking.", "towers.tower.", "head.normalise.", "head.project."
_HISTORIES = "head.histories.vectors."
_PROBE_ROWS = 3
_NO_MEMORY = "can't allocate memory"  # the only mark of an error of torch, which says nothing about the code
# Logits of the probe may differ by this, relative to the largest of them and to 1: another processor or number of
# threads gives differences of about 1e-6, other code far larger ones.
_SAME = 1e-3
_OTHER_CODE = "install the release and packages that published it, or publish again with those that are installed"


def write_dense(
    draft: Draft,
    schema: DatasetSchema,
    towers: Towers,
    weights: Sequence[Mapping[str, Tensor]],
    counted: Sequence[float],
    logits: Sequence[float] = (),
) -> None:
    """Write what ``read_dense`` builds the dense part from, but for ``config.yaml``.

    Args:
        weights: Of each member the parameters of its checkpoint, by name.
        counted: What each member's logits count.
        logits: What ``probe`` gives of the module; empty: nothing tells whether a reader's code computes the same.
    """
    tensors = {f"{at}/{name}": value.contiguous() for at, own in enumerate(weights) for name, value in own.items()}
    with draft.open(WEIGHTS) as sink:
        sink.write(to_safetensors(tensors))
    about = replace(schema, files={}, groups={})
    record = DenseRecord(schema=about, towers=towers, shares=tuple(counted), probe=tuple(logits))
    draft.write_json(DENSE, record.to_json())


def read_dense(folder: Path) -> nn.Module:
    """Build the dense part of the version in ``folder``, on this machine, in float32 and for evaluation.

    Raises:
        ArtifactError: A file is damaged.
        OtherCodeError: What is installed here cannot build it, or computes something else of its weights.
    """
    from pipeline.compose import from_yaml

    try:
        record = DenseRecord.from_json(json.loads((folder / DENSE).read_bytes()), str(folder / DENSE))
        settings = (folder / CONFIG).read_text()
        tensors = load_file(folder / WEIGHTS)
    except (OSError, ValueError, RecursionError, SafetensorError) as error:
        raise ArtifactError(f"the dense part of {folder} cannot be read: {error}", hint="publish it again") from error
    members = [
        {name.removeprefix(f"{at}/"): value for name, value in tensors.items() if name.startswith(f"{at}/")}
        for at in range(len(record.shares))
    ]
    try:
        config = from_yaml(settings)
        module = build_dense(record.schema, record.towers, members, record.shares, config)
        found = probe(module, record.schema, config.model, len(members)) if record.probe else ()
    except Exception as error:  # whatever the code of a package raises
        if passes(error) or _NO_MEMORY in str(error):
            raise
        message = error.message if isinstance(error, NightjarError) else f"{type(error).__name__}: {error}"
        raise OtherCodeError(
            f"the dense part of {folder} cannot be built by what is installed here: {message}", hint=_OTHER_CODE
        ) from error
    if not _alike(record.probe, found):
        raise OtherCodeError(
            f"what is installed here computes another model of the weights of {folder}: logits of a probe are "
            f"{_shown(found)}, expected {_shown(record.probe)}",
            hint=_OTHER_CODE,
        )
    return module


def input_shapes(schema: DatasetSchema, model: ModelConfig, members: int) -> tuple[tuple[int, ...], list[int]]:
    """The shape of a sample's embeddings, and the width of each sequence's events, of ``members`` side by side."""
    widths = [members * model.dim_of(column.owner) for column in schema.sparse]
    even = len(set(widths)) == 1 and widths[0] == members * model.embedding_dim
    events = [sum(members * model.dim_of(column.owner) for column in each.columns) for each in schema.sequences]
    return (len(widths), widths[0]) if even else (sum(widths),), events


def probe(module: nn.Module, schema: DatasetSchema, model: ModelConfig, members: int) -> tuple[float, ...]:
    """Return the logits that ``module`` gives a few made-up rows, by which its code is known again.

    Empty where one is not finite: the gate says so, and nothing is compared.
    """
    shape, events = input_shapes(schema, model, members)
    given = [_numbers(_PROBE_ROWS, len(schema.dense)), _numbers(_PROBE_ROWS, *shape)]
    for width in events:
        given += [_numbers(_PROBE_ROWS, width), torch.arange(_PROBE_ROWS)]
    with torch.no_grad():
        logits: list[float] = module(*given).flatten().tolist()
    return tuple(logits) if all(map(math.isfinite, logits)) else ()


def _numbers(*shape: int) -> Tensor:
    """Numbers between -0.1 and 0.1, about as large as embeddings: the same bits on every machine."""
    whole = torch.arange(math.prod(shape)) * 37 % 101 - 50
    return (whole.to(torch.float32) / 512).reshape(shape)


def _alike(expected: Sequence[float], found: Sequence[float]) -> bool:
    size = max([1.0, *map(abs, expected)])
    return len(expected) == len(found) and all(
        abs(one - other) <= _SAME * size for one, other in zip(expected, found, strict=True)
    )


def _shown(logits: Sequence[float]) -> str:
    return ", ".join(f"{each:.6g}" for each in logits[:_PROBE_ROWS]) or "not finite"


def build_dense(
    schema: DatasetSchema,
    towers: Towers,
    weights: Sequence[Mapping[str, Tensor]],
    counted: Sequence[float],
    config: Config,
) -> nn.Module:
    """Return the members with these ``weights``, whose logits count ``counted``, as one module."""
    modules = [
        dense_part(
            schema, towers, own, model=config.model, data=config.data, hardware=config.hardware, seed=config.seed
        )
        for own in weights
    ]
    return joined(schema, config.model, modules, counted)


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
                values.split(each.widths, dim=1),
                rows,
                [None if place is None else self._taken(pooled, [place]).flatten(1) for place in each.candidates],
                samples,
            )
            for vector, each, values, rows in zip(self.vectors, self._events, events[::2], events[1::2], strict=True)
        ]
        return torch.stack(vectors, dim=1)

    def _in_towers(self, embeddings: Tensor, sequences: Tensor | None) -> Tensor:
        """What the towers put out; places behind the features are those of ``sequences``."""
        if self.widths is None:
            every = embeddings if sequences is None else torch.cat([embeddings, sequences], dim=1)
            taken = [every[:, places] for places in self._places]
        else:
            parts = [*embeddings.split(self.widths, dim=1), *(() if sequences is None else sequences.unbind(1))]
            taken = [joined_vectors([parts[place] for place in places]) for places in self._places]
        found = joined_vectors([module(each) for module, each in zip(self.towers, taken, strict=True)])
        return found[:, self._order] if self._order else found

    def _taken(self, embeddings: Tensor, places: list[int]) -> Tensor:
        """The embeddings of the features at ``places``."""
        if self.widths is None:
            return embeddings[:, places]
        parts = embeddings.split(self.widths, dim=1)
        return joined_vectors([parts[place] for place in places])


def dense_part(
    schema: DatasetSchema,
    towers: Towers,
    weights: Mapping[str, Tensor],
    *,
    model: ModelConfig,
    data: DataConfig,
    hardware: HardwareConfig,
    seed: int,
) -> DensePart:
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
        ranking,
        modules,
        [] if order == sorted(order) else order,
        normalise,
        apart,
        None if modules else project,
        sequences,
    ).eval()


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


class Ensemble(nn.Module):
    """forward(dense, embeddings, *events) -> the weighted sum of its members' logits, [b] or [b, T].

    ``widths``: of the features' embeddings in a member, None where all have one width ``dim`` and come as [b, F, m *
    dim]; ``events``: by sequence the widths of its columns. ``shares``: what logits count, [m] or [m, T].
    """

    def __init__(
        self,
        members: Sequence[nn.Module],
        shares: NDArray[np.floating],
        dim: int,
        widths: Sequence[int] | None,
        events: Sequence[Sequence[int]],
    ) -> None:
        super().__init__()
        self.members = nn.ModuleList(members)
        self.register_buffer("shares", torch.from_numpy(shares.astype(np.float32))[:, None])
        self.register_buffer("places", places([dim] if widths is None else widths, len(members)))
        self._events = len(events)
        for number, own in enumerate(events):
            self.register_buffer(f"events{number}", places(own, len(members)))

    def forward(self, dense: Tensor, embeddings: Tensor, *events: Tensor) -> Tensor:
        """The logits; ``events``: as ``DensePart`` takes them, of all members side by side."""
        logits = [
            member(dense, embeddings.index_select(-1, self.get_buffer("places")[at]), *self._own(at, events))
            for at, member in enumerate(self.members)
        ]
        return (torch.stack(logits) * self.get_buffer("shares")).sum(dim=0)

    def _own(self, at: int, events: Sequence[Tensor]) -> list[Tensor]:
        """The part of ``events`` of member ``at``."""
        own: list[Tensor] = []
        for number, (values, rows) in enumerate(zip(events[::2], events[1::2], strict=True)):
            own += [values.index_select(-1, self.get_buffer(f"events{number}")[at]), rows]
        return own


def joined(
    schema: DatasetSchema, model: ModelConfig, members: Sequence[nn.Module], weights: Sequence[float]
) -> nn.Module:
    """``members`` as one module whose logits count ``weights``; the only one as it is."""
    if len(members) == 1:
        return members[0]
    widths = [model.dim_of(column.owner) for column in schema.sparse]
    even = all(width == model.embedding_dim for width in widths)
    events = [[model.dim_of(column.owner) for column in each.columns] for each in schema.sequences]
    counted = shares(np.asarray(weights), len(schema.tasks))
    return Ensemble(members, counted, model.embedding_dim, None if even else widths, events)


def places(widths: Sequence[int], members: int) -> Tensor:
    """Columns of each member in rows where parts of these ``widths`` have all members side by side: [members, sum]."""
    starts = np.cumsum([0, *widths])[:-1] * members
    own = [
        [start + at * width + np.arange(width) for start, width in zip(starts, widths, strict=True)]
        for at in range(members)
    ]
    return torch.from_numpy(np.stack([np.concatenate(each) for each in own]))
