"""One rank's sharded model with its optimizers and pipeline: it takes the steps."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torchrec.distributed.train_pipeline import (
    PrefetchTrainPipelineSparseDist,
    TrainPipelineBase,
    TrainPipelineSparseDist,
)

from pipeline.embeddings.fused_optimizer import keeping_steps
from pipeline.embeddings.huge_pages import use_large_pages
from pipeline.embeddings.sharding import cached_tables
from pipeline.embeddings.single_rank_lookup import without_exchange
from pipeline.embeddings.ssd.store import SsdStore
from pipeline.embeddings.tables import dense_parameters, dense_table_parameters
from pipeline.embeddings.workers import Workers
from pipeline.errors import ConfigError
from pipeline.records.dataset import DatasetSchema
from pipeline.records.plan import Plan
from pipeline.records.towers import Towers
from pipeline.towers.links import Links
from pipeline.training.data import Batch
from pipeline.training.distributed import workers_of
from pipeline.training.model import TOWERS, Output, Sharded, assemble
from pipeline.training.optimizer import Average, Optimizers
from pipeline.training.regularise import seed_step
from pipeline.training.roofline import Speed
from pipeline.training.settings import ModelSettings
from pipeline.training.shared_memory import DenseReduction, memory_between
from pipeline.training.step_phases import PhaseClock, watch, watch_pipeline
from pipeline.training.towers import TowerPipeline, gather_towers
from pipeline.units import MIB

log = logging.getLogger(__name__)


class Trainer:
    """Takes steps. ``steps``: the number taken; ``rows``, ``dense``: the tables and the other parameters.

    ``clock``: times the phases; ``total``: steps planned, for ``train.schedule``; ``ssd``: the files of the plan's
    tables on tier ssd; ``alone``: one rank that has all tables whole. Initial values depend on ``settings.seed`` alone,
    not on plan or number of ranks.
    """

    def __init__(
        self,
        settings: ModelSettings,
        schema: DatasetSchema,
        plan: Plan,
        device: torch.device,
        towers: Towers | None = None,
        ssd: SsdStore | None = None,
        total: int = 0,
    ) -> None:
        apart = towers is not None and not towers.is_flat
        pipeline = pipeline_of(settings.train.pipeline, plan, towers=apart)
        sharded = assemble(settings, schema, plan, towers, device, trained=True, ssd=ssd)
        self.model, self.rows, self._towers = sharded.model, sharded.rows, sharded.towers
        self.dense_part = sharded.dense_part
        self.ssd, self._model_config = ssd, settings.model
        self.rows.initialise(settings.seed)
        self._move_tables(device)
        self.dense = dense_parameters(self.model)
        self.workers, self.links = workers_of(settings.hardware), Links(settings.hardware.ranks_per_host)
        self.optimizers = Optimizers(self.model, settings.train, total, self._towers, self.workers)
        self._reductions = _reductions(sharded, self.dense, self.workers)
        self.seed, self.steps = settings.seed, 0
        self.lr = 0.0
        self._average_used = settings.train.average.use
        self.alone = alone = device.type == "cpu" and dist.get_world_size() == 1 and without_exchange(self.model)
        # One rank has no ids to send ahead.
        tables = torch.device("cpu") if self.dense_part.workers is not None else device
        self._pipeline = self._make_pipeline(tables, TrainPipelineBase if alone else pipeline)
        self._exchanging = self._exchange(device, settings)
        self.clock = PhaseClock(device)
        watch(self.clock, self.model, self.dense_part.pooled, self.optimizers)
        watch_pipeline(self.clock, self._pipeline)

    def _move_tables(self, device: torch.device) -> None:
        """Have the tables in large pages, where Linux has some: see ``use_large_pages``."""
        moved = use_large_pages(self.rows.local_shards()) if device.type == "cpu" else 0
        if moved and dist.get_rank() == 0:
            log.info("tables: %.0f MiB in memory pages of 2 MiB", moved / MIB)

    def _make_pipeline(self, device: torch.device, kind: type[Any]) -> Any:
        if self._towers is not None:
            ahead = kind is not TrainPipelineBase
            return TowerPipeline(self.model, self._towers, self.optimizers, device, ahead=ahead)
        return kind(self.model, self.optimizers, device)

    def _exchange(self, device: torch.device, settings: ModelSettings) -> Callable[[], AbstractContextManager[None]]:
        """What a step runs in: ranks on the CPUs of one host exchange through its memory, the others as they are.

        With towers, these are the ranks that share a tower's tables.
        """
        memory = memory_between(device, settings, self._towers)
        if memory is None:
            return nullcontext
        memory.counted = self.links.exchanged
        if self._towers is not None:
            memory.dtype = self._towers.read_as
            return memory.exchanging
        wrapped = self.model._dmp_wrapped_module
        if isinstance(wrapped, DistributedDataParallel):
            own = memory_between(device, settings, None)
            if own is not None:  # without, DDP averages them by itself
                self.optimizers.before = DenseReduction(wrapped, own).finish
        return memory.exchanging

    def step(self, batches: Iterator[Batch]) -> Output:
        """Train on the next batch; returns its (logits, labels, weights). StopIteration where there is none."""
        if self.ssd is not None:
            self.ssd.check()
        self.clock.begin()
        self.lr = self.optimizers.set_step(self.steps)
        seed_step(self.seed, self.steps)
        output: Output
        if dist.get_world_size() == 1:
            output = self._pipeline.progress(batches)
        else:
            with self._exchanging(), self.links.counting():
                output = self._pipeline.progress(batches)
            for size, ranks, dense in self._reductions:
                self.links.reduced(size, ranks, dense=dense)
        self.clock.end()
        self.steps += 1
        return output

    def drain(self) -> list[Output]:
        """End all steps that are under way; what those put out that ``step`` has not returned."""
        return []

    def close(self) -> None:
        """End what works for this trainer."""

    def measure_speed(self, samples: int) -> Speed:
        """The matrix products of a step over ``samples`` samples, timed on this rank."""
        part, device = self.dense_part, next(iter(self.dense.values())).device
        assert part.inputs is not None
        return Speed.measure(self._model_config, part.inputs, samples, part.dtype, device)

    @property
    def tower_features(self) -> dict[str, list[str]]:
        """The features of every tower module that learns, by what its parameters' names start with."""
        return self._towers.module_features(TOWERS) if self._towers is not None else {}

    @property
    def feature_order(self) -> dict[str, list[str]]:
        """The features by group of ``data``, in the order in which the model takes them."""
        part = self.dense_part
        return {"dense": list(part.inputs.dense) if part.inputs is not None else [], "sparse": list(part.tables)}

    def gather(self) -> None:
        """Bring what other ranks trained or keep to rank 0, tower modules and optimizer state. Collective."""
        self.optimizers.gather()
        if self._towers is not None:
            gather_towers(self._towers, self.optimizers.dense)

    @property
    def published_average(self) -> Average | None:
        """The average of the dense weights that takes their place when they are published; None without one."""
        return self.optimizers.average if self._average_used else None

    @contextmanager
    def looking(self) -> Iterator[torch.nn.Module]:
        """The model as it would be published, in evaluation mode, to be called directly; afterwards it trains on.

        The pipeline must be empty: see ``drains``.
        """
        average = self.published_average
        if self.must_drain:
            self._pipeline.detach()
        if average is not None:
            average.swap()
        self.model.eval()
        try:
            with torch.no_grad(), keeping_steps(self.model):
                yield self.model
        finally:
            self.model.train()
            if average is not None:
                average.swap()
            if self.must_drain:  # TorchRec's prefetching pipeline does not do so by itself
                self._pipeline.attach(self.model)

    @property
    def must_drain(self) -> bool:
        """Whether the pipeline holds batches between steps, so that its batches must end before ``looking``."""
        return isinstance(self._pipeline, TrainPipelineSparseDist)

    def finished(self) -> torch.nn.Module:
        """The model taken out of the pipeline, to be called directly in evaluation mode."""
        if isinstance(self._pipeline, TrainPipelineSparseDist):
            self._pipeline.detach()
        return self.model.eval()


def pipeline_of(name: str, plan: Plan, *, towers: bool) -> type[Any]:
    """TorchRec's pipeline for ``train.pipeline``; ConfigError for prefetch where no table has a cache, or with towers.

    They copy the next batches, which lie in page-locked memory, to a GPU on a stream of their own.
    """
    kinds = {
        "base": TrainPipelineBase,
        "sparse_dist": TrainPipelineSparseDist,
        "prefetch": PrefetchTrainPipelineSparseDist,
    }
    if name == "prefetch" and (towers or not cached_tables(plan)):
        raise ConfigError(
            "train.pipeline is prefetch, "
            + ("but towers exchange their ids by themselves" if towers else "but no table is on tier hbm_cached"),
            hint="train.pipeline=sparse_dist",
        )
    return kinds[name]


def _reductions(
    sharded: Sharded, dense: dict[str, torch.nn.Parameter], workers: Workers
) -> list[tuple[int, list[int], bool]]:
    """This rank's all-reductions of a step, which DDP does: (bytes, global ranks, whether it is the dense part)."""
    if not workers.here:
        return []
    every = list(workers.ranks)
    towers = sharded.towers
    tower_ranks = towers.groups.tower_ranks if towers is not None else every
    apart = towers.apart_parameters() if towers is not None else []
    away = {id(parameter) for parameter in apart}
    own = sum(p.nbytes for p in towers.own_parameters()) if towers is not None else 0
    shared = sum(p.nbytes for p in dense.values() if id(p) not in away)
    tables = sum(weights.nbytes for weights in dense_table_parameters(sharded.model).values())
    reductions = [(shared, every, True), (own, list(tower_ranks), True), (tables, list(tower_ranks), False)]
    return [(size, ranks, is_dense) for size, ranks, is_dense in reductions if size and len(ranks) > 1]
