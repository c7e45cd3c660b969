"""The yardstick of ``benchmarks.train``: a plain TorchRec training loop, eager and in float32.

TorchRec's own ``DLRM`` and EmbeddingBagCollection under DistributedModelParallel, fused row-wise Adagrad for the
tables, Adam for the dense part, and one of TorchRec's pipelines. Shares no code with ``pipeline/`` but the batches.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.distributed.optim import _apply_optimizer_in_backward
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.train_pipeline import TrainPipelineBase, TrainPipelineSparseDist
from torchrec.models.dlrm import DLRM
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizerWrapper
from torchrec.optim.optimizers import in_backward_optimizer_filter
from torchrec.optim.rowwise_adagrad import RowWiseAdagrad

from pipeline.training.data import Batch


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

    def __init__(
        self, names: list[str], rows: int, *, dense: int, dim: int, bottom: list[int], top: list[int], lr: float,
        sparse_lr: float, warmup_steps: int, seed: int, pipelined: bool,
    ) -> None:  # fmt: skip
        torch.manual_seed(seed)
        tables = EmbeddingBagCollection(
            tables=[
                EmbeddingBagConfig(name=name, embedding_dim=dim, num_embeddings=rows, feature_names=[name])
                for name in names
            ],
            device=torch.device("meta"),
        )
        _apply_optimizer_in_backward(RowWiseAdagrad, tables.parameters(), {"lr": sparse_lr, "eps": 1e-8})
        device = torch.device("cpu")
        dlrm = DLRM(
            embedding_bag_collection=tables,
            dense_in_features=dense,
            dense_arch_layer_sizes=[*bottom, dim],
            over_arch_layer_sizes=[*top, 1],
        )
        self.model = DistributedModelParallel(_Train(dlrm), device=device)
        dense_optimizer = KeyedOptimizerWrapper(
            dict(in_backward_optimizer_filter(self.model.named_parameters())),
            lambda parameters: torch.optim.Adam(parameters, lr=lr),
        )
        self.optimizer = CombinedOptimizer([self.model.fused_optimizer, dense_optimizer])
        self.schedule = torch.optim.lr_scheduler.LambdaLR(
            self.optimizer,  # type: ignore[arg-type]
            lambda step: min(1.0, (step + 1) / warmup_steps) if warmup_steps else 1.0,
        )
        pipeline = TrainPipelineSparseDist if pipelined else TrainPipelineBase
        self.pipeline = pipeline(self.model, self.optimizer, device)  # type: ignore[arg-type]

    def step(self, batches: Iterator[Batch]) -> None:
        """One forward, backward and optimizer step."""
        self.pipeline.progress(batches)
        self.schedule.step()

    @torch.no_grad()
    def logits(self, batch: Batch) -> Tensor:
        """Logits [b]."""
        return self.model.module(batch)[1][1]
