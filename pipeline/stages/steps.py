"""The steps of a run: the stages' order, and what the key and path of each one are.

``steps`` works out every key and path of a run at once: a key is made of keys, not of content.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from pipeline.artifacts import Store, artifact_key
from pipeline.config import STAGES, Config
from pipeline.contracts import Towers, dataset_path
from pipeline.errors import DataError
from pipeline.launch.step import Step, run_directory, write_steps
from pipeline.stages.batch import with_former_batch
from pipeline.stages.init import covered_init
from pipeline.stages.partition import covered_probe, covered_settings

INPUTS: dict[str, tuple[str, ...]] = {
    "ingest": (),
    "plan": ("ingest",),
    "partition": ("ingest", "plan"),
    "train": ("ingest", "plan", "partition"),
    "evaluate": ("ingest", "plan", "partition", "train"),
    "publish": ("ingest", "plan", "partition", "train", "evaluate"),
}
NEEDS_ROWS = ("train", "evaluate", "publish")
# Settings of train that change speed or what is shown, never the model that comes out.
NOT_IN_TRAIN_KEY = ("log_every_steps", "prefetch_batches")
# What a constant learning rate has no use for, and one that always falls: trainings of before keep their keys.
SCHEDULE = ("schedule", "decay_share", "min_lr_share")
# Settings of data that a dataset of format tables depends on; but for the first two no other one does.
DECLARED = ("name", "format", "tables", "table_defaults", "dense_features")
# Settings of data that decide whether a dataset is made, not what is in it.
CHECKED = ("watermark", "max_quarantine_share", "checks")


def steps(config: Config, store: Store, names: Sequence[str] = STAGES) -> list[Step]:
    """The steps of the run ``config`` describes, in order. Raises DataError where the raw data is missing.

    ``names``: only the first of them, up to the one that is wanted. Publishing is among them only where it is to run.
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
        covered = key_config(name, config)
        if name == "ingest":
            covered["raw"] = raw_fingerprint(config, store)
        if name == "train" and config.checkpoint.init_from is not None:
            covered["init"] = covered_init(config, store, made["ingest"].key)
        if name == "publish":
            covered["incumbent"] = covered_incumbent(config, store, made["train"].key)
        if name == "partition" and (probe := covered_probe(config, store)):
            covered["probe"] = probe
        input_keys = {stage: made[stage].key for stage in INPUTS[name]}
        key = artifact_key(name, covered, input_keys)
        made[name] = Step(
            name=name, key=key, path=_path(name, key, config), config=covered, input_keys=input_keys,
            inputs={stage: made[stage].path for stage in INPUTS[name]},
            scratch=(checkpoint_directory(config, continuation_key(config, covered, input_keys)),)
            if name == "train"
            else (),
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
    """The part of the configuration that stage ``name``'s key covers: what its artifact depends on, no more."""
    full = dataclasses.asdict(config)
    if name == "ingest":
        data, ingest = full["data"], full["ingest"]
        del data["path"]  # raw_fingerprint stands for it: the same file elsewhere is the same data
        if config.data.format == "tables":
            return {"data": {key: data[key] for key in DECLARED}}
        for name in DECLARED[2:]:
            del data[name]
        for name in CHECKED:
            del data[name]
        for name in ("block_mib", "engine", "ray"):  # how much is read at a time, and by whom, changes no byte
            del ingest[name]
        if config.data.format == "synthetic":
            return {"data": data, "ingest": ingest, "seed": config.seed}
        del data["synthetic"]  # real logs depend neither on the generator's settings nor on the seed
        return {"data": data, "ingest": ingest}
    if name == "plan":
        if config.plan.former is None:
            del full["plan"]["former"]
        del full["hardware"]["ssd_paths"]  # where scratch files lie changes no plan
        optimizer = config.train.sparse_optimizer
        stateless = {} if optimizer == "rowwise_adagrad" else {"sparse_optimizer": optimizer}
        return {
            **stateless,
            "plan": full["plan"],
            "hardware": full["hardware"],
            "embedding_dim": config.model.embedding_dim,
            "global_batch": config.train.global_batch,
        }
    if name == "partition":
        return {"partition": covered_settings(config), "towers_version": Towers.VERSION}
    if name == "train":
        unused = {*NOT_IN_TRAIN_KEY, *(SCHEDULE if config.train.schedule == "constant" else ())}
        if config.train.decay_share == 1.0:
            unused.add("decay_share")
        train = {key: value for key, value in full["train"].items() if key not in unused}
        exchange = {} if config.partition.exchange == "fp32" else {"exchange": config.partition.exchange}
        return {"model": full["model"], "train": train, "seed": config.seed, **exchange}
    if name == "publish":
        return {"gate": full["gate"], "model": config.model_name, "quantise": config.publish.quantise}
    return {"evaluate": full["evaluate"]}


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


def continuation_key(config: Config, train_config: Mapping[str, Any], input_keys: Mapping[str, str]) -> str:
    """What a training must share with a checkpoint to go on from it: everything but the hardware and the plan.

    Rows are stored by table and row number and the batches do not depend on the ranks, so a run that lost its
    machines goes on with others.
    """
    covered = {**train_config, "partition": covered_settings(config)}
    return artifact_key("checkpoints", covered, {"ingest": input_keys["ingest"]})


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
