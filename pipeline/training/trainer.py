"""One rank's sharded model with its optimizers and pipeline: everything that takes a step."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torchrec.distributed.train_pipeline import TrainPipelineBase, TrainPipelineSparseDist

from pipeline.config import Config
from pipeline.contracts import DatasetSchema, Plan, Towers
from pipeline.embeddings import dense_parameters
from pipeline.training.data import Batch
from pipeline.training.model import Output, assemble
from pipeline.training.optimizers import Optimizers
from pipeline.training.towers import TowerPipeline, gather_towers


class Trainer:
    """Takes steps. ``steps`` counts those taken, ``rows`` and ``dense`` are the tables and the other parameters.

    Initial values depend on ``config.seed`` alone, not on the plan or the number of ranks.
    """

    def __init__(
        self, config: Config, schema: DatasetSchema, plan: Plan, device: torch.device, towers: Towers | None = None
    ) -> None:
        sharded = assemble(config, schema, plan, towers, device, trained=True)
        self.model, self.head, self.rows, self._towers = sharded.model, sharded.head, sharded.rows, sharded.towers
        self.rows.initialise(config.seed)
        self.dense = dense_parameters(self.model)
        self.optimizers = Optimizers(self.model, config.train)
        self.steps = 0
        self.lr = 0.0
        ahead = config.train.pipeline == "sparse_dist"
        self._pipeline: Any
        if self._towers is not None:
            self._pipeline = TowerPipeline(self.model, self._towers, self.optimizers, device, ahead=ahead)
        else:
            pipeline = TrainPipelineSparseDist if ahead else TrainPipelineBase
            self._pipeline = pipeline(self.model, self.optimizers, device)  # type: ignore[arg-type, abstract]

    def step(self, batches: Iterator[Batch]) -> Output:
        """Train on the next batch; returns its (logits, labels, weights). StopIteration where there is none."""
        self.lr = self.optimizers.set_step(self.steps)
        output: Output = self._pipeline.progress(batches)
        self.steps += 1
        return output

    def gather_towers(self) -> None:
        """Give every rank the tower modules and optimizer state that other ranks trained. Collective."""
        if self._towers is not None:
            gather_towers(self._towers, self.optimizers.dense)

    def finished(self) -> torch.nn.Module:
        """The model taken out of the pipeline, to be called directly in evaluation mode."""
        if isinstance(self._pipeline, TrainPipelineSparseDist):
            self._pipeline.detach()
        return self.model.eval()
