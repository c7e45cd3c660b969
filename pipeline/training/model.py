"""The trained module: sharded tables, the ranking model on top, and the loss; precision."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor, KeyedTensor

from pipeline.config.data import DataConfig
from pipeline.config.model import ModelConfig
from pipeline.config.train import TrainConfig
from pipeline.embeddings.collection import build_collection, event_collection, feature_vectors, penalised
from pipeline.embeddings.row_access import RowAccess
from pipeline.embeddings.sharding import shard_model, whole_tables
from pipeline.embeddings.ssd.store import SsdStore
from pipeline.embeddings.table_optimizer_config import table_rules
from pipeline.embeddings.tables import TableSpec
from pipeline.embeddings.widths import Projections, projections
from pipeline.embeddings.workers import Workers
from pipeline.errors import ConfigError
from pipeline.models.build import build_model
from pipeline.models.layers.mlp import MaxNorm, Ranker, batch_norms
from pipeline.models.layers.multi_task import MultiTaskRanker
from pipeline.records.dataset import DatasetSchema
from pipeline.records.plan import Plan
from pipeline.records.towers import Towers
from pipeline.specs.model import ModelInputs, task_inputs
from pipeline.towers.events import TowerEvents
from pipeline.towers.layout import TowerLayout, layout_of
from pipeline.towers.transform import TowerEmbeddings, exchange_codecs, flat_exchange_codecs, make_groups
from pipeline.training.data import Batch, RowCounts
from pipeline.training.distributed import workers_of
from pipeline.training.faults import Fault, FaultFinder
from pipeline.training.linear import use_cpu_kernels
from pipeline.training.regularise import largest_of_ranks, synchronise
from pipeline.training.sequence_vectors import SequenceEncoders, build_sequence_encoders
from pipeline.training.settings import ModelSettings
from pipeline.training.tasks import TaskLoss, join_labels

TABLES = "collection"
EVENT_TABLES = "event_tables"
TOWERS = "towers"
HISTORIES = "head.histories."  # what the parameters of sequences start with, in towers too
Output = tuple[Tensor, Tensor, Tensor]


class ClickModel(nn.Module):
    """forward(batch) -> (loss, (logits [b], labels [b], weights [b])); the tables are at path ``TABLES``.

    With further tasks, logits and labels are [b, T], the main task's first. The tables take their ids straight from the
    batch, so that TorchRec's pipeline can fetch them ahead. The dense part is at path ``head``, by which checkpoints
    name its parameters. ``event_tables``: those of sequences, at path ``EVENT_TABLES``; a collection without tables is
    left out.
    """

    def __init__(
        self, collection: EmbeddingBagCollection, head: DensePart, event_tables: EmbeddingBagCollection | None = None
    ) -> None:
        super().__init__()
        self.collection = collection if len(collection.embedding_bags) else None
        self.head = head
        self.event_tables = event_tables

    def forward(self, batch: Batch) -> tuple[Tensor, Output]:
        """The rank's loss as ``Batch`` defines it, and what metrics need."""
        pooled = self.collection(batch.sparse) if self.collection is not None else None
        if self.event_tables is None:
            return self.head(pooled, batch.dense, batch.labels, batch.weights, batch.extra)
        looked_up = self.event_tables(batch.lookups)
        return self.head(pooled, batch.dense, batch.labels, batch.weights, batch.extra, looked_up, batch.events)

    @property
    def paths(self) -> list[str]:
        """The paths of its collections."""
        return [path for path in (TABLES, EVENT_TABLES) if getattr(self, path) is not None]


class TowerClickModel(nn.Module):
    """``ClickModel`` with towers: their modules and tables are below the path ``TOWERS``."""

    def __init__(self, towers: TowerEmbeddings, head: DensePart) -> None:
        super().__init__()
        self.towers = towers
        self.head = head

    def forward(self, batch: Batch, received: KeyedJaggedTensor | None = None) -> tuple[Tensor, Output]:
        """As ``ClickModel``; ``received``: its ids from ``TowerEmbeddings.send``, where that was called ahead."""
        embeddings = self.towers(batch.sparse, received, batch.weights, batch.lookups, batch.events)
        return self.head(embeddings, batch.dense, batch.labels, batch.weights, batch.extra)

    @property
    def paths(self) -> list[str]:
        """The paths of its collections."""
        return [f"{TOWERS}.{path}" for path in (TABLES, EVENT_TABLES) if getattr(self.towers, path) is not None]


class PooledEmbeddings(nn.Module):
    """The features' embeddings in the schema's order, once exchanged; towers' outputs as they are.

    [b, F, D], and where tables differ in width (not ``even``) [b, sum of widths]. A module, so that it takes hooks.
    """

    def __init__(self, features: list[str], *, even: bool = True) -> None:
        super().__init__()
        self.features, self.even = features, even

    def forward(self, pooled: KeyedTensor | Tensor | None, apart: Mapping[str, Tensor] | None = None) -> Tensor:
        """``apart``: embeddings [b, w] of the features that ``pooled`` lacks."""
        if isinstance(pooled, Tensor):
            return pooled
        return feature_vectors(pooled, apart, self.features, even=self.even)


class DensePart(nn.Module):
    """The ranking model and the loss, regularised by ``train``. ``faults`` finds values that are not finite.

    ``names``: of the embedding vectors, for messages (None: those of the schema's tables). ``project``: what brings
    the tables' embeddings to one width, where they have several and do not come from towers.
    """

    def __init__(
        self,
        ranking: Ranker,
        schema: DatasetSchema,
        dtype: torch.dtype | None,
        names: list[str] | None = None,
        normalise: MaxNorm | None = None,
        train: TrainConfig | None = None,
        project: Projections | None = None,
        histories: SequenceEncoders | None = None,
    ) -> None:
        super().__init__()
        train = train or TrainConfig()
        self.ranking = ranking
        self.smoothing, self.penalty = train.label_smoothing, train.embedding_l2
        self.tasks, self.counts = len(schema.tasks), RowCounts.of(schema)
        self.task_loss = TaskLoss.of(schema, train)
        self._batch_norms = batch_norms(ranking)
        self.normalise, self.project, self.histories = normalise, project, histories
        self.tables = [column.name for column in schema.sparse]
        self.pooled = PooledEmbeddings(self.tables, even=project is None)
        self.dtype = dtype
        vectors = names or [f"table {name!r}" for name in self.tables]
        vectors += [f"sequence {each.name!r}" for each in schema.sequences if names is None]
        self.faults = FaultFinder(schema.dense, vectors, ranking, self._rank)
        self._embeddings: Tensor | None = None
        self.workers: Workers | None = None  # None: every rank has samples
        self.inputs: ModelInputs | None = None  # what the ranking model was built for
        self.replayed = False  # from a CUDA graph, whose next replay writes over the outputs of this one

    def forward(
        self,
        pooled: KeyedTensor | Tensor | None,
        dense: Tensor,
        labels: Tensor,
        weights: Tensor,
        extra: Tensor | None = None,
        looked_up: KeyedTensor | None = None,
        events: Sequence[Tensor] = (),
    ) -> tuple[Tensor, Output]:
        """Loss sum(weights * log loss), logits float32; of ``pooled`` embeddings, or of vectors [b, V, D] in order.

        ``extra``: see ``Batch``. Where rows without a click were left out, the loss is of the logits that the rest has,
        and the logits are those of all rows. The weights that come out say how many rows each row stands for.
        ``looked_up``: the embeddings of the tables of sequences; ``events``: see ``Batch``.
        """
        if self.workers is not None and pooled is not None and not isinstance(pooled, Tensor):
            if not self.workers.here:
                return self._without_samples(pooled, labels, weights, extra)
            self.workers.averaged(pooled.values())
            pooled, dense, labels, weights, extra = self._near(pooled, dense, labels, weights, extra)
        taken = None
        if looked_up is not None and self.histories is not None:
            taken = self.histories.take(looked_up, len(labels), events)
        embeddings = self.pooled(pooled, None if taken is None else taken.pooled)
        if self.penalty and not isinstance(pooled, Tensor):  # towers penalise what their tables give
            embeddings = penalised(embeddings, self.penalty * weights)
        if self.project is not None:
            embeddings = self.project(embeddings)
        if taken is not None and self.histories is not None:
            with torch.autocast(dense.device.type, self.dtype, enabled=self.dtype is not None):
                embeddings = torch.cat([embeddings, self.histories(taken, events)], dim=1)
        if self.normalise is not None:
            dense = self.normalise(dense)
        logits = self.rank(dense, embeddings, weights > 0)
        if self.replayed:
            logits = logits.clone()
        offset = self.counts.offset(extra)
        if self.tasks and extra is not None:
            labels = join_labels(labels, extra, self.tasks)
            others = self.counts.left_out(labels[:, 0], extra) if offset is not None else None
            loss = self.task_loss(logits, labels, weights, offset, others)
        else:
            targets = labels if not self.smoothing else labels.lerp(torch.full_like(labels, 0.5), self.smoothing)
            kept = logits if offset is None else logits + offset
            loss = functional.binary_cross_entropy_with_logits(kept, targets, weights, reduction="sum")
        if (counted := self.counts.in_figures(labels[:, 0] if labels.dim() > 1 else labels, extra)) is not None:
            weights = counted * (weights > 0)
        self._embeddings = embeddings.detach()
        self.faults.check_forward(dense.detach(), embeddings.detach(), loss.detach())
        return loss, (logits.detach(), labels, weights)

    def _without_samples(
        self, pooled: KeyedTensor, labels: Tensor, weights: Tensor, extra: Tensor | None
    ) -> tuple[Tensor, Output]:
        """A loss of no rows, through which the gradients of other ranks' rows reach this rank's tables."""
        if self.tasks and extra is not None:
            labels = join_labels(labels, extra, self.tasks)
        return pooled.values().sum(), (torch.zeros_like(labels), labels, weights)

    def _near(self, pooled: KeyedTensor, *parts: Tensor | None) -> tuple[Any, ...]:
        """``pooled`` and ``parts`` of a batch on the device of the ranking model: embeddings come to host memory."""
        device = next(self.ranking.parameters()).device
        moved = (None if part is None else part.to(device, non_blocking=True) for part in parts)
        return (pooled if pooled.device() == device else pooled.to(device), *moved)

    def rank(self, dense: Tensor, embeddings: Tensor, real: Tensor) -> Tensor:
        """The ranking model's logits; ``real`` [b]: which rows are no padding."""
        for norm in self._batch_norms:
            norm.rows = real[:, None]
        return self._rank(dense, embeddings)

    def start_at(self, logits: Sequence[float]) -> None:
        """Have an untrained model's logits near ``logits``, those of the main task and of the further ones."""
        if isinstance(self.ranking, MultiTaskRanker):
            self.ranking.start_all(logits)
        else:
            self.ranking.start_at(logits[0])

    def _rank(self, dense: Tensor, embeddings: Tensor) -> Tensor:
        with torch.autocast(dense.device.type, self.dtype, enabled=self.dtype is not None):
            return self.ranking(dense, embeddings)

    @property
    def embeddings(self) -> Tensor:
        """The vectors [B, F, D] of features and sequences of the last forward pass, in their order, detached."""
        assert self._embeddings is not None, "no forward pass yet"
        return self._embeddings

    def first_fault(self) -> Fault | None:
        """This rank's first part that was not finite; None where every loss was finite."""
        return self.faults.first()


def compute_dtype(precision: str, device: torch.device) -> torch.dtype | None:
    """The autocast dtype for ``train.precision``; None: float32. ConfigError for bf16 on a device that lacks it."""
    able = has_fast_bf16(device)
    if precision == "bf16" and not able and device.type != "cpu":
        raise ConfigError(
            "train.precision is bf16, but this CUDA device cannot compute in it", hint="train.precision=fp32"
        )
    return torch.bfloat16 if precision == "bf16" or (precision == "auto" and able) else None


def use_tf32(precision: str, device: torch.device) -> None:
    """Have this process's float32 products on CUDA round to TF32 with ``train.precision=tf32``, and no others.

    ConfigError where the device has no TF32.
    """
    if precision == "tf32" and not has_tf32(device):
        raise ConfigError(
            f"train.precision is tf32, which this {'CPU' if device.type == 'cpu' else 'CUDA device'} lacks; NVIDIA "
            "GPUs have it from Ampere on",
            hint="train.precision=fp32",
        )
    if device.type == "cuda":
        torch.set_float32_matmul_precision("high" if precision == "tf32" else "highest")


def has_tf32(device: torch.device) -> bool:
    """Whether the device multiplies in TF32: Ampere or later."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 0)


def has_fast_bf16(device: torch.device) -> bool:
    """Whether the device multiplies bf16 natively: AVX512_BF16 or AMX on a CPU, Ampere or later on CUDA."""
    if device.type == "cuda":
        return torch.cuda.is_bf16_supported(including_emulation=False)
    return bool(torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported())


def build(settings: ModelSettings, schema: DatasetSchema, device: torch.device, *, trained: bool) -> ClickModel:
    """The unsharded model, its tables on the meta device; ``trained``: compiled if the configuration says so."""
    width = settings.model.embedding_dim
    collection = build_collection(schema, settings.model, torch.device("meta"))
    names = tuple(column.name for column in schema.sparse)
    project = projections(widths_of(settings.model, schema), width, settings.seed)
    histories = build_sequence_encoders(settings.model, schema, settings.seed, settings.train.max_events)
    names += tuple(sequence.name for sequence in schema.sequences)
    part = _dense_part(settings, schema, names, width, device, project=project, histories=histories, trained=trained)
    events = event_collection(schema, settings.model, torch.device("meta")) if schema.sequences else None
    return ClickModel(collection, part, events)


def widths_of(model: ModelConfig, schema: DatasetSchema) -> dict[str, int]:
    """The width of every sparse feature's embedding, in the order of ``schema``."""
    return {column.name: model.dim_of(column.owner) for column in schema.sparse}


def build_towers(
    settings: ModelSettings, schema: DatasetSchema, layout: TowerLayout, device: torch.device, *, trained: bool
) -> TowerClickModel:
    """The unsharded model of this rank's towers; collective. The ranking model takes the towers' outputs."""
    groups, width = make_groups(layout), settings.model.embedding_dim
    own = schema.with_vectors(layout.tower_hosts[groups.number].features)
    # Weights travel with all ids or with none, so that every tower is weighted where one is.
    weighted = any(column.weighted for column in schema.sparse)
    collection = build_collection(own, settings.model, torch.device("meta"), weighted=weighted)
    widths, dtype = widths_of(settings.model, schema), compute_dtype(settings.train.precision, device)
    widths |= {sequence.name: width for sequence in schema.sequences}
    histories = build_sequence_encoders(settings.model, schema, settings.seed, settings.train.max_events)
    events = None
    if histories is not None:
        tables = event_collection(own, settings.model, torch.device("meta"), weighted=weighted)
        blocks = histories.of(own)
        events = TowerEvents(schema, own, blocks, histories.vectors, tables, groups.tower, weighted=weighted)
    exchange = exchange_codecs(settings.partition.exchange)
    towers = TowerEmbeddings(layout, groups, collection, widths, width, settings.seed, exchange, dtype, events)
    towers.penalty = settings.train.embedding_l2
    towers.tower.to(device)
    passed = layout.towers.module.name == "pass_through"
    if trained and not passed and device.type == "cpu":
        use_cpu_kernels(towers.tower)
    names = None if passed else [f"tower output {name!r}" for name in towers.names]
    part = _dense_part(settings, schema, towers.names, towers.dim, device, names, histories=histories, trained=trained)
    return TowerClickModel(towers, part)


def _max_norm(
    data: DataConfig, schema: DatasetSchema, device: torch.device, group: dist.ProcessGroup | None
) -> MaxNorm | None:
    """The layer for the dense features with transform max_norm; None without any."""
    chosen = {name for name, f in data.dense.items() if (f.transform or data.dense_transform) == "max_norm"}
    columns = [column for column, name in enumerate(schema.dense) if name in chosen]
    return MaxNorm(columns, partial(largest_of_ranks, group=group)).to(device) if columns else None


def _dense_part(
    settings: ModelSettings,
    schema: DatasetSchema,
    vectors: tuple[str, ...],
    dim: int,
    device: torch.device,
    names: list[str] | None = None,
    project: Projections | None = None,
    histories: SequenceEncoders | None = None,
    *,
    trained: bool,
) -> DensePart:
    """The dense part for the embedding ``vectors`` of width ``dim``."""
    tasks = task_inputs(schema.tasks)
    inputs = ModelInputs(dense=schema.dense, vectors=vectors, dim=dim, seed=settings.seed, tasks=tasks)
    ranking = build_model(settings.model, inputs).to(device)
    workers = workers_of(settings.hardware)
    synchronise(ranking, workers.group)
    graphs = trained and settings.train.cuda_graphs
    if graphs:
        _check_graphs(device)
    if trained and (graphs or settings.train.compile is True):
        ranking.compile(dynamic=False, mode="reduce-overhead" if graphs else None)
    elif trained and device.type == "cpu":  # scores of files and of versions come from the plain layers
        use_cpu_kernels(ranking)
    dtype = compute_dtype(settings.train.precision, device)
    normalise = _max_norm(settings.data, schema, device, workers.group)
    project = project.to(device) if project is not None else None
    histories = histories.to(device) if histories is not None else None
    part = DensePart(ranking, schema, dtype, names, normalise, settings.train, project, histories)
    part.inputs, part.replayed = inputs, graphs
    part.workers = workers if workers.remote else None
    return part


def _check_graphs(device: torch.device) -> None:
    if device.type != "cuda":
        raise ConfigError(
            "train.cuda_graphs is true, but the dense part is trained on a CPU", hint="train.cuda_graphs=false"
        )


@dataclass(frozen=True)
class Sharded:
    """A model over all ranks, with its dense part, its rows, and its towers if it has some."""

    model: DistributedModelParallel
    dense_part: DensePart
    rows: RowAccess
    towers: TowerEmbeddings | None = None


def assemble(
    settings: ModelSettings,
    schema: DatasetSchema,
    plan: Plan,
    towers: Towers | None,
    device: torch.device,
    *,
    trained: bool,
    ssd: SsdStore | None = None,
    whole: bool = False,
) -> Sharded:
    """Build and shard the configured model, flat or with towers; collective. PlanError where the plan does not fit.

    ``whole``: a flat model that is not trained gets all tables on every rank (``embeddings.whole``), whatever the plan.
    ``ssd``: the files of the plan's tables on tier ssd. ConfigError for ``train`` settings that device or plan lack.
    """
    rules = table_rules(settings.model, settings.train)
    if trained:
        use_tf32(settings.train.precision, device)
    if towers is None or towers.is_flat:
        flat = build(settings, schema, device, trained=trained)
        exchange = flat_exchange_codecs(settings.partition.exchange, plan)
        prefetch = trained and settings.train.pipeline == "prefetch"
        tables = torch.device("cpu") if flat.head.workers is not None else device
        plan, among = whole_tables(plan) if whole else (plan, None)
        model = shard_model(
            flat,
            plan,
            flat.paths,
            tables,
            rules,
            among,
            codecs=exchange,
            ssd=ssd,
            prefetch=prefetch,
            workers=flat.head.workers,
            trained=trained,
        )
        return Sharded(model, flat.head, RowAccess(model))
    layout = layout_of(towers, schema.vectors, settings.hardware.hosts, settings.hardware.ranks_per_host)
    built = build_towers(settings, schema, layout, device, trained=trained)
    own = schema.with_vectors(layout.tower_hosts[built.towers.groups.number].features)
    names = {table.name for table in own.tables}
    own_plan = replace(plan, tables={name: table for name, table in plan.tables.items() if name in names})
    ranks = built.towers.table_ranks(TOWERS)
    ranks = replace(ranks, apart=(*ranks.apart, HISTORIES))
    model = shard_model(built, own_plan, built.paths, device, rules, ranks, ssd=ssd)
    specs = [
        TableSpec(t.name, t.rows, settings.model.dim_of(t.name), settings.model.table(t.name).init_bound)
        for t in schema.tables
    ]
    return Sharded(model, built.head, RowAccess(model, specs), built.towers)
