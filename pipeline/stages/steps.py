"""The steps of a run: the stages' order, and what the key and path of each one are.

``steps`` works out every key and path of a run at once: a key is made of keys, not of content.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from pipeline.config import STAGES, Config
from pipeline.errors import DataError
from pipeline.launch.steps import write_steps
from pipeline.records import Towers, dataset_path
from pipeline.records.step import Step, run_directory
from pipeline.stages.assigning import covered_probe
from pipeline.stages.batch import with_former_batch
from pipeline.stages.forced import current_directory
from pipeline.stages.init import covered_init
from pipeline.stages.keys import CHECKPOINTS, PARTITION, PUBLISH, TRAIN, covered
from pipeline.store import Store, artifact_key

INPUTS: dict[str, tuple[str, ...]] = {
    "ingest": (),
    "plan": ("ingest",),
    "partition": ("ingest", "plan"),
    "train": ("ingest", "plan", "partition"),
    "evaluate": ("ingest", "plan", "partition", "train"),
    "publish": ("ingest", "plan", "partition", "train", "evaluate"),
}
NEEDS_ROWS = ("train", "evaluate", "publish")


def steps(config: Config, store: Store, names: Sequence[str] = STAGES, *, forced: bool = True) -> list[Step]:
    """The steps of the run ``config`` describes, in order. Raises DataError where the raw data is missing.

    ``names``: only the first of them, up to the one that is wanted. Publishing is among them only where it is to run.
    ``forced``: False does not ask the store whether a forced training has a checkpoint directory of its own, so that
    steps can be shown where the store cannot be reached.
    """
    from pipeline.ingest import raw_fingerprint
    from pipeline.stages.publish import covered_incumbent
    from pipeline.towers import check_partition

    config = with_former_batch(config, store)
    if config.data.sparse:
        check_partition(config, list(config.data.sparse))
    made: dict[str, Step] = {}
    for name in names:
        if name == "publish" and name not in config.stages:
            continue
        settings = key_config(name, config)
        if name == "ingest":
            settings["raw"] = raw_fingerprint(config, store)
        if name == "train" and config.checkpoint.init_from is not None:
            settings["init"] = covered_init(config, store, made["ingest"].key)
        if name == "publish":
            settings["incumbent"] = covered_incumbent(config, store, made["train"].key)
        if name == "partition" and (probe := covered_probe(config, store)) is not None:
            settings["probe"] = probe
        input_keys = {stage: made[stage].key for stage in INPUTS[name]}
        scratch: tuple[str, ...] = ()
        key = artifact_key(name, settings, input_keys)
        if name == "train":
            own = continuation_key(config, settings.get("init"), input_keys["ingest"])
            place = checkpoint_directory(config, own)
            scratch = (current_directory(store, place) if forced else place,)
        made[name] = Step(
            name=name, key=key, path=_path(name, key, config), config=settings, input_keys=input_keys,
            inputs={stage: made[stage].path for stage in INPUTS[name]}, scratch=scratch,
        )  # fmt: skip
    return list(made.values())


def with_possible_stages(config: Config) -> Config:
    """``config`` with the stages that are to run: a dataset of ``data.format=tables`` is made wherever it is read.

    It is the configuration in another form, so nobody should have to ingest it first. Raises DataError for stages
    that need its rows: it has none.
    """
    if config.data.format != "tables":
        return config
    idle = [name for name in config.stages if name in NEEDS_ROWS]
    if idle:
        raise DataError(
            f"data={config.data.name} has data.format=tables, a list of tables without rows: it can be planned for, "
            f"but {idle[0]} needs click logs",
            hint="stages=[ingest,plan], or data=synthetic, data=criteo or data=parquet with logs of your own",
        )
    return dataclasses.replace(config, stages=[s for s in STAGES if s in config.stages or s == "ingest"])


def key_config(name: str, config: Config) -> dict[str, Any]:
    """The part of the configuration that key ``name`` covers (``keys.SETTINGS``); what it names, ``steps`` adds."""
    found = covered(name, config)
    if name in (PARTITION, CHECKPOINTS, TRAIN) and config.partition.name != "flat":
        from pipeline.towers import tower_count

        found["partition"]["towers"] = tower_count(config)
    if name == PARTITION:
        found["towers_version"] = Towers.VERSION
    if name == PUBLISH:
        found["model"] = config.model_name
    return found


def _path(name: str, key: str, config: Config) -> str:
    run = run_directory(str(config.run))
    return {
        "ingest": dataset_path(config.data.name, key, config.data.day),
        "plan": f"plans/{key}",
        "partition": f"towers/{key}",
        "train": f"{run}/train/{key}",
        "evaluate": f"{run}/evaluate/{key}",
        "publish": f"{run}/publish/{key}",
    }[name]


def continuation_key(config: Config, init: Any, dataset: str) -> str:
    """What a training must share with a checkpoint to go on from it: ``keys.CHECKPOINTS``, start and dataset.

    Neither hardware nor plan: rows are stored by table and row number and the batches do not depend on the ranks, so
    a run that lost its machines goes on with others. Nor its length: a training may be made longer. ``init``: what
    the train step covers of the checkpoint it starts from, None where there is none; ``dataset``: that one's key.
    """
    start = {} if init is None else {"init": init}
    return artifact_key(CHECKPOINTS, {**key_config(CHECKPOINTS, config), **start}, {"ingest": dataset})


def checkpoint_directory(config: Config, key: str) -> str:
    """Where the checkpoints of the training with continuation ``key`` lie, relative to the store."""
    return f"{run_directory(str(config.run))}/checkpoints/{key[:10]}"


def prepare(config: Config, store: Store) -> list[Step]:
    """Work the steps out and write ``config.yaml`` and ``steps.json`` of the run, for the ranks to read."""
    from pipeline.compose import to_yaml

    config = with_former_batch(config, store)
    found = steps(config, store)
    store.write_bytes(f"{run_directory(str(config.run))}/config.yaml", to_yaml(config).encode())
    write_steps(store, str(config.run), found)
    return found
