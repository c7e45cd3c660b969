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
from dataclasses import replace
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
from pipeline.core.errors import ArtifactError, NightjarError, OtherCodeError
from pipeline.core.retrying import passes
from pipeline.embeddings.widths import projections
from pipeline.evaluation.metrics import compute_member_shares
from pipeline.models.build import build_model
from pipeline.models.dense_model import DenseModel, SequenceInputs, TowerInputs
from pipeline.models.layers.perceptron import MaxNorm
from pipeline.models.sequence_encoders import build_sequences
from pipeline.records.dataset import DatasetSchema
from pipeline.records.serving import DENSE, WEIGHTS, DenseRecord
from pipeline.records.towers import Towers
from pipeline.specs.model import ModelInputs, task_inputs
from pipeline.towers.layout import layout_of
from pipeline.towers.modules import projected_tower

if TYPE_CHECKING:
    from pipeline.config import Config
    from pipeline.store.artifacts import Draft

CONFIG = "config.yaml"
# Prefixes of parameter names in checkpoints.
_RANKING = "head.ranking."
_TOWERS = "towers.tower."
_NORMALISE = "head.normalise."
_PROJECT = "head.project."
_HISTORIES = "head.histories.vectors."
_PROBE_ROWS = 3
# The only sign of torch's out-of-memory error, which says nothing about the code.
_NO_MEMORY = "can't allocate memory"
# Logits of the probe may differ by this share of the largest logit, or of 1 if that is larger. Another processor or
# number of threads gives differences of about 1e-6, other code far larger ones.
_SAME = 1e-3
_OTHER_CODE = "install the release and packages that published it, or publish again with those that are installed"


def write_dense(
    draft: Draft,
    schema: DatasetSchema,
    towers: Towers,
    weights: Sequence[Mapping[str, Tensor]],
    shares: Sequence[float],
    logits: Sequence[float] = (),
) -> None:
    """Write what ``read_dense`` builds the dense part from, but for ``config.yaml``.

    Args:
        weights: For each member, the parameters of its checkpoint by name.
        shares: What each member's logits count.
        logits: What ``probe`` gives of the module; empty: nothing tells whether a reader's code computes the same.
    """
    tensors = {}
    for number, parameters in enumerate(weights):
        for name, value in parameters.items():
            tensors[f"{number}/{name}"] = value.contiguous()
    with draft.open(WEIGHTS) as sink:
        sink.write(to_safetensors(tensors))
    about = replace(schema, files={}, groups={})
    record = DenseRecord(schema=about, towers=towers, shares=tuple(shares), probe=tuple(logits))
    draft.write_json(DENSE, record.to_json())


def read_dense(folder: Path) -> nn.Module:
    """Build the dense part of the version in ``folder``, on this machine, in float32 and for evaluation.

    Raises:
        ArtifactError: A file is damaged.
        OtherCodeError: What is installed here cannot build it, or computes something else of its weights.
    """
    from pipeline.config.compose import from_yaml

    try:
        record = DenseRecord.from_json(json.loads((folder / DENSE).read_bytes()), str(folder / DENSE))
        settings = (folder / CONFIG).read_text()
        tensors = load_file(folder / WEIGHTS)
    except (OSError, ValueError, RecursionError, SafetensorError) as error:
        raise ArtifactError(f"the dense part of {folder} cannot be read: {error}", hint="publish it again") from error
    weights = [select_prefix(tensors, f"{number}/") for number in range(len(record.shares))]
    logits: tuple[float, ...] = ()
    try:
        config = from_yaml(settings)
        module = build_dense(record.schema, record.towers, weights, record.shares, config)
        if record.probe:
            logits = probe(module, record.schema, config.model, len(weights))
    # A package's code may raise anything.
    except Exception as error:
        if passes(error) or _NO_MEMORY in str(error):
            raise
        message = f"{type(error).__name__}: {error}"
        if isinstance(error, NightjarError):
            message = error.message
        raise OtherCodeError(
            f"the dense part of {folder} cannot be built by what is installed here: {message}", hint=_OTHER_CODE
        ) from error
    if not same_logits(record.probe, logits):
        raise OtherCodeError(
            f"what is installed here computes another model of the weights of {folder}: logits of a probe are "
            f"{format_logits(logits)}, expected {format_logits(record.probe)}",
            hint=_OTHER_CODE,
        )
    return module


def input_shapes(schema: DatasetSchema, model: ModelConfig, members: int) -> tuple[tuple[int, ...], list[int]]:
    """Return the shape of a sample's embeddings, and the width of each sequence's events.

    Embeddings of all ``members`` are concatenated.
    """
    widths = [members * model.dim_of(column.owner) for column in schema.sparse]
    events = []
    for sequence in schema.sequences:
        events.append(sum(members * model.dim_of(column.owner) for column in sequence.columns))
    # Embeddings of equal width are stacked, [F, D]; those of several widths are concatenated.
    if set(widths) == {members * model.embedding_dim}:
        return (len(widths), widths[0]), events
    return (sum(widths),), events


def probe(module: nn.Module, schema: DatasetSchema, model: ModelConfig, members: int) -> tuple[float, ...]:
    """Return the logits that ``module`` gives a few made-up rows, by which its code is known again.

    Empty if a logit is not finite: the gate reports that, and nothing is compared.
    """
    shape, event_widths = input_shapes(schema, model, members)
    inputs = [probe_values(_PROBE_ROWS, len(schema.dense)), probe_values(_PROBE_ROWS, *shape)]
    for width in event_widths:
        inputs += [probe_values(_PROBE_ROWS, width), torch.arange(_PROBE_ROWS)]
    with torch.no_grad():
        logits: list[float] = module(*inputs).flatten().tolist()
    return tuple(logits) if all(map(math.isfinite, logits)) else ()


def probe_values(*shape: int) -> Tensor:
    """Return numbers between -0.1 and 0.1, about as large as embeddings: the same bits on every machine."""
    # Whole numbers divided by a power of two are exact.
    whole = torch.arange(math.prod(shape)) * 37 % 101 - 50
    return (whole.to(torch.float32) / 512).reshape(shape)


def same_logits(expected: Sequence[float], found: Sequence[float]) -> bool:
    """Return whether two probes agree within ``_SAME``."""
    if len(expected) != len(found):
        return False
    size = max([1.0, *map(abs, expected)])
    # Compare relative to the largest logit. A tolerance relative to each logit, as in ``np.allclose``, is too strict
    # near 0.
    return all(abs(one - other) <= _SAME * size for one, other in zip(expected, found, strict=True))


def format_logits(logits: Sequence[float]) -> str:
    """Format the first logits for a message."""
    return ", ".join(f"{each:.6g}" for each in logits[:_PROBE_ROWS]) or "not finite"


def build_dense(
    schema: DatasetSchema,
    towers: Towers,
    weights: Sequence[Mapping[str, Tensor]],
    shares: Sequence[float],
    config: Config,
) -> nn.Module:
    """Build the members with these ``weights``, whose logits count ``shares``, as one module."""
    members = []
    for parameters in weights:
        member = build_member(
            schema,
            towers,
            parameters,
            model=config.model,
            data=config.data,
            hardware=config.hardware,
            seed=config.seed,
        )
        members.append(member)
    return join_members(schema, config.model, members, shares)


def build_member(
    schema: DatasetSchema,
    towers: Towers,
    weights: Mapping[str, Tensor],
    *,
    model: ModelConfig,
    data: DataConfig,
    hardware: HardwareConfig,
    seed: int,
) -> DenseModel:
    """Build the dense part of a checkpoint, for evaluation.

    Args:
        towers: The plan's towers; flat: there are none.
        weights: Parameters by their names in the checkpoint.
        data: Names the features with transform max_norm.
        hardware: Its hosts decide the order of the towers.
        seed: The seed of the initial weights, which are replaced.

    Raises:
        ArtifactError: The weights do not fit.
    """
    dim = model.embedding_dim
    widths = {column.name: model.dim_of(column.owner) for column in schema.sparse}
    project = projections(widths, dim, seed)
    uneven = project is not None

    # 1. Build the towers, in the order in which their hosts exchange vectors, and the order that restores the schema's.
    tower_inputs: list[TowerInputs] = []
    tower_features: list[str] = []
    order: list[int] = []
    vectors = schema.vectors
    if not towers.is_flat:
        layout = layout_of(towers, vectors, hardware.hosts, hardware.ranks_per_host)
        input_widths = widths | {sequence.name: dim for sequence in schema.sequences}
        for group in layout.tower_hosts:
            for number in group.towers:
                features = towers.towers[number].features
                own_widths = {name: input_widths[name] for name in features}
                tower = projected_tower(towers.module, own_widths, model.embedding_dim, seed, number, even=not uneven)
                load_weights(tower, weights, f"{_TOWERS}{number}.")
                tower_inputs.append(TowerInputs(tower, list(map(schema.vectors.index, features))))
                tower_features += features
                dim = tower.dim
        if towers.module.by_feature:
            order = list(map(tower_features.index, schema.vectors))
            # Indexing would copy, so give no order if the vectors already come in the schema's order.
            if order == sorted(order):
                order = []
        else:
            vectors = layout.vectors
        # Towers project embeddings to width D themselves.
        project = None

    # 2. Build the ranking model, the layers in front of it, and the sequences.
    tasks = task_inputs(schema.tasks)
    ranking = build_model(model, ModelInputs(dense=schema.dense, vectors=vectors, dim=dim, seed=seed, tasks=tasks))
    load_weights(ranking, weights, _RANKING)
    normalise = None
    # Max-norm's maxima and biases belong to the training, not to the dataset, so they come with the weights.
    if columns := [column for column, name in enumerate(schema.dense) if name in data.max_normed]:
        normalise = MaxNorm(columns)
        load_weights(normalise, weights, _NORMALISE)
    if project is not None:
        load_weights(project, weights, _PROJECT)

    dense_model = DenseModel(
        ranking,
        normalise=normalise,
        project=project,
        widths=list(widths.values()) if uneven else None,
        sequences=load_sequences(schema, weights, model, seed),
        towers=tower_inputs,
        order=order,
    )
    return dense_model.eval()


def load_sequences(
    schema: DatasetSchema, weights: Mapping[str, Tensor], model: ModelConfig, seed: int
) -> list[SequenceInputs]:
    """Build the encoders of all sequences; the arguments are those of ``build_member``."""
    if not schema.sequences:
        return []
    encoders = build_sequences(model, schema, seed)
    load_weights(encoders, weights, _HISTORIES)
    positions = {column.name: position for position, column in enumerate(schema.sparse)}
    sequences = []
    for sequence in schema.sequences:
        widths, candidates = [], []
        for column in sequence.columns:
            widths.append(model.dim_of(column.owner))
            # Events with their own table cannot be compared with a candidate's embedding.
            candidates.append(positions[column.table] if column.table else None)
        sequences.append(SequenceInputs(encoders[sequence.name], widths, candidates))
    return sequences


def load_weights(module: nn.Module, weights: Mapping[str, Tensor], prefix: str) -> None:
    """Give ``module`` the ``weights`` whose names start with ``prefix``.

    Raises:
        ArtifactError: They do not fit.
    """
    try:
        module.load_state_dict(select_prefix(weights, prefix))
    except RuntimeError as error:
        raise ArtifactError(
            f"the checkpoint's dense part does not fit the model: {error}", hint="nightjar train force=true"
        ) from None


def select_prefix(tensors: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    """Return the tensors whose names start with ``prefix``, by the rest of their names."""
    return {name.removeprefix(prefix): value for name, value in tensors.items() if name.startswith(prefix)}


class Ensemble(nn.Module):
    """forward(dense, embeddings, *events) -> the weighted sum of its members' logits, [b] or [b, T].

    Args:
        members: ``DenseModel``s. Their embeddings come concatenated, all members' of a feature side by side.
        shares: The weights of logits, [m] or [m, T].
        dim: Width of a member's embeddings, which come as [b, F, m * dim].
        widths: Widths of the features' embeddings in a member, if they differ and come as [b, m * sum of widths].
        events: The widths of each sequence's columns.
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
        self.register_buffer("places", member_columns([dim] if widths is None else widths, len(members)))
        for number, column_widths in enumerate(events):
            self.register_buffer(f"events{number}", member_columns(column_widths, len(members)))

    def forward(self, dense: Tensor, embeddings: Tensor, *events: Tensor) -> Tensor:
        """Return the logits; ``events``: as ``DenseModel`` takes them, concatenated over all members."""
        logits = []
        for member_number, member in enumerate(self.members):
            member_embeddings = embeddings.index_select(-1, self.get_buffer("places")[member_number])
            member_events: list[Tensor] = []
            for number, (values, rows) in enumerate(zip(events[::2], events[1::2], strict=True)):
                columns = self.get_buffer(f"events{number}")[member_number]
                member_events += [values.index_select(-1, columns), rows]
            logits.append(member(dense, member_embeddings, *member_events))
        return (torch.stack(logits) * self.get_buffer("shares")).sum(dim=0)


def join_members(
    schema: DatasetSchema, model: ModelConfig, members: Sequence[nn.Module], weights: Sequence[float]
) -> nn.Module:
    """Return ``members`` as one module whose logits count ``weights``; a single one as it is."""
    if len(members) == 1:
        return members[0]
    widths = [model.dim_of(column.owner) for column in schema.sparse]
    # Embeddings of equal width come stacked, [b, F, m * dim].
    even = set(widths) <= {model.embedding_dim}
    events = []
    for sequence in schema.sequences:
        events.append([model.dim_of(column.owner) for column in sequence.columns])
    shares = compute_member_shares(np.asarray(weights), len(schema.tasks))
    return Ensemble(members, shares, model.embedding_dim, None if even else widths, events)


def member_columns(widths: Sequence[int], members: int) -> Tensor:
    """Return the columns of each member, [members, sum of ``widths``], in rows that have every part of all members."""
    starts = np.cumsum([0, *widths])[:-1] * members
    rows = []
    for member in range(members):
        parts = [start + member * width + np.arange(width) for start, width in zip(starts, widths, strict=True)]
        rows.append(np.concatenate(parts))
    return torch.from_numpy(np.stack(rows))
