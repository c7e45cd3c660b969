"""``checkpoint.init_from``: the checkpoint that a training starts from, and what its key covers of that."""

from __future__ import annotations

from typing import Any

from pipeline.config import Config
from pipeline.config.secrets import recorded
from pipeline.errors import ArtifactError, ConfigError, NightjarError
from pipeline.launch.run_steps import read_steps
from pipeline.records.runs import Step, run_directory
from pipeline.store import Artifact, Store

INIT_FROM = "checkpoint.init_from="  # as it is typed


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
