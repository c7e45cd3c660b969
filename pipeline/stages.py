"""The six stages: their order, their keys, and what each does with its configuration and input artifacts.

A stage meets the others only through artifacts. ``steps`` works out every key and path of a run at
once (a key is made of keys, not of content), ``run_stage`` does one of them on this rank. The rooms
are imported inside the stage functions, so that a command that runs no stage imports no torch.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pipeline.artifacts import Artifact, Draft, Store, artifact_key
from pipeline.config import STAGES, Config
from pipeline.contracts import DatasetSchema, Plan, Profile, Towers, dataset_path
from pipeline.errors import ArtifactError, ConfigError, DataError, NightjarError, UnreachableError
from pipeline.launch.step import Step, read_steps, run_directory, write_steps
from pipeline.partition import assign, covered_probe, covered_settings, kept_towers, refine_plan

__all__ = ["INPUTS", "STAGES", "StageIO", "prepare", "run_stage", "steps"]

INPUTS: dict[str, tuple[str, ...]] = {
    "ingest": (),
    "plan": ("ingest",),
    "partition": ("ingest", "plan"),
    "train": ("ingest", "plan", "partition"),
    "evaluate": ("ingest", "plan", "partition", "train"),
    "publish": ("ingest", "plan", "partition", "train", "evaluate"),
}
NEEDS_ROWS = ("train", "evaluate", "publish")
_INIT_FROM = "checkpoint.init_from="  # as it is typed
# Settings of train that change speed or what is shown, never the model that comes out.
NOT_IN_TRAIN_KEY = ("log_every_steps", "prefetch_batches")
# What a constant learning rate has no use for: trainings of before there were others keep their keys.
SCHEDULE = ("schedule", "min_lr_share")
# Settings of data that a dataset of format tables depends on; but for the first two no other one does.
DECLARED = ("name", "format", "tables", "table_defaults", "dense_features")
# Settings of data that decide whether a dataset is made, not what is in it.
CHECKED = ("watermark", "max_quarantine_share", "checks")


@dataclass(frozen=True)
class StageIO:
    """How a stage speaks: ``say`` takes a line, ``interval`` a record of the training loop, ``close`` ends a line.

    ``on_phase``: learns of every named point that training passes (``checkpoint.Phase``).
    """

    say: Callable[[str], None]
    interval: Callable[[dict[str, Any]], None]
    close: Callable[[], None]
    on_phase: Callable[[str], None] = lambda phase: None


def steps(config: Config, store: Store, names: Sequence[str] = STAGES) -> list[Step]:
    """The steps of the run ``config`` describes, in order. Raises DataError where the raw data is missing.

    ``names``: only the first of them, up to the one that is wanted. Publishing is among them only where it is to run.
    """
    from pipeline.ingest import raw_fingerprint
    from pipeline.publish import covered_incumbent
    from pipeline.towers import check_partition

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
            covered["init"] = _init(config, store, made["ingest"].key)
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
        artifact = find_checkpoint(store, str(wanted.init_from), *(known or ()), option=_INIT_FROM)
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
        place, key, step_number = str(config.checkpoint.init_from), covered["key"], covered["step"]
        return find_checkpoint(store, place, key, step_number, option=_INIT_FROM)
    except ArtifactError:
        if not config.force and committed(store, step.scratch[0]):
            return None
        raise


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
        unused = (*NOT_IN_TRAIN_KEY, *(SCHEDULE if config.train.schedule == "constant" else ()))
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
    from pipeline.ingest import answering, ingest

    with answering(config, store), _draft(store, step) as draft:
        return draft.commit(ingest(config, draft, io.say))


def _plan(step: Step, config: Config, store: Store, inputs: dict[str, Artifact], io: StageIO) -> Artifact:
    from pipeline.planning import make_plan, plan_summary, render_plan
    from pipeline.planning.carried import carried_plan
    from pipeline.report import PLAN_PAGE, plan_page

    dataset, about, plan = read_dataset(store, inputs["ingest"]), {}, None
    if config.plan.former is not None:
        plan, why = carried_plan(store, config.plan.former, step.config, *dataset, inputs["ingest"].key)
        about = {"former": config.plan.former, "reused": plan is not None, "why": why}
        io.say(f"plan       {config.plan.former} {'is used again' if plan else 'is not used again'}: {why}")
    plan = plan or make_plan(config, *dataset, inputs["ingest"].key)
    draft: Draft
    with _draft(store, step) as draft:
        draft.write_json("plan.json", plan.to_json())
        with draft.open(PLAN_PAGE) as sink:
            sink.write(plan_page(plan).encode())
        artifact = draft.commit({**plan_summary(plan), **about})
    io.say(render_plan(plan))
    return artifact


def _partition(step: Step, config: Config, store: Store, inputs: dict[str, Artifact], io: StageIO) -> Artifact:
    """``towers.json``, and for towers ``plan.json``: the plan refined, every table on the hosts of its tower."""
    from pipeline.planning import plan_summary
    from pipeline.report import PLAN_PAGE, plan_page
    from pipeline.report.towers import TOWERS_PAGE, refined_text, towers_page, towers_summary, towers_text
    from pipeline.towers import flat_towers, towers_of

    schema, profile = read_dataset(store, inputs["ingest"])
    features = [column.name for column in schema.sparse]
    if config.partition.name == "flat":
        towers, plan, said = flat_towers(config, features), None, ""
    else:
        flat = read_plan(store, inputs["plan"])
        assigned, evidence = assign(config, store, inputs["ingest"], schema, flat, io.say)
        towers = dataclasses.replace(towers_of(config, assigned, features), evidence=evidence)
        plan = refine_plan(config, schema, profile, towers, inputs["ingest"].key)
        said = f"{towers_text(towers)}\n{refined_text(plan, flat)}"
    draft: Draft
    with _draft(store, step) as draft:
        draft.write_json("towers.json", towers.to_json())
        if plan is not None:
            draft.write_json("plan.json", plan.to_json())
            for page, text in ((TOWERS_PAGE, towers_page(towers)), (PLAN_PAGE, plan_page(plan))):
                with draft.open(page) as sink:
                    sink.write(text.encode())
        placed = {} if plan is None else {"shape": towers_summary(towers), **plan_summary(plan)}
        summary = {"partition": config.partition.name, "towers": len(towers.towers), "features": len(features)}
        artifact = draft.commit({**summary, **placed})
    if said:
        io.say(said)
    return artifact


def _train(step: Step, config: Config, store: Store, inputs: dict[str, Artifact], io: StageIO) -> Artifact | None:
    from pipeline.checkpoint import committed
    from pipeline.training import train

    key = continuation_key(config, step.config, step.input_keys)
    before = [] if config.force else committed(store, step.scratch[0])
    plan, towers = read_towers(config, store, inputs, before, io.say)
    init = _init_artifact(step, config, store)
    summary = train(
        config, store, inputs["ingest"], plan, step.scratch[0], key, io.interval, io.say, init, io.on_phase,
        plan_key=inputs["plan"].key, towers=towers,
    )  # fmt: skip
    if not is_first_rank():
        return None
    draft: Draft
    with _draft(store, step) as draft:
        draft.write_json("train.json", summary)
        return draft.commit(summary)


def _evaluate(step: Step, config: Config, store: Store, inputs: dict[str, Artifact], io: StageIO) -> Artifact | None:
    import numpy as np

    from pipeline.checkpoint.reader import OTHER_MODEL
    from pipeline.evaluation import evaluate, reliability
    from pipeline.publish import LOGITS
    from pipeline.training import predict

    final = inputs["train"].summary.get("final")
    if not final:
        raise ArtifactError(f"{inputs['train'].path} names no final checkpoint", hint="nightjar train force=true")
    plan, towers = read_towers(config, store, inputs, _named(store, final))
    try:
        predictions = predict(config, store, inputs["ingest"], plan, final, towers)
    except UnreachableError:
        raise
    except ArtifactError as error:
        if error.hint == OTHER_MODEL:
            raise
        hint = f"remove {store.url_of(final)}; then stages=[train,evaluate] goes on from the newest whole checkpoint"
        raise ArtifactError(error.message, hint=hint) from error
    if predictions is None:
        return None
    figures = evaluate(predictions.labels, predictions.logits, predictions.true_probability)
    draft: Draft
    with _draft(store, step) as draft:
        draft.write_json("metrics.json", figures)
        draft.write_json("reliability.json", reliability(predictions.labels, predictions.logits))
        with draft.open(LOGITS) as sink:
            np.lib.format.write_array(sink, predictions.logits, allow_pickle=False)
        return draft.commit(figures)


def _publish(step: Step, config: Config, store: Store, inputs: dict[str, Artifact], io: StageIO) -> Artifact:
    from pipeline.publish import publish

    with _draft(store, step) as draft:
        return draft.commit(publish(config, store, step, inputs, draft, io.say))


def _named(store: Store, checkpoint: str) -> list[Artifact]:
    """The checkpoint at that path, if it can be read; what is wrong with it is for those to say who need it."""
    from pipeline.checkpoint import committed

    return [each for each in committed(store, checkpoint.rpartition("/")[0]) if each.path == checkpoint]


def read_dataset(store: Store, artifact: Artifact) -> tuple[DatasetSchema, Profile]:
    """What planning needs of a committed dataset: its schema and profile."""
    schema = DatasetSchema.from_json(store.read_json(f"{artifact.path}/schema.json"))
    return schema, Profile.from_json(store.read_json(f"{artifact.path}/profile.json"))


def planning_inputs(config: Config, store: Store) -> tuple[DatasetSchema, Profile]:
    """Schema and profile of the dataset that ``config`` describes; ArtifactError where it is not in the store yet."""
    step = steps(config, store, STAGES[:1])[0]
    artifact = store.find(step.path)
    if artifact is None:
        raise ArtifactError(
            f"no dataset of {config.data.name!r} with these settings in store {config.store}: planning needs its "
            f"schema and profile",
            hint="nightjar ingest with the same data settings makes it",
        )
    return read_dataset(store, artifact)


def read_towers(
    config: Config,
    store: Store,
    inputs: Mapping[str, Artifact],
    checkpoints: Sequence[Artifact],
    say: Callable[[str], None] = lambda line: None,
) -> tuple[Plan, Towers]:
    """The plan and the towers to train by: with towers, the plan refined for their hosts.

    ``checkpoints``: of this training, oldest first; the newest one's towers stay.
    """
    partition = inputs["partition"]
    towers = Towers.from_json(store.read_json(f"{partition.path}/towers.json"))
    if towers.is_flat:
        return read_plan(store, inputs["plan"]), towers
    kept = kept_towers(config, store, checkpoints, towers)
    if kept == towers:
        return read_plan(store, partition), towers
    if is_first_rank():
        say("this hardware would divide the features otherwise; they stay in the towers of the checkpoints")
    schema, profile = read_dataset(store, inputs["ingest"])
    return refine_plan(config, schema, profile, kept, inputs["ingest"].key), kept


def read_plan(store: Store, artifact: Artifact) -> Plan:
    """The sharding plan inside a committed plan or partition artifact; ArtifactError where it was changed since."""
    try:
        store.verify(artifact, "plan.json")
    except ArtifactError as error:
        raise ArtifactError(error.message, hint=f"nightjar {artifact.kind} force=true makes it again") from None
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
    "publish": _publish,
}


def prepare(config: Config, store: Store) -> list[Step]:
    """Work the steps out and write ``config.yaml`` and ``steps.json`` of the run, for the ranks to read."""
    from pipeline.compose import to_yaml

    found = steps(config, store)
    store.write_bytes(f"{run_directory(str(config.run))}/config.yaml", to_yaml(config).encode())
    write_steps(store, str(config.run), found)
    return found
