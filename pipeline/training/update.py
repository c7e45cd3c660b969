"""All optimizers of a model as one, with the schedule of both learning rates."""

from __future__ import annotations

import torch
from torchrec.distributed.model_parallel import DistributedModelParallel

from pipeline.config import TrainConfig
from pipeline.embeddings.clipping import clip_table_gradients
from pipeline.embeddings.learning import dense_table_optimizer, set_sparse_lr
from pipeline.embeddings.tables import dense_parameters
from pipeline.towers.transform import TowerEmbeddings
from pipeline.training.clipping import DenseClip
from pipeline.training.schedule import lr_factor


class Optimizers:
    """What TorchRec's pipelines call: ``zero_grad`` before the backward pass, ``step`` after it.

    The fused table optimizer works inside the backward pass; Adam(W) or Adagrad for the dense part (``dense``) and the
    data-parallel tables' Adagrad (``tables``, None where there are none) work in ``step``. ``total``: steps planned,
    at whose last the learning rates' schedule ends. ``towers``: whose modules' gradients differ between the ranks.
    """

    def __init__(
        self, dmp: DistributedModelParallel, config: TrainConfig, total: int, towers: TowerEmbeddings | None = None
    ) -> None:
        self._dmp, self._config, self._total = dmp, config, total
        parameters, clip = list(dense_parameters(dmp).values()), config.clip
        self.dense = _dense_optimizer(parameters, config)
        self._clip = DenseClip(parameters, clip.dense_norm, towers) if clip.dense_norm is not None else None
        if clip.table_value is not None:
            clip_table_gradients(dmp, clip.table_value)
        self._factor = 0.0
        self.tables = dense_table_optimizer(dmp)
        self._parts = [self.dense, *([self.tables] if self.tables else [])]

    def set_step(self, step: int) -> float:
        """Set the learning rates for training step ``step`` (from 0); returns the dense one."""
        factor = lr_factor(self._config, step, self._total)
        for group in self.dense.param_groups:
            group["lr"] = self._config.lr * factor
        if factor != self._factor:
            self._factor = factor
            set_sparse_lr(self._dmp, self._config.sparse_lr * factor)
        return self._config.lr * factor

    def zero_grad(self) -> None:
        """Drop the gradients of the last step."""
        for part in self._parts:
            part.zero_grad(set_to_none=True)

    def step(self) -> None:
        """Apply the gradients of the last backward pass."""
        if self._clip is not None:
            self._clip()
        for part in self._parts:
            part.step()


def _dense_optimizer(parameters: list[torch.nn.Parameter], config: TrainConfig) -> torch.optim.Optimizer:
    if config.dense_optimizer == "adagrad":
        return torch.optim.Adagrad(parameters, lr=config.lr, weight_decay=config.weight_decay, fused=_fused(parameters))
    if config.weight_decay:
        return torch.optim.AdamW(parameters, lr=config.lr, weight_decay=config.weight_decay, fused=True)
    return torch.optim.Adam(parameters, lr=config.lr, fused=True)


def _fused(parameters: list[torch.nn.Parameter]) -> bool:
    """PyTorch's fused Adagrad exists for the CPU only."""
    return all(parameter.device.type == "cpu" for parameter in parameters)
