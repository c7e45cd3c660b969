"""Trains on one rank, from a dataset and a plan to a committed checkpoint. Read it from top to bottom.

``Trainer`` builds everything in order, takes the remaining steps, and between them reports, validates, guards and
saves. ``step.py`` takes a step, ``callbacks.py`` has the hooks, and each further noun has its own file.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, fields
from operator import add
from typing import Any

import torch
import torch.distributed as dist

from pipeline.checkpoint.fault_points import FaultPoint, OnPoint, ignore
from pipeline.core.registry import STEP_EXECUTORS, load_hooks
from pipeline.embeddings.norms import histograms, squared_norms
from pipeline.embeddings.row_access import RowStore
from pipeline.models.layers.perceptron import log_odds
from pipeline.records.plan import Plan
from pipeline.records.towers import Towers
from pipeline.store.artifacts import Store
from pipeline.store.manifest import Artifact
from pipeline.towers.links import LinkBytes
from pipeline.training.batches import BatchReader, BoundedBatches
from pipeline.training.callbacks import Callback, IntervalRecord
from pipeline.training.checkpoints import Checkpoints
from pipeline.training.compiling import AutoCompile
from pipeline.training.distributed import SAVE, STOP, Agreement, add_up, connect, largest, shared_failure
from pipeline.training.early_stopping import StoppingDecision
from pipeline.training.guards import Collapse, check_finite, check_layers
from pipeline.training.lr_schedule import first_cycle, log_planned, planned_steps, warmup_steps
from pipeline.training.memory import (
    MemoryBudget,
    MemoryMeter,
    SsdMeter,
    log_shortcomings,
    naming_checkpoint,
    open_row_store,
    peak_rss,
)
from pipeline.training.parquet import SplitReader
from pipeline.training.predict import judge_train_rows
from pipeline.training.prefetch_exchange import Announce
from pipeline.training.profiling import STEPS, Profiler, SpeedMeter, debugging
from pipeline.training.rank_loss import RankLossMeter
from pipeline.training.sampler import Order, shuffle_key
from pipeline.training.settings import TrainingSettings
from pipeline.training.step import StepExecutor
from pipeline.training.step_phases import compare_with_plan
from pipeline.training.train_metrics import MetricAccumulator
from pipeline.training.validation import ValidatedTraining, Validation, build_validation, validation_split

# The classes that take steps, by ``train.mode``; plugins add others (``find_executor``).
EXECUTORS: dict[str, type[StepExecutor]] = {"sync": StepExecutor}

OnInterval = Callable[[dict[str, Any]], None]


def train(
    settings: TrainingSettings,
    store: Store,
    dataset: Artifact,
    plan: Plan,
    checkpoints: str,
    key: str,
    on_interval: OnInterval,
    init: Artifact | None = None,
    on_point: OnPoint = ignore,
    plan_key: str = "",
    towers: Towers | None = None,
    teacher: Artifact | None = None,
) -> dict[str, Any]:
    """Train by ``settings.train``, from the newest checkpoint of the same ``key``; every rank calls it.

    Args:
        settings: The settings that training reads.
        store: Where datasets and checkpoints lie.
        dataset: Training uses its split train; its split validation, if it has one, decides when training stops.
        plan: The placement of the tables.
        checkpoints: The store's directory for checkpoints; the last one is committed at the end.
        key: The key of the checkpoints that this training may continue from.
        on_interval: Called on rank 0 with a record every ``log_every_steps`` steps.
        init: The checkpoint that tables and dense part start from where ``key`` has none; None: initial values.
        on_point: Called with every named point that a rank passes.
        plan_key: The plan's key, which is recorded in the checkpoints.
        towers: The result of the partition stage, whose hosts ``plan`` must keep; None: a flat model.
        teacher: The scores of the train rows that ``train.distill`` learns from; None: labels alone.

    Returns:
        {"train", "checkpoint", "final"}: figures of this run (rates) and of the whole training (samples, steps;
            predicted next to measured), and the path of the last checkpoint. "train" has ``resumed``, a step and its
            samples, where the run continues from a checkpoint.

    Raises:
        GuardError: A guard stops the run.
        DataError: A split is empty.
        PlanError: The plan does not fit.
        LaunchError: A SIGTERM was received; a checkpoint was committed first.
    """
    # Find the executor before ``connect``, which sets a rank's threads: Hogwild's threads share the rank's CPUs.
    threads = find_executor(settings.train.mode).threads_per_rank(settings.train)
    device = connect(settings.hardware, threads, one_machine=settings.one_machine)
    torch.manual_seed(settings.seed + dist.get_rank())
    with (
        shared_failure(),
        naming_checkpoint(store, checkpoints),
        open_row_store(settings.hardware, store, plan) as row_store,
    ):
        log_shortcomings(row_store)
        inputs = {"dataset": dataset.key, "plan": plan_key}
        trainer = Trainer(
            settings,
            store,
            dataset,
            plan,
            checkpoints,
            key,
            inputs,
            device,
            on_interval,
            on_point,
            init,
            towers,
            row_store,
            teacher,
        )
        return trainer.train()


def find_executor(mode: str) -> type[StepExecutor]:
    """Return the class that takes the steps of ``mode``: built in, or a plugin's (``nightjar.step_executors``)."""
    if mode in EXECUTORS:
        return EXECUTORS[mode]
    executor: type[StepExecutor] = load_hooks(STEP_EXECUTORS)[mode]
    return executor


@dataclass
class DueActions:
    """What follows a step. It is the same on every rank, since wishes and measurements were agreed on before.

    Args:
        stop: Whether a rank got a SIGTERM; then ``save`` is set too.
        save: Whether to take a checkpoint.
        validate: Whether to score the validation rows.
        judge: Whether the guard judges the model, because its predictions in an earlier interval asked for it.
    """

    stop: bool
    save: bool
    validate: bool
    judge: bool

    @property
    def need_weights(self) -> bool:
        """Whether something reads the weights, so that no step may change them meanwhile."""
        return self.save or self.validate or self.judge


class Trainer:
    """Builds a training and resumes it; ``train`` takes the remaining steps. See the function ``train``."""

    def __init__(
        self,
        settings: TrainingSettings,
        store: Store,
        dataset: Artifact,
        plan: Plan,
        directory: str,
        key: str,
        inputs: dict[str, str],
        device: torch.device,
        on_interval: OnInterval,
        on_point: OnPoint,
        init: Artifact | None,
        towers: Towers | None,
        row_store: RowStore | None,
        teacher: Artifact | None,
    ) -> None:
        self.settings, self.config, self.plan, self.device = settings, settings.train, plan, device
        self.on_interval, self.on_point = on_interval, on_point
        config = settings.train

        # 1. Find the rows, and the number of steps that they make. ``train.global_batch=auto`` is a number by now
        # (``stages/execution.py``).
        self.split = SplitReader(store, dataset, "train", teacher)
        self.total = planned_steps(config, self.split.rows)
        order = Order(
            key=shuffle_key(dataset),
            seed=settings.seed,
            global_batch=config.batch,
            shuffle=config.shuffle,
            window_groups=config.shuffle_window_groups,
            lanes=config.dealt_lanes,
            group_by=config.rank_loss.group_by if config.rank_loss.keep_groups else None,
            rank=dist.get_rank(),
            world_size=settings.hardware.workers,
            without=settings.hardware.world_size - settings.hardware.workers,
        )

        # 2. Build the sharded model with its optimizers. The meter comes first, since it measures from here.
        self.memory = MemoryMeter(device)
        self.executor = find_executor(config.mode)(
            settings, self.split.schema, plan, device, towers, row_store, self.total
        )
        if teacher is not None:
            self.executor.dense_part.teacher_share = config.distill.weight
        base_rate = self.split.base_rate()
        starts = None
        if base_rate is not None:
            starts = [log_odds(base_rate, self.split.rows), *self.split.task_starts()]
            # Set the last bias of a new model, so that it is calibrated at any click rate. A checkpoint replaces it.
            self.executor.dense_part.start_at(starts)

        # 3. Build metrics, checkpoints and validation, which share the state that a resumed training continues from.
        self.metrics = MetricAccumulator(config.guard.window_steps, self.split.schema)
        compiling = AutoCompile(self.executor, settings, store, order.local_batch)
        self.checkpoints = Checkpoints(
            settings, store, directory, key, inputs, self.executor, self.metrics, compiling, self.split, order, on_point
        )
        self.validation = self._build_validation(order, starts, init)

        # 4. Resume from the newest checkpoint, with the order that the training began with and its earlier validations.
        self.checkpoints.resume(init, self.total)
        self.order = self.checkpoints.order
        if self.validation is not None:
            self.total = self.validation.begin(self.total, warm=init is not None)
        if dist.get_rank() == 0:
            log_planned(config, self.split.rows, self.executor.optimizers.schedule.cycle)
        self.first = self.executor.steps
        # With validation rows the learning rates rise within the first cycle, however many follow.
        rising = first_cycle(config, self.total, self.executor.optimizers.schedule.cycle)
        self.collapse = Collapse(config, min(warmup_steps(config, rising), rising))
        # The step after which the guard judges the model; None while its predictions do not ask for it.
        self.judged_after: int | None = None

        # 5. Prepare what happens beside the steps.
        self.samples = 0.0
        self.sent = LinkBytes().as_list()
        self.profiler: Profiler | None = None
        self.callbacks = self._build_callbacks(store, directory, compiling)

    def _build_validation(self, order: Order, starts: list[float] | None, init: Artifact | None) -> Validation | None:
        split = validation_split(self.split, self.config)
        if split is None:
            return None
        # A resume may still change the order of train rows; held-out rows are not shuffled and have their own lanes.
        training = ValidatedTraining(
            self.settings, self.split, split, order, self.executor, self.checkpoints, starts, init
        )
        # A plugin may validate in its own way; the one for snapshots does.
        return build_validation(training)

    def _build_callbacks(self, store: Store, directory: str, compiling: AutoCompile) -> list[Callback]:
        # Callbacks are in the order of their figures in ``metrics.jsonl``. The budget reuses the SSD meter's memory
        # reading.
        settings, callbacks = self.settings, list[Callback]()
        speed = None
        if self.config.profile and self.order.has_share:
            speed = self.executor.measure_speed(self.order.local_batch)
        profiled = settings.debug.profile_steps or (STEPS if self.config.profile else 0)
        if profiled:
            name = f"{directory.rsplit('/', 2)[0]}/*-rank{dist.get_rank()}"
            self.profiler = Profiler(store, name, profiled, speed)
            callbacks.append(self.profiler)
        callbacks.append(compiling)
        if speed is not None:
            callbacks.append(SpeedMeter(speed))
        rank_loss = self.executor.dense_part.rank_loss
        if rank_loss is not None:
            callbacks.append(RankLossMeter(rank_loss))
        callbacks.append(SsdMeter(self.executor.row_store))
        callbacks.append(MemoryBudget(settings.hardware, settings.limit_memory, self.plan))
        return callbacks

    def train(self) -> dict[str, Any]:
        """Take the remaining steps; returns what the function ``train`` does. Collective."""
        for callback in self.callbacks:
            callback.on_start(self.total)
        # Announce ids of tables on tier ssd to the store of their rows ahead of the batches.
        row_store, announce = self.executor.row_store, None
        if row_store is not None:
            placed = row_store.placed
            columns = {table.name: table.columns for table in self.split.schema.tables if table.name in placed}
            announce = Announce(columns, placed, row_store.prefetch)
        epoch, batch = divmod(self.first, self.order.steps_per_epoch(self.split.rows))
        reader = BatchReader(
            self.split,
            self.order,
            epochs=self.config.epochs,
            start=(epoch, batch),
            prefetch=self.config.prefetch_batches,
            pin=self.device.type == "cuda",
            announce=announce,
            group_by=self.config.rank_loss.group_by,
        )
        with reader, debugging(self.settings.debug, self.profiler), Agreement() as agreement:
            self.reader = reader
            try:
                self._take_steps(agreement)
            except BaseException:
                # Several ranks end together, and with them the threads that write checkpoints.
                if dist.get_world_size() == 1:
                    self.checkpoints.checkpointer.abandon()
                raise
            finally:
                self.executor.close()
        return self._summarize()

    def _take_steps(self, agreement: Agreement) -> None:
        self.began = time.perf_counter()
        if self.checkpoints.ends_early:
            # A training that is resumed at its last step ends like one that has just taken that step. This is not early
            # stopping: its length was changed, and it ends where its newest checkpoint is.
            if self.validation is not None:
                self.validation.end_early(self.executor.steps, self.metrics.window.ne)
            check_layers(self.executor.dense, self.executor.optimizers.dense, self.executor.steps, self.config)
            self.checkpoints.end_early()
        self._feed_pipeline()
        while self.executor.steps < self.total:
            due = self.train_step(agreement)

            # 1. Drain: nothing may read the weights while an executor's threads still change them. The steps that they
            # have begun may be the last ones.
            if due.need_weights:
                for output in self.executor.drain():
                    self.metrics.add(output)
                if self.executor.steps == self.total:
                    due.save, due.validate = True, self.validation is not None

            # 2. Report and validate. A validation may make this step the last one, in which case it sets
            # ``self.total``.
            if due.need_weights or self.metrics.steps >= self.config.log_every_steps:
                self._close_interval(validating=due.validate)
                self._judge(due)

            # 3. Save, but only after the validation, which knows whether these weights are the best ones, or the last.
            if due.save or due.validate:
                self._save(due, agreement)

            # 4. Feed the pipeline again if it was emptied for the validation.
            emptied = (due.validate or due.judge) and self.executor.must_drain
            if emptied and self.executor.steps < self.total:
                self._feed_pipeline()
        self.seconds = time.perf_counter() - self.began

    def train_step(self, agreement: Agreement) -> DueActions:
        """Train on the next batch and return what is due after it."""
        self.on_point(FaultPoint.BATCH)
        self.metrics.add(self.executor.step(self.batches))
        for callback in self.callbacks:
            callback.on_step_end()

        # Ranks' clocks differ, and a SIGTERM may reach only one rank, so they agree by an exchange beside the step.
        step = self.executor.steps
        agreed = agreement.step(save=self.checkpoints.late())
        return DueActions(
            stop=agreed == STOP,
            save=step == self.total or agreed in (SAVE, STOP) or self.checkpoints.due(step),
            validate=self.validation is not None and self.validation.due(step, self.total),
            judge=self.judged_after is not None and step >= self.judged_after,
        )

    def _feed_pipeline(self) -> None:
        step, end = self.executor.steps, self.total
        # TorchRec's pipeline holds batches ahead, and must be empty when the model is validated, so it gets no batches
        # beyond the next validation. A training that was resumed at its last step has no further look, and takes no
        # batch.
        if self.validation is not None and self.executor.must_drain and step < self.total:
            end = self.validation.next_look(step, self.total)
        self.bounded = BoundedBatches(self.reader, step, end)
        # The wait for a batch belongs to no phase of the step, since the plan does not predict it.
        self.batches = self.executor.clock.between(self.bounded)

    def _save(self, due: DueActions, agreement: Agreement) -> None:
        # Run the guards first: a checkpoint with values that are not finite could be resumed from, or published.
        step = self.executor.steps
        check_layers(self.executor.dense, self.executor.optimizers.dense, step, self.config)

        # ``act_on_validation`` saves the best weights and snapshots in this step's checkpoint. It also goes back to the
        # best weights, with lower rates, or begins the next cycle.
        saved = False
        if due.validate and self.validation is not None:
            saved = self.validation.act_on_validation(self.total)
        ended = step == self.total
        if not (saved or due.save or ended):
            return
        if due.stop and not ended:
            self.checkpoints.save_and_stop(saved=saved)
        if not saved:
            self.checkpoints.save(final=ended)
        agreement.saved()

    def _close_interval(self, *, validating: bool) -> None:
        step, steps = self.executor.steps, self.metrics.steps
        sums, seconds, waited = self.metrics.close(self.reader.wait_seconds)
        self.executor.clock.collect()
        check_finite(sums, step, self.config, self.executor.dense_part.first_fault)
        sent = self.executor.links.take().as_list()
        sent = add_up(torch.tensor(sent, dtype=torch.float64, device=self.executor.device)).tolist()
        self.sent = list(map(add, self.sent, sent))
        self.samples += sums.samples

        interval = IntervalRecord(step, steps, seconds)
        if self.split.schema.tasks:
            interval.figures["tasks"] = self.metrics.task_figures()
        for callback in self.callbacks:
            callback.on_interval(interval)
        if validating and self.validation is not None:
            decision = self.validation.validate(self.metrics.window.ne)
            self.metrics.leave_out()
            if decision is StoppingDecision.STOP:
                self.total = step
            interval.figures |= self.validation.record()
        if validating or step == self.total:
            squares = add_up(squared_norms(self.executor.rows).to(self.executor.device))
            interval.figures["norms"] = histograms(self.executor.rows.tables, squares)

        if dist.get_rank() == 0:
            elapsed = time.perf_counter() - self.began
            # With row weights, an interval may have no row that counts.
            samples = max(sums.samples, 1.0)
            self.on_interval(
                {
                    "step": step,
                    "steps_total": self.total,
                    "samples": self.order.samples_after(step, self.split.rows),
                    "samples_per_s": sums.samples / seconds,
                    "data_wait_share": waited,
                    "loss": sums.mean_loss,
                    "ne_window": self.metrics.window.ne,
                    "eta_seconds": elapsed / (step - self.first) * (self.total - step),
                    "lr": self.executor.lr,
                    "seconds": elapsed,
                    "step_ms": 1000 * seconds / steps,
                    "resumed_step": self.first,
                    "intra_host_bytes_per_sample": sent[0] / samples,
                    "inter_host_bytes_per_sample": sent[1] / samples,
                    **interval.figures,
                }
            )

    def _judge(self, due: DueActions) -> None:
        step = self.executor.steps
        age = step if self.validation is None else self.validation.age(step)
        ended = step == self.total
        # A judgement costs a pass over rows, unless the model has just been validated. The last step is the last chance
        # for one.
        if not (due.validate or due.judge or ended):
            # The model can only be called when the pipeline holds no batches, so it is judged later.
            if self.collapse.is_due(self.metrics, age) and self.judged_after is None:
                self.judged_after = self.bounded.cut() if self.executor.must_drain else step + 1
            return
        self.judged_after = None
        if not self.collapse.is_due(self.metrics, age, free=due.validate or ended):
            return
        if self.validation is not None:
            judged = self.validation.judged()
        else:
            judged = judge_train_rows(self.executor, self.split, self.order)
        self.collapse.take(judged, age, last=ended)
        self.metrics.leave_out()

    def _summarize(self) -> dict[str, Any]:
        # Returns the figures of this run, the same on every rank. Collective.
        step, device = self.executor.steps, self.executor.device
        seconds = max(self.seconds, 1e-9)
        samples = self.order.samples_after(step, self.split.rows)
        resumed_samples = self.order.samples_after(self.first, self.split.rows)
        peak = largest(torch.tensor([peak_rss()], dtype=torch.float64, device=device)).item()
        # Embedding hosts have no rows of a batch, so they wait for no data; the mean is over the ranks with rows.
        waited = self.reader.wait_seconds if self.order.has_share else 0.0
        waited = add_up(torch.tensor([waited], dtype=torch.float64, device=device)).item()
        figures: dict[str, Any] = {
            "samples": samples,
            "steps": step,
            "global_batch": self.order.global_batch,
            "seconds": seconds,
            "samples_per_s": (samples - resumed_samples) / seconds,
            "data_wait_share": waited / self.order.world_size / seconds,
            "peak_rss_bytes": int(peak),
            "world_size": dist.get_world_size(),
        }
        for callback in self.callbacks:
            callback.on_end(figures)
        if self.validation is not None:
            figures["validation"] = self.validation.summary()
        if self.first:
            figures["resumed"] = {"step": self.first, "samples": resumed_samples}
            if self.checkpoints.planned is not None:
                figures["resumed"]["planned"] = self.checkpoints.planned
        if self.samples:
            by_link = {link.name: sent / self.samples for link, sent in zip(fields(LinkBytes), self.sent, strict=True)}
            figures["bytes_per_sample"] = by_link
        summary = {"train": figures, "checkpoint": self.checkpoints.figures(seconds), "final": self.checkpoints.newest}
        figures |= compare_with_plan(self.plan, self.executor.clock, self.memory, self.device)
        if self.validation is not None:
            figures |= self.validation.result()
        return summary
