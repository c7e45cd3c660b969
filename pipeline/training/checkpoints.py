"""When the training loop takes and reads checkpoints; ``checkpoint/`` writes them."""

from __future__ import annotations

import logging
import time
from dataclasses import asdict, replace
from typing import Any, NoReturn

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
from pipeline.checkpoint.warm import check_order, warm_start
from pipeline.config.plan import PartitionConfig
from pipeline.core.errors import ArtifactError, LaunchError
from pipeline.embeddings.row_access import reset_rows
from pipeline.embeddings.table_training import set_table_steps
from pipeline.embeddings.touched import TouchedRows
from pipeline.records.dataset import dataset_path
from pipeline.store.artifacts import Store
from pipeline.store.manifest import Artifact
from pipeline.training.compiling import AutoCompile
from pipeline.training.early_stopping import Stopping
from pipeline.training.optimizer import drop_averages
from pipeline.training.parquet import SplitReader
from pipeline.training.predict import calibrate_last_bias, ends_with_level, restore_last_bias
from pipeline.training.resume_checks import (
    check_average,
    check_finer,
    check_length,
    coding_of,
    length_line,
    planned_before,
    rates_differ,
    remapped_rows,
    same_coding,
)
from pipeline.training.sampler import Order
from pipeline.training.settings import TrainingSettings
from pipeline.training.step import StepExecutor
from pipeline.training.train_metrics import MetricAccumulator

# A key of the schedule's record: the saved parameters are averages, and the weights that train are in their state.
AVERAGED = "averaged"
# A key of the schedule's record, with values by parameter: the last bias that training continues with, from before it
# was set to the level at which published predictions add up to the clicks.
LEVEL = "level"
# A key of the schedule's record: the steps planned before, if the learning rates of the steps taken depended on them.
PLANNED = "planned"
# The settings that, together with the number of steps, fix a step's learning rates. These six are recorded for people;
# a resumed training reads only the three keys above.
SCHEDULE = ("lr", "sparse_lr", "warmup_steps", "schedule", "decay_ratio", "min_lr_factor")
log = logging.getLogger(__name__)


class Checkpoints:
    """The checkpoints of one training: ``resume`` from the newest, ``save`` where one is due and at the end.

    What is published may differ from what trains: it has the average of the weights, and a last bias at the level of
    the clicks. Only checkpoints that may be published have these, together with the values that training continues
    from.

    Attributes:
        checkpointer: Writes and restores.
        stopping: What validations have decided so far; None without validation rows.
        retained: Names of the checkpoints that may be published besides the last one; None: retention keeps only the
            best.
        order: The order of this training's batches; a resumed training keeps the one that it began with.
        ends_early: Whether the training was resumed at the step where it now ends, which was not its end before: its
            length was changed. Early stopping is another matter (``stopping.stopped``).
        planned: The steps planned before, if the learning rates of the steps taken depended on them.
    """

    def __init__(
        self,
        settings: TrainingSettings,
        store: Store,
        directory: str,
        key: str,
        inputs: dict[str, str],
        executor: StepExecutor,
        metrics: MetricAccumulator,
        compiling: AutoCompile,
        split: SplitReader,
        order: Order,
        on_point: OnPoint = ignore,
    ) -> None:
        self.settings, self.executor, self.metrics, self.compiling = settings, executor, metrics, compiling
        model = CheckpointedModel(
            executor.rows, TouchedRows(executor.model), dict(executor.dense), executor.optimizers.dense
        )
        self.checkpointer = Checkpointer(
            store, directory, settings.checkpoint, model, key, settings.record, inputs, on_point=on_point
        )
        self.order = order
        self.stopping: Stopping | None = None
        self.retained: list[str] | None = None
        self.ends_early = False
        self.planned: int | None = None
        self._split, self._sets_last_bias = split, ends_with_level(split.schema)
        self._directory, self._dataset = directory, inputs["dataset"]
        self._last_saved = time.monotonic()

    @property
    def newest(self) -> str:
        """Return the path of the newest committed checkpoint, '' where there is none."""
        return self.checkpointer.newest or ""

    @property
    def best(self) -> str | None:
        """The name of the checkpoint with the best weights; None without validation rows."""
        if self.stopping is None or self.stopping.kept is None:
            return None
        return name_of(self.stopping.kept)

    def resume(self, init: Artifact | None, total: int) -> None:
        """Continue from the newest whole checkpoint of this training. Collective.

        Args:
            init: The checkpoint that a training without one starts from; None: initial values.
            total: Steps planned.

        Raises:
            ConfigError: The checkpoint has taken more steps, or has missed the start of the average.
            ArtifactError: Its towers have other features.
        """
        state = self.checkpointer.resume()
        if state is None:
            if init is not None:
                self.start_from(init)
            return
        executor, train, rows = self.executor, self.settings.train, self._split.rows
        if state.towers not in ({}, executor.tower_features):
            raise ArtifactError(
                f"the towers of checkpoint {self.newest} have other features: {_features_text(state.towers)}; "
                f"the model's: {_features_text(executor.tower_features)}",
                hint="the partition settings it was trained with, or force=true",
            )
        check_order(state.order, executor.feature_order, self.newest or "")
        saved_config = run_on_rank0(
            f"reading {self.newest}", lambda: self.checkpointer.store.get(self.newest, "train").config
        )
        check_length(train, saved_config, state.step, total, self.newest)

        # 1. Restore the position, and the state of everything that has one.
        executor.steps = state.step
        # Checkpoints of earlier releases have no shuffle key: their order followed the dataset's own key.
        self.order = replace(self.order, key=state.shuffle_key or self._dataset, lanes=state.lanes)
        set_table_steps(executor.model, state.step)
        schedule = executor.optimizers.schedule
        stopped = False
        if self.stopping is not None:
            self.stopping.load(state.validation)
            schedule.scale = self.stopping.lr_scale
            stopped = self.stopping.stopped
        if not stopped:
            check_average(train, saved_config, state.step, total, rows, self.newest)
        self.metrics.load(state.windows)
        self.compiling.compiled = state.compiled
        if state.rng is not None:
            torch.set_rng_state(state.rng[min(dist.get_rank(), len(state.rng) - 1)].clone())
        if dist.get_rank() == 0:
            log.info("resumed from %s after step %s", self.newest, f"{state.step:,}")
            if stopped:
                log.info("the validation rows had stopped it there; it stays so")
            elif line := length_line(train, saved_config, state.step, total, rows, schedule.cycle):
                log.info("%s", line)

        # 2. Let a training that has become longer or shorter continue with the steps that it has taken.
        before = planned_before(train, saved_config, rows)
        self.planned = state.schedule.get(PLANNED)
        if self.planned is None and rates_differ(train, before, total, state.step, schedule.cycle):
            self.planned = before
        if stopped or before == total == state.step:
            # Nothing is left to train, so the published weights stay in place. checkpoint.final_quantise or .state may
            # ask for another coding of them.
            self._recode_last(state, saved_config)
            return
        if self._sets_last_bias and before == state.step and LEVEL not in state.schedule and dist.get_rank() == 0:
            log.warning(
                "%s, the end of a training, is of an earlier release: training goes on from the last bias that was set "
                "for what was published, not from the one that was trained; force=true trains from the start",
                self.newest,
            )
        self.ends_early = state.step == total
        self._restore_trained_weights(state)
        # The average has not begun yet. One in the state comes from a training planned shorter, which began it earlier.
        average = executor.optimizers.average
        if average is not None and state.step < average.first:
            drop_averages(executor.optimizers.dense)

    def _restore_trained_weights(self, state: TrainState) -> None:
        # Restores the bias before the swap: the level belongs to the bias of a published average, which is still in
        # place.
        restore_last_bias(self.executor, state.schedule.get(LEVEL, {}))
        if state.schedule.get(AVERAGED) and self.executor.optimizers.average is not None:
            self.executor.optimizers.average.swap()

    def start_from(self, init: Artifact) -> None:
        """Replace initial values by the fitting parts of checkpoint ``init``. Collective.

        Rows that are loaded are not marked as touched: the first checkpoint of a training holds all rows anyway.
        """
        wanted, model, store = self.settings.checkpoint, self.checkpointer.model, self.checkpointer.store
        data = self.settings.data
        partition = {**asdict(PartitionConfig()), **init.config.get("partition", {})}
        allowed = check_changes(init, self.settings.record, wanted, data, self._dataset)
        lines = warm_start(
            store,
            init,
            RestoreTarget(model.rows, model.dense, model.optimizer),
            tables_only=wanted.init_tables_only,
            rename=dict(wanted.rename),
            # With an automatic choice, equal settings may have led to other towers.
            partly=partition != asdict(self.settings.partition) or self.settings.partition.auto,
            towers=self.executor.tower_features,
            order=self.executor.feature_order,
        )
        # Drop the averages: a validation before this training's average begins would use those of the former training.
        drop_averages(self.executor.optimizers.dense)
        # A new id must not start with the row of another id.
        dataset = store.find(dataset_path(data.name, self._dataset, data.day))
        if dataset is not None:
            for table, rows in remapped_rows(store, init, dataset, data, wanted).items():
                reset_rows(self.executor.rows, table, rows, self.settings.seed)
                lines.append(f"table {table}: {len(rows):,} rows reset, whose ids changed")
        if dist.get_rank() == 0:
            log.info("%s", "\n  ".join([f"starting from {init.path}", *allowed, *lines]))

    def load(self, path: str) -> None:
        """Load tables and dense part of the checkpoint at ``path``, without optimizer state. Collective."""
        self._restore(path, RestoreTarget(self.checkpointer.model.rows, dict(self.executor.dense), states=False))

    def go_back(self) -> None:
        """Restore the best weights and their optimizer state; the position stays. Collective."""
        assert self.best is not None
        model = self.checkpointer.model
        target = RestoreTarget(
            model.rows, model.dense, model.optimizer, touched=model.touched, on_point=self.checkpointer.on_point
        )
        self._restore_trained_weights(self._restore(f"{self.checkpointer.directory}/{self.best}", target))
        # Mark all rows as touched, since the next delta is based on a checkpoint with other rows.
        model.touched.fill()
        set_table_steps(self.executor.model, self.executor.steps)

    def _restore(self, path: str, target: RestoreTarget) -> TrainState:
        store = self.checkpointer.store
        artifact = run_on_rank0(f"opening {path}", lambda: store.get(path, "train").to_json())
        return restore(store, Artifact.from_json(path, artifact), target)

    def due(self, step: int) -> bool:
        """Whether ``checkpoint.every_steps`` asks for a checkpoint after ``step``; the same on every rank."""
        every = self.settings.checkpoint.every_steps
        return every is not None and step % every == 0

    def late(self) -> bool:
        """Whether ``checkpoint.every_minutes`` have passed since the last checkpoint, by this rank's clock."""
        minutes = self.settings.checkpoint.every_minutes
        return minutes is not None and time.monotonic() - self._last_saved >= 60 * minutes

    def save_and_stop(self, *, saved: bool) -> NoReturn:
        """End the run after a SIGTERM, with this step committed if the grace time is enough. Collective.

        ``saved``: this step's checkpoint has been taken already.

        Raises:
            LaunchError: Always; it names the checkpoint that the next run continues from.
        """
        try:
            if not saved:
                self.save(grace=self.settings.checkpoint.grace_seconds)
            outcome = f"its checkpoint {self.newest} is committed"
        except (TimeoutError, ArtifactError) as error:
            outcome = f"no checkpoint could be taken in time ({error}); the newest is {self.newest or 'none'}"
        raise LaunchError(
            f"training stopped on SIGTERM after step {self.executor.steps}; {outcome}",
            hint="the same command continues from there",
        )

    def end_early(self) -> None:
        """Take the last checkpoint of a training that was resumed at its last step. Collective.

        The checkpoint that it was resumed from stays, so that a training made longer again can continue from there.
        """
        path = self._redirect_last()
        # An earlier run of the same length may have written this checkpoint already.
        if path is None:
            return
        self.save(final=True)
        if dist.get_rank() == 0:
            log.info("training ends here; its last checkpoint is %s", path)

    def _recode_last(self, state: TrainState, saved_config: dict[str, Any]) -> None:
        # Writes a finished training's last checkpoint again if ``checkpoint`` asks for another coding. Collective.
        # ``saved_config`` is the configuration that wrote it. The old checkpoint stays, since other artifacts name it.
        wanted = self.settings.checkpoint
        if same_coding(wanted, saved_config):
            return
        check_finer(wanted, saved_config, self.newest)
        path = self._redirect_last()
        if path is not None:
            self.checkpointer.save(state, final=True, wait=True)
            if dist.get_rank() == 0:
                log.info("the last checkpoint was rewritten as %s with coding %s", path, coding_of(wanted))

    def _redirect_last(self) -> str | None:
        # Has the last checkpoint written to a sibling of the checkpoints' directory; returns None if it is there
        # already. The directory's name includes the coding, so that no other coding replaces a checkpoint that
        # artifacts name.
        directory = f"{self.checkpointer.directory}-{coding_of(self.settings.checkpoint)}"
        path = f"{directory}/{name_of(self.executor.steps)}"
        self.checkpointer.turn_to(directory)
        if run_on_rank0(f"looking for {path}", lambda: self.checkpointer.store.find(path) is not None):
            self.checkpointer.newest = path
            return None
        return path

    def save(
        self, *, final: bool = False, best: bool = False, publishable: bool = False, grace: float | None = None
    ) -> None:
        """Take a checkpoint of the executor's state. Only a plain one may be committed after the return. Collective.

        Args:
            final: Whether it is the result of the run.
            best: Whether it has the weights that the last validation found best, which are stored exact to the bit.
            publishable: Whether it may be published besides the last one; it is stored exact to the bit.
            grace: Seconds within which it must be committed (TimeoutError).
        """
        exact = best or publishable
        # 1. Replace what trains by what is published. The level comes first: it is computed for the average.
        executor, step = self.executor, self.executor.steps
        unlevelled: dict[str, list[float]] = {}
        if (final or publishable) and self._sets_last_bias:
            unlevelled = calibrate_last_bias(executor, self._split, self.order)
        executor.gather()
        average = executor.published_average if final or exact else None
        if average is not None:
            average.swap()

        # 2. Save it, together with what a resumed training needs to continue.
        schedule = {name: getattr(self.settings.train, name) for name in SCHEDULE}
        if average is not None:
            schedule[AVERAGED] = True
        if unlevelled:
            schedule[LEVEL] = unlevelled
        if self.planned is not None:
            schedule[PLANNED] = self.planned
        epoch, batch = divmod(step, self.order.steps_per_epoch(self._split.rows))
        state = TrainState(
            step=step,
            epoch=epoch,
            next_batch=batch,
            samples=self.order.samples_after(step, self._split.rows),
            schedule=schedule,
            windows=self.metrics.state(),
            towers=executor.tower_features,
            order=executor.feature_order,
            rng=_all_rng_states(),
            validation={} if self.stopping is None else self.stopping.state(),
            compiled=self.compiling.compiled,
            lanes=self.order.lanes,
            shuffle_key=self.order.key,
            tower_module=executor.tower_module if self.settings.partition.auto else {},
        )
        # Hold the checkpoints that retention must not remove yet.
        held: list[str] = []
        if self.retained is not None:
            held = [name for name in self.retained if name != name_of(step)]
        elif self.best is not None and not final:
            held = [self.best]
        wait = final or exact or grace is not None
        self.checkpointer.save(state, final=final, exact=exact, held=held, wait=wait, timeout=grace)

        # 3. Restore the values that training continues with.
        restore_last_bias(executor, unlevelled)
        if average is not None:
            average.swap()
        # A skipped checkpoint (``when_busy=skip``) counts too: the next one is due after a whole interval.
        self._last_saved = time.monotonic()

    def retained_paths(self) -> list[str]:
        """Return the retained checkpoints in the order of their steps; the last one is the training's last.

        Checkpoints that a ``gc`` has removed since the training ended are left out. Collective.
        """
        store = self.checkpointer.store
        # The last name is left out: its checkpoint is ``newest``, which may be in the directory of another coding.
        paths = [f"{self._directory}/{name}" for name in (self.retained or [])[:-1]]
        found = run_on_rank0("finding checkpoints", lambda: [path for path in paths if store.find(path) is not None])
        return [*found, self.newest]

    def figures(self, seconds: float) -> dict[str, Any]:
        """Return ``checkpoint`` of result.json for a run of ``seconds``."""
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
    return "; ".join(map(", ".join, towers.values())) or "none"


def _all_rng_states() -> Tensor | None:
    # Gathers every rank's torch.get_rng_state() on rank 0, which writes it: uint8 [world size, bytes]. Collective.
    state = torch.get_rng_state()
    if dist.get_world_size() == 1:
        return state[None]
    device = state.device
    if dist.get_backend() == "nccl":
        device = torch.device("cuda", torch.cuda.current_device())
    if dist.get_rank() != 0:
        dist.gather(state.to(device), None, dst=0)
        return None
    states = [torch.empty_like(state, device=device) for _ in range(dist.get_world_size())]
    dist.gather(state.to(device), states, dst=0)
    return torch.stack(states).cpu()
