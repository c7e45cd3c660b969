"""What a training takes over from an earlier one: its checkpoint, and the batch of ``train.global_batch=auto``."""

from __future__ import annotations

import dataclasses
from typing import Any

from pipeline.config import Config
from pipeline.config.secrets import recorded
from pipeline.errors import ArtifactError, ConfigError, NightjarError, UnreachableError
from pipeline.launch.run_records import read_steps
from pipeline.records.runs import Step, run_directory
from pipeline.store.artifacts import Store
from pipeline.store.manifest import Artifact

INIT_FROM = "checkpoint.init_from="  # as it is typed
STEPS = 200  # of an epoch, at least: fewer updates leave a model that has hardly begun to learn
LARGEST = 4096  # samples a step: what the default learning rates are meant for
SMALLEST = 64  # samples a step: below, a step costs as much and its gradient is mostly noise
MULTIPLE = 64  # samples: ranks get equal parts


def covered_init(config: Config, store: Store, dataset: str) -> dict[str, Any]:
    """What the train key covers of ``checkpoint.init_from``: the checkpoint it names, by its key and step.

    Raises ArtifactError where there is no such checkpoint, ConfigError where it does not go with the settings.
    """
    from pipeline.checkpoint.config_compatibility import check_changes
    from pipeline.checkpoint.reference import find_checkpoint

    wanted = config.checkpoint
    if wanted.init_from == config.run:
        raise ConfigError(
            f"checkpoint.init_from is {wanted.init_from!r}, the run itself, which goes on from its own checkpoints",
            hint="checkpoint.init_from=null, or a step of it: checkpoint.init_from=<run>/step-00000100",
        )
    known = None if config.force else recorded_init(config, store)[1]
    try:
        artifact = find_checkpoint(store, str(wanted.init_from), *(known or ()), option=INIT_FROM)
    except ArtifactError:
        if known is None:
            raise
        return {"key": known[0], "step": known[1]}  # removed since; training has checkpoints of its own
    if "train" in config.stages:
        check_changes(artifact, recorded(config), wanted, config.data, dataset)
    return {"key": artifact.key, "step": artifact.summary["step"]}


def recorded_init(config: Config, store: Store) -> tuple[Config, tuple[str, int]] | tuple[None, None]:
    """What this run recorded when it began from the checkpoint of the same name; None where it did not.

    Its configuration, and the checkpoint's key and step: a run that goes on must not begin anew because the other run
    has newer checkpoints by now.
    """
    from pipeline.compose import from_yaml

    run = str(config.run)
    path = f"{run_directory(run)}/config.yaml"
    if not store.exists(path):
        return None, None
    try:
        with store.open(path) as source:
            former = from_yaml(source.read().decode())
        init = next(step.config.get("init") for step in read_steps(store, run) if step.name == "train")
    except (NightjarError, StopIteration):
        return None, None
    if former.checkpoint.init_from != config.checkpoint.init_from or not isinstance(init, dict):
        return None, None
    return former, (init["key"], init["step"])


def init_artifact(step: Step, config: Config, store: Store) -> Artifact | None:
    """The checkpoint that training starts from, the very one its key names; None also where it goes on by itself."""
    covered = step.config.get("init")
    if not isinstance(covered, dict):
        return None
    from pipeline.checkpoint.index import committed
    from pipeline.checkpoint.reference import find_checkpoint

    try:
        place, key, step_number = str(config.checkpoint.init_from), covered["key"], covered["step"]
        return find_checkpoint(store, place, key, step_number, option=INIT_FROM)
    except ArtifactError:
        if committed(store, step.scratch[0]):
            return None
        raise


def automatic_batch(rows: int) -> int:
    """Samples a step for ``rows`` train rows (0: not known, as for a list of tables): an epoch of 200 steps or more.

    A multiple of 64, between 64 and 4,096 samples; so fewer than 12,800 rows give fewer than 200 steps. The number
    never depends on the hardware: a training that goes on elsewhere takes the same batches.
    """
    if rows == 0:
        return LARGEST
    return min(LARGEST, max(SMALLEST, rows // STEPS // MULTIPLE * MULTIPLE))


def with_batch(config: Config, rows: int) -> Config:
    """``config`` with ``train.global_batch`` as a number where it is auto, for a dataset of ``rows`` train rows.

    Raises ConfigError where that number is smaller than the number of ranks.
    """
    if isinstance(config.train.global_batch, int):
        return config
    batch = automatic_batch(rows)
    ranks = config.hardware.workers
    if batch < ranks:
        raise ConfigError(
            f"train.global_batch=auto is {batch} for {rows:,} train rows, expected at least one sample for each of "
            f"the {ranks} ranks",
            hint=f"train.global_batch={64 * ranks}, or fewer ranks: hardware.hosts=1",
        )
    return _with(config, batch)


def with_former_batch(config: Config, store: Store) -> Config:
    """``config`` with ``train.global_batch``, where it is auto, as in the checkpoint ``checkpoint.init_from`` names.

    So one night takes the batches of the night before. A checkpoint removed since then counts by what this run recorded
    when it began. ``config`` itself where training starts from nothing, or where that checkpoint cannot be read: what
    is wrong with it, ``covered_init`` says.
    """
    if isinstance(config.train.global_batch, int) or config.checkpoint.init_from is None:
        return config
    from pipeline.checkpoint.reference import find_checkpoint

    former, known = (None, None) if config.force else recorded_init(config, store)
    try:
        artifact = find_checkpoint(store, config.checkpoint.init_from, *(known or ()))
    except UnreachableError:
        raise
    except ArtifactError:
        return config if former is None else _with(config, former.train.global_batch)
    return _with(config, artifact.config.get("train", {}).get("global_batch"))


def _with(config: Config, batch: object) -> Config:
    """``config`` with that global batch; itself where ``batch`` is no number."""
    if not isinstance(batch, int):
        return config
    return dataclasses.replace(config, train=dataclasses.replace(config.train, global_batch=batch))
