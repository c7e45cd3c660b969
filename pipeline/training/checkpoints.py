"""When the training loop takes and reads checkpoints; ``checkpoint/`` writes them."""

from __future__ import annotations

import logging
import time
from dataclasses import asdict, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from pipeline.checkpoint.checkpointer import CheckpointedModel, Checkpointer
from pipeline.checkpoint.collectives import run_on_rank0
from pipeline.checkpoint.config_compatibility import check_changes
from pipeline.checkpoint.fault_points import OnPoint, ignore
from pipeline.checkpoint.index import name_of
from pipeline.checkpoint.reader import RestoreTarget, restore
from pipeline.checkpoint.train_state import TrainState
from pipeline.checkpoint.warm import warm_start
from pipeline.config.partition import PartitionConfig
from pipeline.embeddings.fused_optimizer import set_table_steps
from pipeline.embeddings.row_access import reset_rows
from pipeline.embeddings.touched import TouchedRows
from pipeline.errors import ArtifactError
from pipeline.records.dataset import dataset_path
from pipeline.store.artifacts import Store
from pipeline.store.manifest import Artifact
from pipeline.training.bias_correction import set_level, unset_level
from pipeline.training.compiling import AutoCompile
from pipeline.training.early_stopping import Stopping
from pipeline.training.metrics import MetricAccumulator
from pipeline.training.optimizer import drop_averages
from pipeline.training.parquet import SplitReader
from pipeline.training.remapped import remapped_rows
from pipeline.training.resume_checks import (
    check_average,
    check_finer,
    check_length,
    coding_of,
    length_line,
    planned_before,
    rates_differ,
    same_coding,
)
from pipeline.training.sampler import Order
from pipeline.training.settings import TrainingSettings
from pipeline.training.trainer import Trainer

# The settings that fix a step's learning rates, together with the number of steps.
# In the schedule's record: the parameters are averages, the weights that train their state.
AVERAGED = "averaged"
LEVEL = "level"  # in the schedule's record, by parameter: values with which training goes on, without the level
PLANNED = "planned"  # in the schedule's record: steps planned before, where those taken had other rates for that
SCHEDULE = ("lr", "sparse_lr", "warmup_steps", "schedule", "decay_ratio", "min_lr_factor")
log = logging.getLogger(__name__)


class Checkpoints:
    """The checkpoints of one training: ``resume`` from the newest, ``save`` where one is due and at the end."""

    def __init__(
        self,
        settings: TrainingSettings,
        store: Store,
        directory: str,
        key: str,
        inputs: dict[str, str],
        trainer: Trainer,
        meter: MetricAccumulator,
        compiling: AutoCompile,
        order: Order,
        on_point: OnPoint = ignore,
    ) -> None:
        self.settings, self.trainer, self.meter, self.compiling = settings, trainer, meter, compiling
        model = CheckpointedModel(
            trainer.rows, TouchedRows(trainer.model), dict(trainer.dense), trainer.optimizers.dense
        )
        self.checkpointer = Checkpointer(
            store, directory, settings.checkpoint, model, key, settings.record, inputs, on_point=on_point
        )
        self._last = time.monotonic()
        self.stopping: Stopping | None = None  # what the looks at validation rows have decided so far
        self.snapshots: list[str] | None = None  # names of those that may join an ensemble; None: none is made
        self.order = order  # of this training, which keeps the order that it began with
        self.levelled: SplitReader | None = None  # rows by which the level of what is published is set; None: it is not
        self.ends_early = False  # resumed where the training now ends, which was not its end before
        self.planned: int | None = None  # steps planned before, where those taken had other rates for that
        self._place, self._dataset = directory, inputs["dataset"]

    @property
    def final(self) -> str:
        """Path of the newest committed checkpoint, '' where there is none."""
        return self.checkpointer.newest or ""

    def resume(self, init: Artifact | None, total: int, rows: int) -> None:
        """Continue from the newest whole checkpoint of this training. Collective.

        Without one, start at step 0 with the values of ``init``. ``total``: steps planned, on ``rows`` rows an epoch;
        ConfigError where the checkpoint has taken more.
        """
        state = self.checkpointer.resume()
        if state is None:
            if init is not None:
                self.start_from(init)
            return
        if state.towers not in ({}, self.trainer.tower_features):
            raise ArtifactError(
                f"the towers of checkpoint {self.final} have other features: {_features_text(state.towers)}; "
                f"the model's: {_features_text(self.trainer.tower_features)}",
                hint="the partition settings it was trained with, or force=true",
            )
        then = run_on_rank0(f"reading {self.final}", lambda: self.checkpointer.store.get(self.final, "train").config)
        check_length(self.settings.train, then, state.step, total, self.final)
        self.trainer.steps = state.step
        self.order = replace(self.order, key=state.shuffle_key or self._dataset, lanes=state.lanes)
        set_table_steps(self.trainer.model, state.step)
        if self.stopping is not None:
            self.stopping.load(state.validation)
            self.trainer.optimizers.scale = self.stopping.lr_scale
        stopped = self.stopping is not None and self.stopping.stopped
        if not stopped:
            check_average(self.settings.train, then, state.step, total, rows, self.final)
        self.meter.load(state.windows)
        self.compiling.compiled = state.compiled
        if state.rng is not None:
            torch.set_rng_state(state.rng[min(dist.get_rank(), len(state.rng) - 1)].clone())
        if dist.get_rank() == 0:
            log.info("resumed from %s after step %s", self.final, f"{state.step:,}")
            if stopped:
                log.info("the validation rows had stopped it there; it stays so")
            elif line := length_line(self.settings.train, then, state.step, total, rows, self.trainer.optimizers.cycle):
                log.info("%s", line)
        before, self.planned = planned_before(self.settings.train, then, rows), state.schedule.get(PLANNED)
        cycle = self.trainer.optimizers.cycle
        if self.planned is None and rates_differ(self.settings.train, before, total, state.step, cycle):
            self.planned = before
        if stopped or before == total == state.step:
            self._end_as_asked(state, then)
            return
        if self.levelled is not None and before == state.step and LEVEL not in state.schedule and dist.get_rank() == 0:
            log.warning(
                "%s, the end of a training, is of an earlier release: training goes on from the last bias that was set "
                "for what was published, not from the one that was trained; force=true trains from the start",
                self.final,
            )
        self.ends_early = state.step == total
        self._train_on(state)
        if (average := self.trainer.optimizers.average) is not None:
            average.restart(state.step)

    def _train_on(self, state: TrainState) -> None:
        """Put the weights that train in their place, where ``state`` was saved with what is published there."""
        unset_level(self.trainer, state.schedule.get(LEVEL, {}))
        if state.schedule.get(AVERAGED) and self.trainer.optimizers.average is not None:
            self.trainer.optimizers.average.swap()

    def save_best(self, per_epoch: int, samples: int) -> None:
        """Take an exact checkpoint of the weights that the last look found best; it is committed. Collective."""
        self._save(per_epoch, samples, exact=True, averaged=True)

    def save_snapshot(self, per_epoch: int, samples: int) -> None:
        """Take an exact checkpoint that may be published as a member of an ensemble; it is committed. Collective."""
        self._save(per_epoch, samples, exact=True, averaged=True, levelled=True)

    def go_back(self) -> None:
        """Bring the best weights back, with the state of their optimizers; the position stays. Collective."""
        assert self.best is not None
        model, store = self.checkpointer.model, self.checkpointer.store
        path = f"{self.checkpointer.directory}/{self.best}"
        artifact = run_on_rank0(f"opening {path}", lambda: store.get(path, "train").to_json())
        target = RestoreTarget(
            model.rows, model.dense, model.optimizer, touched=model.touched, on_point=self.checkpointer.on_point
        )
        self._train_on(restore(store, Artifact.from_json(path, artifact), target))
        model.touched.fill()  # the next delta rests on a checkpoint of other rows
        set_table_steps(self.trainer.model, self.trainer.steps)

    @property
    def best(self) -> str | None:
        """The name of the checkpoint with the best weights; None without looks at validation rows."""
        kept = self.stopping.kept if self.stopping is not None else None
        return None if kept is None else name_of(kept)

    def snapshot_paths(self) -> list[str]:
        """The snapshots in the order of their steps; the last one is the training's last checkpoint.

        One that a ``gc`` has removed since the training ended is left out. Collective.
        """
        paths = [f"{self._place}/{name}" for name in (self.snapshots or [])[:-1]]
        store = self.checkpointer.store
        return [*run_on_rank0("finding snapshots", lambda: [p for p in paths if store.find(p) is not None]), self.final]

    def load(self, path: str) -> None:
        """Put tables and dense part of the checkpoint at ``path`` in place, no optimizer's state. Collective."""
        model, store = self.checkpointer.model, self.checkpointer.store
        artifact = run_on_rank0(f"opening {path}", lambda: store.get(path, "train").to_json())
        restore(
            store, Artifact.from_json(path, artifact), RestoreTarget(model.rows, dict(self.trainer.dense), states=False)
        )

    def changed_without_lookups(self) -> None:
        """Have the next checkpoint hold every row, and the guards look at no figures of before."""
        self.checkpointer.model.touched.fill()
        self.meter.begin_anew()

    def _end_as_asked(self, state: TrainState, then: dict[str, Any]) -> None:
        """Write a finished training's last checkpoint again where ``checkpoint`` asks for another coding. Collective.

        ``then``: the configuration that wrote it. It stays, since other artifacts name it.
        """
        wanted = self.settings.checkpoint
        if same_coding(wanted, then):
            return
        check_finer(wanted, then, self.final)
        if (path := self._turn_aside()) is not None:
            self.checkpointer.save(state, final=True, wait=True)
            if dist.get_rank() == 0:
                log.info("the last checkpoint was rewritten as %s with coding %s", path, coding_of(wanted))

    def end_early(self, per_epoch: int, samples: int) -> None:
        """Take the last checkpoint of a training that was resumed where it ends now. Collective.

        The one it was resumed from stays: a training that is made longer again goes on from there.
        """
        if (path := self._turn_aside()) is not None:
            self._save(per_epoch, samples, final=True, averaged=True, levelled=True)
            if dist.get_rank() == 0:
                log.info("training ends here; its last checkpoint is %s", path)

    def _turn_aside(self) -> str | None:
        """Have the last checkpoint written beside the directory of the others; None where it lies there already."""
        directory = f"{self.checkpointer.directory}-{coding_of(self.settings.checkpoint)}"
        path = f"{directory}/{name_of(self.trainer.steps)}"
        self.checkpointer.turn_to(directory)
        if run_on_rank0(f"looking for {path}", lambda: self.checkpointer.store.find(path) is not None):
            self.checkpointer.newest = path
            return None
        return path

    def start_from(self, init: Artifact) -> None:
        """Put what fits of checkpoint ``init`` in the place of initial values. Collective."""
        wanted, model = self.settings.checkpoint, self.checkpointer.model
        partition = {**asdict(PartitionConfig()), **init.config.get("partition", {})}
        allowed = check_changes(
            init, self.settings.record, wanted, self.settings.data, self.checkpointer.inputs["dataset"]
        )
        target = RestoreTarget(model.rows, model.dense, model.optimizer)
        lines = warm_start(
            self.checkpointer.store,
            init,
            target,
            tables_only=wanted.init_tables_only,
            rename=dict(wanted.rename),
            partly=partition != asdict(self.settings.partition),
            towers=self.trainer.tower_features,
            order=self.trainer.feature_order,
        )
        drop_averages(self.trainer.optimizers.dense)  # looks before its own begins would be at a former training's
        lines += self._reset_remapped(init)
        if dist.get_rank() == 0:
            log.info("%s", "\n  ".join([f"starting from {init.path}", *allowed, *lines]))

    def _reset_remapped(self, init: Artifact) -> list[str]:
        """Reset the rows whose ids changed, so that no id starts with what another one learnt."""
        data, store = self.settings.data, self.checkpointer.store
        dataset = store.find(dataset_path(data.name, self.checkpointer.inputs["dataset"], data.day))
        if dataset is None:
            return []
        lines = []
        for table, rows in remapped_rows(store, init, dataset, self.settings.data, self.settings.checkpoint).items():
            reset_rows(self.trainer.rows, table, rows, self.settings.seed)
            lines.append(f"table {table}: {len(rows):,} rows reset, whose ids changed")
        return lines

    def due(self, step: int) -> bool:
        """Whether ``checkpoint.every_steps`` asks for one after ``step``; the same on every rank."""
        every = self.settings.checkpoint.every_steps
        return every is not None and step % every == 0

    def late(self) -> bool:
        """Whether ``checkpoint.every_minutes`` have passed since the last one, by this rank's clock."""
        minutes = self.settings.checkpoint.every_minutes
        return minutes is not None and time.monotonic() - self._last >= 60 * minutes

    def save(self, per_epoch: int, samples: int, *, final: bool = False, grace: float | None = None) -> None:
        """Take a checkpoint of the trainer's state. Collective.

        ``final``: the result of the run; ``grace``: seconds in which it must be committed (TimeoutError). With either,
        it is committed on return.
        """
        self._save(per_epoch, samples, final=final, averaged=final, levelled=final, grace=grace)

    def _save(
        self,
        per_epoch: int,
        samples: int,
        *,
        averaged: bool,
        levelled: bool = False,
        final: bool = False,
        exact: bool = False,
        grace: float | None = None,
    ) -> None:
        """``averaged``: the averaged weights take the place of those that train, where they are what is published.

        ``levelled``: they have the level of the train rows, where that is published.
        """
        rows = self.levelled if levelled else None
        former = set_level(self.trainer, rows, self.order) if rows is not None else {}
        self.trainer.gather()
        step = self.trainer.steps
        epoch, batch = divmod(step, per_epoch)
        schedule = {name: getattr(self.settings.train, name) for name in SCHEDULE}
        average = self.trainer.published_average if averaged else None
        if average is not None:
            schedule[AVERAGED] = True
            average.swap()
        if former:
            schedule[LEVEL] = former
        if self.planned is not None:
            schedule[PLANNED] = self.planned
        state = TrainState(
            step=step,
            epoch=epoch,
            next_batch=batch,
            samples=samples,
            schedule=schedule,
            windows=self.meter.state(),
            towers=self.trainer.tower_features,
            order=self.trainer.feature_order,
            rng=_all_rng_states(),
            validation=self.stopping.state() if self.stopping is not None else {},
            compiled=self.compiling.compiled,
            lanes=self.order.lanes,
            shuffle_key=self.order.key,
        )
        held: list[str] = [] if final or self.best is None else [self.best]
        held = held if self.snapshots is None else [name for name in self.snapshots if name != name_of(step)]
        wait = final or exact or grace is not None
        self.checkpointer.save(state, final=final, exact=exact, held=held, wait=wait, timeout=grace)
        unset_level(self.trainer, former)
        if average is not None:
            average.swap()
        self._last = time.monotonic()

    def figures(self, seconds: float) -> dict[str, Any]:
        """``checkpoint`` of result.json for a session of ``seconds``."""
        figures = self.checkpointer.figures
        return {
            "count": figures.count,
            "bytes_written": figures.bytes_written,
            "bytes_full_equivalent": figures.bytes_full_equivalent,
            "stall_share": figures.stalled / seconds,
            "skipped": figures.skipped,
            "failed": figures.failed,
        }


def _features_text(towers: dict[str, list[str]]) -> str:
    return "; ".join(", ".join(features) for features in towers.values()) or "none"


def _all_rng_states() -> Tensor | None:
    """Every rank's ``torch.get_rng_state()``, uint8 [world size, bytes], on rank 0, which writes it. Collective."""
    own = torch.get_rng_state()
    if dist.get_world_size() == 1:
        return own[None]
    device = torch.device("cuda", torch.cuda.current_device()) if dist.get_backend() == "nccl" else own.device
    if dist.get_rank() != 0:
        dist.gather(own.to(device), None, dst=0)
        return None
    states = [torch.empty_like(own, device=device) for _ in range(dist.get_world_size())]
    dist.gather(own.to(device), states, dst=0)
    return torch.stack(states).cpu()
