"""The stages: their order, their keys, and what each does with its configuration and input artifacts.

A stage meets the others only through artifacts. ``steps`` works out every key and path of a run at
once (a key is made of keys, not of content), ``run_stage`` does one of them on this rank. The rooms
are imported inside the stage functions, so that a command that runs no stage imports no torch.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from pipeline.artifacts import Artifact, Draft, Store, artifact_key
from pipeline.config import STAGES, Config
from pipeline.contracts import DatasetSchema, Plan, Profile
from pipeline.errors import ArtifactError, ConfigError, NightjarError
from pipeline.launch.step import Step, read_steps, run_directory, write_steps

__all__ = ["INPUTS", "STAGES", "StageIO", "prepare", "run_stage", "steps"]

INPUTS: dict[str, tuple[str, ...]] = {
    "ingest": (),
    "plan": ("ingest",),
    "partition": ("ingest", "plan"),
    "train": ("ingest", "plan", "partition"),
    "evaluate": ("ingest", "plan", "train"),
}
# Settings of train that change speed or what is shown, never the model that comes out.
NOT_IN_TRAIN_KEY = ("log_every_steps", "prefetch_batches")


@dataclass(frozen=True)
class StageIO:
    """How a stage speaks: ``say`` takes a line, ``interval`` a record of the training loop, ``close`` ends a line."""

    say: Callable[[str], None]
    interval: Callable[[dict[str, Any]], None]
    close: Callable[[], None]


def steps(config: Config, store: Store) -> list[Step]:
    """All steps of the run ``config`` describes, in order. Raises DataError where the raw data is missing."""
    from pipeline.ingest import raw_fingerprint

    made: dict[str, Step] = {}
    for name in STAGES:
        covered = key_config(name, config)
        if name == "ingest":
            covered["raw"] = raw_fingerprint(config)
        if name == "train" and config.checkpoint.init_from is not None:
            covered["init"] = _init(config, store, made["ingest"].key)
        input_keys = {stage: made[stage].key for stage in INPUTS[name]}
        key = artifact_key(name, covered, input_keys)
        made[name] = Step(
            name=name, key=key, path=_path(name, key, config), config=covered, input_keys=input_keys,
            inputs={stage: made[stage].path for stage in INPUTS[name]},
            scratch=(checkpoint_directory(config, key),) if name == "train" else (),
        )  # fmt: skip
    return list(made.values())


def _init(config: Config, store: Store, dataset: str) -> dict[str, Any]:
    """What the train key covers of ``checkpoint.init_from``: the checkpoint it names and how it is used.

    Raises ArtifactError where there is no such checkpoint, ConfigError where it does not go with the settings.
    """
    from pipeline.checkpoint.changes import check_changes
    from pipeline.checkpoint.naming import find_checkpoint

    wanted = config.checkpoint
    if wanted.init_from == config.run:
        raise ConfigError(
            f"checkpoint.init_from is {wanted.init_from!r}, the run itself, which goes on from its own checkpoints",
            hint="checkpoint.init_from=null, or a step of it: checkpoint.init_from=<run>/step-00000100",
        )
    known = None if config.force else _recorded_init(config, store)
    use = {"tables_only": wanted.init_tables_only, "rename": dict(wanted.rename)}
    try:
        artifact = find_checkpoint(store, str(wanted.init_from), *(known or ()))
    except ArtifactError:
        if known is None:
            raise
        return {"key": known[0], "step": known[1], **use}  # removed since; training has checkpoints of its own
    if "train" in config.stages:
        check_changes(artifact, config, dataset)
    return {"key": artifact.key, "step": artifact.summary["step"], **use}


def _recorded_init(config: Config, store: Store) -> tuple[str, int] | None:
    """Key and step of the checkpoint this run started from before, by the same name; None where it did not.

    A run that goes on must not begin anew because the other one has newer checkpoints by now.
    """
    from pipeline.compose import from_yaml

    run = str(config.run)
    path = f"{run_directory(run)}/config.yaml"
    if not store.exists(path):
        return None
    try:
        with store.open(path) as source:
            former = from_yaml(source.read().decode())
        init = next(step.config.get("init") for step in read_steps(store, run) if step.name == "train")
    except (NightjarError, StopIteration):
        return None
    if former.checkpoint.init_from != config.checkpoint.init_from or not isinstance(init, dict):
        return None
    return init["key"], init["step"]


def _init_artifact(step: Step, config: Config, store: Store) -> Artifact | None:
    """The checkpoint that training starts from, the very one its key names; None also where it goes on by itself."""
    covered = step.config.get("init")
    if not isinstance(covered, dict):
        return None
    from pipeline.checkpoint import committed, find_checkpoint

    try:
        return find_checkpoint(store, str(config.checkpoint.init_from), covered["key"], covered["step"])
    except ArtifactError:
        if not config.force and committed(store, checkpoint_directory(config, step.key)):
            return None
        raise


def key_config(name: str, config: Config) -> dict[str, Any]:
    """The part of the configuration that stage ``name``'s key covers: what its artifact depends on, no more."""
    full = dataclasses.asdict(config)
    if name == "ingest":
        data, ingest = full["data"], full["ingest"]
        del data["path"]  # raw_fingerprint stands for it: the same file elsewhere is the same data
        del ingest["block_mib"]  # how much is read at a time does not change the bytes
        if config.data.format == "synthetic":
            return {"data": data, "ingest": ingest, "seed": config.seed}
        del data["synthetic"]  # real logs depend neither on the generator's settings nor on the seed
        return {"data": data, "ingest": ingest}
    if name == "plan":
        del full["hardware"]["ssd_paths"]  # where scratch files lie changes no plan
        return {
            "plan": full["plan"],
            "hardware": full["hardware"],
            "embedding_dim": config.model.embedding_dim,
            "global_batch": config.train.global_batch,
        }
    if name == "partition":
        return {"partition": full["partition"]}
    if name == "train":
        train = {key: value for key, value in full["train"].items() if key not in NOT_IN_TRAIN_KEY}
        return {"model": full["model"], "train": train, "seed": config.seed}
    return {"evaluate": full["evaluate"]}


def _path(name: str, key: str, config: Config) -> str:
    run = run_directory(str(config.run))
    return {
        "ingest": f"datasets/{config.data.name}/{key}",
        "plan": f"plans/{key}",
        "partition": f"towers/{key}",
        "train": f"{run}/train/{key}",
        "evaluate": f"{run}/evaluate/{key}",
    }[name]


def checkpoint_directory(config: Config, train_key: str) -> str:
    """Where the checkpoints of the training step with ``train_key`` lie, relative to the store."""
    return f"{run_directory(str(config.run))}/checkpoints/{train_key[:10]}"


def run_stage(step: Step, config: Config, store: Store, io: StageIO) -> Artifact | None:
    """Do ``step`` on this rank; every rank of the stage calls it. Returns the artifact on rank 0, None elsewhere.

    Raises ArtifactError where an input is not committed, and what the stage's room raises.
    """
    inputs = {name: store.get(path, name) for name, path in step.inputs.items()}
    try:
        return _FUNCTIONS[step.name](step, config, store, inputs, io)
    finally:
        io.close()


def _draft(store: Store, step: Step) -> Any:
    return store.draft(step.path, kind=step.name, key=step.key, config=step.config, inputs=step.input_keys)


def _ingest(step: Step, config: Config, store: Store, inputs: dict[str, Artifact], io: StageIO) -> Artifact:
    from pipeline.ingest import ingest

    with _draft(store, step) as draft:
        return draft.commit(ingest(config, draft, io.say))


def _plan(step: Step, config: Config, store: Store, inputs: dict[str, Artifact], io: StageIO) -> Artifact:
    from pipeline.planning import make_plan, plan_summary, render_plan

    dataset = inputs["ingest"].path
    schema = DatasetSchema.from_json(store.read_json(f"{dataset}/schema.json"))
    profile = Profile.from_json(store.read_json(f"{dataset}/profile.json"))
    plan = make_plan(config, schema, profile)
    draft: Draft
    with _draft(store, step) as draft:
        draft.write_json("plan.json", plan.to_json())
        artifact = draft.commit(plan_summary(plan))
    io.say(render_plan(plan))
    return artifact


def _partition(step: Step, config: Config, store: Store, inputs: dict[str, Artifact], io: StageIO) -> Artifact:
    """One tower with every feature: what ``partition=flat`` means."""
    schema = DatasetSchema.from_json(store.read_json(f"{inputs['ingest'].path}/schema.json"))
    features = [column.name for column in schema.sparse]
    draft: Draft
    with _draft(store, step) as draft:
        draft.write_json("towers.json", {"version": 1, "partition": config.partition.name, "towers": [features]})
        return draft.commit({"partition": config.partition.name, "towers": 1, "features": len(features)})


def _train(step: Step, config: Config, store: Store, inputs: dict[str, Artifact], io: StageIO) -> Artifact | None:
    from pipeline.training import train

    checkpoints = checkpoint_directory(config, step.key)
    plan = read_plan(store, inputs["plan"])
    init = _init_artifact(step, config, store)
    summary = train(config, store, inputs["ingest"], plan, checkpoints, step.key, io.interval, io.say, init)
    if not is_first_rank():
        return None
    draft: Draft
    with _draft(store, step) as draft:
        draft.write_json("train.json", summary)
        return draft.commit(summary)


def _evaluate(step: Step, config: Config, store: Store, inputs: dict[str, Artifact], io: StageIO) -> Artifact | None:
    from pipeline.evaluation import evaluate, reliability
    from pipeline.training import predict

    final = inputs["train"].summary.get("final")
    if not final:
        raise ArtifactError(f"{inputs['train'].path} names no final checkpoint", hint="nightjar train force=true")
    predictions = predict(config, store, inputs["ingest"], read_plan(store, inputs["plan"]), final)
    if predictions is None:
        return None
    figures = evaluate(predictions.labels, predictions.logits, predictions.true_probability)
    draft: Draft
    with _draft(store, step) as draft:
        draft.write_json("metrics.json", figures)
        draft.write_json("reliability.json", reliability(predictions.labels, predictions.logits))
        return draft.commit(figures)


def read_plan(store: Store, artifact: Artifact) -> Plan:
    """The sharding plan inside a committed plan artifact."""
    return Plan.from_json(store.read_json(f"{artifact.path}/plan.json"))


def shown_plan(store: Store, path: str) -> str:
    """The table of the committed plan at ``path``, for a ``nightjar plan`` that had nothing to do."""
    from pipeline.planning import render_plan

    return render_plan(read_plan(store, store.get(path, "plan")))


def is_first_rank() -> bool:
    """Whether this process is rank 0 (or alone)."""
    import torch.distributed as dist

    return not (dist.is_available() and dist.is_initialized()) or dist.get_rank() == 0


_FUNCTIONS: dict[str, Callable[[Step, Config, Store, dict[str, Artifact], StageIO], Artifact | None]] = {
    "ingest": _ingest,
    "plan": _plan,
    "partition": _partition,
    "train": _train,
    "evaluate": _evaluate,
}


def prepare(config: Config, store: Store) -> list[Step]:
    """Work the steps out and write ``config.yaml`` and ``steps.json`` of the run, for the ranks to read."""
    from pipeline.compose import to_yaml

    found = steps(config, store)
    store.write_bytes(f"{run_directory(str(config.run))}/config.yaml", to_yaml(config).encode())
    write_steps(store, str(config.run), found)
    return found
