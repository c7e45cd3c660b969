"""The publish stage: write the version, score it beside the incumbent, let the gate decide, promote or hold.

The version is whole (its manifest is written) before anything names it, and ``current.json`` is swapped last. Killed
anywhere, the same command goes on: a version of the same key that is whole is judged already.
"""

from __future__ import annotations

import dataclasses
import logging
import time
from typing import Any

from pipeline.config import Config
from pipeline.errors import LaunchError
from pipeline.publishing import promotion, versions
from pipeline.records.dataset import TRANSFORMS, DatasetSchema
from pipeline.records.ensemble import members_of
from pipeline.records.gate import GATE, HOLD, PASS, GateRecord, Interval, ModelFigures
from pipeline.records.model_version import CALIBRATOR, CARD, CardPlan, Lineage, ModelCard, Verdict
from pipeline.records.record import read
from pipeline.records.result import Evaluation
from pipeline.records.runs import Step
from pipeline.records.serving import WEIGHTS, Description, TableLayout
from pipeline.records.towers import Towers
from pipeline.specs.model import MODELS
from pipeline.stages.judging import WrittenModel, judge_version
from pipeline.store.artifacts import Draft, Store
from pipeline.store.manifest import Artifact

log = logging.getLogger(__name__)


def covered_incumbent(config: Config, store: Store, train_key: str) -> str | None:
    """The version that the key of the publish stage covers: what the candidate is compared with; None: nothing.

    A version that this very training became is not its own incumbent: then it is the one it was compared with, so
    that the same run again finds its own artifact.
    """
    current = promotion.incumbent(store, config.model_name)
    while current is not None and current.inputs.get("train") == train_key:
        former = current.summary.get("incumbent")
        current = store.find(versions.version_path(config.model_name, former)) if former else None
    return None if current is None else current.path.rpartition("/")[2]


def publish(config: Config, store: Store, step: Step, inputs: dict[str, Artifact], draft: Draft) -> Any:
    """Write, judge and promote a version of ``step``; the stage's summary, its gate report in ``draft``. On rank 0.

    A version that is held stays in the store without being promoted, and so does one whose training served before and
    was taken out of service by somebody. Raises ArtifactError for damaged inputs or a damaged incumbent.
    """
    model, version = config.model_name, version_of(config, store, step, inputs)
    assert version is not None, "rank 0 commits it"
    training, judged_as = inputs["train"].key, read(GateRecord, store, f"{version.path}/{GATE}")
    record, made_from = judged_as, promotion.Training.of(version)

    def check() -> None:
        _require_not_withdrawn(store, model, made_from, judged_as)
        _require_same_incumbent(config, store, training, judged_as)

    if record.verdict == PASS:
        try:
            _require_not_withdrawn(store, model, made_from, record)
            write_report(draft, record)
            promotion.promote(store, model, record.version, by="publish", reason=record.forced or "", check=check)
        except _WithdrawnError as withdrawn:
            record = dataclasses.replace(record, verdict=HOLD, reasons=(str(withdrawn),))
    if record.verdict != PASS:
        write_report(draft, record)
    gate: dict[str, Any] = {"verdict": record.verdict, "reasons": [*record.reasons]}
    gate |= {"forced": record.forced} if record.forced else {}
    gate |= {"warnings": [*record.warnings]} if record.warnings else {}
    gate |= {"max_ne_increase": record.power.instead} if record.power and record.power.instead else {}
    summary: dict[str, Any] = {"gate": {**gate, "version": record.version, "incumbent": record.incumbent_version}}
    if record.verdict == PASS:
        summary["model"] = {"name": model, "version": record.version, "uri": version.path}
    return summary


def version_of(config: Config, store: Store, step: Step, inputs: dict[str, Artifact]) -> Artifact | None:
    """The version of ``step``, whole and judged, not promoted: the one that there is, or a new one.

    Collective: all ranks write and judge it. On rank 0; None elsewhere.
    """
    from pipeline.checkpoint.collectives import log_on_rank0, run_on_rank0, this_rank

    def there() -> list[str | None]:
        made = None if config.force else versions.made_by(store, config.model_name, step.key)
        return [made.path if made else None, versions.new_version(store, config.model_name, step.key)]

    path, name = run_on_rank0("looking for the version", there)
    if path is None:
        return _make(config, store, step, inputs, name)
    made, model = path.rpartition("/")[2], config.model_name
    log_on_rank0(log.info, "publish    version %s of model %s is this very model: its verdict stands", made, model)
    return store.get(path, "publish") if this_rank() == 0 else None


class _WithdrawnError(Exception):
    """Somebody took this training out of service; the message is the reason to hold its version."""


def _require_not_withdrawn(store: Store, model: str, training: promotion.Training, record: GateRecord) -> None:
    """_WithdrawnError where a version of this training served and was taken out of service by somebody."""
    undone = promotion.withdrawal(store, promotion.read_current(store, model), record.version, training)
    if undone is None:
        return
    text = promotion.withdrawal_text(undone, record.version)
    raise _WithdrawnError(f"{text}; only nightjar models promote lets this training serve again")


def _require_same_incumbent(config: Config, store: Store, train_key: str, record: GateRecord) -> None:
    """A verdict holds beside what the candidate was judged with; LaunchError where something else serves by now."""
    now, then = covered_incumbent(config, store, train_key), record.incumbent_version
    if now != then:
        raise LaunchError(
            f"{record.version} of model {config.model_name!r} passed the gate beside {then or 'nothing'}, but by "
            f"now {now or 'nothing'} serves: it is not published",
            hint=f"the same command judges it beside {now or 'nothing'}; nightjar models promote {config.model_name} "
            f"{record.version} --reason '...' publishes it as it is",
        )


def write_report(draft: Draft, record: GateRecord) -> None:
    """The verdict for programs and people: gate.json, gate.html, gate.md."""
    from pipeline.report.gate import GATE_PAGE, GATE_TEXT, gate_markdown, gate_page

    draft.write_json(GATE, record.to_json())
    for name, text in ((GATE_PAGE, gate_page(record)), (GATE_TEXT, gate_markdown(record))):
        with draft.open(name) as sink:
            sink.write(text.encode())


def _make(config: Config, store: Store, step: Step, inputs: dict[str, Artifact], name: str) -> Artifact | None:
    """A new version called ``name``, whole and judged, not promoted; on rank 0."""
    from pipeline.checkpoint.collectives import log_on_rank0, world_size
    from pipeline.publishing.versions import CARD_TEXT, card_text
    from pipeline.stages.sharing import shared_draft

    members = members_of(inputs["train"].summary)
    model, path = config.model_name, versions.version_path(config.model_name, name)
    about: dict[str, Any] = {"kind": versions.KIND, "key": step.key, "config": step.config, "inputs": step.input_keys}
    with shared_draft(store, path, **about) as draft:
        shared = f"; tables and scores by {world_size()} ranks" if world_size() > 1 else ""
        log_on_rank0(log.info, "publish    writing version %s of model %s%s", name, model, shared)
        written = _write_model(config, store, inputs, draft)
        record = judge_version(config, store, step, inputs, draft, written)
        if record is None:
            return None
        record = dataclasses.replace(record, model=model, version=name)
        draft.write_json(GATE, record.to_json())
        card = _card(config, inputs, record, written)
        draft.write_json(CARD, card.to_json())
        with draft.open(CARD_TEXT) as sink:
            sink.write(card_text(card).encode())
        figures = {figure: interval.point for figure, interval in card.figures.items()}
        summary = {
            "version": name,
            "verdict": record.verdict,
            "reasons": [*record.reasons],
            "forced": record.forced,
            "incumbent": record.incumbent_version,
            "checkpoint": inputs["train"].summary["final"],
            "dataset": inputs["ingest"].path,
            "run": config.run,
            **({"members": [each.checkpoint for each in members]} if len(members) > 1 else {}),
            **figures,
        }
        artifact: Artifact = draft.commit(summary)
    return artifact


def _write_model(config: Config, store: Store, inputs: dict[str, Artifact], draft: Draft) -> WrittenModel:
    """Tables, dense program, transforms, id mappings, configuration: whole on every rank when it returns."""
    from pipeline.checkpoint.collectives import run_on_rank0
    from pipeline.checkpoint.reader import ChainReader
    from pipeline.stages.sharing import write_tables
    from pipeline.training.parquet import SplitReader

    members = members_of(inputs["train"].summary)
    checkpoints = [store.get(each.checkpoint, "train") for each in members]
    schema = SplitReader(store, inputs["ingest"], "test").schema
    readers = [ChainReader(store, checkpoint) for checkpoint in checkpoints]
    bad = dict[str, int]()
    tables = write_tables(
        draft,
        readers,
        [each.name for each in schema.tables],
        config.publish.quantise,
        beside=lambda: bad.update(_write_dense(config, store, inputs, draft, schema)),
    )
    layouts = {name: table.layout for name, table in tables.items()}
    bad |= {f"table {name!r}": table.not_finite for name, table in tables.items()}
    run_on_rank0("writing what is small", lambda: _write_rest(config, store, inputs, draft, schema, layouts))
    return WrittenModel(tables, {name: count for name, count in bad.items() if count}, len(members))


def _write_dense(
    config: Config, store: Store, inputs: dict[str, Artifact], draft: Draft, schema: DatasetSchema
) -> dict[str, int]:
    """The dense part as a program; by parameter, values that are not finite."""
    from pipeline.checkpoint.reader import read_dense
    from pipeline.publishing.dense import build_dense, input_shapes, probe, write_dense
    from pipeline.publishing.program import write_program
    from pipeline.serving.scorer import one_thread

    members = members_of(inputs["train"].summary)
    dense = [read_dense(store, store.get(each.checkpoint, "train")) for each in members]
    towers = read(Towers, store, f"{inputs['partition'].path}/towers.json")
    counted = [each.weight for each in members]
    module = build_dense(schema, towers, dense, counted, config)
    with one_thread():  # as any machine has: the version is the same bytes on all of them
        logits = probe(module, schema, config.model, len(members))
    write_dense(draft, schema, towers, dense, counted, logits)
    embeddings, events = input_shapes(schema, config.model, len(members))
    write_program(draft, module, len(schema.dense), embeddings, events)
    return {f"parameter {name}": sum(int((~each[name].isfinite()).sum()) for each in dense) for name in dense[0]}


def _write_rest(
    config: Config,
    store: Store,
    inputs: dict[str, Artifact],
    draft: Draft,
    schema: DatasetSchema,
    layouts: dict[str, TableLayout],
) -> None:
    """The description, transforms, id mappings, configuration."""
    from pipeline.compose import to_yaml
    from pipeline.publishing.served import SERVING

    draft.write_json(SERVING, _description(config, schema, layouts, len(members_of(inputs["train"].summary))).to_json())
    for name in _mappings(inputs["ingest"]):
        store.verify(inputs["ingest"], name)
        with store.open(f"{inputs['ingest'].path}/{name}") as source, draft.open(name) as sink:
            sink.write(source.read())
    with draft.open("config.yaml") as sink:
        sink.write(to_yaml(config).encode())


def _description(config: Config, schema: DatasetSchema, layouts: dict[str, TableLayout], members: int) -> Description:
    """What ``serving.json`` says of the version."""

    name, dim = config.model.name, config.model.embedding_dim * members
    mean = tuple(table for table in layouts if config.model.table(table).pooling == "mean")
    description = Description.of(schema, dim, layouts, mean).built_by(name, MODELS.package(name))
    calibrator = None if config.publish.calibrator.method is None else CALIBRATOR
    return dataclasses.replace(description, members=members, calibrator=calibrator, weights=WEIGHTS)


def _mappings(dataset: Artifact) -> list[str]:
    """The files of a dataset that turn raw rows into its columns."""
    return [name for name in dataset.files if name == TRANSFORMS or name.startswith("vocab/")]


def _card_figures(ours: ModelFigures, record: GateRecord) -> dict[str, Interval]:
    """The main task's, and NE or RMSE of every further one, as ``<task>_ne``."""
    tasks = (record.tasks or {}).items()
    further = {f"{name}_{each.figure.lower()}": each.candidate for name, each in tasks if each.candidate is not None}
    return {"ne": ours.ne, "auc": ours.auc, "calibration": ours.calibration, **further}


def _card(config: Config, inputs: dict[str, Artifact], record: GateRecord, written: WrittenModel) -> ModelCard:
    """What ``card.json`` says: data, figures, tables, plan, lineage."""
    plan, trained = inputs["plan"], inputs["train"]
    ours, resumed = record.candidate, (trained.summary.get("train") or {}).get("resumed") or {}
    return ModelCard(
        model=record.model,
        version=record.version,
        created=time.time(),
        gate=Verdict(verdict=record.verdict, reasons=record.reasons, forced=record.forced),
        figures={} if ours is None else _card_figures(ours, record),
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
