"""All optimizers of a model as one, with the schedule of both learning rates."""

from __future__ import annotations

from torchrec.distributed.model_parallel import DistributedModelParallel

from pipeline.config import TrainConfig
from pipeline.embeddings.learning import clip_table_gradients, replica_optimizer, set_sparse_lr
from pipeline.embeddings.tables import dense_parameters
from pipeline.specs import DENSE_OPTIMIZERS
from pipeline.towers.transform import TowerEmbeddings
from pipeline.training.clipping import DenseClip
from pipeline.training.schedule import lr_factor


class Optimizers:
    """What TorchRec's pipelines call: ``zero_grad`` before the backward pass, ``step`` after it.

    Tables learn inside the backward pass. Only data-parallel tables learn in ``step``, by ``tables`` (None without
    any), as the dense part does by ``dense``. ``total``: steps planned; the schedule ends with the last one.
    ``towers``: their modules' gradients differ between the ranks.
    """

    def __init__(
        self, dmp: DistributedModelParallel, config: TrainConfig, total: int, towers: TowerEmbeddings | None = None
    ) -> None:
        self._dmp, self._config, self._total = dmp, config, total
        parameters, clip = list(dense_parameters(dmp).values()), config.clip
        self.dense = DENSE_OPTIMIZERS.get(config.dense_optimizer).build(parameters, config.lr, config.weight_decay)
        self._clip = DenseClip(parameters, clip.dense_norm, towers) if clip.dense_norm is not None else None
        if clip.table_value is not None:
            clip_table_gradients(dmp, clip.table_value)
        self._factor = 0.0
        self.tables = replica_optimizer(dmp)
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
