"""All optimizers of a model as one, with the schedule of both learning rates."""

from __future__ import annotations

from collections.abc import Callable
from typing import cast

from torchrec.distributed.model_parallel import DistributedModelParallel

from pipeline.config import TrainConfig
from pipeline.embeddings.fused_optimizer import clip_table_gradients, replica_optimizer, set_sparse_lr
from pipeline.embeddings.tables import dense_parameters
from pipeline.embeddings.workers import Workers
from pipeline.towers.transform import TowerEmbeddings
from pipeline.training.averages import Average
from pipeline.training.clipping import DenseClip
from pipeline.training.grouping import dense_groups
from pipeline.training.schedule import cycled


class Optimizers:
    """What TorchRec's pipelines call: ``zero_grad`` before the backward pass, ``step`` after it.

    Tables learn inside the backward pass. Only data-parallel tables learn in ``step``, by ``tables`` (None without
    any), as the dense part does by ``dense``. ``total``: steps planned; the schedule ends with the last one.
    ``towers``: their modules' gradients differ between the ranks. ``workers``: the ranks with samples (None: all).
    ``scale``: a factor of both learning rates besides the schedule's, which begins anew every ``cycle`` steps (None: it
    spans all). ``before``: called before each step.
    """

    def __init__(
        self,
        dmp: DistributedModelParallel,
        config: TrainConfig,
        total: int,
        towers: TowerEmbeddings | None = None,
        workers: Workers | None = None,
    ) -> None:
        self._dmp, self._config, self._total = dmp, config, total
        named, clip = dense_parameters(dmp), config.clip
        parameters, groups = list(named.values()), dense_groups(named, config)
        own = towers.apart_parameters() if towers is not None else []
        if workers is not None and workers.remote:  # only workers have gradients
            own = parameters
        self.dense = config.dense_spec.build(groups, own)
        self._rates = [group.lr for group in groups]
        self._clip = DenseClip(parameters, clip.dense_norm, towers) if clip.dense_norm is not None else None
        if clip.table_value is not None:
            clip_table_gradients(dmp, clip.table_value)
        self._factor, self._step = 0.0, 0
        self.scale, self.cycle = 1.0, cast("int | None", None)
        self.before: Callable[[], None] | None = None
        self.average = Average(config.average, self.dense, parameters, total) if config.average.active else None
        self.tables = replica_optimizer(dmp)
        self._parts = [self.dense, *([self.tables] if self.tables else [])]

    def set_step(self, step: int) -> float:
        """Set the learning rates for training step ``step`` (from 0); returns ``train.lr`` times its factor."""
        self._step, factor = step, cycled(self._config, step, self._total, self.cycle) * self.scale
        for group, rate in zip(self.dense.param_groups, self.rates(step), strict=True):
            group["lr"] = rate
        if factor != self._factor:
            self._factor = factor
            set_sparse_lr(self._dmp, self._config.sparse_lr * factor, factor)
        return self._config.lr * factor

    def rates(self, step: int) -> list[float]:
        """The learning rates of the dense part's parameter groups in training step ``step``."""
        factor = cycled(self._config, step, self._total, self.cycle) * self.scale
        return [rate * factor for rate in self._rates]

    def zero_grad(self) -> None:
        """Drop the gradients of the last step."""
        for part in self._parts:
            part.zero_grad(set_to_none=True)

    def step(self) -> None:
        """Apply the gradients of the last backward pass."""
        if self.before is not None:
            self.before()
        if self._clip is not None:
            self._clip()
        for part in self._parts:
            part.step()
        if self.average is not None:
            self.average.take(self._step)

    def gather(self) -> None:
        """Bring the dense optimizer's whole state to rank 0, where the ranks share it. Collective."""
        gather = getattr(self.dense, "gather", None)
        if gather is not None:
            gather()
