"""The times of a run's stages on this machine, from a short real run or from the last night of a model.

A rehearsal is ``nightjar run`` itself with a training of a few seconds: its start, its steps, its checkpoint and the
whole evaluation are those of the real run. Its records are removed; plan and towers stay in the store, for the run to
use.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass

from pipeline.config import Config
from pipeline.config.train import TrainConfig
from pipeline.core.errors import ArtifactError, DataError, LaunchError
from pipeline.planning.inputs import PlanInputs
from pipeline.records.dataset import DatasetSchema
from pipeline.records.record import read
from pipeline.records.result import Result, TrainPart
from pipeline.records.runs import run_directory
from pipeline.report.records import read_records
from pipeline.report.store_page import STORE_PAGE
from pipeline.schedule.store_overview import write_store_page
from pipeline.store.artifacts import Store
from pipeline.store.removal import remove
from pipeline.training.lr_schedule import planned_steps

# Seconds that the steps of a rehearsal should take, and the limits of their number.
SECONDS = 6.0
LEAST_STEPS, MOST_STEPS = 40, 4_000
# A rehearsal takes at most this share of a training's steps.
SHARE = 0.25
# A rehearsal's steps are timed in INTERVALS intervals. The first WARM_UP of them do not count: pages of tables are
# touched for the first time, kernels choose their blocking.
INTERVALS, WARM_UP = 12, 3
LOOKS_PER_EPOCH = 4  # train.validate.every_steps=auto
# Overrides that a rehearsal sets itself.
OWN = ("run", "stages", "force", "train.max_steps", "train.log_every_steps", "train.guard.collapse")
# Config groups that a rehearsal sets itself: it runs on this machine, and reports to no tracker.
OWN_GROUPS = ("launch", "track")


@dataclass(frozen=True, kw_only=True)
class StageTimes:
    """What the stages of a run took, in parts that grow with its rows and parts that do not.

    ``start_s``: the train stage before its first step; ``step_ms``: a step, with what goes on beside it; ``end_s``:
    the rest of the training, above all its last checkpoint; ``look_s``: a validation. ``evaluate_s``: evaluation of
    ``test_rows``. ``publish_s``: None if the run published nothing. ``memory_bytes``: the memory of
    the largest process. ``source``: where the figures come from.
    """

    source: str
    ingest_rows_per_s: float
    plan_s: float
    partition_s: float
    start_s: float
    step_ms: float
    end_s: float
    look_s: float
    evaluate_s: float
    test_rows: int
    publish_s: float | None
    memory_bytes: int

    def training_s(self, steps: int, looks: int, step_ms: float) -> float:
        """Return the seconds of a training of so many steps and validations, without its start."""
        return self.end_s + steps * step_ms / 1e3 + looks * self.look_s


def steps_of(inputs: PlanInputs) -> int:
    """Return the steps of a whole training.

    Raises:
        DataError: The dataset is a list of tables without rows.
    """
    rows = inputs.schema.rows.get("train", 0)
    if not rows:
        raise DataError(
            "the dataset has no train rows, so it cannot be said how long a training takes",
            hint="data=criteo or data=parquet with logs of your own; nightjar scale predicts steps of a list of tables",
        )
    return planned_steps(inputs.train, rows)


def looks_of(train: TrainConfig, schema: DatasetSchema, steps: int) -> int:
    """Return how often a training of so many steps validates, unless it ends early."""
    if not schema.rows.get("validation"):
        return 0
    every = train.validate.every_steps
    if isinstance(every, int):
        return -(-steps // every)
    # auto: LOOKS_PER_EPOCH in each epoch, and at least one in all.
    per_epoch = -(-schema.rows["train"] // train.batch)
    return max(1, round(LOOKS_PER_EPOCH * steps / per_epoch))


def rehearse(
    config: Config, inputs: PlanInputs, overrides: Sequence[str], config_dir: str | None, predicted_ms: float
) -> StageTimes:
    """Run the stages after ingestion on this machine, with a training of about SECONDS.

    Args:
        overrides: The overrides of ``config``.
        predicted_ms: What the plan predicts for a step; it decides how many are taken.

    Raises:
        LaunchError: The run failed.
    """
    store, total = Store(config.store), steps_of(inputs)
    # Take as many steps as fit into SECONDS, but enough for a median, and only a share of a short training.
    steps = round(1e3 * SECONDS / max(predicted_ms, 1e-3))
    steps = min(max(steps, LEAST_STEPS), MOST_STEPS, max(LEAST_STEPS, round(SHARE * total)), total)
    run, had_page = f"rehearsal-{os.getpid()}", store.exists(STORE_PAGE)
    command = [sys.executable, "-m", "pipeline.cli", "run", *rehearsal_overrides(overrides, run, steps)]
    if config_dir is not None:
        command += ["--config-dir", config_dir]
    # Run in a separate process, as the real run does: its start is part of the measurement.
    try:
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            lines = done.stderr.strip().splitlines() or [""]
            raise LaunchError(
                f"the rehearsal of {steps} steps ended with exit code {done.returncode}: {lines[-1]}",
                hint=f"nightjar run with the same overrides and train.max_steps={steps} says more",
            )
        result = read(Result, store, f"{run_directory(run)}/{Result.FILE}")
        records = read_records(store, run)
    finally:
        remove(store, run_directory(run), nested=True)
        # The store's page lists the run, so it is written again without it.
        if had_page:
            write_store_page(store)
        elif store.exists(STORE_PAGE):
            store.fs.rm(store.full(STORE_PAGE))
    intervals = [record["step_ms"] for record in records[WARM_UP:] if record.get("step_ms")]
    # Take the median, so that an interval in which the machine was busy with something else does not count.
    step_ms = statistics.median(intervals or [_mean_step_ms(result.train)])
    return _times(result, step_ms, inputs.schema, f"a rehearsal of {steps:,} steps on this machine")


def rehearsal_overrides(overrides: Sequence[str], run: str, steps: int) -> list[str]:
    """Return the overrides of a rehearsal called ``run``, of ``steps`` steps, for a run with ``overrides``."""
    # Leave out what the rehearsal sets itself, since no key may be set twice.
    kept = []
    for text in overrides:
        key = text.lstrip("+~").partition("=")[0]
        if key not in OWN and key.partition(".")[0] not in OWN_GROUPS:
            kept.append(text)
    own = [f"run={run}", "stages=[plan,partition,train,evaluate]", f"train.max_steps={steps}"]
    own += [f"train.log_every_steps={max(1, steps // INTERVALS)}", "train.guard.collapse=false"]
    return [*kept, *own, "launch=local", "track.to=[]"]


def times_of_run(store: Store, run: str, schema: DatasetSchema) -> StageTimes | None:
    """Return what the stages of ``run`` took; None if it did not train from its beginning to its end.

    Args:
        schema: The schema of its dataset.
    """
    try:
        result = read(Result, store, f"{run_directory(run)}/{Result.FILE}")
    except ArtifactError:
        return None
    for name in ("train", "evaluate"):
        # A skipped stage, whose artifact existed already, does not show how long it takes.
        if name not in result.stages or result.stages[name].status != "done":
            return None
    if result.train is None or result.train.resumed is not None or not result.train.steps:
        return None
    return _times(result, _mean_step_ms(result.train), schema, f"run {run}")


def _mean_step_ms(train: TrainPart | None) -> float:
    # This is the mean over the whole training, without its validations.
    assert train is not None and train.seconds is not None and train.steps
    seconds = train.seconds
    if train.validation is not None:
        seconds -= train.validation.seconds
    return 1e3 * max(seconds, 1e-6) / train.steps


def _times(result: Result, step_ms: float, schema: DatasetSchema, source: str) -> StageTimes:
    stages, train, rows = result.stages, result.train, result.ingest
    assert train is not None and train.steps is not None
    look_s, looks = 0.0, 0
    if train.validation is not None and train.validation.looks:
        looks = train.validation.looks
        look_s = train.validation.seconds / looks
    training = train.seconds or stages["train"].seconds
    ingest_rows_per_s = 1.0
    if rows is not None:
        # The dataset records the speed of its ingestion. The time of the whole stage is better, if this run ingested.
        ingest_rows_per_s = rows.rows_per_s or 1.0
        if rows.rows and stages["ingest"].status == "done" and stages["ingest"].seconds:
            ingest_rows_per_s = rows.rows / stages["ingest"].seconds
    publish_s = None
    if "publish" in stages and stages["publish"].status == "done":
        publish_s = stages["publish"].seconds
    return StageTimes(
        source=source,
        ingest_rows_per_s=ingest_rows_per_s,
        plan_s=stages["plan"].seconds if "plan" in stages else 0.0,
        partition_s=stages["partition"].seconds if "partition" in stages else 0.0,
        start_s=max(stages["train"].seconds - training, 0.0),
        step_ms=step_ms,
        end_s=max(training - train.steps * step_ms / 1e3 - looks * look_s, 0.0),
        look_s=look_s,
        evaluate_s=stages["evaluate"].seconds,
        test_rows=max(schema.rows.get("test", 0), 1),
        publish_s=publish_s,
        memory_bytes=train.peak_rss_bytes or 0,
    )
