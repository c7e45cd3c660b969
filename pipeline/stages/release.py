"""The publish stage: write the version, score it with the incumbent, let the gate decide, promote or hold.

It makes two artifacts, each with a ``gate.json``: the version itself, whose draft all ranks write
(``_write_and_judge``), and that of the stage, which only rank 0 drafts (``publish``). If somebody took the training out
of service, the stage's verdict is HOLD, although the version's may be PASS.
"""

from __future__ import annotations

import logging
import time
from dataclasses import replace
from typing import Any

from pipeline.config import Config
from pipeline.core.errors import LaunchError
from pipeline.publishing import promotion, versions
from pipeline.records.dataset import TRANSFORMS, DatasetSchema
from pipeline.records.ensemble import members_of
from pipeline.records.gate import GATE, HOLD, PASS, GateRecord, Interval, ModelFigures
from pipeline.records.model_version import CALIBRATOR, CARD, CardPlan, Lineage, ModelCard, Verdict
from pipeline.records.record import read
from pipeline.records.result import Evaluation
from pipeline.records.runs import Step
from pipeline.records.serving import WEIGHTS, Description, TableLayout
from pipeline.specs.model import MODELS
from pipeline.stages.release_gate import WrittenModel, judge_version
from pipeline.store.artifacts import Draft, Store
from pipeline.store.manifest import Artifact

log = logging.getLogger(__name__)


def covered_incumbent(config: Config, store: Store, train_key: str) -> str | None:
    """Return the version that the key of the publish stage covers, with which the candidate is compared.

    If the version in service came from this same training, the key covers the version that it was compared with, so
    that the same run again finds its own artifact.
    """
    current = promotion.incumbent(store, config.model_name)
    while current is not None and current.inputs.get("train") == train_key:
        former: str | None = current.summary.get("incumbent")
        if not former:
            return None
        current = store.find(versions.version_path(config.model_name, former))
        if current is None:
            # Without its name, a model that was held beside it would be judged as a first one, and pass.
            return former
    if current is None:
        return None
    return current.path.rpartition("/")[2]


def publish(config: Config, store: Store, step: Step, inputs: dict[str, Artifact], draft: Draft) -> dict[str, Any]:
    """Write, judge and promote a version of ``step``, with its gate report in ``draft``. Runs on rank 0.

    The version's own gate.json has the verdict. ``draft`` gets a copy, which a withdrawal may turn into a HOLD.

    A held version stays in the store without being promoted, and so does one whose training was in service before and
    was withdrawn by somebody. With ``publish.judge_beside`` no version is promoted.

    Returns:
        The stage's summary.

    Raises:
        ArtifactError: Inputs or the incumbent are damaged.
        LaunchError: The version in service is not the one that the candidate was compared with.
    """
    model, version = config.model_name, find_or_judge_version(config, store, step, inputs)
    assert version is not None, "rank 0 commits it"
    judged = record = read(GateRecord, store, f"{version.path}/{GATE}")
    training = promotion.Training.of(version)

    def check() -> None:
        # A verdict holds only beside the version that the candidate was judged with.
        _require_not_withdrawn(store, model, training, judged)
        _require_same_incumbent(config, store, inputs["train"].key, judged)

    promotes = record.verdict == PASS and config.publish.judge_beside is None
    if promotes:
        try:
            # Check this first, so that no report says PASS of a held version; `check` repeats it under the lock.
            _require_not_withdrawn(store, model, training, record)
            write_report(draft, record)
            promotion.promote(store, model, record.version, by="publish", reason=record.forced or "", check=check)
        except _WithdrawnError as withdrawn:
            record = replace(record, verdict=HOLD, reasons=(str(withdrawn),))
            promotes = False
    if not promotes:
        write_report(draft, record)

    # A HOLD is not an error yet: `Publish.accept` raises it at the end of the run (`launch/chain.py`).
    gate: dict[str, Any] = {"verdict": record.verdict, "reasons": [*record.reasons]}
    if record.forced:
        gate["forced"] = record.forced
    if record.warnings:
        gate["warnings"] = [*record.warnings]
    if record.power and record.power.instead:
        # This is not the limit that was set, but the one to set instead, which ``Publish.accept`` proposes.
        gate["max_ne_increase"] = record.power.instead
    gate |= {"version": record.version, "incumbent": record.incumbent_version}
    summary: dict[str, Any] = {"gate": gate}
    if promotes:
        summary["model"] = {"name": model, "version": record.version, "uri": version.path}
    return summary


class _WithdrawnError(Exception):
    """Somebody took this training out of service; the message is the reason to hold its version."""


def _require_not_withdrawn(store: Store, model: str, training: promotion.Training, record: GateRecord) -> None:
    undone = promotion.withdrawal(store, promotion.read_current(store, model), record.version, training)
    if undone is not None:
        text = promotion.withdrawal_text(undone, record.version)
        raise _WithdrawnError(f"{text}; only nightjar models promote lets this training serve again")


def _require_same_incumbent(config: Config, store: Store, train_key: str, record: GateRecord) -> None:
    now, then = covered_incumbent(config, store, train_key), record.incumbent_version
    if now != then:
        raise LaunchError(
            f"{record.version} of model {config.model_name!r} passed the gate beside {then or 'nothing'}, but by "
            f"now {now or 'nothing'} serves: it is not published",
            hint=f"the same command judges it beside {now or 'nothing'}; nightjar models promote {config.model_name} "
            f"{record.version} --reason '...' publishes it as it is",
        )


def write_report(draft: Draft, record: GateRecord) -> None:
    """Write the verdict for programs and people: gate.json, gate.html, gate.md."""
    from pipeline.report.gate import GATE_PAGE, GATE_TEXT, gate_markdown, gate_page

    draft.write_json(GATE, record.to_json())
    for name, text in ((GATE_PAGE, gate_page(record)), (GATE_TEXT, gate_markdown(record))):
        with draft.open(name) as sink:
            sink.write(text.encode())


def find_or_judge_version(config: Config, store: Store, step: Step, inputs: dict[str, Artifact]) -> Artifact | None:
    """Find the version of ``step``, or write it with all ranks, whole and judged but not promoted. Collective.

    Returns:
        The version on rank 0; None elsewhere.
    """
    from pipeline.checkpoint.collectives import log_on_rank0, run_on_rank0, this_rank

    model = config.model_name

    def find() -> list[str | None]:
        # Rank 0 asks for all, since each rank might find another number for the next version.
        made = None if config.force else versions.made_by(store, model, step.key)
        return [made.path if made else None, versions.new_version(store, model, step.key)]

    path, name = run_on_rank0("looking for the version", find)
    if path is None:
        return _write_and_judge(config, store, step, inputs, name)
    made = path.rpartition("/")[2]
    log_on_rank0(log.info, "publish    version %s of model %s is this very model: its verdict stands", made, model)
    return store.get(path, "publish") if this_rank() == 0 else None


def _write_and_judge(
    config: Config, store: Store, step: Step, inputs: dict[str, Artifact], name: str
) -> Artifact | None:
    from pipeline.checkpoint.collectives import log_on_rank0, world_size
    from pipeline.publishing.versions import CARD_TEXT, card_text
    from pipeline.stages.release_ranks import shared_draft

    model, path = config.model_name, versions.version_path(config.model_name, name)
    about: dict[str, Any] = {"kind": versions.KIND, "key": step.key, "config": step.config, "inputs": step.input_keys}
    with shared_draft(store, path, **about) as draft:
        shared = ""
        if world_size() > 1:
            shared = f"; tables and scores by {world_size()} ranks"
        log_on_rank0(log.info, "publish    writing version %s of model %s%s", name, model, shared)
        written = _write_model(config, store, inputs, draft)
        record = judge_version(config, store, step, inputs, draft, written)
        if record is None:
            return None
        record = replace(record, model=model, version=name)
        draft.write_json(GATE, record.to_json())
        card = _card(config, inputs, record, written)
        draft.write_json(CARD, card.to_json())
        with draft.open(CARD_TEXT) as sink:
            sink.write(card_text(card).encode())
        summary: dict[str, Any] = {
            "version": name,
            "verdict": record.verdict,
            "reasons": [*record.reasons],
            "forced": record.forced,
            "incumbent": record.incumbent_version,
            "checkpoint": inputs["train"].summary["final"],
            "dataset": inputs["ingest"].path,
            "run": config.run,
        }
        if written.members > 1:
            summary["members"] = [member.checkpoint for member in members_of(inputs["train"].summary)]
        for figure, interval in card.figures.items():
            summary[figure] = interval.point
        artifact: Artifact = draft.commit(summary)
    return artifact


def _write_model(config: Config, store: Store, inputs: dict[str, Artifact], draft: Draft) -> WrittenModel:
    # Writes tables, dense program, transforms, id mappings and configuration, all complete on every rank at the return.
    from pipeline.checkpoint.collectives import run_on_rank0
    from pipeline.checkpoint.reader import ChainReader, read_state
    from pipeline.checkpoint.warm import check_order, feature_order
    from pipeline.stages.release_ranks import write_tables
    from pipeline.training.parquet import SplitReader

    members = members_of(inputs["train"].summary)
    schema = SplitReader(store, inputs["ingest"], "test").schema
    readers = []
    for member in members:
        checkpoint = store.get(member.checkpoint, "train")
        # Keys do not cover the order of features, and the version takes the dataset's.
        order = read_state(store, checkpoint)["train"].get("order", {})
        check_order(order, feature_order(schema), member.checkpoint)
        readers.append(ChainReader(store, checkpoint))
    not_finite = dict[str, int]()
    tables = write_tables(
        draft,
        readers,
        [table.name for table in schema.tables],
        config.publish.quantise,
        first=lambda: not_finite.update(_write_dense(config, store, inputs, draft, schema)),
    )
    layouts = {}
    for name, table in tables.items():
        layouts[name] = table.layout
        not_finite[f"table {name!r}"] = table.not_finite
    run_on_rank0("writing what is small", lambda: _write_rest(config, store, inputs, draft, schema, layouts))
    return WrittenModel(tables, {name: count for name, count in not_finite.items() if count}, len(members))


def _write_dense(
    config: Config, store: Store, inputs: dict[str, Artifact], draft: Draft, schema: DatasetSchema
) -> dict[str, int]:
    # Writes the dense part as a program; returns the number of values that are not finite, by parameter.
    from pipeline.checkpoint.reader import read_dense
    from pipeline.publishing.dense import build_dense, input_shapes, probe, write_dense
    from pipeline.publishing.program import write_program
    from pipeline.serving.scorer import one_thread
    from pipeline.stages.stage_inputs import read_trained_towers

    members = members_of(inputs["train"].summary)
    dense, weights = [], []
    for member in members:
        dense.append(read_dense(store, store.get(member.checkpoint, "train")))
        weights.append(member.weight)
    towers = read_trained_towers(config, store, inputs)
    module = build_dense(schema, towers, dense, weights, config)
    # Use one thread, which any machine has, so that the version has the same bytes on all machines.
    with one_thread():
        logits = probe(module, schema, config.model, len(members))
    write_dense(draft, schema, towers, dense, weights, logits)
    embeddings, events = input_shapes(schema, config.model, len(members))
    write_program(draft, module, len(schema.dense), embeddings, events)
    not_finite = {}
    for name in dense[0]:
        # Values are summed over the members, which have the same parameters.
        not_finite[f"parameter {name}"] = sum(int((~each[name].isfinite()).sum()) for each in dense)
    return not_finite


def _write_rest(
    config: Config,
    store: Store,
    inputs: dict[str, Artifact],
    draft: Draft,
    schema: DatasetSchema,
    layouts: dict[str, TableLayout],
) -> None:
    from pipeline.config.compose import to_yaml
    from pipeline.publishing.served import SERVING

    dataset = inputs["ingest"]
    draft.write_json(SERVING, _description(config, schema, layouts, len(members_of(inputs["train"].summary))).to_json())
    # A version may outlive its dataset, so it gets copies of the files that turn raw rows into columns.
    for name in _mappings(dataset):
        store.verify(dataset, name)
        with store.open(f"{dataset.path}/{name}") as source, draft.open(name) as sink:
            sink.write(source.read())
    with draft.open("config.yaml") as sink:
        sink.write(to_yaml(config).encode())


def _description(config: Config, schema: DatasetSchema, layouts: dict[str, TableLayout], members: int) -> Description:
    name, dim = config.model.name, config.model.embedding_dim * members
    mean = tuple(table for table in layouts if config.model.table(table).pooling == "mean")
    description = Description.of(schema, dim, layouts, mean).built_by(name, MODELS.package(name))
    # The calibrator is fitted later, on scores of these files, but the description already names its file.
    calibrator = None if config.publish.calibrator.method is None else CALIBRATOR
    return replace(description, members=members, calibrator=calibrator, weights=WEIGHTS)


def _mappings(dataset: Artifact) -> list[str]:
    # Returns the files of a dataset that turn raw rows into its columns.
    return [name for name in dataset.files if name == TRANSFORMS or name.startswith("vocab/")]


def _card(config: Config, inputs: dict[str, Artifact], record: GateRecord, written: WrittenModel) -> ModelCard:
    plan, trained = inputs["plan"], inputs["train"]
    resumed = (trained.summary.get("train") or {}).get("resumed") or {}
    # A candidate whose predictions are not finite has no figures.
    figures = {} if record.candidate is None else _card_figures(record.candidate, record)
    return ModelCard(
        model=record.model,
        version=record.version,
        created=time.time(),
        gate=Verdict(verdict=record.verdict, reasons=record.reasons, forced=record.forced),
        figures=figures,
        calibrator=record.calibrated,
        evaluation_of_training=Evaluation.from_json(inputs["evaluate"].summary),
        data={"name": config.data.name, "dataset": inputs["ingest"].path, **inputs["ingest"].summary},
        tables={name: table.layout for name, table in written.tables.items()},
        plan=CardPlan(path=plan.path, hardware=config.hardware.name, tiers=plan.summary.get("tiers")),
        lineage=Lineage(
            run=str(config.run),
            checkpoint=trained.summary["final"],
            training=trained.path,
            evaluation=inputs["evaluate"].path,
            partition=inputs["partition"].path,
            started_from=config.checkpoint.init_from,
            started_from_checkpoint=trained.config.get("init"),
            incumbent=record.incumbent_version,
            planned_steps=resumed.get("planned"),
        ),
    )


def _card_figures(candidate: ModelFigures, record: GateRecord) -> dict[str, Interval]:
    # Returns the main task's figures, and NE or RMSE of every further task, as ``<task>_ne``.
    figures = {"ne": candidate.ne, "auc": candidate.auc, "calibration": candidate.calibration}
    for name, task in (record.tasks or {}).items():
        if task.candidate is not None:
            figures[f"{name}_{task.figure.lower()}"] = task.candidate
    return figures
