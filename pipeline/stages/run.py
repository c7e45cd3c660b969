"""What each stage does with its configuration and input artifacts, on this rank.

The rooms are imported inside the stage functions, so that a command that runs no stage imports no torch.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from pipeline.config import Config
from pipeline.errors import ArtifactError, DamagedError
from pipeline.records.step import Step
from pipeline.stages.assigning import assign, refine_plan
from pipeline.stages.batch import with_batch, with_former_batch
from pipeline.stages.init import init_artifact
from pipeline.stages.read import is_first_rank, read_dataset, read_plan, read_towers
from pipeline.stages.steps import continuation_key
from pipeline.store import Artifact, Draft, Store
from pipeline.store.retrying import retried


@dataclass(frozen=True)
class StageIO:
    """How a stage speaks: ``say`` takes a line, ``interval`` a record of the training loop, ``close`` ends a line.

    ``on_point``: learns of every named point that training passes (``checkpoint.FaultPoint``).
    """

    say: Callable[[str], None]
    interval: Callable[[dict[str, Any]], None]
    close: Callable[[], None]
    on_point: Callable[[str], None] = lambda point: None


def run_stage(step: Step, config: Config, store: Store, io: StageIO) -> Artifact | None:
    """Do ``step`` on this rank; every rank of the stage calls it. Returns the artifact on rank 0, None elsewhere.

    Raises ArtifactError where an input is not committed, and what the stage's room raises.
    """
    inputs = {name: store.get(path, name) for name, path in step.inputs.items()}
    if "ingest" in inputs:
        config = settled(config, store, inputs["ingest"])
    try:
        return FUNCTIONS[step.name](step, config, store, inputs, io)
    finally:
        io.close()


def settled(config: Config, store: Store, dataset: Artifact) -> Config:
    """``config`` with the number that ``train.global_batch=auto`` stands for. Raises ConfigError as ``with_batch``."""
    if isinstance(config.train.global_batch, int):
        return config
    return with_batch(with_former_batch(config, store), read_dataset(store, dataset)[0].rows.get("train", 0))


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
        covered = {**step.config, "train": {**step.config["train"], "global_batch": config.train.batch}}  # type: ignore[dict-item]
        plan, why = carried_plan(store, config.plan.former, covered, *dataset, inputs["ingest"].key)
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
    from pipeline.training.loop import train

    key = continuation_key(config, step.config.get("init"), step.input_keys["ingest"])
    before = retried(lambda: committed(store, step.scratch[0]), f"listing {store.url_of(step.scratch[0])}")
    plan, towers = read_towers(config, store, inputs, before, io.say)
    init = init_artifact(step, config, store)
    summary = train(
        config, store, inputs["ingest"], plan, step.scratch[0], key, io.interval, io.say, init, io.on_point,
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

    from pipeline.evaluation import evaluate, reliability
    from pipeline.stages.judging import LOGITS
    from pipeline.training.predict import predict

    final = inputs["train"].summary.get("final")
    if not final:
        raise ArtifactError(f"{inputs['train'].path} names no final checkpoint", hint="nightjar train force=true")
    plan, towers = read_towers(config, store, inputs, _named(store, final))
    try:
        predictions = predict(config, store, inputs["ingest"], plan, final, towers)
    except DamagedError as error:
        hint = f"remove {store.url_of(final)}; then stages=[train,evaluate] goes on from the newest whole checkpoint"
        raise ArtifactError(error.message, hint=hint) from error
    if predictions is None:
        return None
    figures = evaluate(predictions.labels, predictions.logits, predictions.true_probability)
    draft: Draft
    with _draft(store, step) as draft:
        draft.write_json("metrics.json", figures)
        draft.write_json("reliability.json", reliability(predictions.labels, predictions.logits).to_json())
        with draft.open(LOGITS) as sink:
            np.lib.format.write_array(sink, predictions.logits, allow_pickle=False)
        return draft.commit(figures)


def _publish(step: Step, config: Config, store: Store, inputs: dict[str, Artifact], io: StageIO) -> Artifact:
    from pipeline.stages.publish import publish

    with _draft(store, step) as draft:
        return draft.commit(publish(config, store, step, inputs, draft, io.say))


def _named(store: Store, checkpoint: str) -> list[Artifact]:
    """The checkpoint at that path, if it can be read; what is wrong with it is for those to say who need it."""
    from pipeline.checkpoint import committed

    return [each for each in committed(store, checkpoint.rpartition("/")[0]) if each.path == checkpoint]


FUNCTIONS: dict[str, Callable[[Step, Config, Store, dict[str, Artifact], StageIO], Artifact | None]] = {
    "ingest": _ingest,
    "plan": _plan,
    "partition": _partition,
    "train": _train,
    "evaluate": _evaluate,
    "publish": _publish,
}
