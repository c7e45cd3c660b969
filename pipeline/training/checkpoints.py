"""When the training loop writes and reads checkpoints; how they lie on disk is ``checkpoint/``'s business."""

from __future__ import annotations

import time
from dataclasses import asdict
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn

from pipeline.artifacts import Store
from pipeline.checkpoint import TrainState, checkpoint_path, latest, prune, restore, save
from pipeline.config import Config
from pipeline.embeddings import RowAccess
from pipeline.training.trainer import Trainer


class Checkpoints:
    """The checkpoints of one training: ``resume`` from the newest, ``save`` the current state and drop old ones."""

    def __init__(self, config: Config, store: Store, directory: str, key: str, trainer: Trainer) -> None:
        self.config, self.store, self.directory, self.key, self.trainer = config, store, directory, key, trainer
        self.final = ""
        self._count = 0
        self._bytes = 0
        self._seconds = 0.0

    def resume(self) -> None:
        """Continue from the newest committed checkpoint of the same key, unless ``force`` starts anew."""
        found = None if self.config.force else latest(self.store, self.directory)
        if found is None or found.key != self.key:
            return
        dense: dict[str, Tensor] = dict(self.trainer.dense)
        optimizer = self.trainer.optimizers.dense
        state = restore(self.store, found, rows=self.trainer.rows, dense=dense, optimizer=optimizer)
        self.trainer.steps = state.step
        self.final = found.path

    def save(self, per_epoch: int, samples: int) -> None:
        """Commit a checkpoint of the trainer's state, then drop old ones. Collective."""
        step = self.trainer.steps
        epoch, batch = divmod(step, per_epoch)
        path = checkpoint_path(self.directory, step)
        began = time.perf_counter()
        artifact = save(
            self.store,
            path,
            state=TrainState(step=step, epoch=epoch, next_batch=batch, samples=samples),
            rows=self.trainer.rows,
            dense=dict(self.trainer.dense),
            optimizer=self.trainer.optimizers.dense,
            key=self.key,
            config={"model": asdict(self.config.model), "train": asdict(self.config.train), "seed": self.config.seed},
        )
        if dist.get_rank() == 0:
            prune(self.store, self.directory, self.config.checkpoint.keep_last)
        self._seconds += time.perf_counter() - began
        self._count += 1
        self._bytes += sum(entry.bytes for entry in artifact.files.values())
        self.final = path

    def figures(self, seconds: float) -> dict[str, Any]:
        """``checkpoint`` of result.json for a session of ``seconds``; full checkpoints cost what they are worth."""
        return {
            "count": self._count,
            "bytes_written": self._bytes,
            "bytes_full_equivalent": self._bytes,
            "stall_share": self._seconds / seconds,
        }


def load_weights(store: Store, path: str, rows: RowAccess, dense: dict[str, nn.Parameter]) -> None:
    """Read tables and dense parameters of the checkpoint at ``path``; ArtifactError where it is missing or corrupt."""
    restore(store, store.get(path, "train"), rows=rows, dense=dict(dense), weights_only=True)
