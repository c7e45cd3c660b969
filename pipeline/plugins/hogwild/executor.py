"""Asynchronous training in one process: threads that update the same weights without locks (Niu et al., NeurIPS'11).

Every thread takes a batch, computes its gradients from the weights as they are at that moment, and applies them while
others read and write the same memory. So a gradient may be of weights that are some steps old, and two updates of a row
at once may lose one of them. What a run ends with depends on how its threads happen to run.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch
from torch import nn

from pipeline.config.fields import AUTO
from pipeline.config.train import TrainConfig
from pipeline.core.cpus import available_cpus
from pipeline.core.errors import ConfigError
from pipeline.embeddings.row_access import RowStore
from pipeline.embeddings.table_training import anchors
from pipeline.embeddings.tables import dense_parameters
from pipeline.models.layers.perceptron import batch_norms
from pipeline.records.dataset import DatasetSchema
from pipeline.records.plan import Plan
from pipeline.records.towers import Towers
from pipeline.training.batches import Batch
from pipeline.training.model import Output
from pipeline.training.optimizer import DenseClip, dense_groups
from pipeline.training.settings import ModelSettings
from pipeline.training.step import StepExecutor

MEMORY, WHOLE = "ddr", "table_wise"


class Hogwild(StepExecutor):
    """A ``StepExecutor`` whose steps threads take: ``step`` returns the output of the next step that finishes.

    Threads run ahead of ``step``. ``drain`` lets them finish what they have begun: call it before anything looks at the
    weights. The first step of a process is taken alone: it makes the state of the optimizers, and TorchRec prepares for
    the features of a batch, which several threads at once cannot.
    """

    can_recompile = False

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
        _check_plan(plan)
        super().__init__(settings, schema, plan, device, towers, row_store, total)
        # Batch norm keeps statistics of the current batch, and several threads would mix theirs.
        if batch_norms(self.dense_part.ranking):
            raise ConfigError(
                "model.norm is batch, which keeps statistics of one batch at a time, but train.mode=hogwild has "
                "several under way",
                hint="model.norm=layer, or train.mode=sync",
            )
        self._named = dense_parameters(self.model)
        self._anchors = anchors(self.model)
        # The lock protects the taking of a batch, not the weights.
        self._take = threading.Lock()
        self._running = threading.Event()
        self._prepared = self._ended = False
        self._source: Iterator[Batch] = iter(())
        self._taken = self._returned = 0
        # Each entry is a step's output, or the error that made the step fail.
        self.done: queue.Queue[Output | BaseException] = queue.Queue()
        threads = settings.train.hogwild.threads
        count = available_cpus() if threads == AUTO else int(threads)
        self.threads = [_Worker(self, settings.train) for _ in range(count)]

    @staticmethod
    def threads_per_rank(train: TrainConfig) -> int | None:
        """Return 1: the threads that take steps share the CPUs."""
        return 1

    def step(self, batches: Iterator[Batch]) -> Output:
        """Return the (logits, labels, weights) of the next step that a thread has finished."""
        self.lr = self.optimizers.set_step(self.steps)
        if self._prepared:
            self._start(batches)
            output = self._next()
        else:
            output = self.learn(next(batches), list(self._named.values()))
            self.optimizers.step()
            self.optimizers.zero_grad()
            self._prepared = True
        self.steps += 1
        return output

    def drain(self) -> list[Output]:
        """Let the threads finish the steps that they have begun, and stop; return the outputs of these steps."""
        self._running.clear()
        # Hold the lock, so that no thread has seen ``_running`` set without counting the batch that it takes.
        with self._take:
            begun = self._taken - self._returned
        # ``_next`` raises the error of a thread that failed.
        outputs = [self._next() for _ in range(begun)]
        self.steps += len(outputs)
        return outputs

    def close(self) -> None:
        """End the threads, after the steps that they have begun."""
        with self._take:
            self._ended = True
        # Stopped threads wait for this event, and then look at ``_ended``.
        self._running.set()
        for thread in self.threads:
            # A thread that never started cannot be joined.
            if thread.ident is not None:
                thread.join()

    def _start(self, batches: Iterator[Batch]) -> None:
        if self._running.is_set():
            return
        self._source = batches
        # Share the state at every start, since a validation may have restored other weights and optimizer state.
        for thread in self.threads:
            thread.share_state()
        self._running.set()
        for thread in self.threads:
            if thread.ident is None:
                thread.start()

    def _next(self) -> Output:
        output = self.done.get()
        if isinstance(output, BaseException):
            raise output
        self._returned += 1
        return output

    def take(self) -> tuple[int, Batch] | None:
        """Return the next batch with the number of its step, once the threads may run; None at the end."""
        while True:
            self._running.wait()
            with self._take:
                if self._ended:
                    return None
                if not self._running.is_set():
                    continue
                try:
                    batch = next(self._source)
                except StopIteration:
                    self._running.clear()
                    continue
                self._taken += 1
                return self.steps + self._taken - self._returned - 1, batch

    def learn(self, batch: Batch, parameters: Sequence[nn.Parameter]) -> Output:
        """Run a forward and backward pass, in which tables learn and the thread's own ``parameters`` get gradients."""
        output: Output
        loss, output = self.model(batch)
        learning, trained = list[nn.Parameter](), list[torch.Tensor]()
        for parameter, shared in zip(parameters, self._named.values(), strict=True):
            # A layer's statistics are parameters without a gradient.
            if shared.requires_grad:
                learning.append(parameter)
                trained.append(shared)
        # Use ``grad`` rather than ``backward``, which would leave the gradients of all threads in the same place. The
        # anchors make autograd run the tables' backward passes; their own gradients, the last ones, are not used.
        gradients = torch.autograd.grad(loss, [*trained, *self._anchors], allow_unused=True)
        for parameter, gradient in zip(learning, gradients, strict=False):
            parameter.grad = gradient
        return output


class _Worker(threading.Thread):
    """One thread with its own gradients and optimizer; weights and optimizer state are shared."""

    def __init__(self, trainer: Hogwild, config: TrainConfig) -> None:
        super().__init__(name="nightjar-hogwild", daemon=True)
        self._trainer, self._config = trainer, config
        named = dense_parameters(trainer.model)
        # These parameters share the memory of the model's weights, but have gradients of their own.
        self._parameters = [nn.Parameter(parameter.data) for parameter in named.values()]
        self._pairs = list(zip(named.values(), self._parameters, strict=True))
        mirror = {id(parameter): own for parameter, own in self._pairs}
        groups = []
        for group in dense_groups(named, config):
            own = [mirror[id(parameter)] for parameter in group.parameters]
            groups.append(replace(group, parameters=own))
        self._optimizer = config.dense_spec.build(groups)
        limit = config.clip.dense_norm
        self._clip = DenseClip(self._parameters, limit) if limit is not None else None

    def share_state(self) -> None:
        """Take the state of the trainer's optimizer as it is now for this thread's: the same tensors."""
        state = self._trainer.optimizers.dense.state
        for parameter, own in self._pairs:
            if parameter in state:
                self._optimizer.state[own] = state[parameter]

    def run(self) -> None:
        """Take steps until there are no more batches."""
        # Both are settings of a thread, and ``connect`` has set them only for the main thread.
        torch.set_num_threads(1)
        torch.set_flush_denormal(True)
        try:
            while (taken := self._trainer.take()) is not None:
                self._trainer.done.put(self._step(*taken))
        except BaseException as error:
            # ``step`` raises the error in the main thread.
            self._trainer.done.put(error)

    def _step(self, step: int, batch: Batch) -> Output:
        output = self._trainer.learn(batch, self._parameters)
        # Each thread clips the gradient of its own batch, since gradients are not averaged over batches.
        if self._clip is not None:
            self._clip()
        for group, rate in zip(self._optimizer.param_groups, self._trainer.optimizers.rates(step), strict=True):
            group["lr"] = rate
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        return output


def _check_plan(plan: Plan) -> None:
    """Raise ConfigError for a table that does not lie whole in the host's memory."""
    for name, table in plan.tables.items():
        if table.tier != MEMORY:
            raise ConfigError(
                f"train.mode=hogwild trains tables in host memory, but the plan has table {name!r} on tier "
                f"{table.tier}",
                hint=f"+plan.tables.{name}.tier={MEMORY}, or train.mode=sync",
            )
        if table.kernel == "dense":
            raise ConfigError(
                f"train.mode=hogwild cannot train table {name!r}, which is planned data_parallel",
                hint=f"+plan.tables.{name}.sharding={WHOLE}, or train.mode=sync",
            )
        if table.sharding != WHOLE:
            raise ConfigError(
                f"train.mode=hogwild needs tables that are not cut into pieces, but the plan has table {name!r} "
                f"{table.sharding}",
                hint=f"+plan.tables.{name}.sharding={WHOLE}, or train.mode=sync",
            )
