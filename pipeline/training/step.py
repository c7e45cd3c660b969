"""One rank's sharded model with its optimizers and pipeline: what takes a training's steps.

The way of a step: ``StepExecutor.step`` sets the learning rates and calls ``progress`` of TorchRec's pipeline (with
towers, of ``TowerPipeline``). That takes a batch and runs ``model.ClickModel.forward``, which returns the loss and what
metrics need. In the backward pass of the loss, rows of tables are updated already: part 4 of
``embeddings.sharding.shard_model`` says by which code. Finally ``optimizer.Optimizers.step`` updates everything else.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.train_pipeline import (
    PrefetchTrainPipelineSparseDist,
    TrainPipelineBase,
    TrainPipelineSparseDist,
)
from torchrec.distributed.types import Awaitable
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from pipeline.checkpoint.warm import feature_order
from pipeline.config.train import TrainConfig
from pipeline.core.errors import ConfigError
from pipeline.core.units import MIB
from pipeline.embeddings.compiled_tables import narrow_exchanged
from pipeline.embeddings.huge_pages import use_large_pages
from pipeline.embeddings.row_access import RowStore
from pipeline.embeddings.single_rank_lookup import bypass_exchange
from pipeline.embeddings.table_training import keeping_steps
from pipeline.embeddings.tables import dense_parameters, dense_table_parameters
from pipeline.embeddings.workers import Workers
from pipeline.records.dataset import DatasetSchema
from pipeline.records.plan import Plan
from pipeline.records.towers import Towers
from pipeline.towers.links import Links
from pipeline.towers.transform import Sent, TowerEmbeddings
from pipeline.training.batches import Batch
from pipeline.training.distributed import seed_step, workers_of
from pipeline.training.model import TOWERS, Output, Sharded, assemble
from pipeline.training.optimizer import AVERAGE, COUNT, Average, Optimizers
from pipeline.training.profiling import Speed
from pipeline.training.settings import ModelSettings
from pipeline.training.shared_memory import DenseReduction, memory_between
from pipeline.training.step_phases import PhaseClock, watch, watch_pipeline

log = logging.getLogger(__name__)


class StepExecutor:
    """One rank's sharded model with its optimizers and TorchRec's pipeline. It takes synchronous steps.

    Initial values depend on ``settings.seed`` alone, not on the plan or the number of ranks.

    Args:
        settings: What builds the model.
        schema: The columns of the dataset.
        plan: The placement of the tables.
        device: This rank's device.
        towers: The result of the partition stage; None: a flat model.
        row_store: The rows of the plan's tables on tier ssd; None where the plan has none.
        total: Steps planned, which the schedule of the learning rates spans.

    Attributes:
        steps: The number of steps taken.
        lr: ``train.lr`` times the factor of the newest step.
        rows, dense: The tables, and all other parameters by name.
        alone: Whether there is one rank, which has all tables whole.
        clock: Times the phases of steps.
        links: Counts the bytes that this rank sends.
    """

    # Whether ``train.compile=auto`` may swap the dense part's code between two steps.
    can_recompile = True

    def __init__(
        self,
        settings: ModelSettings,
        schema: DatasetSchema,
        plan: Plan,
        device: torch.device,
        towers: Towers | None = None,
        row_store: RowStore | None = None,
        total: int = 0,
    ) -> None:
        pipeline = pipeline_of(settings.train.pipeline, plan, towers=towers is not None and not towers.is_flat)

        # 1. Build the model, with its tables sharded by the plan.
        sharded = assemble(settings, schema, plan, towers, device, trained=True, row_store=row_store)
        self.model, self.rows, self._towers = sharded.model, sharded.rows, sharded.towers
        self.dense_part, self.row_store = sharded.dense_part, row_store
        self._model_config, self._average_used = settings.model, settings.train.average.use
        # Checkpoints record it: layers identify features by position.
        self.feature_order = feature_order(schema)
        if self.dense_part.inputs is None:
            self.feature_order["dense"] = []
        self.rows.initialise(settings.seed)
        if device.type == "cpu":
            # Rows are read at random, so with pages of 4 KiB each row would cost a TLB miss.
            moved = use_large_pages(self.rows.local_shards())
            if moved and dist.get_rank() == 0:
                log.info("tables: %.0f MiB in memory pages of 2 MiB", moved / MIB)

        # 2. Build its optimizers. Fused optimizers of tables learn in the backward pass.
        self.dense = dense_parameters(self.model)
        self.workers, self.links = workers_of(settings.hardware), Links(settings.hardware.ranks_per_host)
        self.optimizers = Optimizers(self.model, settings.train, total, self._towers, self.workers)
        self._reductions = _reductions(sharded, self.dense, self.workers)
        self.seed, self.steps, self.lr = settings.seed, 0, 0.0

        # 3. Build the pipeline, which feeds the model and calls the optimizers. A single rank has no ids to send ahead,
        # so the kernels are called directly, unless a sharding needs what TorchRec's exchange does.
        self.alone = False
        if device.type == "cpu" and dist.get_world_size() == 1:
            self.alone = bypass_exchange(self.model)
        if self.alone:
            pipeline = TrainPipelineBase
        # Embedding hosts hold the tables in host memory, whatever device the workers' dense part is on.
        input_device = device
        if self.dense_part.workers is not None:
            input_device = torch.device("cpu")
        self._pipeline: Any
        if self._towers is not None:
            ahead = pipeline is not TrainPipelineBase
            self._pipeline = TowerPipeline(self.model, self._towers, self.optimizers, input_device, ahead=ahead)
        else:
            self._pipeline = pipeline(self.model, self.optimizers, input_device)
        self._exchanging = self._share_memory(device, settings)

        # 4. Add hooks that time a step's phases.
        self.clock = PhaseClock(device)
        watch(self.clock, self.model, self.dense_part.pooled, self.optimizers)
        watch_pipeline(self.clock, self._pipeline)

    @staticmethod
    def threads_per_rank(train: TrainConfig) -> int | None:
        """Return the threads of an operation on this rank; None: its share of the CPUs."""
        return train.threads_per_rank

    @property
    def device(self) -> torch.device:
        """The device of the dense part."""
        return next(iter(self.dense.values())).device

    def _share_memory(
        self, device: torch.device, settings: ModelSettings
    ) -> Callable[[], AbstractContextManager[None]]:
        # Ranks on the CPUs of one host exchange through its memory while a step runs; with towers, those that share a
        # tower's tables do. All others use TorchRec's exchange.
        memory = memory_between(device, settings, self._towers)
        if self._towers is not None:
            self._towers.exchange.counted = self.links.exchanged
        if memory is None:
            return nullcontext
        memory.counted = self.links.exchanged
        if self._towers is not None:
            memory.dtype = self._towers.read_as
            ranks = len(self._towers.groups.tower_ranks)
            # Gradients are divided by the number of ranks, which rounds nothing if that is a power of two. A limit of
            # their values would be rounded.
            if memory.dtype is not None and ranks & (ranks - 1) == 0 and settings.train.clip.table_value is None:
                narrow_exchanged(self.model, memory.dtype)
            return memory.exchanging
        wrapped = self.model._dmp_wrapped_module
        if isinstance(wrapped, DistributedDataParallel):
            # Without this memory, DDP averages the gradients of the dense part itself.
            dense_memory = memory_between(device, settings, None)
            if dense_memory is not None:
                self.optimizers.before = DenseReduction(wrapped, dense_memory).finish
        return memory.exchanging

    def step(self, batches: Iterator[Batch]) -> Output:
        """Train on the next batch of ``batches``.

        Returns:
            Its (logits, labels, weights).

        Raises:
            StopIteration: There is no batch left.
        """
        # 1. Prepare what the step depends on besides its batch. Threads that fetch rows from SSD cannot raise their
        # errors themselves, so check them here. Learning rates and dropout are functions of the step's number, so a
        # resumed run repeats them.
        if self.row_store is not None:
            self.row_store.check()
        self.clock.begin()
        self.lr = self.optimizers.set_step(self.steps)
        seed_step(self.seed, self.steps)

        # 2. Run TorchRec's pipeline on the next batch: zero_grad, forward, backward, in which the tables learn, and
        # ``Optimizers.step`` for everything else.
        output: Output
        if dist.get_world_size() == 1:
            output = self._pipeline.progress(batches)
        else:
            with self._exchanging(), self.links.counting():
                output = self._pipeline.progress(batches)
            # DDP's gradient reductions bypass the functions that ``counting`` wraps.
            for size, ranks, dense in self._reductions:
                self.links.reduced(size, ranks, dense=dense)

        # 3. Count the step only once all of it is done, so ``steps`` always matches the weights.
        self.clock.end()
        self.steps += 1
        return output

    def drain(self) -> list[Output]:
        """Finish the steps under way and return their outputs that ``step`` has not returned."""
        return []

    def close(self) -> None:
        """End the threads that work for this executor."""

    def measure_speed(self, samples: int) -> Speed:
        """Time only the matrix products of a step over ``samples`` samples, on this rank."""
        part = self.dense_part
        assert part.inputs is not None
        return Speed.measure(self._model_config, part.inputs, samples, part.dtype, self.device, part.parts)

    @property
    def tower_features(self) -> dict[str, list[str]]:
        """Return the features of every tower module that learns, by the prefix of its parameters' names."""
        if self._towers is None:
            return {}
        return self._towers.module_features(TOWERS)

    @property
    def tower_module(self) -> dict[str, Any]:
        """Return the ``TowerModuleSpec`` of the towers as plain data; {} without towers."""
        if self._towers is None:
            return {}
        return self._towers.layout.towers.module.to_json()

    def gather(self) -> None:
        """Collect on rank 0 what other ranks trained or keep: tower modules and optimizer state. Collective."""
        self.optimizers.gather()
        if self._towers is not None:
            gather_towers(self._towers, self.optimizers.dense)

    @property
    def published_average(self) -> Average | None:
        """The average of the dense weights, which replaces them when they are published; None without one."""
        return self.optimizers.average if self._average_used else None

    @contextmanager
    def looking(self) -> Iterator[torch.nn.Module]:
        """Yield the model as it would be published, in evaluation mode, to be called directly; then resume training.

        The pipeline must be empty: see ``must_drain``.
        """
        average = self.published_average
        # The pipeline has replaced the forward of sharded modules by its own, which waits for ids that were sent ahead.
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
            if self.must_drain:
                # TorchRec's prefetching pipeline does not attach by itself.
                self._pipeline.attach(self.model)

    @property
    def must_drain(self) -> bool:
        """Whether the pipeline holds batches between steps, so that its batches must end before ``looking``."""
        return isinstance(self._pipeline, TrainPipelineSparseDist)

    def finished(self) -> torch.nn.Module:
        """Detach the model from the pipeline and return it, to be called directly in evaluation mode."""
        if self.must_drain:
            self._pipeline.detach()
        return self.model.eval()


def pipeline_of(name: str, plan: Plan, *, towers: bool) -> type[Any]:
    """Return TorchRec's pipeline for ``train.pipeline``.

    The pipelines copy the next batches, which are in page-locked memory, to a GPU on a separate stream.

    Raises:
        ConfigError: It is prefetch, and no table has a cache, or there are ``towers``.
    """
    pipelines = {
        "base": TrainPipelineBase,
        "sparse_dist": TrainPipelineSparseDist,
        "prefetch": PrefetchTrainPipelineSparseDist,
    }
    reason = ""
    if towers:
        reason = "towers exchange their ids by themselves"
    elif not plan.tables_on("hbm_cached"):
        reason = "no table is on tier hbm_cached"
    if name == "prefetch" and reason:
        raise ConfigError(f"train.pipeline is prefetch, but {reason}", hint="train.pipeline=sparse_dist")
    return pipelines[name]


def _reductions(
    sharded: Sharded, dense: dict[str, torch.nn.Parameter], workers: Workers
) -> list[tuple[int, list[int], bool]]:
    # Lists this rank's all-reductions by DDP in a step: (bytes, global ranks, whether it is the dense part).
    if not workers.here:
        return []
    ranks, towers = list(workers.ranks), sharded.towers
    # Parameters of towers' modules are reduced among the ranks that train the tower, all others among the workers.
    unshared: set[int] = set()
    table_ranks, tower_bytes = ranks, 0
    if towers is not None:
        unshared.update(map(id, towers.unshared_parameters()))
        table_ranks = list(towers.groups.tower_ranks)
        tower_bytes = sum(parameter.nbytes for parameter in towers.own_parameters())
    shared_bytes = sum(parameter.nbytes for parameter in dense.values() if id(parameter) not in unshared)
    table_bytes = sum(weights.nbytes for weights in dense_table_parameters(sharded.model).values())

    reductions = []
    for size, among, is_dense in (
        (shared_bytes, ranks, True),
        (tower_bytes, table_ranks, True),
        (table_bytes, table_ranks, False),
    ):
        if size and len(among) > 1:
            reductions.append((size, among, is_dense))
    return reductions


class TowerPipeline:
    """Takes steps by ``progress``, as TorchRec's pipelines do, which cannot fetch ahead here: the ids travel first.

    With ``ahead``, the next batch's lengths travel during the forward pass, its ids during the backward pass.
    """

    def __init__(
        self,
        model: DistributedModelParallel,
        towers: TowerEmbeddings,
        optimizers: Optimizers,
        device: torch.device,
        *,
        ahead: bool,
    ) -> None:
        self._model, self._towers, self._optimizers, self._device = model, towers, optimizers, device
        self._ahead = ahead
        self._next: tuple[Batch, Awaitable[KeyedJaggedTensor]] | None = None

    def progress(self, batches: Iterator[Batch]) -> Output:
        """Train on the next batch; StopIteration where there is none."""
        if self._next is None:
            batch, sent = self.start_sparse_data_dist(next(batches))
            self._next = batch, self.wait_sparse_data_dist(sent)
        batch, ids = self._next
        received = self.wait_sparse_data_dist(ids)
        coming = None
        if self._ahead:
            coming = next(batches, None)
        self._next = None
        if coming is not None:
            coming, sent = self.start_sparse_data_dist(coming)
        self._optimizers.zero_grad()
        output: Output
        loss, output = self._model(batch, received)
        if coming is not None:
            self._next = coming, self.wait_sparse_data_dist(sent)
        loss.backward()
        # Reduce before the optimizers step: DDP skips towers' modules, whose gradients only the ranks of a tower share.
        self._towers.reduce_gradients()
        self._optimizers.step()
        return output

    def start_sparse_data_dist(self, batch: Batch) -> tuple[Batch, Sent]:
        """Start to send a batch's ids to their towers. ``step_phases`` times this method by TorchRec's name for it."""
        batch = batch.to(self._device, non_blocking=True)
        return batch, self._towers.send(batch.sparse, batch.lookups, batch.events)

    def wait_sparse_data_dist(self, sent: Awaitable[Any]) -> Any:
        """Wait for what was sent: first lengths, then ids."""
        return sent.wait()


@torch.no_grad()
def gather_towers(towers: TowerEmbeddings, optimizer: torch.optim.Optimizer) -> None:
    """Copy every tower module and its optimizer state from the first rank of its hosts to all ranks. Collective."""
    # Merge the keys of all states: after a restore, only the states of parameters that learn here have all of them.
    template: dict[str, Any] = {}
    for state in optimizer.state.values():
        template |= state
    for group in range(len(towers.layout.tower_hosts)):
        source = towers.layout.tower_ranks(group)[0]
        for parameter in towers.parameters_of(group):
            _broadcast(parameter.data, source, parameter.device)
            if not template:
                continue
            # This rank has no state yet for parameters that other ranks train.
            state = optimizer.state[parameter]
            for name, value in _initial_state(optimizer, parameter, template).items():
                state.setdefault(name, value)
            for name in sorted(state):
                state[name] = _broadcast(state[name], source, parameter.device)


def _broadcast(value: Any, source: int, device: torch.device) -> Any:
    # A tensor is filled in place; other values are whole numbers, such as the count of an average.
    if not isinstance(value, Tensor):
        return int(_broadcast(torch.tensor(value), source, device))
    # Adagrad keeps its step count on the CPU, but NCCL only sends from CUDA.
    sent = value.to(device)
    dist.broadcast(sent, source)
    return value.copy_(sent)


def _initial_state(optimizer: torch.optim.Optimizer, parameter: Tensor, template: dict[str, Any]) -> dict[str, Any]:
    zeros: dict[str, Any] = {}
    for name, value in template.items():
        zeros[name] = 0
        if isinstance(value, Tensor):
            zeros[name] = torch.zeros_like(parameter if value.dim() else value)
    if not hasattr(optimizer, "new_state"):
        return zeros
    # The optimizer itself makes states that depend on the parameter's shape, but it knows nothing of the average.
    state: dict[str, Any] = optimizer.new_state(parameter)
    for name in (AVERAGE, COUNT):
        if name in zeros:
            state[name] = zeros[name]
    return state
