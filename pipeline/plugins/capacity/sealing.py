"""``nightjar price --seal``: a prediction of a run on this machine, written under its hash before the run."""

from __future__ import annotations

import time
from collections.abc import Sequence

from pipeline.config import Config
from pipeline.config.compose import config_hash
from pipeline.core.cpus import available_cpus
from pipeline.core.errors import ConfigError
from pipeline.core.machine import machine_of
from pipeline.planning.inputs import PlanInputs
from pipeline.plugins.capacity.rehearsal import StageTimes, looks_of, steps_of
from pipeline.records.sealed_prediction import RunPrediction
from pipeline.stages.steps import steps
from pipeline.store.artifacts import Store

# Publishing scores the test rows with the candidate and with the version that serves.
SCORED = 2


def missing_stages(config: Config, store: Store) -> list[str]:
    """Return the stages of the run whose artifacts the store lacks, in order.

    Raises:
        ConfigError: The training is done already, so nothing is left to predict.
    """
    names = []
    for step in steps(config, store):
        # A stage whose artifact exists takes no time, unless force=true makes it again.
        if step.name in config.stages and (config.force or store.find(step.path) is None):
            names.append(step.name)
    if "train" not in names:
        why = "has trained already" if "train" in config.stages else "does not train: stages lacks train"
        raise ConfigError(
            f"run {config.run} of store {config.store} {why}, so there is nothing to predict",
            hint="run=<another name>, or force=true, for the prediction and for the run",
        )
    return names


def predict_run(
    config: Config, inputs: PlanInputs, times: StageTimes, stages: Sequence[str], plan_s: float, dataset: str
) -> RunPrediction:
    """Predict the run of ``config`` on the machine that ``times`` were taken on.

    Args:
        config: The configuration as composed, whose hash is that of the run.
        inputs: The inputs of its plan.
        stages: The stages that it will not skip.
        plan_s: Seconds of making the plan, for a rehearsal that found it in the store.
        dataset: Path of the dataset.
    """
    total = steps_of(inputs)
    training_s = times.training_s(total, looks_of(inputs.train, inputs.schema, total), times.step_ms)
    publish_s = times.publish_s
    if publish_s is None:
        # A rehearsal publishes nothing, so the time is estimated: publishing scores with SCORED models.
        publish_s = SCORED * times.evaluate_s
    known = {
        "ingest": sum(inputs.schema.rows.values()) / times.ingest_rows_per_s,
        "plan": max(plan_s, times.plan_s),
        "partition": times.partition_s,
        "train": times.start_s + training_s,
        "evaluate": times.evaluate_s,
        "publish": publish_s,
    }
    # The launcher divides the machine's CPUs in this way if no number is set.
    hardware = inputs.hardware
    threads = config.train.threads_per_rank or max(1, available_cpus() // hardware.ranks_per_host)
    return RunPrediction(
        config=config_hash(config),
        created=round(time.time(), 3),
        model=str(config.model.name),
        data=config.data.name,
        hardware=hardware.name,
        ranks=inputs.world_size,
        threads=threads,
        batch=inputs.batch,
        steps=total,
        step_ms=round(1e3 * training_s / total, 4),
        memory_bytes=times.memory_bytes,
        seconds={stage: round(known[stage], 3) for stage in stages if stage in known},
        source=times.source,
        dataset=dataset,
        machine=machine_of(),
    )
