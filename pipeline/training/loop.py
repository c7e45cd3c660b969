"""The training run: from a dataset and a plan to a committed checkpoint."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, fields
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from pipeline.checkpoint.fault_points import FaultPoint, OnPoint, ignore
from pipeline.config.train import TrainConfig
from pipeline.embeddings.norms import histograms, squared_norms
from pipeline.embeddings.ssd.store import SsdStore
from pipeline.errors import ArtifactError, LaunchError
from pipeline.models.layers.mlp import log_odds
from pipeline.records.dataset import DatasetSchema
from pipeline.records.plan import Plan
from pipeline.records.towers import Towers
from pipeline.store.artifacts import Store
from pipeline.store.manifest import Artifact
from pipeline.towers.links import LinkBytes
from pipeline.training.bias_correction import levels
from pipeline.training.checkpoints import Checkpoints
from pipeline.training.compiling import AutoCompile
from pipeline.training.data import Batch, BatchReader
from pipeline.training.distributed import add_up, connect, largest, shared_failure
from pipeline.training.early_stopping import StoppingDecision
from pipeline.training.guards import Collapse, GuardFigures, check_finite, check_layers
from pipeline.training.hogwild import Hogwild
from pipeline.training.lr_schedule import log_planned, planned_steps, warmup_steps
from pipeline.training.memory_budget import MemoryBudget, MemoryMeter, peak_rss
from pipeline.training.metrics import MetricAccumulator
from pipeline.training.parquet import SplitReader
from pipeline.training.predict import judge_train_rows
from pipeline.training.preemption import STOP, Agreement
from pipeline.training.prefetch_exchange import Announce
from pipeline.training.profiling import STEPS, Profiler, debugging
from pipeline.training.roofline import Speed
from pipeline.training.sampler import Order, shuffle_key
from pipeline.training.settings import TrainingSettings
from pipeline.training.snapshots import Snapshots, Start
from pipeline.training.ssd import SsdMeter, log_shortcomings, naming_checkpoint, ssd_store
from pipeline.training.step_phases import compare_with_plan
from pipeline.training.trainer import Trainer
from pipeline.training.validation import Validation, log_without, validation_split

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
) -> dict[str, Any]:
    """Train by ``settings.train``, from the newest checkpoint of the same ``key``; every rank calls it.

    Without such a checkpoint, tables and dense part come from checkpoint ``init`` (None: initial values).

    ``checkpoints``: the store's directory for checkpoints; the last one is committed at the end. ``on_interval`` gets a
    record on rank 0 every ``log_every_steps`` steps, ``on_point`` every named point
    that a rank passes. ``plan_key`` is recorded with the checkpoints. ``towers``: the result of the partition stage
    (None: flat), whose hosts ``plan`` must keep.
    Returns {"train", "checkpoint", "final"}: figures of this session (rates) and of the whole training (samples,
    steps; predicted beside measured), and the path of the last checkpoint. "train" has ``resumed``, a step and its
    samples, where the session continues from a checkpoint.
    Raises GuardError where a guard stops the run, DataError for an empty split, PlanError where the plan does not fit,
    LaunchError after a SIGTERM (with a checkpoint committed first).
    """
    config = settings.train
    threads = 1 if config.asynchronous else config.threads_per_rank
    device = connect(settings.hardware, threads, one_machine=settings.one_machine)
    torch.manual_seed(settings.seed + dist.get_rank())
    with shared_failure(), naming_checkpoint(store, checkpoints), ssd_store(settings.hardware, store, plan) as ssd:
        log_shortcomings(ssd)
        split = SplitReader(store, dataset, "train")
        memory = MemoryMeter(device)
        total = planned_steps(config, split.rows)
        trainer = _trainer(settings, split.schema, plan, device, towers, ssd, total)
        if (starts := _starts(split)) is not None:  # of a new model; a checkpoint replaces it
            trainer.dense_part.start_at(starts)
        meter = MetricAccumulator(config.guard.window_steps, split.schema)
        inputs = {"dataset": dataset.key, "plan": plan_key}
        order = _order(settings, dataset)
        compiling = AutoCompile(trainer, settings, order.local_batch)
        checkpointing = Checkpoints(
            settings, store, checkpoints, key, inputs, trainer, meter, compiling, order, on_point
        )
        checkpointing.levelled = split if levels(split.schema) else None
        looks = _build_validation(config, split, order, trainer, checkpointing, Start(settings, split, starts), init)
        checkpointing.resume(init, total, split.rows)
        order = checkpointing.order
        if looks is not None:
            total = looks.begin(total, warm=init is not None)
        if dist.get_rank() == 0:
            log_planned(config, split.rows, trainer.optimizers.cycle)
        compiling.begin(store, total)
        budget = MemoryBudget(settings.hardware, settings.limit_memory, plan)
        grace = settings.checkpoint.grace_seconds
        run = _TrainingRun(
            config,
            grace,
            trainer,
            checkpointing,
            meter,
            order,
            split,
            total,
            on_interval,
            on_point,
            budget,
            compiling,
            looks,
        )
        steps = settings.debug.profile_steps or (STEPS if config.profile else 0)
        run.speed = trainer.measure_speed(order.local_batch) if config.profile and order.has_share else None
        name = f"{checkpoints.rsplit('/', 2)[0]}/*-rank{dist.get_rank()}"
        profiler = Profiler(store, name, steps, run.speed) if steps else None
        with (
            run.open_reader() as reader,
            debugging(settings.debug, profiler) as after_step,
            Agreement() as agreement,
        ):
            try:
                run.loop(reader, after_step, agreement)
            except BaseException:
                if dist.get_world_size() == 1:  # several ranks end at once, and their threads with them
                    checkpointing.checkpointer.abandon()
                raise
            finally:
                trainer.close()
        summary = run.summary()
        summary["train"] |= compare_with_plan(plan, trainer.clock, memory, device)
        if looks is not None:
            summary["train"] |= looks.result()
        return summary


def _trainer(
    settings: TrainingSettings,
    schema: DatasetSchema,
    plan: Plan,
    device: torch.device,
    towers: Towers | None,
    ssd: SsdStore | None,
    total: int,
) -> Trainer:
    if settings.train.asynchronous:
        return Hogwild(settings, schema, plan, device, total)
    return Trainer(settings, schema, plan, device, towers, ssd, total)


def _starts(split: SplitReader) -> list[float] | None:
    """The logits of the tasks' base rates; None where the dataset does not say them."""
    rate = split.base_rate()
    return None if rate is None else [log_odds(rate, split.rows), *split.task_starts()]


def _order(settings: TrainingSettings, dataset: Artifact) -> Order:
    """The batches of this rank."""
    config = settings.train
    return Order(
        key=shuffle_key(dataset),
        seed=settings.seed,
        global_batch=config.batch,
        shuffle=config.shuffle,
        window_groups=config.shuffle_window_groups,
        lanes=config.dealt_lanes,
        rank=dist.get_rank(),
        world_size=settings.hardware.workers,
        without=settings.hardware.world_size - settings.hardware.workers,
    )


def _build_validation(
    config: TrainConfig,
    split: SplitReader,
    order: Order,
    trainer: Trainer,
    checkpointing: Checkpoints,
    start: Start,
    init: Artifact | None,
) -> Validation | None:
    """The looks at the validation rows that lie beside those of ``split``; None where there are none."""
    looked_at, per_epoch = validation_split(split), -(-split.rows // config.batch)
    if looked_at is not None and config.snapshots.active:
        warm = None if init is None else partial(checkpointing.start_from, init)
        return Snapshots(config, looked_at, order, trainer, checkpointing, per_epoch, start, warm)
    if looked_at is not None:
        return Validation(config, looked_at, order, trainer, checkpointing, per_epoch)
    if dist.get_rank() == 0:
        log_without(config)
    return None


class _Leg:
    """The batches of ``reader`` from ``step`` to ``end``; ``cut`` ends them with those that were taken already."""

    def __init__(self, reader: BatchReader, step: int, end: int) -> None:
        self._reader, self._taken, self._end = reader, step, end

    def __iter__(self) -> Iterator[Batch]:
        return self

    def __next__(self) -> Batch:
        if self._taken >= self._end:
            raise StopIteration
        batch = next(self._reader)
        self._taken += 1
        return batch

    def cut(self) -> int:
        """Take no more; returns the step with the last batch, after which a pipeline is empty."""
        self._end = self._taken
        return self._end


@dataclass
class _TrainingRun:
    """The loop around the steps: intervals, guards, checkpoints. ``grace``: seconds to commit one after a SIGTERM."""

    config: TrainConfig
    grace: float
    trainer: Trainer
    checkpointing: Checkpoints
    meter: MetricAccumulator
    order: Order
    split: SplitReader
    total: int
    on_interval: OnInterval
    on_point: OnPoint
    budget: MemoryBudget
    compiling: AutoCompile
    looks: Validation | None = None
    sent: list[float] = field(default_factory=lambda: LinkBytes().as_list())
    rows: float = 0.0
    speed: Speed | None = None

    def __post_init__(self) -> None:
        self.ssd = SsdMeter(self.trainer.ssd)
        self.collapse = Collapse(self.config, min(warmup_steps(self.config, self.total), self.total))
        self.judging: int | None = None  # the step after which the model is judged

    @property
    def per_epoch(self) -> int:
        """Global batches in an epoch."""
        return -(-self.split.rows // self.order.global_batch)

    def open_reader(self) -> BatchReader:
        """The batches from the trainer's position on."""
        self.first = self.trainer.steps
        return BatchReader(
            self.split,
            self.order,
            epochs=self.config.epochs,
            start=divmod(self.first, self.per_epoch),
            prefetch=self.config.prefetch_batches,
            pin=self._device.type == "cuda",
            announce=self._announce(),
        )

    def _announce(self) -> Announce | None:
        """Ids to the files of tables on tier ssd, ahead of the batches; None where there are none."""
        ssd = self.trainer.ssd
        if ssd is None:
            return None
        columns = {table.name: table.columns for table in self.split.schema.tables if table.name in ssd.placed}
        return Announce(columns, ssd.placed, ssd.prefetch)

    def loop(self, reader: BatchReader, after_step: Callable[[], None], agreement: Agreement) -> None:
        """Take the remaining steps. The guards check a state before a checkpoint of it is written."""
        self.began, self.reader = time.perf_counter(), reader
        if self.checkpointing.ends_early:
            self._end_early()
        self._begin_leg()
        while self.trainer.steps < self.total:
            self.on_point(FaultPoint.BATCH)
            self.meter.add(self.trainer.step(self.batches))
            after_step()
            self.compiling.after()
            step = self.trainer.steps
            agreed = agreement.step(save=self.checkpointing.late())
            looking = self.looks is not None and self.looks.due(step, self.total)
            saving = step == self.total or agreed > 0 or self.checkpointing.due(step)
            judging = self.judging is not None and step >= self.judging
            if (saving or looking or judging) and (step := self._drain()) == self.total:
                saving, looking = True, self.looks is not None
            if saving or looking or judging or self.meter.steps >= self.config.log_every_steps:
                verdict = self._close_interval(looking)
                self._judge(empty=looking or judging or step == self.total, free=looking or step == self.total)
            if saving or looking:
                check_layers(self.trainer.dense, self.trainer.optimizers.dense, step, self.config)
            saved = looking and self._follow(verdict)
            if saved or saving or step == self.total:
                self._save(final=step == self.total, stopping=agreed == STOP and step < self.total, saved=saved)
                agreement.saved()
            if (looking or judging) and self.trainer.must_drain and step < self.total:
                self._begin_leg()
        self.seconds = time.perf_counter() - self.began

    def _end_early(self) -> None:
        """End a training that was resumed at its last step as one that has just taken it."""
        step = self.trainer.steps
        if self.looks is not None:
            self.looks.end_early(step, self.meter.window.ne)
        check_layers(self.trainer.dense, self.trainer.optimizers.dense, step, self.config)
        self.checkpointing.end_early(self.per_epoch, self._samples(step))

    def _drain(self) -> int:
        """End the steps under way; returns the number of steps taken."""
        for output in self.trainer.drain():
            self.meter.add(output)
        return self.trainer.steps

    def _begin_leg(self) -> None:
        """Take the coming batches: up to the next look where the pipeline must be empty for it, else all of them."""
        end = self.total
        if self.looks is not None and self.trainer.must_drain and self.trainer.steps < self.total:
            end = self.looks.next_look(self.trainer.steps, self.total)
        self.leg = _Leg(self.reader, self.trainer.steps, end)
        self.batches = self.trainer.clock.between(self.leg)

    def _judge(self, *, empty: bool, free: bool) -> None:
        """Have the guard judge the model where its predictions ask for it; later, unless the pipeline is ``empty``.

        ``free``: it has just been looked at, or this is the last chance.
        """
        step = self.trainer.steps
        age = step if self.looks is None else self.looks.age(step)
        if empty:
            self.judging = None
        if not self.collapse.is_due(self.meter, age, free=free):
            return
        if empty:
            self.collapse.take(self._judged(), age, last=step == self.total)
            self.meter.leave_out()
        elif self.judging is None:
            self.judging = self.leg.cut() if self.trainer.must_drain else step + 1

    def _judged(self) -> GuardFigures:
        if self.looks is not None:
            return self.looks.judged()
        return judge_train_rows(self.trainer, self.split, self.order)

    def _follow(self, verdict: StoppingDecision | None) -> bool:
        """Do what follows from a look at the validation rows; returns whether that took a checkpoint of this step."""
        assert self.looks is not None
        step = self.trainer.steps
        if isinstance(self.looks, Snapshots):
            return self._end_cycle(self.looks, step)
        if verdict is StoppingDecision.BETTER and step < self.total:
            self.checkpointing.save_best(self.per_epoch, self._samples(step))
            return True
        if verdict is not StoppingDecision.BETTER and step == self.total:
            self.looks.end(step)
        elif verdict is StoppingDecision.LOWER:
            self.looks.lower()
        return False

    def _end_cycle(self, snapshots: Snapshots, step: int) -> bool:
        """Take a snapshot, whose place that of the last cycle leaves to the last checkpoint, and begin the next cycle.

        Returns whether it was taken.
        """
        if step == self.total:
            return False
        self.checkpointing.save_snapshot(self.per_epoch, self._samples(step))
        snapshots.restart()
        return True

    def _save(self, final: bool, stopping: bool, saved: bool) -> None:
        """Take a checkpoint, unless one was ``saved`` already.

        ``stopping``: a SIGTERM ends the run, so commit it first, within the grace time.
        """
        step = self.trainer.steps
        if not stopping:
            if not saved:
                self.checkpointing.save(self.per_epoch, self._samples(step), final=final)
            return
        try:
            if not saved:
                self.checkpointing.save(self.per_epoch, self._samples(step), grace=self.grace)
            what = f"its checkpoint {self.checkpointing.final} is committed"
        except (TimeoutError, ArtifactError) as error:
            what = f"no checkpoint could be taken in time ({error}); the newest is {self.checkpointing.final or 'none'}"
        raise LaunchError(
            f"training stopped on SIGTERM after step {step}; {what}",
            hint="the same command continues from there",
        )

    def _close_interval(self, looking: bool = False) -> StoppingDecision | None:
        """Report the interval; ``looking``: with a look at the validation rows, whose verdict is returned."""
        step, steps = self.trainer.steps, self.meter.steps
        sums, seconds, waited = self.meter.close(self.reader.wait_seconds)
        self.trainer.clock.collect()
        check_finite(sums, step, self.config, self.trainer.dense_part.first_fault)
        sent = self._sent()
        self.sent = [total + part for total, part in zip(self.sent, sent, strict=True)]
        self.rows += sums.samples
        samples = max(sums.samples, 1.0)  # rows without weight are none
        ssd = self.ssd.interval(steps)
        memory = self.budget.interval(step, ssd.get("pss_bytes"))
        verdict, looked = self._validate() if looking else (None, {})
        norms = self._norms() if looking or step == self.total else None
        if dist.get_rank() == 0:
            elapsed = time.perf_counter() - self.began
            self.on_interval(
                {
                    "step": step,
                    "steps_total": self.total,
                    "samples": self._samples(step),
                    "samples_per_s": sums.samples / seconds,
                    "data_wait_share": waited,
                    "loss": sums.mean_loss,
                    "ne_window": self.meter.window.ne,
                    "eta_seconds": elapsed / (step - self.first) * (self.total - step),
                    "lr": self.trainer.lr,
                    "seconds": elapsed,
                    "step_ms": 1000 * seconds / steps,
                    "resumed_step": self.first,
                    "intra_host_bytes_per_sample": sent[0] / samples,
                    "inter_host_bytes_per_sample": sent[1] / samples,
                    **({"tasks": self.meter.task_figures()} if self.split.schema.tasks else {}),
                    **(self.speed.figures(seconds / steps) if self.speed is not None else {}),
                    **ssd,
                    **memory,
                    **looked,
                    **({} if norms is None else {"norms": norms}),
                }
            )
        return verdict

    def _validate(self) -> tuple[StoppingDecision, dict[str, Any]]:
        """A look at the validation rows: what it decides, and its figures. It may make this step the last one."""
        assert self.looks is not None
        verdict = self.looks.validate(self.meter.window.ne)
        self.meter.leave_out()
        if verdict is StoppingDecision.STOP:
            self.total = self.trainer.steps
        return verdict, self.looks.record()

    def _norms(self) -> dict[str, dict[str, Any]]:
        """Histograms of the rows' norms by table. Collective."""
        squares = add_up(squared_norms(self.trainer.rows).to(self._device))
        return histograms(self.trainer.rows.tables, squares)

    def _sent(self) -> list[float]:
        """Bytes that all ranks sent since the last call, in the order of ``LinkBytes``. Collective on several ranks."""
        sent = self.trainer.links.take().as_list()
        return add_up(torch.tensor(sent, dtype=torch.float64, device=self._device)).tolist()

    @property
    def _device(self) -> torch.device:
        return next(iter(self.trainer.dense.values())).device

    def _samples(self, steps: int) -> int:
        epochs, rest = divmod(steps, self.per_epoch)
        return epochs * self.split.rows + rest * self.order.global_batch

    def summary(self) -> dict[str, Any]:
        """What ``train`` returns, the same on every rank."""
        device = self._device
        seconds = max(self.seconds, 1e-9)
        peak = largest(torch.tensor([peak_rss()], dtype=torch.float64, device=device)).item()
        own = self.reader.wait_seconds if self.order.has_share else 0.0
        waited = add_up(torch.tensor([own], dtype=torch.float64, device=device)).item()
        figures: dict[str, Any] = {
            "samples": self._samples(self.trainer.steps),
            "steps": self.trainer.steps,
            "global_batch": self.order.global_batch,
            "seconds": seconds,
            "samples_per_s": (self._samples(self.trainer.steps) - self._samples(self.first)) / seconds,
            "data_wait_share": waited / self.order.world_size / seconds,
            "peak_rss_bytes": int(peak),
            "world_size": dist.get_world_size(),
            **self.ssd.summary(self.trainer.steps - self.first),
            **self.budget.summary(),
        }
        if self.looks is not None:
            figures["validation"] = self.looks.summary()
        if self.first:
            figures["resumed"] = {"step": self.first, "samples": self._samples(self.first)}
            if self.checkpointing.planned is not None:
                figures["resumed"]["planned"] = self.checkpointing.planned
        if self.rows:
            names = (field.name for field in fields(LinkBytes))
            figures["bytes_per_sample"] = {n: v / self.rows for n, v in zip(names, self.sent, strict=True)}
        return {"train": figures, "checkpoint": self.checkpointing.figures(seconds), "final": self.checkpointing.final}
