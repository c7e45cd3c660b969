"""One rank's sharded model with its optimizers and pipeline: everything that takes a step."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torchrec.distributed.train_pipeline import TrainPipelineBase, TrainPipelineSparseDist

from pipeline.config import Config
from pipeline.contracts import DatasetSchema, Plan
from pipeline.embeddings import RowAccess, dense_parameters, shard_model
from pipeline.training.data import Batch
from pipeline.training.model import TABLES, Head, Output, build
from pipeline.training.optimizers import Optimizers
from pipeline.training.phases import PhaseClock, watch, watch_pipeline


class Trainer:
    """Takes steps. ``steps`` counts those taken, ``rows`` and ``dense`` are the tables and the other parameters,
    ``clock`` knows where the time of its steps went.

    Initial values depend on ``config.seed`` alone, not on the plan or the number of ranks.
    """

    def __init__(self, config: Config, schema: DatasetSchema, plan: Plan, device: torch.device) -> None:
        model = build(config, schema, device, trained=True)
        self.head: Head = model.head
        self.model = shard_model(model, plan, TABLES, device)
        self.rows = RowAccess(self.model)
        self.rows.initialise(config.seed)
        self.dense = dense_parameters(self.model)
        self.optimizers = Optimizers(self.model, config.train)
        self.steps = 0
        self.lr = 0.0
        pipeline = TrainPipelineSparseDist if config.train.pipeline == "sparse_dist" else TrainPipelineBase
        self._pipeline = pipeline(self.model, self.optimizers, device)  # type: ignore[arg-type, abstract]
        self.clock = PhaseClock(device)
        watch(self.clock, self.model, self.head.pooled, self.optimizers)
        watch_pipeline(self.clock, self._pipeline)

    def step(self, batches: Iterator[Batch]) -> Output:
        """Train on the next batch; returns its (logits, labels, weights). StopIteration where there is none."""
        self.clock.begin()
        self.lr = self.optimizers.set_step(self.steps)
        output: Output = self._pipeline.progress(batches)
        self.clock.end()
        self.steps += 1
        return output

    def finished(self) -> torch.nn.Module:
        """The model taken out of the pipeline, to be called directly in evaluation mode."""
        if isinstance(self._pipeline, TrainPipelineSparseDist):
            self._pipeline.detach()
        return self.model.eval()
