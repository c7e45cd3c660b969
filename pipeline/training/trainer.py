"""One rank's sharded model with its optimizers and pipeline: everything that takes a step."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torchrec.distributed.train_pipeline import TrainPipelineBase, TrainPipelineSparseDist

from pipeline.config import Config
from pipeline.contracts import DatasetSchema, Plan
from pipeline.embeddings import RowAccess, SsdStore, dense_parameters, shard_model
from pipeline.training.data import Batch
from pipeline.training.model import TABLES, Head, Output, build
from pipeline.training.optimizers import Optimizers


class Trainer:
    """Takes steps. ``steps`` counts those taken, ``rows`` and ``dense`` are the tables and the other parameters.

    Initial values depend on ``config.seed`` alone, not on the plan or the number of ranks. ``ssd``: the files of the
    plan's tables on tier ssd.
    """

    def __init__(
        self, config: Config, schema: DatasetSchema, plan: Plan, device: torch.device, ssd: SsdStore | None = None
    ) -> None:
        model = build(config, schema, device, trained=True)
        self.head: Head = model.head
        self.ssd = ssd
        self.model = shard_model(model, plan, TABLES, device, ssd)
        self.rows = RowAccess(self.model)
        self.rows.initialise(config.seed)
        self.dense = dense_parameters(self.model)
        self.optimizers = Optimizers(self.model, config.train)
        self.steps = 0
        self.lr = 0.0
        pipeline = TrainPipelineSparseDist if config.train.pipeline == "sparse_dist" else TrainPipelineBase
        self._pipeline = pipeline(self.model, self.optimizers, device)  # type: ignore[arg-type, abstract]

    def step(self, batches: Iterator[Batch]) -> Output:
        """Train on the next batch; returns its (logits, labels, weights). StopIteration where there is none."""
        if self.ssd is not None:
            self.ssd.check()
        self.lr = self.optimizers.set_step(self.steps)
        output: Output = self._pipeline.progress(batches)
        self.steps += 1
        return output

    def finished(self) -> torch.nn.Module:
        """The model taken out of the pipeline, to be called directly in evaluation mode."""
        if isinstance(self._pipeline, TrainPipelineSparseDist):
            self._pipeline.detach()
        return self.model.eval()
