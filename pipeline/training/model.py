"""The trained module: sharded tables, the ranking model on top, the loss, and the precision."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor, KeyedTensor

from pipeline.config.model import ModelConfig
from pipeline.config.train import TrainConfig
from pipeline.core.errors import ConfigError
from pipeline.core.logs import hide_tracing_advice
from pipeline.embeddings.collection import build_collection, event_collection, feature_vectors, penalised
from pipeline.embeddings.row_access import RowAccess, RowStore
from pipeline.embeddings.sharding import shard_model, whole_tables
from pipeline.embeddings.table_optimizers import table_rules
from pipeline.embeddings.tables import TableSpec
from pipeline.embeddings.widths import Projections, projections
from pipeline.embeddings.workers import Workers
from pipeline.models.build import build_model
from pipeline.models.dense_model import DenseModel
from pipeline.models.layers.multi_task import MultiTaskRanker
from pipeline.models.layers.perceptron import MaxNorm, Ranker, batch_norms
from pipeline.records.dataset import DatasetSchema
from pipeline.records.plan import Plan
from pipeline.records.towers import Towers
from pipeline.specs.model import ModelInputs, task_inputs
from pipeline.towers.event_ids import TowerEvents
from pipeline.towers.layout import TowerLayout, layout_of
from pipeline.towers.transform import TowerEmbeddings, exchange_codecs, flat_exchange_codecs, make_groups
from pipeline.training.accumulation import accumulate, require_rowwise, split_rows
from pipeline.training.batches import Batch, RowCounts
from pipeline.training.distributed import largest_of_ranks, synchronise, workers_of
from pipeline.training.faults import Fault, FaultFinder
from pipeline.training.linear import use_cpu_kernels
from pipeline.training.rank_loss import RankLoss
from pipeline.training.sequence_vectors import SequenceEncoders, build_sequence_encoders
from pipeline.training.settings import ModelSettings
from pipeline.training.tasks import TaskLoss, join_labels

TABLES = "collection"
EVENT_TABLES = "event_tables"
TOWERS = "towers"
# The names of sequences' parameters start with this prefix, with and without towers.
HISTORIES = "head.histories."
# The first compute capability with TF32.
AMPERE = (8, 0)
Output = tuple[Tensor, Tensor, Tensor]


class ClickModel(nn.Module):
    """forward(batch) -> (loss, (logits [b], labels [b], weights [b])); the tables are at path ``TABLES``.

    With further tasks, logits and labels are [b, T], the main task's first. The tables take their ids directly from the
    batch, so that TorchRec's pipeline can fetch them ahead. The dense part is at path ``head``, by which checkpoints
    name its parameters. ``event_tables`` are the tables of sequences, at path ``EVENT_TABLES``; a collection without
    tables is left out.
    """

    def __init__(
        self, collection: EmbeddingBagCollection, head: DensePart, event_tables: EmbeddingBagCollection | None = None
    ) -> None:
        super().__init__()
        self.collection = collection if len(collection.embedding_bags) else None
        self.head = head
        self.event_tables = event_tables

    def forward(self, batch: Batch) -> tuple[Tensor, Output]:
        """Compute the rank's loss as ``Batch`` defines it, and what metrics need."""
        # TorchRec's pipeline traces this method to find the collections and their inputs, so they are called directly.
        pooled = looked_up = None
        if self.collection is not None:
            pooled = self.collection(batch.sparse)
        if self.event_tables is not None:
            looked_up = self.event_tables(batch.lookups)
        rows = batch.dense, batch.labels, batch.weights, batch.extra
        return self.head(pooled, *rows, looked_up, batch.events, batch.groups)

    @property
    def paths(self) -> list[str]:
        """Return the paths of its collections."""
        return [path for path in (TABLES, EVENT_TABLES) if getattr(self, path) is not None]


class TowerClickModel(nn.Module):
    """``ClickModel`` with towers: their modules and tables are below the path ``TOWERS``."""

    def __init__(self, towers: TowerEmbeddings, head: DensePart) -> None:
        super().__init__()
        self.towers = towers
        self.head = head

    def forward(self, batch: Batch, received: KeyedJaggedTensor | None = None) -> tuple[Tensor, Output]:
        """Compute as ``ClickModel`` does; ``received`` has the ids if ``TowerEmbeddings.send`` was called ahead."""
        embeddings = self.towers(batch.sparse, received, batch.weights, batch.lookups, batch.events)
        return self.head(embeddings, batch.dense, batch.labels, batch.weights, batch.extra, groups=batch.groups)

    @property
    def paths(self) -> list[str]:
        """Return the paths of its collections."""
        return [f"{TOWERS}.{path}" for path in (TABLES, EVENT_TABLES) if getattr(self.towers, path) is not None]


class PooledEmbeddings(nn.Module):
    """Joins the features' embeddings in the schema's order after their exchange; passes on towers' outputs unchanged.

    Gives [b, F, D], or [b, sum of widths] where tables differ in width (not ``even``). It is a module to take hooks.
    """

    def __init__(self, features: list[str], *, even: bool = True) -> None:
        super().__init__()
        self.features, self.even = features, even

    def forward(self, pooled: KeyedTensor | Tensor | None, separate: Mapping[str, Tensor] | None = None) -> Tensor:
        """Join them; ``separate`` has the embeddings [b, w] of features that ``pooled`` lacks."""
        if isinstance(pooled, Tensor):
            return pooled
        return feature_vectors(pooled, separate, self.features, even=self.even)


class DensePart(DenseModel):
    """The model on top of the tables, as versions serve it, and the loss. Checkpoints name its parameters by ``head``.

    Args:
        ranking: The ranking model.
        schema: The columns of the dataset.
        dtype: The dtype of products; None: float32.
        names: Names of the embedding vectors, for messages; None: those of the schema's tables and sequences.
        normalise: Normalises some of the dense features.
        train: Settings that regularise the loss.
        project: Maps the tables' embeddings to one width, if they have several and do not come from towers.
        histories: Encodes the sequences of a flat model.
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
        super().__init__(ranking, normalise=normalise, project=project, dtype=dtype)
        self.histories = histories
        # The sparse features, each of which gives a vector; several of them may share a table.
        self.tables = [column.name for column in schema.sparse]
        # Joins what collections return, which is the argument ``pooled`` of ``forward``, in the schema's order.
        # Embeddings of different widths stay concatenated until ``project`` takes them.
        self.pooled = PooledEmbeddings(self.tables, even=project is None)

        train = train or TrainConfig()
        self.smoothing = train.label_smoothing
        self.penalty = train.embedding_l2
        # How many parts of a batch ``forward`` gives to ``compare``, one after the other.
        self.parts = train.accumulate
        # The teacher's share in the loss of clicks; above 0, ``extra`` has the teacher's logits after the tasks'
        # labels.
        self.teacher_share = 0.0
        self.tasks = len(schema.tasks)
        self.counts = RowCounts.of(schema)
        self.task_loss = TaskLoss.of(schema, train)
        self._batch_norms = batch_norms(ranking)

        if names is None:
            names = [f"table {name!r}" for name in self.tables]
            names += [f"sequence {sequence.name!r}" for sequence in schema.sequences]
        self.faults = FaultFinder(schema.dense, names, ranking, self.compute_logits)
        self._embeddings: Tensor | None = None
        # None means that every rank has samples.
        self.workers: Workers | None = None
        # None means the log loss alone.
        self.rank_loss: RankLoss | None = None
        # The inputs that the ranking model was built for.
        self.inputs: ModelInputs | None = None
        # Whether a CUDA graph computes the logits; its next replay overwrites the outputs of this one.
        self.replayed = False

    def forward(  # type: ignore[override]
        self,
        pooled: KeyedTensor | Tensor | None,
        dense: Tensor,
        labels: Tensor,
        weights: Tensor,
        extra: Tensor | None = None,
        looked_up: KeyedTensor | None = None,
        events: Sequence[Tensor] = (),
        groups: Tensor | None = None,
    ) -> tuple[Tensor, Output]:
        """Compute the rank's loss, sum(weights * log loss) plus a ranking loss, and what metrics need.

        Args:
            pooled: Embeddings of the tables, or vectors [b, V, D] in order.
            dense: [b, n].
            labels: Labels of the main task, [b].
            weights: [b]; 0 is padding.
            extra: See ``Batch``.
            looked_up: The embeddings of the tables of sequences.
            events: See ``Batch``.
            groups: See ``Batch``.

        Returns:
            The loss; logits in float32, labels and weights. Where rows without a click were left out, the loss uses the
            logits of the kept rows, but the returned logits are those of all rows, and each weight is the number of
            rows that a row stands for.
        """
        # 1. With embedding hosts, only the workers have samples, on the device of the ranking model.
        if self.workers is not None and pooled is not None and not isinstance(pooled, Tensor):
            if not self.workers.here:
                if self.tasks and extra is not None:
                    labels = join_labels(labels, extra, self.tasks)
                # Use a loss of no rows, through which the gradients of other ranks' rows reach this rank's tables.
                return pooled.values().sum(), (torch.zeros_like(labels), labels, weights)
            self.workers.averaged(pooled.values())
            device = next(self.ranking.parameters()).device
            if pooled.device() != device:
                pooled = pooled.to(device)
            dense, labels, weights = (part.to(device, non_blocking=True) for part in (dense, labels, weights))
            if extra is not None:
                extra = extra.to(device, non_blocking=True)
            if groups is not None:
                groups = groups.to(device, non_blocking=True)

        # 2. Compute the embeddings of features, and the vectors of sequences.
        taken = separate = None
        if looked_up is not None and self.histories is not None:
            taken = self.histories.take(looked_up, len(labels), events)
            separate = taken.pooled
        embeddings = self.pooled(pooled, separate)
        # With towers, the penalty is applied where their tables give the embeddings.
        if self.penalty and not isinstance(pooled, Tensor):
            embeddings = penalised(embeddings, self.penalty * weights)
        if self.project is not None:
            embeddings = self.project(embeddings)
        sequences = None
        if taken is not None and self.histories is not None:
            with torch.autocast(dense.device.type, self.dtype, enabled=self.dtype is not None):
                sequences = self.histories(taken, events)

        # 3. The logits and the loss. With ``train.accumulate``, training computes them in parts, each with its backward
        # pass.
        dense, vectors = self.ranking_inputs(dense, embeddings, sequences)
        self._embeddings = vectors.detach()
        if self.parts == 1 or not torch.is_grad_enabled():
            return self.compare(dense, vectors, labels, weights, extra, groups)
        # ``groups`` are not needed: ``config.checks`` refuses a ranking loss here, since a part has only some rows.
        return accumulate(
            self.compare,
            split_rows(len(labels), self.parts),
            dense,
            vectors,
            (labels, weights, extra),
            list(self.ranking.parameters()),
        )

    def compare(
        self,
        dense: Tensor,
        vectors: Tensor,
        labels: Tensor,
        weights: Tensor,
        extra: Tensor | None,
        groups: Tensor | None = None,
    ) -> tuple[Tensor, Output]:
        """Run the ranking model on some rows and compute their loss; returns as ``forward``."""
        logits = self.rank(dense, vectors, weights > 0)
        if self.replayed:
            logits = logits.clone()
        loss, labels, weights = self.compute_loss(logits, labels, weights, extra, groups)
        self.faults.check_forward(dense.detach(), vectors.detach(), loss.detach())
        return loss, (logits.detach(), labels, weights)

    def compute_loss(
        self, logits: Tensor, labels: Tensor, weights: Tensor, extra: Tensor | None, groups: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return the loss of ``logits``, and labels and weights as metrics take them."""
        offset = self.counts.offset(extra)
        targets = labels
        if self.teacher_share and self.training and extra is not None:
            # Log loss is linear in its target, so the loss for a mean of targets is the mean of the losses. The
            # teacher's logit is that of all rows, and so is the model's.
            taught = extra[:, self.tasks]
            if offset is not None:
                taught = taught + offset
            targets = labels.lerp(taught.sigmoid(), self.teacher_share)
        main_logits, main_labels = logits, labels
        if self.tasks and extra is not None:
            labels, others = join_labels(labels, extra, self.tasks), None
            main_logits, main_labels = logits[:, 0], labels[:, 0]
            if offset is not None:
                others = self.counts.left_out(main_labels, extra)
            loss = self.task_loss(logits, join_labels(targets, extra, self.tasks), weights, offset, others)
        else:
            if self.smoothing:
                targets = targets.lerp(torch.full_like(targets, 0.5), self.smoothing)
            sampled_logits = logits
            if offset is not None:
                sampled_logits = logits + offset
            loss = functional.binary_cross_entropy_with_logits(sampled_logits, targets, weights, reduction="sum")
        # The ranking loss is collective, so scoring, in which ranks may work alone, must skip it.
        if self.rank_loss is not None and self.training:
            loss = loss + self.rank_loss(main_logits, main_labels, weights, groups)
        counted = self.counts.in_figures(main_labels, extra)
        if counted is not None:
            weights = counted * (weights > 0)
        return loss, labels, weights

    def rank(self, dense: Tensor, embeddings: Tensor, real: Tensor) -> Tensor:
        """Run the ranking model; ``real`` [b] marks rows that are not padding, for statistics of batch norms."""
        for norm in self._batch_norms:
            norm.rows = real[:, None]
        return self.compute_logits(dense, embeddings)

    def start_at(self, logits: Sequence[float]) -> None:
        """Have an untrained model's logits near ``logits``, those of the main task and of the further ones."""
        if isinstance(self.ranking, MultiTaskRanker):
            self.ranking.start_all(logits)
        else:
            self.ranking.start_at(logits[0])

    @property
    def embeddings(self) -> Tensor:
        """Return the detached vectors [B, F, D] of features and sequences of the last forward pass, in their order."""
        assert self._embeddings is not None, "no forward pass yet"
        return self._embeddings

    def first_fault(self) -> Fault | None:
        """Return this rank's first part that was not finite; None where every loss was finite."""
        return self.faults.first()


def compute_dtype(precision: str, device: torch.device) -> torch.dtype | None:
    """Return the autocast dtype of ``precision`` (None: float32). ConfigError for bf16 on a device that lacks it."""
    # CUDA has native bf16 from Ampere on, a CPU with AVX512_BF16 or AMX. Other devices emulate it slowly.
    if device.type == "cuda":
        fast = torch.cuda.is_bf16_supported(including_emulation=False)
    else:
        fast = torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
    if precision == "bf16" and not fast and device.type != "cpu":
        raise ConfigError(
            "train.precision is bf16, but this CUDA device cannot compute in it", hint="train.precision=fp32"
        )
    if precision == "bf16" or (precision == "auto" and fast):
        return torch.bfloat16
    return None


def use_tf32(precision: str, device: torch.device) -> None:
    """Make float32 products of this process on CUDA round to TF32 if and only if ``train.precision=tf32``.

    ConfigError where the device has no TF32.
    """
    kind = "CPU" if device.type == "cpu" else "CUDA device"
    if precision == "tf32" and (device.type == "cpu" or torch.cuda.get_device_capability(device) < AMPERE):
        raise ConfigError(
            f"train.precision is tf32, which this {kind} lacks; NVIDIA GPUs have it from Ampere on",
            hint="train.precision=fp32",
        )
    if device.type == "cuda":
        # Set it in both cases, since an earlier training in this process may have set the other one.
        torch.set_float32_matmul_precision("high" if precision == "tf32" else "highest")


def build(settings: ModelSettings, schema: DatasetSchema, device: torch.device, *, trained: bool) -> ClickModel:
    """Build the unsharded flat model, its tables on the meta device.

    ``trained``: whether it will take steps; if so, it is compiled where ``train.compile`` says so.
    """
    meta = torch.device("meta")
    dim = settings.model.embedding_dim
    collection = build_collection(schema, settings.model, meta)
    project = projections(_widths_of(settings.model, schema), dim, settings.seed)
    histories = build_sequence_encoders(settings.model, schema, settings.seed, settings.train.max_events)
    part = build_dense_part(
        settings, schema, schema.vectors, dim, device, project=project, histories=histories, trained=trained
    )
    event_tables = None
    if schema.sequences:
        event_tables = event_collection(schema, settings.model, meta)
    return ClickModel(collection, part, event_tables)


def _widths_of(model: ModelConfig, schema: DatasetSchema) -> dict[str, int]:
    return {column.name: model.dim_of(column.owner) for column in schema.sparse}


def build_towers(
    settings: ModelSettings, schema: DatasetSchema, layout: TowerLayout, device: torch.device, *, trained: bool
) -> TowerClickModel:
    """Build the unsharded model of this rank's towers, whose outputs the ranking model takes. Collective.

    The arguments are those of ``build``.
    """
    meta = torch.device("meta")
    dim = settings.model.embedding_dim
    groups = make_groups(layout)
    local_schema = schema.with_vectors(layout.tower_hosts[groups.number].features)
    # Weights travel with all ids or with none, so every tower is weighted if any column is.
    weighted = any(column.weighted for column in schema.sparse)
    collection = build_collection(local_schema, settings.model, meta, weighted=weighted)
    widths = _widths_of(settings.model, schema) | {sequence.name: dim for sequence in schema.sequences}
    histories = build_sequence_encoders(settings.model, schema, settings.seed, settings.train.max_events)
    events = None
    if histories is not None:
        tables = event_collection(local_schema, settings.model, meta, weighted=weighted)
        encoders = histories.of(local_schema)
        events = TowerEvents(schema, local_schema, encoders, histories.vectors, tables, groups.tower, weighted=weighted)
    exchange = exchange_codecs(settings.partition.exchange)
    dtype = compute_dtype(settings.train.precision, device)
    towers = TowerEmbeddings(layout, groups, collection, widths, dim, settings.seed, exchange, dtype, events)
    towers.penalty = settings.train.embedding_l2
    towers.tower.to(device)
    names = None
    if layout.towers.module.name != "pass_through":
        names = [f"tower output {name!r}" for name in towers.names]
        if trained and device.type == "cpu":
            use_cpu_kernels(towers.tower)
    part = build_dense_part(
        settings, schema, towers.names, towers.dim, device, names, histories=histories, trained=trained
    )
    return TowerClickModel(towers, part)


def build_dense_part(
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
    """Build the dense part for the embedding ``vectors`` of width ``dim``.

    Raises:
        ConfigError: The device lacks what ``train`` asks for.
    """
    tasks = task_inputs(schema.tasks)
    inputs = ModelInputs(dense=schema.dense, vectors=vectors, dim=dim, seed=settings.seed, tasks=tasks)
    ranking = build_model(settings.model, inputs).to(device)
    workers = workers_of(settings.hardware)
    synchronise(ranking, workers.group)
    if trained and settings.train.accumulate > 1:
        require_rowwise(ranking, settings.train.accumulate)

    graphs = trained and settings.train.cuda_graphs
    if graphs and device.type != "cuda":
        raise ConfigError(
            "train.cuda_graphs is true, but the dense part is trained on a CPU", hint="train.cuda_graphs=false"
        )
    if trained and (graphs or settings.train.compile is True):
        ranking.compile(dynamic=False, mode="reduce-overhead" if graphs else None)
    elif trained and device.type == "cpu":
        # Only a trained model gets the kernels: scores of files and of versions come from the plain layers.
        use_cpu_kernels(ranking)

    normalise = None
    columns = [column for column, name in enumerate(schema.dense) if name in settings.data.max_normed]
    if columns:
        normalise = MaxNorm(columns, partial(largest_of_ranks, group=workers.group)).to(device)
    if project is not None:
        project = project.to(device)
    if histories is not None:
        histories = histories.to(device)
    dtype = compute_dtype(settings.train.precision, device)
    part = DensePart(ranking, schema, dtype, names, normalise, settings.train, project, histories)
    part.inputs = inputs
    part.replayed = graphs
    part.workers = workers if workers.remote else None
    if settings.train.rank_loss.active:
        part.rank_loss = RankLoss(settings.train.rank_loss, workers)
    return part


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
    row_store: RowStore | None = None,
    whole: bool = False,
) -> Sharded:
    """Build and shard the configured model, flat or with towers. Collective.

    Args:
        towers: The result of the partition stage; None or flat: there are no towers.
        trained: Whether the model will take steps; False for one that only scores, with rows of a checkpoint.
        row_store: The rows of the plan's tables on tier ssd.
        whole: Whether a flat model that only scores has all tables on every rank (``whole_tables``), whatever the plan.

    Raises:
        ConfigError: The device or the plan lacks what ``train`` asks for.
        PlanError: The plan does not fit.
    """
    hide_tracing_advice()
    rules = table_rules(settings.model, settings.train)
    if trained:
        use_tf32(settings.train.precision, device)
    if towers is None or towers.is_flat:
        flat, table_device, table_ranks = build(settings, schema, device, trained=trained), device, None
        # Embedding hosts keep the tables in host memory.
        if flat.head.workers is not None:
            table_device = torch.device("cpu")
        codecs = flat_exchange_codecs(settings.partition.exchange, plan)
        if whole:
            plan, table_ranks = whole_tables(plan)
        model = shard_model(
            flat,
            plan,
            flat.paths,
            table_device,
            rules,
            table_ranks,
            codecs=codecs,
            row_store=row_store,
            prefetch=trained and settings.train.pipeline == "prefetch",
            workers=flat.head.workers,
            trained=trained,
        )
        return Sharded(model, flat.head, RowAccess(model))

    # This rank holds only the tables of its own hosts' towers.
    layout = layout_of(towers, schema.vectors, settings.hardware.hosts, settings.hardware.ranks_per_host)
    model_of_rank = build_towers(settings, schema, layout, device, trained=trained)
    local_schema = schema.with_vectors(layout.tower_hosts[model_of_rank.towers.groups.number].features)
    local_tables = {table.name for table in local_schema.tables}
    local_plan = replace(plan, tables={name: table for name, table in plan.tables.items() if name in local_tables})
    # Towers' modules and sequences are not averaged over all ranks, since only the ranks of some hosts train them.
    table_ranks = model_of_rank.towers.table_ranks(TOWERS)
    table_ranks = replace(table_ranks, unshared=(*table_ranks.unshared, HISTORIES))
    model = shard_model(model_of_rank, local_plan, model_of_rank.paths, device, rules, table_ranks, row_store=row_store)
    specs = []
    for table in schema.tables:
        dim = settings.model.dim_of(table.name)
        specs.append(TableSpec(table.name, table.rows, dim, settings.model.table(table.name).init_bound))
    return Sharded(model, model_of_rank.head, RowAccess(model, specs), model_of_rank.towers)
