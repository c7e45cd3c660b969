"""The yardsticks of ``benchmarks.train``: plain training loops, eager and in float32.

``PlainLoop``: TorchRec's own ``DLRM`` and EmbeddingBagCollection under DistributedModelParallel, fused row-wise Adagrad
for the tables, Adam for the dense part, and TorchRec's plain pipeline. ``EagerLoop``: what one writes without TorchRec,
an ``nn.EmbeddingBag`` for each table and Adam for everything. They share no code with ``pipeline/`` but the batches.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.distributed.optim import _apply_optimizer_in_backward
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.train_pipeline import TrainPipelineBase
from torchrec.models.dlrm import DLRM
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizerWrapper
from torchrec.optim.optimizers import in_backward_optimizer_filter
from torchrec.optim.rowwise_adagrad import RowWiseAdagrad

from pipeline.config import Config
from pipeline.embeddings.tables import kernels
from pipeline.records import DatasetSchema
from pipeline.training.batches import Batch
from pipeline.training.step import StepExecutor


class _Train(nn.Module):
    """TorchRec's DLRM with its loss."""

    def __init__(self, dlrm: DLRM) -> None:
        super().__init__()
        self.dlrm = dlrm

    def forward(self, batch: Batch) -> tuple[Tensor, tuple[Tensor, Tensor, Tensor]]:
        """Mean loss, and (loss, logits, labels)."""
        logits = self.dlrm(batch.dense, batch.sparse).squeeze(-1)
        loss = nn.functional.binary_cross_entropy_with_logits(logits, batch.labels)
        return loss, (loss.detach(), logits.detach(), batch.labels.detach())


class PlainLoop:
    """``step`` trains on the next batch, ``logits`` predicts one. One rank, CPU."""

    def __init__(self, config: Config, schema: DatasetSchema) -> None:
        model, train = config.model, config.train
        tables = EmbeddingBagCollection(
            tables=[
                EmbeddingBagConfig(
                    name=column.name,
                    embedding_dim=model.embedding_dim,
                    num_embeddings=column.rows,
                    feature_names=[column.name],
                )
                for column in schema.sparse
            ],
            device=torch.device("meta"),
        )
        _apply_optimizer_in_backward(RowWiseAdagrad, tables.parameters(), {"lr": train.sparse_lr, "eps": 1e-8})
        device = torch.device("cpu")
        dlrm = DLRM(
            embedding_bag_collection=tables,
            dense_in_features=len(schema.dense),
            dense_arch_layer_sizes=[*model.bottom_mlp, model.embedding_dim],
            over_arch_layer_sizes=[*model.top_mlp, 1],
        )
        self.model = DistributedModelParallel(_Train(dlrm), device=device)
        dense_optimizer = KeyedOptimizerWrapper(
            dict(in_backward_optimizer_filter(self.model.named_parameters())),
            lambda parameters: torch.optim.Adam(parameters, lr=train.lr),
        )
        self.optimizer = CombinedOptimizer([self.model.fused_optimizer, dense_optimizer])
        self.schedule = torch.optim.lr_scheduler.LambdaLR(
            self.optimizer,  # type: ignore[arg-type]
            lambda step: min(1.0, (step + 1) / max(1, train.warmup_steps)),
        )
        self.pipeline = TrainPipelineBase(self.model, self.optimizer, device)  # type: ignore[arg-type]

    def step(self, batches: Iterator[Batch]) -> None:
        """One forward, backward and optimizer step."""
        self.pipeline.progress(batches)
        self.schedule.step()

    @torch.no_grad()
    def start_from(self, trainer: StepExecutor) -> None:
        """Take over the initial values of ``trainer``, so that only the arithmetic differs."""
        ours = {shard.table: shard.weight for shard in trainer.rows.local_shards()}
        for kernel in kernels(self.model):
            for table, weight in zip(kernel.tables, kernel.module.split_embedding_weights(), strict=True):
                weight.copy_(ours[table.name])
        dlrm = self.model.module.dlrm
        theirs = [layer for layer in dlrm.modules() if isinstance(layer, nn.Linear)]
        given = [layer for layer in trainer.dense_part.ranking.modules() if isinstance(layer, nn.Linear)]
        for mine, source in zip(theirs, given, strict=True):
            mine.bias.copy_(source.bias)
            mine.weight.copy_(source.weight)
        first, dim = (
            next(layer for layer in dlrm.over_arch.modules() if isinstance(layer, nn.Linear)),
            ours_dim(trainer),
        )
        # Theirs lists the pairs by the upper triangle, ours by the lower one.
        vectors = len(ours) + 1
        low = torch.tril_indices(vectors, vectors, -1)
        place = torch.zeros(vectors, vectors, dtype=torch.long)
        place[low[1], low[0]] = torch.arange(low.shape[1])
        up = torch.triu_indices(vectors, vectors, 1)
        first.weight[:, dim:] = first.weight[:, dim:][:, place[up[0], up[1]]]


class _EagerDlrm(nn.Module):
    """DLRM of PyTorch's own modules; ``first`` takes the first vector, then the pairs i > j by rows."""

    def __init__(self, config: Config, schema: DatasetSchema) -> None:
        super().__init__()
        model, vectors = config.model, len(schema.sparse) + 1
        self.tables = nn.ModuleList(
            nn.EmbeddingBag(column.rows, model.embedding_dim, mode="sum") for column in schema.sparse
        )
        self.bottom = _mlp([len(schema.dense), *model.bottom_mlp, model.embedding_dim])
        self.top = _mlp([model.embedding_dim + vectors * (vectors - 1) // 2, *model.top_mlp])
        self.head = nn.Linear(model.top_mlp[-1], 1)
        self.low = torch.tril_indices(vectors, vectors, -1)

    def forward(self, batch: Batch) -> tuple[Tensor, tuple[Tensor, Tensor, Tensor]]:
        """Mean loss, and (loss, logits, labels)."""
        ids = batch.sparse.values().view(len(self.tables), -1, 1)  # one id a feature
        first = self.bottom(batch.dense)
        vectors = torch.stack([first, *(table(ids[i]) for i, table in enumerate(self.tables))], dim=1)
        products = torch.bmm(vectors, vectors.mT)[:, self.low[0], self.low[1]]
        logits = self.head(self.top(torch.cat([first, products], dim=1))).squeeze(-1)
        loss = nn.functional.binary_cross_entropy_with_logits(logits, batch.labels)
        return loss, (loss.detach(), logits.detach(), batch.labels)


def _mlp(widths: list[int]) -> nn.Sequential:
    layers = [(nn.Linear(a, b), nn.ReLU()) for a, b in zip(widths, widths[1:], strict=False)]
    return nn.Sequential(*(module for layer in layers for module in layer))


class EagerLoop:
    """``step`` trains on the next batch. One rank, CPU; features with one id a sample."""

    def __init__(self, config: Config, schema: DatasetSchema) -> None:
        self.model = _EagerDlrm(config, schema)
        train = config.train
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=train.lr)
        self.schedule = torch.optim.lr_scheduler.LambdaLR(
            self.optimizer, lambda step: min(1.0, (step + 1) / max(1, train.warmup_steps))
        )

    def step(self, batches: Iterator[Batch]) -> None:
        """One forward, backward and optimizer step."""
        self.optimizer.zero_grad()
        loss, _ = self.model(next(batches))
        loss.backward()
        self.optimizer.step()
        self.schedule.step()

    @torch.no_grad()
    def start_from(self, trainer: StepExecutor) -> None:
        """Take over the initial values of ``trainer``."""
        ours = {shard.table: shard.weight for shard in trainer.rows.local_shards()}
        for table, weight in zip(self.model.tables, ours.values(), strict=True):
            table.weight.copy_(weight)
        theirs = [layer for layer in self.model.modules() if isinstance(layer, nn.Linear)]
        given = [layer for layer in trainer.dense_part.ranking.modules() if isinstance(layer, nn.Linear)]
        for mine, source in zip(theirs, given, strict=True):
            mine.bias.copy_(source.bias)
            mine.weight.copy_(source.weight)


def ours_dim(trainer: StepExecutor) -> int:
    """The embedding width of ``trainer``."""
    return next(iter(trainer.rows.tables.values())).dim
